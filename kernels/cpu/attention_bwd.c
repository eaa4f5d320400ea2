// SPDX-License-Identifier: Apache-2.0
/*
 * Backward of blocked attention: FlashAttention-2 (Dao, 2023), with the score tiles transposed.
 *
 * A task owns one KV head of one sequence and a share of its key blocks: dK and dV of a key block
 * are summed over all queries by one thread, in a fixed order. dQ is summed over the task's key
 * blocks in scratch; where a KV head is cut into several parts (more threads than KV heads) each
 * part has its own sum, and the parts are added in order.
 */
#include "kernels/cpu/attention.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "runtime/base/math.h"

typedef struct division {
    int64_t parts;      /* tasks per KV head */
    int64_t block_keys; /* keys of a key block, a multiple of ND_TILE */
    int64_t blocks;     /* key blocks */
    int64_t slots;      /* dQ sums that exist at a time */
} division;

typedef struct call {
    const nd_attention *a;
    const nd_tile_ops *tiles;
    nd_tensor dq, dk, dv, q, k, v, dout;
    const float *lse, *delta;
    bool add_q, add_kv;
    division division;
    float *dq_sums; /* [slots][G][row blocks] (D, ND_TILE) */
} call;

/* One thread's scratch; Dp = D padded to ND_TILE_PAD, all sizes for words of one element. */
typedef struct workspace {
    nd_word *k, *v;       /* A (m = block_keys, k = D) */
    nd_word *kt;          /* per tile of keys: A (m = D, k = ND_TILE) */
    float *dk, *dv;       /* (block_keys, Dp) */
    nd_word *qt, *dot;    /* B (k = D, n = ND_TILE): queries, dout */
    nd_word *q, *dout;    /* B (k = ND_TILE, n = Dp) */
    float *scores, *dp;   /* (ND_TILE keys, ND_TILE) */
    nd_word *p, *ds_rows; /* A (m = ND_TILE keys, k = ND_TILE) */
    nd_word *ds_columns;  /* B (k = ND_TILE keys, n = ND_TILE) */
    float *lse, *delta;   /* (ND_TILE) */
    void *temporary;      /* ND_TILE x D elements */
} workspace;

typedef struct row_block {
    int64_t b, kv, head, q0, index; /* index: of the block among the G heads of the KV head */
    int rows;
} row_block;

static int64_t padded(int64_t d)
{
    return nd_ceil_div(d, ND_TILE_PAD) * ND_TILE_PAD;
}

static division divide(int threads, const nd_attention *a)
{
    const int64_t pairs = a->batch * a->kv_heads, tiles = nd_ceil_div(a->sk, ND_TILE);
    division d = {.parts = 1, .block_keys = ND_ATTENTION_KEYS};
    if (pairs < (int64_t)threads * 4 && pairs % threads != 0) {
        d.parts = nd_ceil_div(threads, pairs);
        while (pairs * d.parts % threads != 0) {
            d.parts++;
        }
        d.parts = d.parts > tiles ? tiles : d.parts;
    }
    while (d.block_keys > ND_TILE && nd_ceil_div(a->sk, d.block_keys) < 2 * d.parts) {
        d.block_keys /= 2;
    }
    d.blocks = nd_ceil_div(a->sk, d.block_keys);
    d.slots = d.parts > 1 ? pairs * d.parts : threads;
    return d;
}

static size_t workspace_init(workspace *w, char *base, const nd_attention *a, int64_t keys)
{
    const int64_t d = a->head_dim, dp = padded(d);
    size_t used = 0;
    w->k = nd_attention_cut(base, &used, keys * d);
    w->v = nd_attention_cut(base, &used, keys * d);
    w->kt = nd_attention_cut(base, &used, keys * d);
    w->dk = nd_attention_cut(base, &used, keys * dp);
    w->dv = nd_attention_cut(base, &used, keys * dp);
    w->qt = nd_attention_cut(base, &used, d * ND_TILE);
    w->dot = nd_attention_cut(base, &used, d * ND_TILE);
    w->q = nd_attention_cut(base, &used, ND_TILE * dp);
    w->dout = nd_attention_cut(base, &used, ND_TILE * dp);
    w->scores = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->dp = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->p = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->ds_rows = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->ds_columns = nd_attention_cut(base, &used, ND_TILE * ND_TILE);
    w->lse = nd_attention_cut(base, &used, ND_TILE);
    w->delta = nd_attention_cut(base, &used, ND_TILE);
    w->temporary = nd_attention_cut(base, &used, ND_TILE * d);
    return used;
}

/* Floats of the dQ sum of one task. */
static int64_t dq_floats(const nd_attention *a)
{
    return nd_attention_group(a) * nd_attention_row_blocks(a) * a->head_dim * ND_TILE;
}

size_t nd_attention_bwd_scratch(int threads, const nd_attention *a)
{
    const division d = divide(threads, a);
    workspace unused;
    return (size_t)threads * workspace_init(&unused, NULL, a, d.block_keys) +
           (size_t)(d.slots * dq_floats(a)) * sizeof(float);
}

static int words_of(const call *c, int64_t count)
{
    return (int)nd_ceil_div(count, c->tiles->group);
}

static void load_keys(const call *c, workspace *w, int64_t b, int64_t kv, int64_t key0, int keys)
{
    const int d = (int)c->a->head_dim, words = words_of(c, d);
    const void *k = nd_attention_row(c->k, b, key0, kv);
    c->tiles->pack_a(w->k, words, k, c->k.dtype, c->k.stride[1], keys, d);
    c->tiles->pack_a(w->v, words, nd_attention_row(c->v, b, key0, kv), c->v.dtype, c->v.stride[1],
                     keys, d);
    for (int t = 0; t < keys; t += ND_TILE) {
        c->tiles->pack_a_transposed(
            w->kt + t * d, ND_TILE / c->tiles->group, nd_attention_row(c->k, b, key0 + t, kv),
            c->k.dtype, c->k.stride[1], keys - t < ND_TILE ? keys - t : ND_TILE, d, w->temporary);
    }
    memset(w->dk, 0, (size_t)(keys * padded(d)) * sizeof(float));
    memset(w->dv, 0, (size_t)(keys * padded(d)) * sizeof(float));
}

static void load_queries(const call *c, workspace *w, const row_block *r)
{
    const int d = (int)c->a->head_dim;
    const int64_t dp = padded(d), at = (r->b * c->a->heads + r->head) * c->a->sq + r->q0;
    const void *q = nd_attention_row(c->q, r->b, r->q0, r->head);
    const void *dout = nd_attention_row(c->dout, r->b, r->q0, r->head);
    const int64_t q_stride = c->q.stride[1], dout_stride = c->dout.stride[1];
    c->tiles->pack_b_transposed(w->qt, ND_TILE, q, c->q.dtype, q_stride, r->rows, d, w->temporary);
    c->tiles->pack_b_transposed(w->dot, ND_TILE, dout, c->dout.dtype, dout_stride, r->rows, d,
                                w->temporary);
    c->tiles->pack_b(w->q, dp, q, c->q.dtype, q_stride, r->rows, d);
    c->tiles->pack_b(w->dout, dp, dout, c->dout.dtype, dout_stride, r->rows, d);
    for (int i = 0; i < ND_TILE; i++) {
        /* Padding and queries that saw nothing get probability 0. */
        bool blind = i >= r->rows || c->lse[at + i] == -INFINITY;
        w->lse[i] = blind ? INFINITY : c->lse[at + i] * (float)M_LOG2E;
        w->delta[i] = blind ? 0.0f : c->delta[at + i];
    }
}

/* The five products of one tile: `keys` keys from `first` of the loaded block against the loaded
 * queries. */
static void tile_step(const call *c, workspace *w, const row_block *r, int64_t key0, int first,
                      int keys, float *dq)
{
    const nd_tile_ops *tiles = c->tiles;
    const int d = (int)c->a->head_dim, words = words_of(c, d), row_words = words_of(c, r->rows);
    const int64_t dp = padded(d), row_ld = ND_TILE / tiles->group;
    int32_t limit[ND_TILE];
    tiles->gemm(keys, ND_TILE, words, w->k + first * words, words, w->qt, ND_TILE, w->scores,
                ND_TILE, false);
    tiles->gemm(keys, ND_TILE, words, w->v + first * words, words, w->dot, ND_TILE, w->dp, ND_TILE,
                false);
    const nd_dscore_step step = {.scores = w->scores,
                                 .dp = w->dp,
                                 .p = w->p,
                                 .ds_rows = w->ds_rows,
                                 /* With F32 words the two forms are one. */
                                 .ds_columns = tiles->group == 1 ? w->ds_rows : w->ds_columns,
                                 .keys = keys,
                                 .limit =
                                     nd_attention_limit(c->a, r->q0, key0 + first, keys, limit),
                                 .lse = w->lse,
                                 .delta = w->delta,
                                 .scale = c->a->scale};
    tiles->dscore(&step);
    tiles->gemm(keys, (int)dp, row_words, w->p, row_ld, w->dout, dp, w->dv + first * dp, dp, true);
    tiles->gemm(keys, (int)dp, row_words, w->ds_rows, row_ld, w->q, dp, w->dk + first * dp, dp,
                true);
    tiles->gemm(d, ND_TILE, words_of(c, keys), w->kt + first * d, row_ld, step.ds_columns, ND_TILE,
                dq, ND_TILE, true);
}

static void store_keys(const call *c, nd_tensor y, const float *sums, int64_t b, int64_t kv,
                       int64_t key0, int keys)
{
    const int64_t d = c->a->head_dim, dp = padded(d);
    for (int j = 0; j < keys; j++) {
        void *row = nd_attention_row(y, b, key0 + j, kv);
        const float *from = sums + j * dp;
        if (y.dtype == ND_DTYPE_F32) {
            float *to = row;
            for (int64_t i = 0; i < d; i++) {
                to[i] = c->add_kv ? to[i] + from[i] : from[i];
            }
        } else {
            nd_bf16 *to = row;
            for (int64_t i = 0; i < d; i++) {
                to[i] = nd_bf16_from_f32(from[i]);
            }
        }
    }
}

/* All queries against one key block. */
static void run_key_block(const call *c, workspace *w, int64_t b, int64_t kv, int64_t key0,
                          float *dq_sum)
{
    const nd_attention *a = c->a;
    const int64_t group = nd_attention_group(a), blocks = nd_attention_row_blocks(a);
    const int keys =
        (int)(a->sk - key0 < c->division.block_keys ? a->sk - key0 : c->division.block_keys);
    load_keys(c, w, b, kv, key0, keys);
    for (int64_t i = 0; i < group * blocks; i++) {
        row_block r = {.b = b,
                       .kv = kv,
                       .head = kv * group + i / blocks,
                       .q0 = i % blocks * ND_TILE,
                       .index = i};
        r.rows = (int)(a->sq - r.q0 < ND_TILE ? a->sq - r.q0 : ND_TILE);
        int64_t seen = nd_attention_last_key(a, r.q0 + r.rows - 1) - key0 + 1;
        seen = seen < keys ? seen : keys;
        if (seen <= 0) {
            continue;
        }
        load_queries(c, w, &r);
        for (int first = 0; first < seen; first += ND_TILE) {
            tile_step(c, w, &r, key0, first, (int)(seen - first < ND_TILE ? seen - first : ND_TILE),
                      dq_sum + i * a->head_dim * ND_TILE);
        }
    }
    store_keys(c, c->dk, w->dk, b, kv, key0, keys);
    store_keys(c, c->dv, w->dv, b, kv, key0, keys);
}

/* Part p of a KV head takes key blocks p, 2 P - 1 - p, 2 P + p, ...: causal work is spread
 * evenly. */
static void run_task(const call *c, workspace *w, int64_t pair, int64_t part, float *dq_sum)
{
    const int64_t parts = c->division.parts;
    memset(dq_sum, 0, (size_t)dq_floats(c->a) * sizeof(float));
    for (int64_t round = 0; round * parts < c->division.blocks; round++) {
        int64_t block = round * parts + (round % 2 ? parts - 1 - part : part);
        if (block < c->division.blocks) {
            run_key_block(c, w, pair / c->a->kv_heads, pair % c->a->kv_heads,
                          block * c->division.block_keys, dq_sum);
        }
    }
}

/* dq of row block i of a KV head, from its sum. */
static void store_queries(const call *c, workspace *w, int64_t pair, int64_t i, const float *sum)
{
    const nd_attention *a = c->a;
    const int64_t blocks = nd_attention_row_blocks(a), q0 = i % blocks * ND_TILE;
    const int64_t head = pair % a->kv_heads * nd_attention_group(a) + i / blocks;
    const int rows = (int)(a->sq - q0 < ND_TILE ? a->sq - q0 : ND_TILE);
    c->tiles->store_transposed(nd_attention_row(c->dq, pair / a->kv_heads, q0, head), c->dq.dtype,
                               c->dq.stride[1], sum, (int)a->head_dim, rows, NULL, c->add_q,
                               w->temporary);
}

/* Sum of the parts of row block i, in order, left in the first. */
static float *add_parts(const call *c, int64_t pair, int64_t i)
{
    const int64_t tile = c->a->head_dim * ND_TILE, task = dq_floats(c->a);
    float *sum = c->dq_sums + pair * c->division.parts * task + i * tile;
    for (int64_t part = 1; part < c->division.parts; part++) {
        const float *other = sum + part * task;
        for (int64_t j = 0; j < tile; j++) {
            sum[j] += other[j];
        }
    }
    return sum;
}

static void run_all(const call *c, char *scratch, size_t bytes, int threads)
{
    const nd_attention *a = c->a;
    const division d = c->division;
    const int64_t pairs = a->batch * a->kv_heads, task = dq_floats(a);
    const int64_t row_blocks = nd_attention_group(a) * nd_attention_row_blocks(a);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num();
        workspace w;
        workspace_init(&w, scratch + (size_t)thread * bytes, a, d.block_keys);
        /* Tasks are independent: which thread runs which does not change results. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < pairs * d.parts; t++) {
            float *sum = c->dq_sums + (d.parts > 1 ? t : thread) * task;
            run_task(c, &w, t / d.parts, t % d.parts, sum);
            for (int64_t i = 0; d.parts == 1 && i < row_blocks; i++) {
                store_queries(c, &w, t, i, sum + i * a->head_dim * ND_TILE);
            }
        }
        if (d.parts > 1) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < pairs * row_blocks; t++) {
                store_queries(c, &w, t / row_blocks, t % row_blocks,
                              add_parts(c, t / row_blocks, t % row_blocks));
            }
        }
    }
}

nd_status nd_cpu_attention_bwd(nd_stream *stream, const nd_attention_bwd_args *args)
{
    const nd_attention *a = &args->attention;
    const nd_tensor dq = args->dq, dk = args->dk, dv = args->dv, q = args->q, k = args->k,
                    v = args->v, dout = args->dout;
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(a->heads % a->kv_heads == 0 && a->scale > 0.0f);
    ND_ASSERT(q.dtype == k.dtype && k.dtype == v.dtype && v.dtype == dout.dtype);
    ND_ASSERT(!args->add_q || dq.dtype == ND_DTYPE_F32);
    ND_ASSERT(!args->add_kv || (dk.dtype == ND_DTYPE_F32 && dv.dtype == ND_DTYPE_F32));
    const int threads = stream->device->threads;
    const bool bf16 = q.dtype == ND_DTYPE_BF16 && context->tiles_bf16;
    call c = {.a = a,
              .tiles = bf16 ? context->tiles_bf16 : context->tiles_f32,
              .dq = dq,
              .dk = dk,
              .dv = dv,
              .q = q,
              .k = k,
              .v = v,
              .dout = dout,
              .lse = args->lse.data,
              .delta = args->delta.data,
              .add_q = args->add_q,
              .add_kv = args->add_kv,
              .division = divide(threads, a)};
    workspace sized;
    const size_t bytes = workspace_init(&sized, NULL, a, c.division.block_keys);
    c.dq_sums = (float *)((char *)args->scratch + (size_t)threads * bytes);
    run_all(&c, args->scratch, bytes, threads);
    return ND_OK;
}
