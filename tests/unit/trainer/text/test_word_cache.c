// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/text/word_cache.h"

enum { TEXT = 128, IDS = 12, SMALL_CACHE = 1 << 12, WORDS = 4000 };

static const int32_t *find(const nd_word_cache *cache, const char *word, size_t size, size_t left,
                           size_t *count)
{
    const nd_word_place place = nd_word_cache_place(cache, (const uint8_t *)word, size, left);
    const nd_word_short *slot = nd_word_cache_short(place);
    if (slot) {
        *count = nd_word_short_count(slot);
        return slot->ids;
    }
    return nd_word_cache_find(cache, place, (const uint8_t *)word, size, count);
}

static void put(nd_word_cache *cache, const char *word, size_t size, const int32_t *ids,
                size_t count)
{
    const nd_word_place place = nd_word_cache_place(cache, (const uint8_t *)word, size, size);
    nd_word_cache_put(cache, place, (const uint8_t *)word, size, ids, count);
}

static void assert_ids(const nd_word_cache *cache, const char *word, size_t size, size_t left,
                       const int32_t *ids, size_t count)
{
    size_t found;
    const int32_t *kept = find(cache, word, size, left, &found);
    cr_assert_not_null(kept, "%zu bytes, %zu ids", size, count);
    cr_assert_eq(found, count);
    cr_assert_arr_eq(kept, ids, count * sizeof *ids);
}

/* All sizes and numbers of ids: what fits is kept, whatever stands behind the word in its text. */
Test(word_cache, words_of_all_sizes)
{
    char text[TEXT];
    int32_t ids[IDS];
    for (int i = 0; i < TEXT; i++) {
        text[i] = (char)(i % 5 == 0 ? 0 : 'a' + i % 26);
    }
    for (size_t size = 1; size < 100; size++) {
        for (size_t count = 1; count <= IDS; count++) {
            nd_word_cache cache;
            size_t other;
            assert_ok(nd_word_cache_init(&cache, SMALL_CACHE));
            for (size_t i = 0; i < count; i++) {
                ids[i] = (int32_t)(1000 * size + i);
            }
            cr_assert_null(find(&cache, text, size, TEXT, &other));
            put(&cache, text, size, ids, count);
            if (size <= ND_WORD_LONG_BYTES && count <= ND_WORD_LONG_IDS) {
                assert_ids(&cache, text, size, TEXT, ids, count);
                assert_ids(&cache, text, size, size, ids, count);
                assert_ids(&cache, text, size, size + 1, ids, count);
            } else if (size > ND_WORD_SHORT_BYTES || count > ND_WORD_SHORT_IDS) {
                cr_assert_null(find(&cache, text, size, TEXT, &other));
            }
            /* A longer and a shorter word with the same beginning are other words. */
            cr_assert_null(find(&cache, text, size + 1, TEXT, &other));
            cr_assert(size == 1 || !find(&cache, text, size - 1, TEXT, &other));
            nd_word_cache_fini(&cache);
        }
    }
}

/* With more words than there is room for, some are gone, but none has the ids of another. */
Test(word_cache, a_full_cache_forgets_and_never_mistakes)
{
    static const size_t sizes[] = {512, 1200, SMALL_CACHE, 1 << 16};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        nd_word_cache cache;
        int kept = 0;
        assert_ok(nd_word_cache_init(&cache, sizes[s]));
        cr_assert_leq(2 * cache.short_sets * sizeof(nd_word_short) +
                          cache.long_slots * sizeof(nd_word_long),
                      sizes[s]);
        for (int pass = 0; pass < 2; pass++) {
            for (int32_t n = 0; n < WORDS; n++) {
                char word[TEXT];
                int32_t ids[6] = {n, n + 1, n + 2, n + 3, n + 4, n + 5};
                const size_t size =
                    (size_t)sprintf(word, "%d%s", n, n % 3 ? "" : "and fifteen more");
                const size_t ids_count = (size_t)(n % 6) + 1;
                size_t count;
                const int32_t *found = find(&cache, word, size, size, &count);
                if (found) {
                    kept++;
                    cr_assert_eq(count, ids_count);
                    cr_assert_arr_eq(found, ids, count * sizeof *ids);
                } else {
                    put(&cache, word, size, ids, ids_count);
                    assert_ids(&cache, word, size, size, ids, ids_count);
                }
            }
        }
        cr_assert(sizes[s] < (1 << 16) || kept > 0);
        nd_word_cache_fini(&cache);
    }
}

/* A set keeps two words: the older one goes first. */
Test(word_cache, two_words_of_one_set)
{
    nd_word_cache cache;
    char words[3][12];
    const nd_word_short *set = NULL;
    assert_ok(nd_word_cache_init(&cache, SMALL_CACHE));
    int count = 0;
    for (int n = 0; count < 3; n++) {
        char word[12];
        const size_t size = (size_t)sprintf(word, "%05d", n & 0xffff);
        const nd_word_place place = nd_word_cache_place(&cache, (uint8_t *)word, size, size);
        if (count == 0 || place.set == set) {
            set = place.set;
            memcpy(words[count++], word, sizeof word);
        }
    }
    for (int32_t i = 0; i < 3; i++) {
        size_t other;
        put(&cache, words[i], 5, &i, 1);
        assert_ids(&cache, words[i], 5, 5, &i, 1);
        if (i > 0) {
            assert_ids(&cache, words[i - 1], 5, 5, &(int32_t){i - 1}, 1);
        }
        cr_assert(i < 2 || !find(&cache, words[0], 5, 5, &other));
    }
    nd_word_cache_fini(&cache);
}

Test(word_cache, without_memory_nothing_is_kept)
{
    nd_word_cache cache;
    size_t count;
    assert_ok(nd_word_cache_init(&cache, 0));
    put(&cache, "word", 4, &(int32_t){7}, 1);
    cr_assert_null(find(&cache, "word", 4, 4, &count));
    put(&cache, "a word of many bytes", 20, &(int32_t){7}, 1);
    cr_assert_null(find(&cache, "a word of many bytes", 20, 20, &count));
    nd_word_cache_fini(&cache);
}
