// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/base/printable.h"

/* The characters next to those that are escaped, and the last one of all. */
#define NEIGHBOURS                                                                                 \
    "~\xc2\xa0\xe2\x80\xa7\xe2\x80\xaf\xe2\x81\xa5\xe2\x81\xaa\xed\x9f\xbf\xee\x80\x80\xef\xbf"    \
    "\xbd\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"

static const struct {
    const char *text, *escaped;
} cases[] = {
    {NEIGHBOURS, NEIGHBOURS},
    {"\x1f \x7f\xc2\x80\xc2\x9f", "\\x1f \\x7f\\u0080\\u009f"},
    {"\xe2\x80\xa9\xe2\x80\xaa\xe2\x81\xa6\xe2\x81\xa9\xef\xbf\xbe\xef\xbf\xbf",
     "\\u2029\\u202a\\u2066\\u2069\\ufffe\\uffff"},
    {"", ""},
    {"runs/caf\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x99\x82",
     "runs/caf\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x99\x82"},
    {"a\nb\tc", "a\\nb\\tc"},
    {"\x1b[31m\x07\x7f", "\\x1b[31m\\x07\\x7f"},
    {"\xc2\x9b"
     "2J",
     "\\u009b2J"},               /* CSI as one character */
    {"\xe2\x80\xae", "\\u202e"}, /* text from here on runs backwards */
    {"\xe2\x80\xa8", "\\u2028"}, /* a line end */
    {"\xef\xbb\xbf", "\\ufeff"},
    {"\xff\xc3", "\\xff\\xc3"}, /* no UTF-8, a character cut off */
    {"\xc0\xaf", "\\xc0\\xaf"}, /* a slash in too long a form */
    {"\xe0\x80\xaf\xe0\x9f\xbf", "\\xe0\\x80\\xaf\\xe0\\x9f\\xbf"}, /* in longer ones */
    {"\xf0\x80\x80\xaf\xf0\x8f\xbf\xbf", "\\xf0\\x80\\x80\\xaf\\xf0\\x8f\\xbf\\xbf"},
    {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"}, /* beyond the last character */
    {"\xed\xa0\x80", "\\xed\\xa0\\x80"},          /* half of a pair of UTF-16 */
    {"\x9b"
     "1m",
     "\\x9b"
     "1m"},
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
