// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "trainer/parallel/cp.h"

enum { CHUNK = 3, SIZE_MAX_ = 8, TOKENS = 2 * SIZE_MAX_ * CHUNK };

/* Global position of row `row` (0 .. 2 chunk - 1) of a rank's local order. */
static int64_t place(int size, int rank, int64_t row)
{
    int64_t chunk = row < CHUNK ? rank : 2 * size - 1 - rank;
    return chunk * CHUNK + row % CHUNK;
}

static int64_t local_place(int size, int rank, int64_t row)
{
    return size == 1 ? row : place(size, rank, row);
}

typedef int pair_table[TOKENS][TOKENS];

/* Counts every (query, key) pair that a block makes visible; keys are those of `owner`, or global
 * when it is -1. */
static void count_block(pair_table seen, int size, int rank, const nd_attention_block *b, int owner)
{
    for (int64_t i = 0; i < CHUNK; i++) {
        int64_t query = local_place(size, rank, b->q_chunk * CHUNK + i);
        for (int64_t j = 0; j < b->kv_count && j <= i + b->diag; j++) {
            int64_t row = b->kv_begin + j;
            seen[query][owner < 0 ? row : local_place(size, owner, row)]++;
        }
    }
}

static void check_causal(pair_table seen, int size)
{
    int64_t tokens = size == 1 ? CHUNK : 2 * size * CHUNK;
    for (int64_t q = 0; q < tokens; q++) {
        for (int64_t k = 0; k < tokens; k++) {
            cr_assert_eq(seen[q][k], k <= q, "cp %d: query %ld sees key %ld %d times", size,
                         (long)q, (long)k, seen[q][k]);
        }
    }
}

static const int sizes[] = {1, 2, 3, 4, 8};

Test(cp, gathered_blocks_are_causal_attention)
{
    static pair_table seen;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        memset(seen, 0, sizeof seen);
        for (int rank = 0; rank < sizes[s]; rank++) {
            nd_attention_block blocks[2];
            int count = nd_cp_blocks_gathered(sizes[s], rank, 0, CHUNK, blocks);
            for (int b = 0; b < count; b++) {
                count_block(seen, sizes[s], rank, &blocks[b], -1);
            }
        }
        check_causal(seen, sizes[s]);
    }
}

/* Every rank also computes as many pairs as any other: that is the purpose of zig-zag. */
Test(cp, ring_blocks_are_causal_attention_in_equal_shares)
{
    static pair_table seen;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int size = sizes[s];
        memset(seen, 0, sizeof seen);
        for (int rank = 0; rank < size; rank++) {
            for (int step = 0; step < size; step++) {
                nd_attention_block blocks[2];
                int count = nd_cp_blocks_ring(size, rank, step, CHUNK, blocks);
                for (int b = 0; b < count; b++) {
                    count_block(seen, size, rank, &blocks[b], (rank - step + size) % size);
                }
            }
        }
        check_causal(seen, size);
        for (int rank = 0; size > 1 && rank < size; rank++) {
            int64_t pairs = 0;
            for (int64_t row = 0; row < 2 * CHUNK; row++) {
                pairs += local_place(size, rank, row) + 1;
            }
            cr_assert_eq(pairs, CHUNK * (2 * size * CHUNK + 1), "cp %d, rank %d", size, rank);
        }
    }
}
