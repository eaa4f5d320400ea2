// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"
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
            nd_attention_block blocks[ND_CP_BLOCKS];
            int count = nd_cp_blocks_gathered(sizes[s], rank, 0, CHUNK, 0, blocks);
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
                nd_attention_block blocks[ND_CP_BLOCKS];
                int count = nd_cp_blocks_ring(size, rank, step, CHUNK, 0, blocks);
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

/* Each pair of the window in one block, and no block that nothing is seen in. */
Test(cp, ring_blocks_with_a_window)
{
    static const int64_t windows[] = {1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 100 * CHUNK};
    static pair_table seen;
    for (size_t s = 1; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
            const int64_t window = windows[w], tokens = 2 * sizes[s] * CHUNK;
            memset(seen, 0, sizeof seen);
            for (int rank = 0; rank < sizes[s]; rank++) {
                for (int step = 0; step < sizes[s]; step++) {
                    nd_attention_block blocks[ND_CP_BLOCKS];
                    int count = nd_cp_blocks_ring(sizes[s], rank, step, CHUNK, window, blocks);
                    cr_expect(step > 0 || (blocks[0].q_chunk == 0 && blocks[1].q_chunk == 1));
                    for (int b = 0; b < count; b++) {
                        cr_expect_lt(blocks[b].diag - CHUNK + 1, window);
                        count_block(seen, sizes[s], rank, &blocks[b],
                                    (rank - step + sizes[s]) % sizes[s]);
                    }
                }
            }
            for (int64_t q = 0; q < tokens; q++) {
                for (int64_t k = 0; k < tokens; k++) {
                    const bool must = k <= q && q - k < window;
                    cr_assert(seen[q][k] == 1 || (seen[q][k] == 0 && !must),
                              "cp %d, window %ld: query %ld and key %ld meet %d times", sizes[s],
                              (long)window, (long)q, (long)k, seen[q][k]);
                    cr_assert(seen[q][k] == 0 || k <= q);
                }
            }
        }
    }
}

/* Attention and its gradients over threads as ranks. The tokens of two samples, rows of both in
 * their global order: what each rank gives goes to its places. */
enum { SAMPLES = 2, SEQUENCE = 24, COLUMNS_MAX = 8 * 16 };

typedef struct whole {
    float o[SAMPLES * SEQUENCE][COLUMNS_MAX];    /* (B S, H D) */
    float dqkv[SAMPLES * SEQUENCE][COLUMNS_MAX]; /* (B S, QKV) */
} whole;

/* Row of the global tensors that is local row `row` of this rank. */
static int64_t global_row(const nd_rank *rank, const nd_dims *d, int64_t row)
{
    int64_t at = row % d->s, chunk = at / d->chunk;
    int64_t size = rank->mesh.size[ND_AXIS_CP], index = rank->coord.at[ND_AXIS_CP];
    int64_t first = d->chunks == 1 ? 0 : chunk == 0 ? index : 2 * size - 1 - index;
    return row / d->s * d->S + first * d->chunk + at % d->chunk;
}

static nd_status attend(nd_rank *rank, nd_cp *cp, whole *out)
{
    const nd_dims *d = &cp->dims;
    const int64_t HD = d->H * d->D;
    float *qkv = calloc((size_t)(d->T * d->QKV), sizeof *qkv), *dqkv = malloc(sizeof out->dqkv);
    float *o = malloc(sizeof out->o), *dout = malloc(sizeof out->o);
    float *lse = malloc((size_t)(d->T * d->H) * sizeof *lse);
    for (int64_t i = 0; i < d->T; i++) {
        const int64_t row = global_row(rank, d, i);
        for (int64_t c = 0; c < d->QKV; c++) {
            qkv[i * d->QKV + c] = mesh_value(1, row * d->QKV + c);
        }
        for (int64_t c = 0; c < HD; c++) {
            dout[i * HD + c] = mesh_value(2, row * HD + c);
        }
    }
    const nd_tensor x = nd_tensor_2d(qkv, ND_DTYPE_F32, d->T, d->QKV);
    const nd_tensor y = nd_tensor_2d(o, ND_DTYPE_F32, d->T, HD);
    nd_status status = nd_cp_attention_fwd(cp, 0, x, y, lse);
    if (status == ND_OK) {
        status = nd_cp_attention_bwd(cp, 0, nd_tensor_2d(dqkv, ND_DTYPE_F32, d->T, d->QKV), x, y,
                                     lse, nd_tensor_2d(dout, ND_DTYPE_F32, d->T, HD));
    }
    if (status == ND_OK) {
        status = nd_cp_attention_bwd_finish(cp, nd_tensor_2d(dqkv, ND_DTYPE_F32, d->T, d->QKV));
    }
    for (int64_t i = 0; i < d->T; i++) {
        const int64_t row = global_row(rank, d, i);
        memcpy(out->o[row], o + i * HD, (size_t)HD * sizeof *o);
        memcpy(out->dqkv[row], dqkv + i * d->QKV, (size_t)d->QKV * sizeof *dqkv);
    }
    free(qkv);
    free(dqkv);
    free(o);
    free(dout);
    free(lse);
    return status;
}

static nd_status attend_body(nd_rank *rank, void *context)
{
    const nd_dims dims = nd_dims_of(&rank->shape, &rank->mesh, rank->coord, rank->config, false);
    nd_memplan plan;
    nd_cp cp;
    ND_CHECK(dims.QKV <= COLUMNS_MAX, "%lld columns", (long long)dims.QKV);
    nd_memplan_init(&plan);
    nd_cp_init(&cp, rank, &dims, &plan);
    nd_status status = nd_memplan_commit(&plan, rank->device);
    status = status == ND_OK ? attend(rank, &cp, context) : status;
    nd_memplan_fini(&plan);
    return status;
}

static void attend_on(int cp, nd_cp_comm method, whole *out)
{
    mesh_ranks job = {.mesh = {{1, 1, 1, cp, 1}},
                      .shape = mesh_shape_of(1, false),
                      .config = mesh_config_of(),
                      .body = attend_body,
                      .context = out};
    job.shape.kv_heads = 2;
    job.config.train.sequence_length = SEQUENCE;
    job.config.train.micro_batch_size = SAMPLES;
    job.config.parallel.cp_comm = method;
    memset(out, 0, sizeof *out);
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "cp %d: %s", cp, nd_error_last()->message);
}

/* Scores of 16 products of values up to 1, and sums over up to 24 keys or, for a key's gradient, 48
 * queries: 2 eps (4 x 16 + 48), with factors of a gradient below 16. One block too many or too few
 * is above 1e-2. */
Test(cp, any_number_of_ranks_gives_the_attention_and_gradients_of_one)
{
    static whole one, many;
    const double bound = 2 * 0x1p-23 * (4 * 16 + 48) * 16;
    attend_on(1, ND_CP_RING, &one);
    for (int cp = 2; cp <= 4; cp++) {
        for (int ring = 0; ring < 2; ring++) {
            attend_on(cp, ring ? ND_CP_RING : ND_CP_ALLGATHER, &many);
            for (int row = 0; row < SAMPLES * SEQUENCE; row++) {
                for (int c = 0; c < COLUMNS_MAX; c++) {
                    const double o = fabs((double)many.o[row][c] - (double)one.o[row][c]);
                    const double d = fabs((double)many.dqkv[row][c] - (double)one.dqkv[row][c]);
                    cr_assert(o <= bound && d <= bound,
                              "cp %d, ring %d: row %d, column %d: output by %g, gradient by %g", cp,
                              ring, row, c, o, d);
                }
            }
        }
    }
}
