// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdio.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/text/vocab.h"

enum { PIECES = 600, MERGES = 5000 };

/* Every pair of pieces, whether it is looked up in the table of the first ids or in the other. */
Test(vocab, all_pairs_that_are_merged_and_no_others)
{
    static const int32_t firsts[] = {0, 100, 500, ND_VOCAB_IDS_MAX};
    static int32_t ranks[PIECES][PIECES];
    for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++) {
        nd_vocab vocab;
        assert_ok(nd_vocab_init(&vocab, PIECES, MERGES, false));
        nd_vocab_set_first(&vocab, firsts[f]);
        memset(ranks, -1, sizeof ranks);
        for (int32_t rank = 0; rank < MERGES; rank++) { /* the later of two equal ones counts */
            const uint64_t random = nd_rng_u64(1, f, (uint64_t)rank);
            const int32_t left = (int32_t)(random % PIECES);
            const int32_t right = (int32_t)((random >> 32) % PIECES);
            nd_vocab_add_merge(&vocab, (nd_merge){left, right, rank, rank % PIECES});
            ranks[left][right] = rank;
        }
        for (int32_t left = 0; left < PIECES; left++) {
            for (int32_t right = 0; right < PIECES; right++) {
                const nd_merged merged = nd_vocab_merge(&vocab, left, right);
                const int32_t rank = ranks[left][right];
                cr_assert_eq(merged.rank, rank < 0 ? ND_MERGE_NONE : rank, "%d %d", left, right);
                cr_assert(rank < 0 || merged.id == rank % PIECES);
            }
        }
        nd_vocab_fini(&vocab);
    }
}

Test(vocab, pieces_by_text_and_by_bytes)
{
    nd_vocab vocab;
    char text[16];
    assert_ok(nd_vocab_init(&vocab, PIECES, 0, true));
    for (int32_t id = 0; id < PIECES; id++) {
        const int size = sprintf(text, "\xc4\xa0%d", id); /* U+0120 stands for a blank */
        assert_ok(nd_vocab_add(&vocab, id, text, (size_t)size, id % 7 != 0));
    }
    for (int32_t id = 0; id < 2 * PIECES; id++) {
        int size = sprintf(text, "\xc4\xa0%d", id);
        cr_assert_eq(nd_vocab_find(&vocab, text, (size_t)size), id < PIECES ? id : -1);
        size = sprintf(text, " %d", id);
        cr_assert_eq(nd_vocab_find_bytes(&vocab, text, (size_t)size),
                     id < PIECES && id % 7 != 0 ? id : -1);
    }
    assert_fails(nd_vocab_add(&vocab, PIECES, "\xc4\xa0\x35", 3, true), ND_ERR_DATA, "there twice");
    nd_vocab_fini(&vocab);
}
