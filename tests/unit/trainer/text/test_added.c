// SPDX-License-Identifier: Apache-2.0
/* Where added tokens match, beside each other: a byte of a text belongs to one of them at most. */
#include "trainer/text/added.h"

#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/tempdir.h"

#define TOKEN(text, ...)                                                                           \
    {                                                                                              \
        .pattern = (const uint8_t *)(text), .size = sizeof(text) - 1, __VA_ARGS__                  \
    }

static const nd_added tokens[] = {
    TOKEN("ab", .id = 0),
    TOKEN("cd", .id = 1, .single_word = true),
    TOKEN("<", .id = 2, .lstrip = true),
    TOKEN(">", .id = 3, .rstrip = true),
};

Test(added, matches_beside_each_other)
{
    static const struct {
        const char *text;
        size_t places[8]; /* begin and end of each match, then 0 */
    } cases[] = {
        {"x cd y", {2, 4}},
        {"abcd cd", {0, 2, 5, 7}},
        {"cdab cd", {2, 4, 5, 7}},
        {"x  <  y", {1, 4}},
        {"x  >  y", {3, 6}},
        {">  <", {0, 3, 3, 4}},
        {"ab  < >  < ", {0, 2, 2, 5, 6, 9, 9, 10}},
    };
    nd_added_set set;
    assert_ok(nd_added_set_init(&set, tokens, sizeof tokens / sizeof *tokens));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t *place = cases[i].places, *end = place + 8;
        nd_added_scan scan = {
            .set = &set, .text = (const uint8_t *)cases[i].text, .size = strlen(cases[i].text)};
        nd_added_match match;
        while (nd_added_next(&scan, &match)) {
            cr_assert(place < end, "case %zu has another match", i);
            cr_expect(match.begin == place[0] && match.end == place[1],
                      "case %zu: %zu to %zu, not %zu to %zu", i, match.begin, match.end, place[0],
                      place[1]);
            place += 2;
        }
        cr_expect(place == end || place[1] == 0, "case %zu lacks a match", i);
    }
    free(set.tokens);
}
