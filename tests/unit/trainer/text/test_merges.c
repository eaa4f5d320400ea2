// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/text/bpe.h"

enum { PIECES = 600, MERGES = 5000 };

static int32_t ranks[PIECES][PIECES]; /* of all pairs; -1: not merged */

static int32_t made_by(int32_t rank)
{
    return (rank * 7) % PIECES;
}

/* Random merges; the later of two of one pair counts. Ids below `few` are in most of them. */
static void fill(nd_merges *merges, uint64_t seed, int32_t first, int32_t few)
{
    assert_ok(nd_merges_init(merges, MERGES, first));
    memset(ranks, -1, sizeof ranks);
    for (int32_t rank = 0; rank < MERGES; rank++) {
        const uint64_t random = nd_rng_u64(seed, 1, (uint64_t)rank);
        const int32_t ids = rank % 4 ? few : PIECES;
        const int32_t left = (int32_t)(random % (uint64_t)ids);
        const int32_t right = (int32_t)((random >> 32) % (uint64_t)ids);
        nd_merges_add(merges, (nd_merge){left, right, rank, made_by(rank)});
        ranks[left][right] = rank;
    }
}

/* Every pair, whether it is looked up in the table of the first ids or in the other. */
Test(merges, all_pairs_that_are_merged_and_no_others)
{
    static const int32_t firsts[] = {0, 100, 500, ND_MERGES_RANK_MAX};
    for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++) {
        nd_merges merges;
        fill(&merges, f, firsts[f], PIECES);
        for (int32_t left = 0; left < PIECES; left++) {
            for (int32_t right = 0; right < PIECES; right++) {
                const nd_merged merged = nd_merges_find(&merges, left, right);
                const int32_t rank = ranks[left][right];
                cr_assert_eq(merged.rank, rank < 0 ? ND_MERGE_NONE : rank, "%d %d", left, right);
                cr_assert(rank < 0 || merged.id == made_by(rank));
            }
        }
        nd_merges_fini(&merges);
    }
}

/* The definition: the leftmost pair of the lowest rank is merged until none is left. */
static int merge_plainly(int32_t *ids, int count)
{
    for (;;) {
        int best = -1;
        for (int i = 0; i + 1 < count; i++) {
            const int32_t rank = ranks[ids[i]][ids[i + 1]];
            if (rank >= 0 && (best < 0 || rank < ranks[ids[best]][ids[best + 1]])) {
                best = i;
            }
        }
        if (best < 0) {
            return count;
        }
        ids[best] = made_by(ranks[ids[best]][ids[best + 1]]);
        count--;
        memmove(ids + best + 1, ids + best + 2, (size_t)(count - best - 1) * sizeof *ids);
    }
}

/* Words of all lengths, any number at once, with few different characters, so that equal pairs
 * overlap. */
Test(merges, short_words_together_are_merged_as_each_alone)
{
    enum { TOGETHER = 19 };
    static nd_short_word words[TOGETHER];
    int32_t expected[TOGETHER][ND_SHORT_WORD];
    int counts[TOGETHER], total = 0, left = 0;
    for (uint64_t round = 0; round < 400; round++) {
        nd_merges merges;
        const int32_t few = 4 + (int32_t)(round % 60);
        const int together = (int)(round % TOGETHER) + 1;
        fill(&merges, round, round % 2 ? 0 : 300, few);
        for (int w = 0; w < together; w++) {
            words[w].count = (int)((round + (uint64_t)w * 5) % (ND_SHORT_WORD + 1));
            for (int i = 0; i < words[w].count; i++) {
                const uint64_t random = nd_rng_u64(round, 2 + (uint64_t)w, (uint64_t)i);
                words[w].ids[i] = (int32_t)(random % (uint64_t)few);
            }
            memcpy(expected[w], words[w].ids, sizeof expected[w]);
            counts[w] = merge_plainly(expected[w], words[w].count);
            total += words[w].count;
            left += counts[w];
        }
        nd_short_words_merge(&merges, words, together);
        for (int w = 0; w < together; w++) {
            cr_assert_eq(words[w].count, counts[w], "round %d", (int)round);
            cr_assert_arr_eq(words[w].ids, expected[w], (size_t)counts[w] * sizeof(int32_t));
        }
        nd_merges_fini(&merges);
    }
    cr_assert_lt(left, total * 3 / 4);
}
