// SPDX-License-Identifier: Apache-2.0
/* Characters that become text where people read: in a whole text, and in bytes that a terminal gets
 * in whatever pieces they arrive. */
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/base/printable.h"

/* The characters next to those that are escaped, and the last one of all. */
#define NEIGHBOURS                                                                                 \
    "~\xc2\xa0\xe2\x80\xa7\xe2\x80\xaf\xe2\x81\xa5\xe2\x81\xaa\xed\x9f\xbf\xee\x80\x80\xef\xbf"    \
    "\xbd\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"

static const struct {
    const char *text, *escaped;
    const char *shown; /* on a terminal; NULL: as it is escaped */
} cases[] = {
    {NEIGHBOURS, NEIGHBOURS, NULL},
    {"\x1f \x7f\xc2\x80\xc2\x9f", "\\x1f \\x7f\\u0080\\u009f", NULL},
    {"\xe2\x80\xa9\xe2\x80\xaa\xe2\x81\xa6\xe2\x81\xa9\xef\xbf\xbe\xef\xbf\xbf",
     "\\u2029\\u202a\\u2066\\u2069\\ufffe\\uffff", NULL},
    {"", "", NULL},
    {"runs/caf\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x99\x82",
     "runs/caf\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x99\x82", NULL},
    {"step 1\tloss 2.5\r\n", "step 1\\tloss 2.5\\x0d\\n", "step 1\tloss 2.5\r\n"},
    {"\x1b[31mred\x1b[0m\x07\x08\x7f", "\\x1b[31mred\\x1b[0m\\x07\\x08\\x7f", NULL},
    {"\x1b]0;title\x07", "\\x1b]0;title\\x07", NULL},
    {"\xc2\x9b"
     "2J",
     "\\u009b2J", NULL}, /* CSI as one character */
    {"a\xe2\x80\xae"
     "b",
     "a\\u202eb", NULL},               /* text from here on runs backwards */
    {"\xe2\x80\xa8", "\\u2028", NULL}, /* a line end */
    {"\xef\xbb\xbf", "\\ufeff", NULL},
    {"\xff\xc3", "\\xff\\xc3", NULL}, /* no UTF-8, a character cut off */
    {"\xe2\x82", "\\xe2\\x82", NULL},
    {"\xf0\x9f\x99 a", "\\xf0\\x9f\\x99 a", NULL},
    {"\xc2\xc2\x9b", "\\xc2\\u009b", NULL},
    {"\xc0\xaf", "\\xc0\\xaf", NULL}, /* a slash in too long a form */
    {"\xe0\x80\xaf\xe0\x9f\xbf", "\\xe0\\x80\\xaf\\xe0\\x9f\\xbf", NULL}, /* in longer ones */
    {"\xf0\x80\x80\xaf\xf0\x8f\xbf\xbf", "\\xf0\\x80\\x80\\xaf\\xf0\\x8f\\xbf\\xbf", NULL},
    {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80", NULL}, /* beyond the last character */
    {"\xed\xa0\x80", "\\xed\\xa0\\x80", NULL},          /* half of a pair of UTF-16 */
    /* A lone byte of a longer character can be a control character of a terminal with 8 bits. */
    {"\x9b"
     "1m",
     "\\x9b"
     "1m",
     NULL},
    /* The sequences that the progress bar sends pass, but incomplete ones do not. */
    {"step 1 [###]\033[K\r", "step 1 [###]\\x1b[K\\x0d", "step 1 [###]\033[K\r"},
    {"\033[K\033[K", "\\x1b[K\\x1b[K", "\033[K\033[K"},
    {"\xe2\033[K", "\\xe2\\x1b[K", "\\xe2\033[K"},
    {"\033\033[K", "\\x1b\\x1b[K", "\\x1b\033[K"},
    {"\033[\033[K", "\\x1b[\\x1b[K", "\\x1b[\033[K"},
    {"\033", "\\x1b", NULL},
    {"\033[", "\\x1b[", NULL},
};

Test(printable, what_is_escaped)
{
    char out[200];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_escape(out, sizeof out, cases[i].text, "");
        cr_expect_str_eq(out, cases[i].escaped, "case %zu", i);
        cr_expect_eq(nd_is_printable(cases[i].text), strcmp(cases[i].text, out) == 0, "case %zu",
                     i);
        cr_expect(nd_is_printable(out), "case %zu", i);
    }
    nd_escape(out, sizeof out, "a\nb\tc", "\n");
    cr_expect_str_eq(out, "a\nb\\tc");
}

Test(printable, never_cut_within_a_character_or_an_escape)
{
    char out[16];
    static const char text[] = "ab\x1b\xc3\xa9z";
    static const char whole[] = "ab\\x1b\xc3\xa9z";
    for (size_t size = 1; size <= sizeof out; size++) {
        memset(out, '?', sizeof out);
        nd_escape(out, size, text, "");
        size_t n = strlen(out);
        cr_expect(n < size && memcmp(out, whole, n) == 0 && nd_is_printable(out), "%zu: %s", size,
                  out);
        cr_expect(n == 0 || n == 1 || n == 2 || n == 6 || n == 8 || n == 9, "%zu", n);
    }
}

static void shown_as(nd_shown shown, const char *bytes, size_t piece, const char *expected)
{
    char out[512];
    size_t count = strlen(bytes), used = 0;
    for (size_t at = 0; at < count; at += piece) {
        size_t part = count - at < piece ? count - at : piece;
        used += nd_shown_filter(&shown, bytes + at, part, out + used);
    }
    used += nd_shown_filter(&shown, NULL, 0, out + used);
    out[used] = '\0';
    cr_assert_str_eq(out, expected, "in pieces of %zu: %s", piece, out);
}

Test(shown, characters_pass_and_what_moves_a_cursor_becomes_text)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t piece = 1; piece <= strlen(cases[i].text); piece++) {
            shown_as((nd_shown){0}, cases[i].text, piece,
                     cases[i].shown ? cases[i].shown : cases[i].escaped);
        }
    }
}

/* A text of a model moves no cursor, not even to the beginning of the line. */
Test(shown, of_text_only_line_ends_and_tabs_pass)
{
    shown_as((nd_shown){.text_only = true}, "a\tb\r\033[Kc\033[31m\n\xc3", 99,
             "a\tb\\x0d\\x1b[Kc\\x1b[31m\n\\xc3");
}
