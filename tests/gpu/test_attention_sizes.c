// SPDX-License-Identifier: Apache-2.0
/*
 * cuDNN's attention at the sizes that are trained, against the plain kernels in F32 on the same
 * device: groups of heads, q, k and v in rows of a fused projection, gradients written into such
 * rows. On a GPU, or, with small sizes (ND_SMALL_ATTENTION), on its double.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/cuda/context.h"
#include "runtime/base/rng.h"
#include "tests/gpu/mirror.h"
#include "tests/ops/conformance.h"

#ifdef ND_SMALL_ATTENTION
enum { HEADS = 4, SHORT = 40, LONG = 136, LAYER = 200, LAYER_HEADS = 4, PACKED = 600, DRAWS = 4 };
#else
enum {
    HEADS = 8,
    SHORT = 1000,
    LONG = 4096,
    LAYER = 8192,
    LAYER_HEADS = 32,
    PACKED = LONG,
    DRAWS = 1
};
#endif
enum { KV_HEADS = HEADS / 4, BATCH = 2, TILES = 12, ROUNDS = TILES / 2 };

/* Operands and results of one type; views into memory of the device. */
typedef struct side {
    nd_tensor qkv, out, dout, dqkv; /* (rows, width) */
    nd_tensor lse, delta;           /* F32 (B, H, Sq) */
    nd_tensor first_key, end_key;   /* absent, or I32 (B Sq) */
    nd_tensor sums;                 /* absent, or F32 as dqkv: where dk and dv are added to */
} side;

static nd_tensor on_device(nd_side *g, nd_dtype dtype, int64_t rows, int64_t width)
{
    nd_tensor t = nd_tensor_2d(NULL, dtype, rows, width);
    nd_expect_ok(nd_device_alloc(g->device, nd_tensor_bytes(t), &t.data), "memory");
    return t;
}

static void release(nd_side *g, nd_tensor t)
{
    nd_device_free(g->device, t.data, nd_tensor_bytes(t));
}

static int64_t width_of(const nd_attention *a)
{
    return (a->heads + 2 * a->kv_heads) * a->head_dim;
}

static side make_side(nd_side *g, const nd_attention *a, nd_dtype dtype)
{
    int64_t queries = a->batch * a->sq, keys = a->batch * a->sk, of_heads = a->heads * a->head_dim;
    return (side){
        .qkv = on_device(g, dtype, keys, width_of(a)),
        .dqkv = on_device(g, dtype, keys, width_of(a)),
        .out = on_device(g, dtype, queries, of_heads),
        .dout = on_device(g, dtype, queries, of_heads),
        .lse = on_device(g, ND_DTYPE_F32, a->batch * a->heads, a->sq),
        .delta = on_device(g, ND_DTYPE_F32, a->batch * a->heads, a->sq),
    };
}

static void free_side(nd_side *g, side *s)
{
    const nd_tensor all[] = {s->qkv, s->dqkv, s->out, s->dout, s->lse, s->delta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        release(g, all[i]);
    }
    if (s->first_key.data) {
        release(g, s->first_key);
        release(g, s->end_key);
    }
    if (s->sums.data) {
        release(g, s->sums);
    }
}

static uint64_t drawn; /* of the documents, and of the tiles that are this rank's */

/* A rank has half of the TILES tiles of a text where its documents are not whole. */
static void draw_tiles(bool own[TILES])
{
    for (int tile = 0, left = TILES / 2; tile < TILES; tile++) {
        own[tile] =
            left > 0 && (left == TILES - tile || nd_rng_normal(drawn, 1, (uint64_t)tile) > 0);
        left -= own[tile];
    }
}

/* How many keys are before a token of a text of S: of all tiles, or where segments are flat of
 * those of others. */
static int64_t keys_before(const nd_attention *a, const bool own[TILES], int64_t S, int64_t token)
{
    int64_t keys = a->documents == ND_SEGMENTS_WHOLE ? token : 0;
    for (int64_t tile = 0; tile < TILES && a->documents != ND_SEGMENTS_WHOLE; tile++) {
        const int64_t in_tile = token - tile * (S / TILES);
        const bool there = a->documents != ND_SEGMENTS_FLAT || !own[tile];
        keys += there && in_tile > 0 ? (in_tile < S / TILES ? in_tile : S / TILES) : 0;
    }
    return keys;
}

/* Documents of log-normal lengths, and of one token. */
static void make_documents(nd_side *g, const nd_attention *a, side *s)
{
    const int64_t tokens = a->batch * a->sq;
    const bool whole = a->documents == ND_SEGMENTS_WHOLE;
    const int64_t S = whole ? a->sq : 2 * a->sq;
    bool own[TILES] = {false};
    int32_t *bounds = malloc((size_t)tokens * 2 * sizeof *bounds);
    cr_assert_not_null(bounds);
    draw_tiles(own);
    for (int64_t at = 0, i = 0, first = 0, end = 0, n = 0; i < a->batch * S; i++) {
        const int64_t token = i % S;
        if (token == 0 || token == end) {
            const double size = 1.3 * (double)nd_rng_normal(drawn, 2, (uint64_t)n);
            end = token + 1 + (n++ % 5 == 3 ? 0 : (int64_t)((double)S / 8.0 * exp(size)));
            first = token;
        }
        if (whole || own[token / (S / TILES)]) {
            bounds[at] = (int32_t)keys_before(a, own, S, first);
            bounds[tokens + at++] = (int32_t)keys_before(a, own, S, token + 1);
        }
    }
    s->first_key = on_device(g, ND_DTYPE_I32, 1, tokens);
    s->end_key = on_device(g, ND_DTYPE_I32, 1, tokens);
    nd_expect_ok(nd_copy(&g->stream, s->first_key.data, bounds, (size_t)tokens * 4), "a copy");
    nd_expect_ok(nd_copy(&g->stream, s->end_key.data, bounds + tokens, (size_t)tokens * 4),
                 "a copy");
    if (!whole) {
        s->sums = on_device(g, ND_DTYPE_F32, a->batch * a->sk, width_of(a));
        nd_expect_ok(nd_zero(&g->stream, s->sums.data, nd_tensor_bytes(s->sums)), "zeros");
    }
    nd_expect_ok(nd_stream_sync(&g->stream), "a copy");
    free(bounds);
}

static nd_tensor bounds_of(nd_tensor m, const nd_attention *a)
{
    return m.data ? nd_tensor_2d(m.data, ND_DTYPE_I32, a->batch, a->sq) : (nd_tensor){0};
}

/* Heads from `first` on of the last `rows` rows of each sequence of a (B S, width) matrix; those of
 * documents lie one behind the other. */
static nd_tensor heads_of(nd_tensor m, const nd_attention *a, int64_t rows, int64_t first,
                          int64_t count)
{
    int64_t S = a->documents ? rows : m.shape[0] / a->batch, width = m.shape[1];
    int64_t skipped = (S - rows) * width + first * a->head_dim;
    char *data = (char *)m.data + (size_t)skipped * nd_dtype_size(m.dtype);
    nd_tensor t = nd_tensor_4d(data, m.dtype, a->batch, rows, count, a->head_dim);
    t.stride[0] = S * width;
    t.stride[1] = width;
    return t;
}

static nd_tensor statistics(nd_tensor m, const nd_attention *a)
{
    return nd_tensor_3d(m.data, ND_DTYPE_F32, a->batch, a->heads, a->sq);
}

/* Draws in BF16 for `bf16`, and the same numbers in F32 for `f32`. */
static void fill(nd_side *g, nd_tensor bf16, nd_tensor f32, uint64_t seed)
{
    int64_t count = nd_tensor_count(bf16);
    nd_bf16 *host = malloc(nd_tensor_bytes(bf16));
    cr_assert_not_null(host);
    for (int64_t i = 0; i < count; i++) {
        host[i] = nd_bf16_from_f32(nd_rng_normal(seed, 0, (uint64_t)i));
    }
    nd_expect_ok(nd_copy(&g->stream, bf16.data, host, nd_tensor_bytes(bf16)), "a copy");
    nd_expect_ok(nd_stream_sync(&g->stream), "a copy");
    free(host);
    nd_expect_ok(ND_CALL(g->ops, &g->stream, cast, .out = f32, .x = bf16), "a cast");
}

static int64_t plans_of(const nd_side *g)
{
    return nd_cudnn_plan_count(nd_cuda_context_of(g->device)->cudnn);
}

/* Returns how many plans of cuDNN the op itself made: those for its fused rows. */
static int64_t run_forward(nd_side *g, const nd_attention *a, side *s)
{
    size_t bytes = g->ops->attention_scratch(g->device, a, s->qkv.dtype, false);
    void *scratch = NULL;
    int64_t before = plans_of(g);
    nd_expect_ok(nd_device_alloc(g->device, bytes + 256, &scratch), "scratch");
    nd_expect_ok(ND_CALL(g->ops, &g->stream, attention_fwd, .attention = *a,
                         .out = heads_of(s->out, a, a->sq, 0, a->heads),
                         .lse = statistics(s->lse, a), .q = heads_of(s->qkv, a, a->sq, 0, a->heads),
                         .k = heads_of(s->qkv, a, a->sk, a->heads, a->kv_heads),
                         .v = heads_of(s->qkv, a, a->sk, a->heads + a->kv_heads, a->kv_heads),
                         .first_key = bounds_of(s->first_key, a),
                         .end_key = bounds_of(s->end_key, a), .scratch = scratch),
                 "forward");
    nd_expect_ok(nd_stream_sync(&g->stream), "forward");
    nd_device_free(g->device, scratch, bytes + 256);
    return plans_of(g) - before;
}

static nd_tensor dkv_of(const side *s)
{
    return s->sums.data ? s->sums : s->dqkv;
}

static int64_t run_backward(nd_side *g, const nd_attention *a, side *s)
{
    size_t bytes = g->ops->attention_scratch(g->device, a, s->qkv.dtype, true);
    void *scratch = NULL;
    nd_tensor out = heads_of(s->out, a, a->sq, 0, a->heads);
    nd_tensor dout = heads_of(s->dout, a, a->sq, 0, a->heads), delta = {0};
    nd_tensor dkv = dkv_of(s);
    nd_expect_ok(nd_zero(&g->stream, s->dqkv.data, nd_tensor_bytes(s->dqkv)), "zeros");
    if (s->first_key.data || g->ops->attention_uses_delta(g->device, a, s->qkv.dtype)) {
        delta = statistics(s->delta, a);
        nd_expect_ok(ND_CALL(g->ops, &g->stream, attention_delta, .attention = *a, .delta = delta,
                             .out = out, .dout = dout),
                     "delta");
    }
    int64_t before = plans_of(g);
    nd_expect_ok(nd_device_alloc(g->device, bytes + 256, &scratch), "scratch");
    nd_expect_ok(ND_CALL(g->ops, &g->stream, attention_bwd, .attention = *a,
                         .dq = heads_of(s->dqkv, a, a->sq, 0, a->heads),
                         .dk = heads_of(dkv, a, a->sk, a->heads, a->kv_heads),
                         .dv = heads_of(dkv, a, a->sk, a->heads + a->kv_heads, a->kv_heads),
                         .add_kv = s->sums.data != NULL,
                         .q = heads_of(s->qkv, a, a->sq, 0, a->heads),
                         .k = heads_of(s->qkv, a, a->sk, a->heads, a->kv_heads),
                         .v = heads_of(s->qkv, a, a->sk, a->heads + a->kv_heads, a->kv_heads),
                         .out = out, .dout = dout, .lse = statistics(s->lse, a), .delta = delta,
                         .first_key = bounds_of(s->first_key, a),
                         .end_key = bounds_of(s->end_key, a), .scratch = scratch),
                 "backward");
    nd_expect_ok(nd_stream_sync(&g->stream), "backward");
    nd_device_free(g->device, scratch, bytes + 256);
    return plans_of(g) - before;
}

static float *fetch(nd_side *g, nd_tensor t)
{
    int64_t count = nd_tensor_count(t);
    char *raw = malloc(nd_tensor_bytes(t));
    float *out = malloc((size_t)count * sizeof *out);
    cr_assert(raw && out);
    nd_expect_ok(nd_copy(&g->stream, raw, t.data, nd_tensor_bytes(t)), "a copy");
    nd_expect_ok(nd_stream_sync(&g->stream), "a copy");
    for (int64_t i = 0; i < count; i++) {
        out[i] = t.dtype == ND_DTYPE_F32 ? ((float *)(void *)raw)[i]
                                         : nd_bf16_to_f32(((nd_bf16 *)(void *)raw)[i]);
    }
    free(raw);
    return out;
}

/*
 * Columns [begin, end) of every row: the root of the mean square of the difference is below 2^-7 of
 * that of the values. Probabilities, their gradients, and results are rounded to BF16, each with an
 * error of both signs whose root mean square is below 2^-9 of the value's; a row of the longest
 * block that is lost is 2^-6 of it.
 */
static void expect_alike(nd_side *g, const char *what, const nd_attention *a, nd_tensor got,
                         nd_tensor want, int64_t begin, int64_t end)
{
    float *x = fetch(g, got), *y = fetch(g, want);
    double error = 0.0, size = 0.0;
    int64_t width = got.shape[1];
    for (int64_t i = 0; i < nd_tensor_count(got); i++) {
        const bool alike = x[i] == y[i] && isinf(x[i]); /* rows that see nothing */
        bool counts = i % width >= begin && i % width < end && !alike;
        double difference = counts ? (double)x[i] - (double)y[i] : 0.0;
        error += difference * difference;
        size += counts ? (double)y[i] * (double)y[i] : 0.0;
    }
    cr_expect_gt(size, 0.0);
    cr_expect_leq(sqrt(error), ldexp(sqrt(size), -7),
                  "%s of %lld x %lld, diagonal %lld, window %lld, heads of %lld: off by %g of %g",
                  what, (long long)a->sq, (long long)a->sk, (long long)a->diag,
                  (long long)a->window, (long long)a->head_dim, sqrt(error), sqrt(size));
    free(x);
    free(y);
}

/* BF16 by cuDNN, F32 by the plain kernels, on equal numbers. */
static void compare(nd_side *g, const nd_attention *a)
{
    int64_t q = a->heads * a->head_dim, k = q + a->kv_heads * a->head_dim, v = width_of(a);
    side cut = make_side(g, a, ND_DTYPE_BF16), plain = make_side(g, a, ND_DTYPE_F32);
    fill(g, cut.qkv, plain.qkv, 1);
    fill(g, cut.dout, plain.dout, 2);
    if (a->documents) {
        make_documents(g, a, &cut);
        make_documents(g, a, &plain);
    }
    cr_expect_gt(run_forward(g, a, &cut), 0, "forward did not use cuDNN");
    cr_expect_gt(run_backward(g, a, &cut), 0, "backward did not use cuDNN");
    cr_expect_eq(run_forward(g, a, &plain), 0, "the reference used cuDNN");
    cr_expect_eq(run_backward(g, a, &plain), 0, "the reference used cuDNN");
    expect_alike(g, "out", a, cut.out, plain.out, 0, q);
    expect_alike(g, "lse", a, cut.lse, plain.lse, 0, a->sq);
    expect_alike(g, "dq", a, cut.dqkv, plain.dqkv, 0, q);
    expect_alike(g, "dk", a, dkv_of(&cut), dkv_of(&plain), q, k);
    expect_alike(g, "dv", a, dkv_of(&cut), dkv_of(&plain), k, v);
    free_side(g, &cut);
    free_side(g, &plain);
}

/* A whole causal block; the second half of the queries after a prefix; the same unmasked; the first
 * two with a window. */
static void compare_blocks(nd_side *g, int64_t D, int64_t S)
{
    float scale = (float)(1.0 / sqrt((double)D));
    const nd_attention blocks[] = {
        {BATCH, S, S, HEADS, KV_HEADS, D, 0, scale},
        {BATCH, S / 2, S, HEADS, KV_HEADS, D, S / 2, scale},
        {BATCH, S / 2, S, HEADS, KV_HEADS, D, S, scale},
        {BATCH, S, S, HEADS, KV_HEADS, D, 0, scale, S / 4 + 3},
        {BATCH, S / 2, S, HEADS, KV_HEADS, D, S / 2, scale, S / 4 + 3},
    };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        compare(g, &blocks[i]);
    }
}

/* Compares documents in texts of two lengths, by calls for each tier of lengths and plain kernels
 * for the shortest: on one rank, and on a rank of cp that gathers keys or gets them in a ring. */
static void compare_documents(int64_t D)
{
    for (int i = 0; i < 2 * DRAWS; i++) {
        nd_side g;
        nd_side_open_cuda(&g, false, false);
        drawn = (uint64_t)i;
        const int64_t S =
            (i % 2 ? PACKED : SHORT + 60) / (2 * TILES) * (2 * TILES); /* tiers: 2, 1 */
        for (int windows = 0; windows < 2; windows++) {
            const int64_t window = windows ? S / 16 + 3 : 0;
            compare(&g, &(nd_attention){BATCH, S, S, HEADS, KV_HEADS, D, 0, 0.1f, window,
                                        ND_SEGMENTS_WHOLE, 1});
            compare(&g, &(nd_attention){BATCH, S / 2, S, HEADS, KV_HEADS, D, 0, 0.1f, window,
                                        ND_SEGMENTS_DIAGONAL, ROUNDS});
        }
        compare(&g, &(nd_attention){BATCH, S, S, HEADS, KV_HEADS, D, 0, 0.1f, 0, ND_SEGMENTS_FLAT,
                                    ROUNDS});
        nd_side_close(&g);
    }
}

Test(attention_sizes, documents)
{
    compare_documents(64);
    compare_documents(128);
}

static void compare_sizes(int64_t short_dim, int64_t long_dim, bool deterministic)
{
    nd_side g;
    nd_side_open_cuda(&g, false, deterministic);
    compare_blocks(&g, short_dim, SHORT);
    compare_blocks(&g, long_dim, LONG);
    cr_expect_leq(plans_of(&g), PLANS_OF_A_TEST, "%lld plans of cuDNN", (long long)plans_of(&g));
    nd_side_close(&g);
}

Test(attention_sizes, heads_of_64)
{
    compare_sizes(64, 64, false);
}

Test(attention_sizes, heads_of_128)
{
    compare_sizes(128, 128, false);
}

Test(attention_sizes, deterministic)
{
    compare_sizes(64, 128, true);
}

static void compare_layer(const nd_attention *a)
{
    nd_side g;
    nd_side_open_cuda(&g, false, false);
    compare(&g, a);
    nd_side_close(&g);
}

/* The layer of Llama 3.1 8B as it is trained: a suite of its own, as figures come after it. */
Test(attention_8b, causal)
{
    compare_layer(
        &(nd_attention){1, LAYER, LAYER, LAYER_HEADS, LAYER_HEADS / 4, 128, 0, 0.08838835f});
}

Test(attention_8b, documents)
{
    compare_layer(&(nd_attention){1, LAYER, LAYER, LAYER_HEADS, LAYER_HEADS / 4, 128, 0,
                                  0.08838835f, 0, true});
}

/* The layer with documents on a rank of cp 2 that has gathered all keys. */
Test(attention_8b, documents_of_cp)
{
    const int64_t S = LAYER / (2 * TILES) * (2 * TILES);
    compare_layer(&(nd_attention){1, S / 2, S, LAYER_HEADS, LAYER_HEADS / 4, 128, 0, 0.08838835f, 0,
                                  ND_SEGMENTS_DIAGONAL, ROUNDS});
}
