// SPDX-License-Identifier: Apache-2.0
/* What a terminal gets of some bytes, in whatever pieces they arrive. */
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/base/printable.h"

/* Bytes, and what is shown of them; NULL: the same. */
static const char *const cases[][2] = {
    /* Text passes. */
    {"step 1\tloss 2.5\r\n", NULL},
    {"\xc3\xa9 \xe2\x82\xac \xc2\xb5", NULL},
    {"\xf0\x9f\x99\x82", NULL},
    /* Bytes that are no characters become text: a lone byte of a longer one can be a control
     * character of a terminal with 8 bits. */
    {"\x9b"
     "31m",
     "\\x9b31m"},
    {"\xc2", "\\xc2"},
    {"\xe2\x82", "\\xe2\\x82"},
    {"\xf0\x9f\x99 a", "\\xf0\\x9f\\x99 a"},
    {"\xc0\xaf\xff", "\\xc0\\xaf\\xff"},
    {"\xed\xa0\x80", "\\xed\\xa0\\x80"},
    {"\xe2\033[K", "\\xe2\033[K"},
    /* Line ends and directions of Unicode become text. */
    {"a\xe2\x80\xa8"
     "b\xe2\x80\xae"
     "c",
     "a\\u2028b\\u202ec"},
    {"\xef\xbb\xbf", "\\ufeff"},
    /* The progress bar passes. */
    {"step 1 [###]\033[K\r", NULL},
    {"\033[K\033[K", NULL},
    /* Control characters become text. */
    {"a\x07"
     "b\x08\x7f",
     "a\\x07b\\x08\\x7f"},
    {"\033[31mred\033[0m", "\\x1b[31mred\\x1b[0m"},
    {"\033]0;title\x07", "\\x1b]0;title\\x07"},
    {"\033", "\\x1b"},
    {"\033[", "\\x1b["},
    {"\033\033[K", "\\x1b\033[K"},
    {"\033[\033[K", "\\x1b[\033[K"},
    {"\xc2\x9b"
     "31m",
     "\\u009b31m"},
    {"\xc2\xc2\x9b", "\\xc2\\u009b"},
};

static void shown_as(const char *bytes, const char *expected)
{
    size_t count = strlen(bytes);
    for (size_t piece = 1; piece <= count; piece++) {
        nd_shown shown = {0};
        char out[512];
        size_t used = 0;
        for (size_t at = 0; at < count; at += piece) {
            size_t part = count - at < piece ? count - at : piece;
            used += nd_shown_filter(&shown, bytes + at, part, out + used);
        }
        used += nd_shown_filter(&shown, NULL, 0, out + used);
        out[used] = '\0';
        cr_assert_str_eq(out, expected, "in pieces of %zu: %s", piece, out);
    }
}

Test(shown, characters_pass_and_what_moves_a_cursor_becomes_text)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shown_as(cases[i][0], cases[i][1] ? cases[i][1] : cases[i][0]);
    }
}

/* What a model writes moves no cursor, not even to the beginning of the line. */
Test(shown, of_text_only_line_ends_and_tabs_pass)
{
    nd_shown shown = {.text_only = true};
    const char bytes[] = "a\tb\r\033[Kc\033[31m\n\xc3";
    char out[sizeof bytes * ND_SHOWN_GROWTH + ND_SHOWN_HELD];
    size_t used = nd_shown_filter(&shown, bytes, sizeof bytes - 1, out);
    used += nd_shown_filter(&shown, NULL, 0, out + used);
    out[used] = '\0';
    cr_assert_str_eq(out, "a\tb\\x0d\\x1b[Kc\\x1b[31m\n\\xc3");
}
