// SPDX-License-Identifier: Apache-2.0
/* Forward of blocked attention: FlashAttention-2 (Dao, 2023), with the score tiles transposed. */
#include "kernels/cpu/attention.h"

#include <math.h>
#include <string.h>

#include "kernels/cached.h"
#include "kernels/cpu/context.h"
#include "runtime/base/math.h"

/* A step reads and writes all sums of outputs, so it has many keys. Their scores are made and used
 * in pieces that stay in L1. */
enum { STEP = ND_ATTENTION_STEP, PIECE = 32 };

typedef struct call {
    const nd_attention *a;
    const nd_tile_ops *tiles;
    const nd_attention_fwd_args *args;
    nd_sight sight;
    int64_t row_blocks; /* row blocks of one head in a task */
} call;

/* One thread's scratch. NB row blocks, W = words of D, all sizes for words of one element. */
typedef struct workspace {
    nd_word *qt;   /* [NB] B (k = D, n = ND_TILE) */
    float *ot;     /* [NB] (D, ND_TILE): outputs so far, transposed, not yet divided by the sums */
    float *max;    /* [NB] (ND_TILE) */
    float *sum;    /* [NB] (ND_TILE) */
    nd_word *k;    /* A (m = STEP keys, k = D) */
    nd_word *vt;   /* A (m = D, k = STEP keys) */
    float *scores; /* (PIECE keys, ND_TILE) */
    nd_word *p;    /* B (k = STEP keys, n = ND_TILE) */
    float *alpha;  /* (ND_TILE) */
    void *temporary; /* STEP x D elements */
} workspace;

/* Row blocks per head of a task: enough to share the packing of K and V, few enough to keep all
 * threads busy. */
static int64_t task_row_blocks(int threads, const nd_attention *a)
{
    int64_t all = nd_attention_row_blocks(a), group = nd_attention_group(a);
    int64_t blocks = ND_ATTENTION_BLOCKS / group;
    while (blocks > 1 && a->batch * a->kv_heads * nd_ceil_div(all, blocks) < (int64_t)threads * 4) {
        blocks /= 2;
    }
    blocks = blocks > all ? all : blocks;
    return blocks < 1 ? 1 : blocks;
}

static size_t workspace_init(workspace *w, char *base, const nd_attention *a, int64_t row_blocks)
{
    const int64_t d = a->head_dim, nb = row_blocks * nd_attention_group(a);
    size_t used = 0;
    w->qt = nd_attention_cut(base, &used, nb * d * ND_TILE);
    w->ot = nd_attention_cut(base, &used, nb * d * ND_TILE);
    w->max = nd_attention_cut(base, &used, nb * ND_TILE);
    w->sum = nd_attention_cut(base, &used, nb * ND_TILE);
    w->k = nd_attention_cut(base, &used, STEP * d);
    w->vt = nd_attention_cut(base, &used, d * STEP);
    w->scores = nd_attention_cut(base, &used, PIECE * ND_TILE);
    w->p = nd_attention_cut(base, &used, STEP * ND_TILE);
    w->alpha = nd_attention_cut(base, &used, ND_TILE);
    w->temporary = nd_attention_cut(base, &used, STEP * d);
    return used;
}

static size_t fwd_scratch(int threads, const nd_attention *a)
{
    workspace unused;
    return (size_t)threads * workspace_init(&unused, NULL, a, task_row_blocks(threads, a)) +
           (size_t)nd_attention_sight_words(a) * 4;
}

/* The row block's queries are packed, its running values reset. */
static void row_block_begin(const call *c, workspace *w, int64_t block, int64_t b, int64_t q0,
                            int rows, int64_t head)
{
    const int64_t d = c->a->head_dim;
    c->tiles->pack_b_transposed(w->qt + block * d * ND_TILE, ND_TILE,
                                nd_attention_row(c->args->q, b, q0, head), c->args->q.dtype,
                                c->args->q.stride[1], rows, (int)d, w->temporary);
    memset(w->ot + block * d * ND_TILE, 0, (size_t)(d * ND_TILE) * sizeof(float));
    for (int r = 0; r < ND_TILE; r++) {
        w->max[block * ND_TILE + r] = -INFINITY;
        w->sum[block * ND_TILE + r] = 0.0f;
    }
}

/* Adds what keys [from, to) of the step give to the row block's outputs. */
static void add_values(const call *c, const workspace *w, float *ot, int from, int to)
{
    const int group = c->tiles->group;
    if (to > from) {
        c->tiles->gemm((int)c->a->head_dim, ND_TILE, (int)nd_ceil_div(to - from, group),
                       w->vt + from / group, STEP / group, w->p + from / group * ND_TILE, ND_TILE,
                       ot, ND_TILE, true);
    }
}

/* One step of keys against one row block: scores, softmax, and its part of the outputs. Where a
 * piece changes the maxima, the keys before it are added first, since they have the old ones. */
static void row_block_step(const call *c, workspace *w, int64_t block, int64_t b, int64_t q0,
                           int64_t key0, int keys)
{
    const nd_attention *a = c->a;
    const int d = (int)a->head_dim, words = (int)nd_ceil_div(d, c->tiles->group);
    const nd_seen_keys *sees = nd_attention_seen(&c->sight, b, q0);
    const int from = (int)nd_max(sees->begin - key0, 0) / PIECE * PIECE;
    const int seen = (int)nd_min(sees->end - key0, keys);
    const nd_word *qt = w->qt + block * d * ND_TILE;
    float *ot = w->ot + block * d * ND_TILE;
    int added = from;
    for (int first = from; first < seen; first += PIECE) {
        const int count = (int)nd_min(seen - first, PIECE);
        nd_key_limits limits;
        c->tiles->gemm(count, ND_TILE, words, w->k + first * words, words, qt, ND_TILE, w->scores,
                       ND_TILE, false);
        const nd_softmax_step step = {
            .scores = w->scores,
            .p = w->p + first / c->tiles->group * ND_TILE,
            .keys = count,
            .limits = nd_attention_limits(&c->sight, b, q0, key0 + first, count, &limits),
            .scale = a->scale * (float)M_LOG2E,
            .max = w->max + block * ND_TILE,
            .sum = w->sum + block * ND_TILE,
            .alpha = w->alpha};
        if (c->tiles->softmax(&step)) {
            add_values(c, w, ot, added, first);
            c->tiles->scale_columns(ot, d, w->alpha);
            added = first;
        }
    }
    add_values(c, w, ot, added, seen);
}

static void row_block_end(const call *c, workspace *w, int64_t block, int64_t b, int64_t q0,
                          int rows, int64_t head)
{
    const nd_attention *a = c->a;
    const int64_t d = a->head_dim;
    const float *max = w->max + block * ND_TILE, *sum = w->sum + block * ND_TILE;
    float *lse = (float *)c->args->lse.data + (b * a->heads + head) * a->sq + q0;
    float inverse[ND_TILE];
    for (int r = 0; r < rows; r++) {
        bool blind = sum[r] == 0.0f;
        inverse[r] = blind ? 0.0f : 1.0f / sum[r];
        lse[r] = blind ? -INFINITY : (max[r] + log2f(sum[r])) * (float)M_LN2;
    }
    c->tiles->store_transposed(nd_attention_row(c->args->out, b, q0, head), c->args->out.dtype,
                               c->args->out.stride[1], w->ot + block * d * ND_TILE, (int)d, rows,
                               inverse, false, w->temporary);
}

/* Queries [q0, q_end) of the heads that share a KV head, in one sample. */
typedef struct task {
    int64_t b, kv, q0, q_end;
} task;

typedef enum phase { BEGIN, KEYS, END } phase;

/* Applies one phase to the task's row blocks. KEYS handles keys [key0, key0 + keys). */
static void for_row_blocks(const call *c, workspace *w, phase what, const task *t, int64_t key0,
                           int keys)
{
    const int64_t group = nd_attention_group(c->a);
    int64_t block = 0;
    for (int64_t g = 0; g < group; g++) {
        for (int64_t q = t->q0; q < t->q_end; q += ND_TILE, block++) {
            int rows = (int)(t->q_end - q < ND_TILE ? t->q_end - q : ND_TILE);
            int64_t head = t->kv * group + g;
            if (what == BEGIN) {
                row_block_begin(c, w, block, t->b, q, rows, head);
            } else if (what == KEYS) {
                row_block_step(c, w, block, t->b, q, key0, keys);
            } else {
                row_block_end(c, w, block, t->b, q, rows, head);
            }
        }
    }
}

/* The keys that a task's queries see. */
static nd_key_range seen_by_task(const call *c, const task *t)
{
    nd_key_range keys = {c->a->sk, 0};
    for (int64_t q = t->q0; q < t->q_end; q += ND_TILE) {
        const nd_seen_keys *sees = nd_attention_seen(&c->sight, t->b, q);
        if (sees->begin < sees->end) {
            keys.begin = nd_min(keys.begin, sees->begin);
            keys.end = nd_max(keys.end, sees->end);
        }
    }
    return keys;
}

/* Steps begin at a piece, and which pieces there are does not depend on the task: nor do bits. */
static void run_task(const call *c, workspace *w, const task *t)
{
    const nd_tile_ops *tiles = c->tiles;
    const int d = (int)c->a->head_dim, words = (int)nd_ceil_div(d, tiles->group);
    const nd_key_range seen = seen_by_task(c, t);
    for_row_blocks(c, w, BEGIN, t, 0, 0);
    for (int64_t key0 = seen.begin / PIECE * PIECE; key0 < seen.end; key0 += STEP) {
        const int keys = (int)nd_min(seen.end - key0, STEP);
        tiles->pack_a(w->k, words, nd_attention_row(c->args->k, t->b, key0, t->kv),
                      c->args->k.dtype, c->args->k.stride[1], keys, d);
        tiles->pack_a_transposed(w->vt, STEP / tiles->group,
                                 nd_attention_row(c->args->v, t->b, key0, t->kv), c->args->v.dtype,
                                 c->args->v.stride[1], keys, d, w->temporary);
        for_row_blocks(c, w, KEYS, t, key0, keys);
    }
    for_row_blocks(c, w, END, t, 0, 0);
}

typedef struct all_tasks {
    const call *c;
    char *scratch;
    size_t bytes; /* of a thread's workspace */
    int64_t span, spans;
} all_tasks;

/* Tasks are independent, so their order does not change results; late queries see most keys and go
 * first. */
static void run_one(void *arg, int64_t t)
{
    const all_tasks *all = arg;
    const nd_attention *a = all->c->a;
    const int64_t pairs = a->batch * a->kv_heads, pair = t % pairs;
    const int64_t q0 = (all->spans - 1 - t / pairs) * all->span;
    workspace w;
    workspace_init(&w, all->scratch + (size_t)nd_team_thread() * all->bytes, a, all->c->row_blocks);
    nd_tiles_begin(all->c->tiles);
    run_task(all->c, &w,
             &(task){.b = pair / a->kv_heads,
                     .kv = pair % a->kv_heads,
                     .q0 = q0,
                     .q_end = nd_min(q0 + all->span, a->sq)});
    nd_tiles_end(all->c->tiles);
}

/*
 * Attention of one query per head, as when a model continues a text: the time is that of reading K
 * and V once, which tiles of packed operands would double. The keys are cut into spans, so that all
 * threads have work where there are few heads; the spans' outputs are merged as those of blocks of
 * context parallel are (lse_merge).
 */

enum {
    SPAN_KEYS = 512, /* at least */
    SPANS = 32       /* at most */
};

typedef struct one_call {
    const nd_attention *a;
    const nd_attention_fwd_args *args;
    int64_t span, spans; /* keys of a span; spans of a head */
    float *outputs;      /* (B, K, spans, G, D), not yet divided by the sums */
    float *max, *sum;    /* (B, K, spans, G) */
    float *scores;       /* (threads, G, span) */
} one_call;

/* Cuts the scratch; returns its bytes: fewer keys never need more. */
static size_t one_call_init(one_call *c, char *base, int threads, const nd_attention *a)
{
    const int64_t D = a->head_dim;
    size_t used = 0;
    c->a = a;
    c->span = nd_max(SPAN_KEYS, nd_round_up(nd_ceil_div(a->sk, SPANS), ND_TILE));
    c->spans = nd_max(nd_ceil_div(a->sk, c->span), 1);
    const int64_t most_spans = nd_max(nd_min(nd_ceil_div(a->sk, SPAN_KEYS), SPANS), 1);
    const int64_t partial = a->batch * a->heads * most_spans;
    c->outputs = nd_attention_cut(base, &used, partial * D);
    c->max = nd_attention_cut(base, &used, partial);
    c->sum = nd_attention_cut(base, &used, partial);
    c->scores = nd_attention_cut(base, &used, threads * nd_attention_group(a) * c->span);
    return used;
}

static size_t one_scratch(int threads, const nd_attention *a)
{
    one_call unused;
    return one_call_init(&unused, NULL, threads, a);
}

/* One span of keys of one KV head: item = (b K + kv) spans + span. */
static void one_span(const nd_row_ops *kernels, const one_call *c, int64_t item, float *scores)
{
    const nd_attention *a = c->a;
    const int64_t D = a->head_dim, group = nd_attention_group(a), first = item * group;
    const int64_t b = item / c->spans / a->kv_heads, kv = item / c->spans % a->kv_heads;
    const int64_t key0 = item % c->spans * c->span;
    const nd_key_range seen = nd_visible_keys(a, c->args->first_key, c->args->end_key, b, 0);
    const int64_t from = nd_min(nd_max(seen.begin, key0), key0 + c->span);
    const int64_t keys = nd_max(nd_min(seen.end, key0 + c->span) - from, 0);
    const nd_row_dots dots = {.x = nd_attention_row(c->args->q, b, 0, kv * group),
                              .x_stride = c->args->q.stride[2],
                              .vectors = group,
                              .rows = nd_attention_row(c->args->k, b, from, kv),
                              .stride = c->args->k.stride[1],
                              .count = keys,
                              .k = D,
                              .bf16 = c->args->q.dtype == ND_DTYPE_BF16,
                              .out = scores,
                              .out_stride = c->span};
    const nd_row_sums sums = {.weights = scores,
                              .weight_stride = c->span,
                              .vectors = group,
                              .rows = nd_attention_row(c->args->v, b, from, kv),
                              .stride = c->args->v.stride[1],
                              .count = keys,
                              .k = D,
                              .bf16 = c->args->v.dtype == ND_DTYPE_BF16,
                              .out = c->outputs + first * D,
                              .out_stride = D};
    kernels->dots(&dots);
    for (int64_t g = 0; g < group; g++) {
        float *row = scores + g * c->span;
        c->max[first + g] = -INFINITY;
        c->sum[first + g] = 0.0f;
        if (keys > 0) {
            kernels->scaled_sum(row, row, a->scale, NULL, false, keys, false);
            kernels->ce_stats(&c->max[first + g], &c->sum[first + g], row, keys, false);
            kernels->ce_bwd(row, c->max[first + g], 1.0f, keys, false);
        }
    }
    kernels->row_sums(&sums);
}

static void some_spans(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const one_call *c = args;
    float *scores = c->scores + nd_team_thread() * nd_attention_group(c->a) * c->span;
    for (int64_t item = begin; item < end; item++) {
        one_span(rows, c, item, scores);
    }
}

/* The spans of head h together: the first one's output becomes the sum of all. */
static void merge_head(const nd_row_ops *rows, const one_call *c, int64_t b, int64_t h)
{
    const nd_attention *a = c->a;
    const int64_t D = a->head_dim, step = nd_attention_group(a);
    const int64_t first = (b * a->kv_heads + h / step) * c->spans * step + h % step;
    float *out = c->outputs + first * D, max = -INFINITY, sum = 0.0f;
    for (int64_t s = 0; s < c->spans; s++) {
        max = fmaxf(max, c->max[first + s * step]);
    }
    const bool blind = max == -INFINITY;
    for (int64_t s = 0; s < c->spans; s++) {
        const float weight = blind ? 0.0f : expf(c->max[first + s * step] - max);
        const float *from = c->outputs + (first + s * step) * D;
        sum += weight * c->sum[first + s * step];
        for (int64_t d = 0; d < D; d++) {
            out[d] = weight * from[d] + (s > 0 ? out[d] : 0.0f);
        }
    }
    for (int64_t d = 0; d < D && !blind; d++) {
        out[d] /= sum;
    }
    ((float *)c->args->lse.data)[b * a->heads + h] = blind ? -INFINITY : max + logf(sum);
    rows->cast(nd_attention_row(c->args->out, b, 0, h), c->args->out.dtype, out, ND_DTYPE_F32, D);
}

static void merge_heads(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const one_call *c = args;
    for (int64_t head = begin; head < end; head++) {
        merge_head(rows, c, head / c->a->heads, head % c->a->heads);
    }
}

/* Sq = 1 and the hint few_rows, where a tile would be empty but for one column. Probabilities are
 * not rounded. The bits do not depend on the number of threads. */
static void attend_one(nd_stream *stream, const nd_attention_fwd_args *args)
{
    const nd_attention *a = &args->attention;
    const int64_t D = a->head_dim;
    one_call c;
    ND_ASSERT(a->sq == 1);
    one_call_init(&c, args->scratch, stream->device->threads, a);
    c.args = args;
    nd_cpu_each(stream, a->batch * a->kv_heads * c.spans,
                2 * nd_min(a->sk, c.span) * nd_attention_group(a) * D, some_spans, &c);
    nd_cpu_each(stream, a->batch * a->heads, c.spans * D, merge_heads, &c);
}

/* the op, and what scratch the ops need */

nd_status nd_cpu_attention_fwd(nd_stream *stream, const nd_attention_fwd_args *args)
{
    const nd_attention *a = &args->attention;
    const nd_tensor q = args->q, k = args->k, v = args->v;
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(a->heads % a->kv_heads == 0 && a->scale > 0.0f);
    ND_ASSERT(q.dtype == k.dtype && k.dtype == v.dtype &&
              nd_are_bounds(args->first_key, args->end_key, a));
    bool bf16 = q.dtype == ND_DTYPE_BF16 && context->tiles_bf16;
    const int threads = stream->device->threads;
    if (args->few_rows && a->sq == 1) {
        attend_one(stream, args);
        return ND_OK;
    }
    const int64_t row_blocks = task_row_blocks(threads, a);
    workspace sized;
    const size_t bytes = workspace_init(&sized, NULL, a, row_blocks);
    char *behind = (char *)args->scratch + (size_t)threads * bytes;
    const call c = {.a = a,
                    .tiles = bf16 ? context->tiles_bf16 : context->tiles_f32,
                    .args = args,
                    .sight = {a, args->first_key, args->end_key, (nd_seen_keys *)behind},
                    .row_blocks = row_blocks};
    const int64_t span = c.row_blocks * ND_TILE, spans = nd_ceil_div(a->sq, span);
    nd_attention_look(&c.sight);
    nd_team_run(
        context->team, a->batch * a->kv_heads * spans, run_one,
        &(all_tasks){
            .c = &c, .scratch = args->scratch, .bytes = bytes, .span = span, .spans = spans});
    return ND_OK;
}

size_t nd_cpu_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    if (backward) {
        return nd_attention_bwd_scratch(device->threads, a);
    }
    const size_t tiles = fwd_scratch(device->threads, a);
    return a->sq == 1 ? nd_max_bytes(tiles, one_scratch(device->threads, a)) : tiles;
}

/* Returns the bytes that are enough for any segment. No segment has a larger extent, but a shorter
 * one may be cut into other tasks. */
size_t nd_cpu_attention_cached_scratch(const nd_device *device, const nd_attention *most,
                                       nd_dtype act)
{
    const nd_attention of_one = nd_attention_of_segment(most, 1, nd_max(most->sk, 1));
    size_t bytes = one_scratch(device->threads, &of_one);
    for (int64_t rows = 1;; rows = nd_min(2 * rows, most->sq)) {
        const int64_t before = nd_max(most->sk - rows, 0), own = nd_min(rows, most->sk);
        const nd_attention a = nd_attention_of_segment(most, own, before + own);
        bytes = nd_max_bytes(bytes, fwd_scratch(device->threads, &a));
        if (rows == most->sq) {
            return nd_cached_lse_bytes(most, most->sq) + bytes;
        }
    }
}

nd_status nd_cpu_attention_cached(nd_stream *stream, const nd_attention_cached_args *x)
{
    const nd_cached_ops ops = {nd_cpu_cast, nd_cpu_attention_fwd};
    return nd_attention_cached_by(stream, &ops, x);
}

bool nd_cpu_attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return true;
}
