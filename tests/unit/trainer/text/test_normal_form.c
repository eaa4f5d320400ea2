// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/text/parts.h"

static nd_bytes normal_form(const char *text, size_t size)
{
    nd_bytes out = {0};
    assert_ok(nd_text_normal_form((const uint8_t *)text, size, &out));
    return out;
}

/* Texts, and the forms that the package tokenizers 0.23.3 gives them. */
static const struct {
    const char *text, *expected;
} cases[] = {
    {"a\u0323\u0301", "\u1ea1\u0301"},
    {"\u00e9\u0323", "\u1eb9\u0301"}, /* taken apart, sorted, put together */
    {"s\u0307\u0323", "\u1e69"},
    {"\u1e69", "\u1e69"},
    {"\u0344", "\u0308\u0301"}, /* a mark of two marks */
    {"\u212b", "\u00c5"},
    {"\u0958", "\u0915\u093c"},
    {"\u2126x\u0301", "\u03a9x\u0301"},
    {"\u1100\u1161\u11a8", "\uac01"},
    {"\uac00\u11a8", "\uac01"},
    {"\uac01\u11a8", "\uac01\u11a8"},
    {"\u1100\u1161\u0301\u11a8", "\uac00\u0301\u11a8"}, /* the mark is between */
    {"\u0dd9\u0dcf\u0dca", "\u0ddd"},                   /* starters that join */
    {"x\u09c7\u09be\u0334", "x\u09cb\u0334"},
    {"\u0301\u0323", "\u0323\u0301"},
    {"a\u0301\u0301", "\u00e1\u0301"},
    {"a\u0313\u0301", "a\u0313\u0301"}, /* the first mark is of the same class */
    {"a\u0327\u0301\u0327", "\u00e1\u0327\u0327"},
    {"a\u0345\u0313", "a\u0313\u0345"},
    {"\u3042\u3099\u304b\u3099", "\u3042\u3099\u304c"},
    {"\U0001d15e", "\U0001d157\U0001d165"},
    {"\ufb1d", "\u05d9\u05b4"},
    {"", ""},
};

Test(normal_form, is_that_of_tokenizers)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* Also between characters that stay as they are. */
        static const char *const around[] = {"", "\u4f60", "b "};
        for (size_t k = 0; k < 3; k++) {
            char text[64], expected[64];
            snprintf(text, sizeof text, "%s%s%s", k == 2 ? around[k] : "", cases[i].text,
                     around[k]);
            snprintf(expected, sizeof expected, "%s%s%s", k == 2 ? around[k] : "",
                     cases[i].expected, around[k]);
            nd_bytes out = normal_form(text, strlen(text));
            cr_expect(out.count == strlen(expected) &&
                          (out.count == 0 || memcmp(out.data, expected, out.count) == 0),
                      "case %zu: %.*s", i, (int)out.count, (const char *)out.data);
            free(out.data);
        }
    }
}

/* Sorting by exchanges would take hours. */
Test(normal_form, a_long_run_of_marks_is_sorted_at_once)
{
    enum { PAIRS = 1 << 20, PAIR_BYTES = 4 };
    char *text = malloc(1 + (size_t)PAIRS * PAIR_BYTES);
    cr_assert_not_null(text);
    text[0] = 'a';
    for (size_t i = 0; i < PAIRS; i++) {
        memcpy(text + 1 + i * PAIR_BYTES, "\u0301\u0323", PAIR_BYTES);
    }
    nd_bytes out = normal_form(text, 1 + (size_t)PAIRS * PAIR_BYTES);
    cr_assert_eq(out.count, 3 + 2u * (2 * PAIRS - 1)); /* one mark is a part of the letter */
    cr_expect_eq(memcmp(out.data, "\u1ea1", 3), 0);
    size_t wrong = 0;
    for (size_t i = 0; i < 2 * PAIRS - 1; i++) {
        wrong += memcmp(out.data + 3 + 2 * i, i < PAIRS - 1 ? "\u0323" : "\u0301", 2) != 0;
    }
    cr_expect_eq(wrong, 0);
    free(out.data);
    free(text);
}
