// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/unicode.h"

#include <criterion/criterion.h>

/* One of each category, and the limits of what has no category of its own. */
Test(unicode, classes_and_characters_of_words)
{
    enum { O = ND_CHAR_OTHER, L = ND_CHAR_LETTER, N = ND_CHAR_NUMBER, S = ND_CHAR_SPACE };
    static const struct {
        uint32_t code;
        int class, word;
    } cases[] = {
        {8, O, 0},       {9, S, 0},       {13, S, 0},      {14, O, 0},      {0x84, O, 0},
        {0x85, S, 0},    {0x1680, S, 0},  {0x2028, S, 0},  {0x2029, S, 0},  {'A', L, 1},
        {0x1c5, L, 1},   {0x5d0, L, 1},   {0x301, O, 1},   {0x20dd, O, 1},  {'9', N, 1},
        {0x2160, N, 1},  {0xb2, N, 0},    {'_', O, 1},     {'-', O, 0},     {0x200b, O, 0},
        {0x200c, O, 1},  {0x200d, O, 1},  {0x200e, O, 0},  {0x24b5, O, 0},  {0x24b6, O, 1},
        {0x24e9, O, 1},  {0x24ea, N, 0},  {0x1f12f, O, 0}, {0x1f130, O, 1}, {0x1f149, O, 1},
        {0x1f14a, O, 0}, {0x1f14f, O, 0}, {0x1f150, O, 1}, {0x1f169, O, 1}, {0x1f16a, O, 0},
        {0x1f16f, O, 0}, {0x1f170, O, 1}, {0x1f189, O, 1}, {0x1f18a, O, 0}, {0x10ffff, O, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq((int)nd_char_class_of(cases[i].code), cases[i].class, "%x", cases[i].code);
        cr_expect_eq(nd_char_is_word(cases[i].code), cases[i].word, "%x", cases[i].code);
    }
}
