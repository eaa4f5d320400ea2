// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/text/parts.h"

enum { WORDS = 512, SIZE = 300 };

/* plain_split.c: nd_text_words without vector instructions. */
int nd_text_words_plain(nd_splitter splitter, const uint8_t *text, size_t size, size_t at,
                        size_t *ends, int room);

/* Vector instructions change nothing, wherever a text begins and ends in memory. */
Test(split, vectors_find_the_same_words_at_every_alignment)
{
    static const nd_splitter splitters[] = {ND_SPLIT_GPT2, ND_SPLIT_LLAMA3, ND_SPLIT_QWEN2,
                                            ND_SPLIT_EACH_DIGIT};
    static uint8_t text[SIZE], moved[SIZE + 64];
    for (uint64_t seed = 0; seed < 40; seed++) {
        size_t size = text_random(seed, false, (char *)text, SIZE - seed % 19);
        for (size_t s = 0; s < sizeof splitters / sizeof *splitters; s++) {
            size_t plain[WORDS], vectors[WORDS];
            int count = nd_text_words_plain(splitters[s], text, size, 0, plain, WORDS);
            cr_assert_eq(plain[count - 1], size);
            for (size_t shift = 0; shift < 32; shift++) {
                memcpy(moved + shift, text, size);
                cr_assert_eq(nd_text_words(splitters[s], moved + shift, size, 0, vectors, WORDS),
                             count);
                cr_assert_eq(memcmp(plain, vectors, (size_t)count * sizeof *plain), 0);
            }
        }
    }
}

/* Texts of few different bytes, mostly ASCII and longer than a block of 64 bytes, in memory that
 * ends with the text. */
Test(split, blocks_find_the_same_words)
{
    static const char bytes[] = "aslLvrez1''    \n\n\r\t!!.\x01";
    static const char *const longer[] = {"\u00e9", "\u4f60",     "\u00a0",   "\u3000",  "\u017f",
                                         "2345",   "some words", "        ", "\n    \n"};
    enum { SOME = sizeof bytes - 1, LONGER = sizeof longer / sizeof *longer };
    for (uint64_t seed = 0; seed < 60000; seed++) {
        const uint64_t base = nd_rng_u64(seed, 1, 0), some = base % SOME + 1, from = base >> 8;
        const uint64_t often = (base >> 16) % 40, wanted = 60 + (base >> 32) % 140;
        size_t size = 0, plain[WORDS], blocks[WORDS];
        uint8_t buffer[SIZE];
        for (uint64_t i = 0; size < wanted; i++) {
            const uint64_t random = nd_rng_u64(seed, 2, i);
            if (random % 100 < often) {
                const char *atom = longer[(random >> 8) % LONGER];
                memcpy(buffer + size, atom, strlen(atom));
                size += strlen(atom);
            } else {
                buffer[size++] = (uint8_t)bytes[(from + (random >> 8) % some) % SOME];
            }
        }
        uint8_t *text = malloc(size);
        const nd_splitter splitter = seed % 2 ? ND_SPLIT_LLAMA3 : ND_SPLIT_QWEN2;
        cr_assert_not_null(text);
        memcpy(text, buffer, size);
        const int count = nd_text_words_plain(splitter, text, size, 0, plain, WORDS);
        cr_assert_eq(plain[count - 1], size);
        cr_assert_eq(nd_text_words(splitter, text, size, 0, blocks, WORDS), count);
        cr_assert_arr_eq(plain, blocks, (size_t)count * sizeof *plain, "seed %d", (int)seed);
        free(text);
    }
}

/* Words in batches are words one by one. */
Test(split, batches_of_any_size)
{
    static uint8_t text[SIZE];
    size_t size = text_random(99, false, (char *)text, SIZE), all[WORDS];
    int count = nd_text_words(ND_SPLIT_LLAMA3, text, size, 0, all, WORDS);
    for (int room = 1; room < 9; room++) {
        size_t ends[8], at = 0;
        for (int done = 0, n; done < count; done += n) {
            n = nd_text_words(ND_SPLIT_LLAMA3, text, size, at, ends, room);
            cr_assert_eq(memcmp(ends, all + done, (size_t)n * sizeof *ends), 0);
            at = ends[n - 1];
        }
        cr_assert_eq(at, size);
    }
}

/* A Metaspace that splits gives such words to the pre-tokenizer behind it. */
Test(split, a_word_begins_at_each_mark)
{
    static const char text[] = "x\u2581ab\u2581\u2581c";
    static const size_t expected[] = {1, 6, 9, 13};
    size_t ends[8];
    cr_assert_eq(nd_text_words(ND_SPLIT_MARKS, (const uint8_t *)text, 13, 0, ends, 8), 4);
    cr_expect_arr_eq(ends, expected, sizeof expected);
}
