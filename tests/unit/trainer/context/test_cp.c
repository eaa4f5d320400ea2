// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/context/deal.h"
#include "trainer/context/cp.h"

enum { CHUNK = 3, SIZE_MAX_ = 8, TOKENS = 2 * SIZE_MAX_ * CHUNK };

/* Global position of row `row` (0 .. 2 chunk - 1) of a rank's local order. */
static int64_t local_place(int size, int rank, int64_t row)
{
    const int64_t chunk = row < CHUNK ? rank : 2 * size - 1 - rank;
    return size == 1 ? row : chunk * CHUNK + row % CHUNK;
}

typedef int pair_table[TOKENS][TOKENS];

/* Counts every (query, key) pair that a block makes visible; keys are those of `owner`, or global
 * when it is -1. */
static void count_block(pair_table seen, int size, int rank, const nd_attention_block *b, int owner)
{
    for (int64_t i = 0; i < CHUNK; i++) {
        int64_t query = local_place(size, rank, b->q_begin + i);
        for (int64_t j = 0; j < b->kv_count && j <= i + b->diag; j++) {
            int64_t row = b->kv_begin + j;
            seen[query][owner < 0 ? row : local_place(size, owner, row)]++;
        }
    }
}

/* Counts the pairs of all blocks of all ranks. With a window no block is there in which nothing is
 * seen, and those of step 0 begin with the rank's own chunks. */
static void count_pairs(pair_table seen, int size, bool ring, int64_t window)
{
    memset(seen, 0, sizeof(pair_table));
    for (int rank = 0; rank < size; rank++) {
        for (int step = 0; step < (ring ? size : 1); step++) {
            nd_attention_block blocks[ND_CP_BLOCKS];
            const int count = ring ? nd_cp_blocks_ring(size, rank, step, CHUNK, window, blocks)
                                   : nd_cp_blocks_gathered(size, rank, step, CHUNK, window, blocks);
            cr_expect(window == 0 || step > 0 ||
                      (blocks[0].q_begin == 0 && blocks[1].q_begin == CHUNK));
            for (int b = 0; b < count; b++) {
                cr_expect(window == 0 || blocks[b].diag - CHUNK + 1 < window);
                count_block(seen, size, rank, &blocks[b], ring ? (rank - step + size) % size : -1);
            }
        }
    }
}

/* `window`: a pair outside of it may be seen, once, as the op hides it. */
static void check_pairs(pair_table seen, int size, int64_t window)
{
    const int64_t tokens = size == 1 ? CHUNK : 2 * size * CHUNK;
    for (int64_t q = 0; q < tokens; q++) {
        for (int64_t k = 0; k < tokens; k++) {
            const bool must = k <= q && (window == 0 || q - k < window), may = window > 0 && k <= q;
            cr_assert(seen[q][k] == must || (may && seen[q][k] == 1),
                      "cp %d, window %ld: query %ld sees key %ld %d times", size, (long)window,
                      (long)q, (long)k, seen[q][k]);
        }
    }
}

static const int sizes[] = {1, 2, 3, 4, 8};

/* With a ring every rank also computes as many pairs as any other: that is the purpose of
 * zig-zag. */
Test(cp, blocks_are_causal_attention_and_those_of_a_ring_are_equal_shares)
{
    static pair_table seen;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int size = sizes[s];
        for (int ring = 0; ring < 2; ring++) {
            count_pairs(seen, size, ring, 0);
            check_pairs(seen, size, 0);
        }
        for (int rank = 0; size > 1 && rank < size; rank++) {
            int64_t pairs = 0;
            for (int64_t row = 0; row < 2 * CHUNK; row++) {
                pairs += local_place(size, rank, row) + 1;
            }
            cr_assert_eq(pairs, CHUNK * (2 * size * CHUNK + 1), "cp %d, rank %d", size, rank);
        }
    }
}

Test(cp, an_exchange_in_words)
{
    static const nd_cp_exchange of[] = {{1, true}, {1, false}, {4, false}, {2, true}, {2, false}};
    static const char *const words[] = {"ring", "allgather", "ulysses", "ulysses 2, then ring",
                                        "ulysses 2, then allgather"};
    const nd_mesh mesh = {{1, 1, 1, 4, 2}};
    char text[64];
    for (int i = 0; i < 5; i++) {
        cr_expect_str_eq(nd_cp_exchange_format(&of[i], &mesh, text, sizeof text), words[i]);
    }
}

Test(cp, ring_blocks_with_a_window)
{
    static const int64_t windows[] = {1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 100 * CHUNK};
    static pair_table seen;
    for (size_t s = 1; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
            count_pairs(seen, sizes[s], true, windows[w]);
            check_pairs(seen, sizes[s], windows[w]);
        }
    }
}

/* Attention and its gradients over threads as ranks. The tokens of two samples, rows of both in
 * their global order: what each rank gives goes to its places. */
enum { SAMPLES = 2, SEQUENCE = 48, COLUMNS_MAX = 12 * 16 };

typedef struct whole {
    float o[SAMPLES * SEQUENCE][COLUMNS_MAX];    /* (B S, H D) */
    float dqkv[SAMPLES * SEQUENCE][COLUMNS_MAX]; /* (B S, QKV) */
    _Atomic int64_t sent;                        /* nd_cp_first_keys, of all ranks; -1: all */
} whole;

typedef struct attention_case {
    int cp, ulysses;
    nd_cp_comm method;
    int tp;                          /* 0: 1 */
    int64_t heads, kv_heads, window; /* heads 0: 4 */
    nd_precision precision;
    bool cpu;                  /* the ops of kernels/cpu, else of kernels/ref */
    bool graphs;               /* the ops are those that CUDA graphs hold */
    const int32_t *first_keys; /* (B, S); NULL: documents are joined */
} attention_case;

typedef struct attention_job {
    const attention_case *c;
    whole *out;
} attention_job;

/* places (B S); rows (T): those of the global tensors that are this rank's. */
static void deal_rows(const nd_rank *rank, const nd_dims *d, const int32_t *first_keys,
                      int32_t *places, int32_t *rows)
{
    const nd_deal_of of = nd_deal_of_mesh(&rank->shape, &rank->mesh, d->S);
    void *scratch = malloc(nd_deal_bytes(&of));
    for (int64_t b = 0; b < d->B; b++) {
        const int32_t *keys = first_keys ? first_keys + b * d->S : NULL;
        nd_deal(&of, keys, scratch, places + b * d->S);
        nd_deal_local(&of, places + b * d->S, rank->coord.at[ND_AXIS_CP], rows + b * d->s);
        for (int64_t i = 0; i < d->s; i++) {
            rows[b * d->s + i] += (int32_t)(b * d->S);
        }
    }
    free(scratch);
}

/* Where a column of a rank's (T, QKV) or (T, H D) is among those of all tp ranks. */
static int64_t column_of(const nd_rank *rank, const nd_dims *d, int64_t column)
{
    const int64_t tp = rank->mesh.size[ND_AXIS_TP], t = rank->coord.at[ND_AXIS_TP];
    const int64_t q = d->H * d->D, kv = d->K * d->D, part = (column - q) / kv;
    return column < q ? t * q + column
                      : tp * (q + part * kv) + t * kv + (column - q) % kv; /* k, v */
}

/* mesh_value is exact in BF16. */
static nd_tensor rows_of(const nd_rank *rank, const int32_t *rows, const nd_dims *d, uint64_t seed,
                         int64_t columns)
{
    const int64_t all = rank->mesh.size[ND_AXIS_TP] * columns;
    nd_tensor t = nd_tensor_2d(NULL, d->act, d->T, columns);
    t.data = malloc(nd_tensor_bytes(t));
    for (int64_t i = 0; i < d->T * columns; i++) {
        const int64_t row = rows[i / columns];
        mesh_put(t, 0, i, mesh_value(seed, row * all + column_of(rank, d, i % columns)));
    }
    return t;
}

static void keep(const nd_rank *rank, const int32_t *rows, const nd_dims *d, nd_tensor t,
                 float (*out)[COLUMNS_MAX])
{
    for (int64_t i = 0; i < nd_tensor_count(t); i++) {
        out[rows[i / t.shape[1]]][column_of(rank, d, i % t.shape[1])] = mesh_get(t, 0, i);
    }
}

static nd_status attend(nd_rank *rank, nd_cp *cp, const attention_job *job)
{
    const nd_dims *d = &cp->tokens;
    const int32_t *of_sequence = job->c->first_keys;
    const nd_cp_key_sizes need = nd_cp_key_sizes_of(rank, d);
    int32_t *keys = malloc((size_t)need.numbers * sizeof *keys);
    int64_t sent[1 + 3 * SIZE_MAX_] = {-1};
    const nd_sight sight = {job->c->window, of_sequence ? keys : NULL, sent};
    int32_t rows[SAMPLES * SEQUENCE], places[SAMPLES * SEQUENCE];
    nd_status status = ND_OK;
    deal_rows(rank, d, of_sequence, places, rows);
    if (of_sequence) {
        void *scratch = malloc((size_t)need.scratch);
        cr_assert_leq((size_t)need.sent, sizeof sent / sizeof *sent);
        nd_cp_first_keys(rank, d, of_sequence, places, scratch, keys, sent);
        free(scratch);
    }
    job->out->sent = sent[0]; /* of any rank, the same */
    nd_tensor qkv = rows_of(rank, rows, d, 1, d->QKV), dqkv = rows_of(rank, rows, d, 3, d->QKV);
    nd_tensor o = rows_of(rank, rows, d, 4, d->H * d->D);
    nd_tensor dout = rows_of(rank, rows, d, 2, d->H * d->D);
    float *lse = malloc((size_t)(d->T * d->H) * sizeof *lse);
    ND_TRY_OUT(nd_cp_attention_fwd(cp, sight, qkv, o, lse));
    ND_TRY_OUT(nd_cp_attention_bwd(cp, sight, &(nd_cp_backward){dqkv, qkv, o, dout, lse}));
    ND_TRY_OUT(nd_cp_attention_bwd_finish(cp, dqkv));
    keep(rank, rows, d, o, job->out->o);
    keep(rank, rows, d, dqkv, job->out->dqkv);
out:
    free(qkv.data);
    free(dqkv.data);
    free(o.data);
    free(dout.data);
    free(keys);
    free(lse);
    return status;
}

static nd_status attend_body(nd_rank *rank, void *context)
{
    const attention_job *job = context;
    const nd_dims dims = nd_dims_of(&rank->shape, &rank->mesh, rank->coord, rank->config, false);
    nd_memplan plan;
    nd_cp cp;
    ND_CHECK(dims.QKV <= COLUMNS_MAX, "%lld columns", (long long)dims.QKV);
    ND_TRY(job->c->cpu ? nd_ops_cpu(rank->device, &rank->ops) : ND_OK);
    nd_memplan_init(&plan);
    nd_cp_init(&cp, rank, &dims, job->c->first_keys, &plan);
    nd_status status = nd_memplan_commit(&plan, rank->device);
    status = status == ND_OK ? attend(rank, &cp, job) : status;
    nd_memplan_fini(&plan);
    return status;
}

static void attend_on(attention_case c, whole *out)
{
    const nd_mesh mesh = {{1, 1, 1, c.cp, (int)nd_max(c.tp, 1)}, c.ulysses};
    mesh_ranks job = mesh_ranks_of(mesh, 1, false, attend_body, &(attention_job){&c, out});
    job.shape.heads = c.heads > 0 ? c.heads : job.shape.heads;
    job.shape.kv_heads = c.kv_heads;
    job.shape.window = c.window;
    job.config.train.sequence_length = SEQUENCE;
    job.config.train.micro_batch_size = SAMPLES;
    job.config.train.precision = c.precision;
    job.config.parallel.cp_comm = c.method;
    job.config.kernels.cuda_graphs = c.graphs;
    memset(out, 0, sizeof *out);
    expect_ranks(&job, "cp %d", c.cp);
}

/* The largest difference, from this column on. */
static double differs(float (*a)[COLUMNS_MAX], float (*b)[COLUMNS_MAX], int from)
{
    double most = 0;
    for (int row = 0; row < SAMPLES * SEQUENCE; row++) {
        for (int c = from; c < COLUMNS_MAX; c++) {
            most = fmax(most, fabs((double)a[row][c] - (double)b[row][c]));
        }
    }
    return most;
}

/* Scores of 16 products of values up to 1, and sums over up to 48 keys or, for a key's gradient, 96
 * queries: 2 eps (4 x 16 + 96), with factors of a gradient below 16. One block too many or too few
 * is above 1e-2. */
static const double bound = 2 * 0x1p-23 * (4 * 16 + 96) * 16;

Test(cp, any_number_of_ranks_gives_the_attention_and_gradients_of_one)
{
    static whole one, many;
    static const int sizes_and_ulysses[][2] = {{2, 1}, {3, 1}, {4, 1}, {4, 2}, {6, 2}, {8, 4}};
    for (int w = 0; w < 2; w++) {
        attention_case c = {
            .cp = 1, .kv_heads = 2, .window = w ? 7 : 0, .precision = ND_PRECISION_FP32};
        attend_on(c, &one);
        for (size_t i = 0; i < sizeof sizes_and_ulysses / sizeof *sizes_and_ulysses; i++) {
            c.cp = sizes_and_ulysses[i][0];
            c.ulysses = sizes_and_ulysses[i][1];
            for (int ring = 0; ring < 2; ring++) {
                c.method = ring ? ND_CP_RING : ND_CP_ALLGATHER;
                attend_on(c, &many);
                const double o = differs(many.o, one.o, 0), d = differs(many.dqkv, one.dqkv, 0);
                cr_expect(o <= bound && d <= bound,
                          "cp %d, ulysses %d, ring %d, window %d: output by %g, gradient by %g",
                          c.cp, c.ulysses, ring, w, o, d);
            }
        }
    }
}

/* A rank has whole heads: each is computed as by one rank. Only sums over replicas of a KV head are
 * rounded otherwise: in BF16 each of two to four parts, of which none is above 16, by 2^-9 of it,
 * and the sum. */
static void check_heads(attention_case c)
{
    static whole one, many;
    const int ranks = c.ulysses, tp = (int)nd_max(c.tp, 1);
    const int keys = (c.heads > 0 ? (int)c.heads : 4) * 16; /* first column of dk */
    const double rounding = c.precision == ND_PRECISION_FP32 ? bound : 0x1p-9 * 16 * 5;
    c.cp = c.ulysses = 1;
    attend_on(c, &one);
    c.cp = c.ulysses = ranks;
    attend_on(c, &many);
    cr_expect(memcmp(one.o, many.o, sizeof one.o) == 0,
              "%d ranks, %ld KV heads, window %ld, precision %d: output by %g", ranks,
              (long)c.kv_heads, (long)c.window, (int)c.precision, differs(one.o, many.o, 0));
    for (int row = 0; row < SAMPLES * SEQUENCE; row++) {
        const size_t same = c.kv_heads / tp >= ranks ? COLUMNS_MAX : (size_t)keys;
        cr_assert(memcmp(one.dqkv[row], many.dqkv[row], same * sizeof(float)) == 0,
                  "%d ranks, %ld KV heads, window %ld, precision %d: gradients of row %d by %g",
                  ranks, (long)c.kv_heads, (long)c.window, (int)c.precision, row,
                  differs(one.dqkv, many.dqkv, 0));
    }
    cr_expect_leq(differs(one.dqkv, many.dqkv, keys), rounding);
}

Test(cp, ulysses_gives_the_bits_of_one_rank)
{
    for (int i = 0; i < 2 * 2 * 2 * 2 * 3; i++) {
        check_heads((attention_case){.ulysses = i / 24 ? 4 : 2,
                                     .method = ND_CP_ULYSSES,
                                     .kv_heads = 1 << i % 3,
                                     .window = i / 3 % 2 ? 13 : 0,
                                     .precision = i / 6 % 2 ? ND_PRECISION_BF16 : ND_PRECISION_FP32,
                                     .cpu = i / 12 % 2});
    }
}

/* Attention over a dense mask in F64, and with each number the sum of its terms' absolute values,
 * of which a rounding of a factor is a share. */
typedef struct dense {
    double o[SAMPLES * SEQUENCE][COLUMNS_MAX], dqkv[SAMPLES * SEQUENCE][COLUMNS_MAX];
    double o_terms[SAMPLES * SEQUENCE][COLUMNS_MAX], dqkv_terms[SAMPLES * SEQUENCE][COLUMNS_MAX];
} dense;

enum { HEADS = 8, KV_HEADS = 2, HEAD_DIM = 16 };

/* The product of two rows, and in `terms` that of their absolute values. */
static double dot(const double *a, const double *b, double *terms)
{
    double sum = 0;
    *terms = 0;
    for (int i = 0; i < HEAD_DIM; i++) {
        sum += a[i] * b[i];
        *terms += fabs(a[i] * b[i]);
    }
    return sum;
}

static void row_of(int tag, int64_t row, int64_t columns, int64_t first, double *out)
{
    for (int i = 0; i < HEAD_DIM; i++) {
        out[i] = mesh_value(tag, row * columns + first + i);
    }
}

/* One query of one head; adds to the sums of its head of keys. */
static void attend_densely(const attention_case *w, int64_t row, int head, dense *out)
{
    enum { D = HEAD_DIM, QKV = (HEADS + 2 * KV_HEADS) * D };
    const int64_t i = row % SEQUENCE, sample = row - i, Q = head * D;
    const int64_t K = (HEADS + head / (HEADS / KV_HEADS)) * D, V = K + KV_HEADS * D;
    const int64_t near = w->window > 0 ? i - w->window + 1 : 0;
    const int64_t first = nd_max(near, w->first_keys[row]);
    const double scale = 1 / sqrt((double)D);
    double q[D], k[D], v[D], dout[D], p[SEQUENCE], sum = 0, delta = 0, delta_terms = 0, terms;
    row_of(1, row, QKV, Q, q);
    row_of(2, row, HEADS * D, Q, dout);
    for (int64_t j = first; j <= i; j++) {
        row_of(1, sample + j, QKV, K, k);
        p[j] = exp(scale * dot(q, k, &terms));
        sum += p[j];
    }
    for (int64_t j = first; j <= i; j++) {
        p[j] /= sum;
        row_of(1, sample + j, QKV, V, v);
        delta += p[j] * dot(dout, v, &terms);
        delta_terms += p[j] * terms;
        for (int c = 0; c < D; c++) {
            out->o[row][Q + c] += p[j] * v[c];
            out->o_terms[row][Q + c] += p[j] * fabs(v[c]);
            out->dqkv[sample + j][V + c] += p[j] * dout[c];
            out->dqkv_terms[sample + j][V + c] += p[j] * fabs(dout[c]);
        }
    }
    for (int64_t j = first; j <= i; j++) {
        row_of(1, sample + j, QKV, K, k);
        row_of(1, sample + j, QKV, V, v);
        const double ds = scale * p[j] * (dot(dout, v, &terms) - delta);
        const double ds_terms = scale * p[j] * (terms + delta_terms);
        for (int c = 0; c < D; c++) {
            out->dqkv[row][Q + c] += ds * k[c];
            out->dqkv_terms[row][Q + c] += ds_terms * fabs(k[c]);
            out->dqkv[sample + j][K + c] += ds * q[c];
            out->dqkv_terms[sample + j][K + c] += ds_terms * fabs(q[c]);
        }
    }
}

/* Documents of any length from one token: borders at every place, also those of chunks; of one
 * token each; or the whole row. */
static void draw_documents(unsigned seed, int32_t first_keys[SAMPLES * SEQUENCE])
{
    srand(seed);
    for (int64_t row = 0; row < SAMPLES * SEQUENCE; row++) {
        const int32_t i = (int32_t)(row % SEQUENCE);
        const bool one = seed % 8 == 7 && row < SEQUENCE;
        const bool begins = i == 0 || (!one && rand() % (int)(1 + seed % 8) == 0);
        first_keys[row] = begins ? i : first_keys[row - 1];
    }
}

/* Borders at any place: what each rank has of them is another part with each method. */
static const attention_case exchanges[] = {
    {1, 1, ND_CP_ALLGATHER}, {2, 1, ND_CP_ALLGATHER}, {2, 1, ND_CP_RING},
    {3, 1, ND_CP_ALLGATHER}, {3, 1, ND_CP_RING},      {4, 1, ND_CP_ALLGATHER},
    {4, 1, ND_CP_RING},      {2, 2, ND_CP_ULYSSES},   {4, 4, ND_CP_ULYSSES},
    {4, 2, ND_CP_RING},      {8, 4, ND_CP_ALLGATHER}};
enum { EXCHANGES = sizeof exchanges / sizeof *exchanges };

/* In F32 sums are over up to 48 keys or, for a key's gradient, 4 heads of 48 queries: 2 eps (4 x 16
 * + 192), with factors of a gradient below 16.
 *
 * In BF16 each of these is rounded by 2^-9 of it: p; the output, which a backward's delta reads;
 * with a ring its parts; ds; a gradient; that of a replica of a KV head, and their sum. So a number
 * is off by 7 such shares of its terms. One key too many or too few is p of them, which of 48 keys
 * or fewer is more. */
static void check_dense(const attention_case *c, const dense *all, const whole *many, unsigned seed)
{
    const double f32 = 2 * 0x1p-23 * (4 * 16 + 192) * 16;
    const double bf16 = c->precision == ND_PRECISION_FP32 ? 0 : 7 * 0x1p-9;
    for (int row = 0; row < SAMPLES * SEQUENCE; row++) {
        for (int i = 0; i < COLUMNS_MAX; i++) {
            const double o = fabs((double)many->o[row][i] - all->o[row][i]);
            const double g = fabs((double)many->dqkv[row][i] - all->dqkv[row][i]);
            cr_assert(
                o <= f32 + bf16 * all->o_terms[row][i] && g <= f32 + bf16 * all->dqkv_terms[row][i],
                "seed %u, cp %d, ulysses %d, method %d, tp %d, precision %d: row %d, column "
                "%d: output by %g, gradient by %g",
                seed, c->cp, c->ulysses, (int)c->method, c->tp, (int)c->precision, row, i, o, g);
        }
    }
}

static int selected; /* exchanges of keys that are seen, alone */

/* Attention is in BF16 where products are in FP8, and graphs change no bit. */
static void check_precisions(attention_case c, const dense *all, unsigned seed)
{
    static whole f32, bf16, fp8;
    c.precision = ND_PRECISION_FP32;
    attend_on(c, &f32);
    check_dense(&c, all, &f32, seed);
    c.precision = ND_PRECISION_BF16;
    attend_on(c, &bf16);
    check_dense(&c, all, &bf16, seed);
    c.precision = ND_PRECISION_FP8;
    c.graphs = true;
    attend_on(c, &fp8);
    cr_assert(memcmp(bf16.o, fp8.o, sizeof fp8.o) == 0 &&
              memcmp(bf16.dqkv, fp8.dqkv, sizeof fp8.dqkv) == 0);
    cr_assert_eq(f32.sent, fp8.sent);
    selected += fp8.sent >= 0;
}

/* Each exchange meets borders at every place modulo 2 cp. */
Test(cp, documents_are_attended_to_as_by_a_dense_mask)
{
    static dense all;
    static int32_t first_keys[SAMPLES * SEQUENCE];
    unsigned offsets[EXCHANGES] = {0};
    for (unsigned seed = 0; seed < 8 * EXCHANGES; seed++) {
        const size_t e = seed % EXCHANGES;
        attention_case c = exchanges[e];
        c.heads = HEADS;
        c.kv_heads = KV_HEADS;
        c.window = seed % 3 == 2 ? 5 : 0;
        c.cpu = seed / EXCHANGES % 2;
        c.first_keys = first_keys;
        draw_documents(seed, first_keys);
        memset(&all, 0, sizeof all);
        for (int64_t row = 0; row < SAMPLES * SEQUENCE; row++) {
            offsets[e] |= first_keys[row] == row % SEQUENCE ? 1U << row % SEQUENCE % (2 * c.cp) : 0;
            for (int head = 0; head < HEADS; head++) {
                attend_densely(&c, row, head, &all);
            }
        }
        for (c.tp = 1; c.tp <= 2; c.tp++) {
            check_precisions(c, &all, seed);
        }
    }
    for (size_t e = 0; e < EXCHANGES; e++) {
        cr_assert_eq(offsets[e], (1U << 2 * exchanges[e].cp) - 1);
    }
    cr_expect(selected >= 6 && selected < 88, "%d exchanges of seen keys alone", selected);
}

/* The other rank sees keys of one long document, and none of documents of two tokens. */
Test(cp, keys_are_gathered_where_a_rank_sends_half_of_them)
{
    static whole out;
    static int32_t first_keys[SAMPLES * SEQUENCE];
    attention_case c = {2, 1, ND_CP_ALLGATHER, .kv_heads = KV_HEADS, .first_keys = first_keys};
    attend_on(c, &out);
    cr_expect_eq(out.sent, -1);
    for (int32_t row = 0; row < SAMPLES * SEQUENCE; row++) {
        first_keys[row] = row % SEQUENCE / 2 * 2;
    }
    attend_on(c, &out);
    cr_expect_eq(out.sent, 0);
}

/* Documents are those of one rank for each head. */
Test(cp, ulysses_gives_the_bits_of_one_rank_with_documents)
{
    static int32_t first_keys[SAMPLES * SEQUENCE];
    static const struct {
        int ulysses, tp, heads, kv_heads;
    } cases[] = {{2, 1, 4, 4}, {4, 1, 4, 4}, {2, 1, 4, 1},
                 {4, 1, 4, 2}, {2, 2, 4, 4}, {4, 2, 8, 2}};
    for (unsigned seed = 0; seed < 4 * 6; seed++) {
        draw_documents(seed, first_keys);
        check_heads(
            (attention_case){.ulysses = cases[seed % 6].ulysses,
                             .tp = cases[seed % 6].tp,
                             .method = ND_CP_ULYSSES,
                             .heads = cases[seed % 6].heads,
                             .kv_heads = cases[seed % 6].kv_heads,
                             .window = seed % 4 == 2 ? 5 : 0,
                             .precision = seed / 6 % 2 ? ND_PRECISION_BF16 : ND_PRECISION_FP32,
                             .cpu = seed / 12,
                             .first_keys = first_keys});
    }
}
