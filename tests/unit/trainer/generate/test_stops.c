// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "trainer/generate/stops.h"

typedef struct stop_case {
    const char *stops[4];
    const char *text, *expected;
    bool stopped;
} stop_case;

static const stop_case cases[] = {
    {{NULL}, "plain text", "plain text", false},
    {{"END"}, "a text END more", "a text ", true},
    {{"END"}, "a text EN", "a text EN", false},
    {{"END"}, "ENDING", "", true},
    {{"END"}, "EENDX", "E", true},
    {{"aab"}, "aaaab", "aa", true},
    {{"abab"}, "ababab", "", true},
    {{"\n\n"}, "one\ntwo\n\nthree", "one\ntwo", true},
    {{"abcd", "bc"}, "xabcd", "xa", true},    /* bc is complete first */
    {{"bc", "abc"}, "xabcd", "x", true},      /* at the same place the longer one */
    {{"<|x|>", "|y|"}, "a<|y|>", "a<", true}, /* the beginning of one holds the other */
    {{"\xc3\xa9t"}, "\xc3\xa9\xc3\xa9t\xc3\xa9", "\xc3\xa9", true}, /* é */
    {{"\xf0\x9f\x98\x80"}, "\xf0\x9f\x98\x81\xf0\x9f\x98\x80", "\xf0\x9f\x98\x81", true},
};

/* All that the filter gives when the text comes in pieces of `piece` bytes. */
static bool filter(const stop_case *c, size_t piece, char *result)
{
    nd_stops stops = {0};
    nd_stop_filter f = {0};
    const char *out;
    size_t size, used = 0, length = strlen(c->text);
    for (int i = 0; i < 4 && c->stops[i]; i++) {
        cr_assert_eq(nd_stops_add(&stops, c->stops[i]), ND_OK);
    }
    for (size_t at = 0; at < length; at += piece) {
        size_t n = length - at < piece ? length - at : piece;
        cr_assert_eq(nd_stop_filter_push(&f, &stops, c->text + at, n, &out, &size), ND_OK);
        memcpy(result + used, out, size);
        used += size;
    }
    nd_stop_filter_end(&f, &out, &size);
    memcpy(result + used, out, size);
    result[used + size] = '\0';
    bool stopped = f.stopped;
    nd_stop_filter_fini(&f);
    return stopped;
}

Test(stops, the_result_does_not_depend_on_the_pieces)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t piece = 1; piece <= strlen(cases[i].text); piece++) {
            char result[64];
            bool stopped = filter(&cases[i], piece, result);
            cr_expect_str_eq(result, cases[i].expected, "case %zu, pieces of %zu: \"%s\"", i, piece,
                             result);
            cr_expect_eq(stopped, cases[i].stopped, "case %zu, pieces of %zu", i, piece);
        }
    }
}

Test(stops, only_what_may_begin_a_stop_is_held_back)
{
    nd_stops stops = {0};
    nd_stop_filter f = {0};
    const char *out;
    size_t size;
    cr_assert_eq(nd_stops_add(&stops, "END"), ND_OK);
    cr_assert_eq(nd_stop_filter_push(&f, &stops, "one EN", 6, &out, &size), ND_OK);
    cr_expect(size == 4 && memcmp(out, "one ", 4) == 0);
    cr_assert_eq(nd_stop_filter_push(&f, &stops, "T ", 2, &out, &size), ND_OK);
    cr_expect(size == 4 && memcmp(out, "ENT ", 4) == 0);
    cr_assert_eq(nd_stop_filter_push(&f, &stops, "E", 1, &out, &size), ND_OK);
    cr_expect_eq(size, 0);
    nd_stop_filter_end(&f, &out, &size);
    cr_expect(size == 1 && out[0] == 'E');
    nd_stop_filter_fini(&f);
}

Test(stops, bad_ones_are_refused)
{
    nd_stops stops = {0};
    cr_expect_eq(nd_stops_add(&stops, ""), ND_ERR_CONFIG);
    cr_expect_eq(nd_stops_add(&stops, "\xff"), ND_ERR_CONFIG);
    for (int i = 0; i < ND_STOPS_MAX; i++) {
        cr_assert_eq(nd_stops_add(&stops, "x"), ND_OK);
    }
    cr_expect_eq(nd_stops_add(&stops, "x"), ND_ERR_CONFIG);
}
