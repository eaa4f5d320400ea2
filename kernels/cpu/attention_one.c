// SPDX-License-Identifier: Apache-2.0
/*
 * Attention of one query per head, as when a model continues a text: the time is that of reading K
 * and V once, which tiles of packed operands would double. The keys are cut into spans, so that all
 * threads have work where there are few heads; the spans' outputs are merged as those of blocks of
 * context parallel are (lse_merge).
 */
#include <math.h>
#include <stdlib.h>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/context.h"

enum {
    SPAN_KEYS = 512, /* at least */
    SPANS = 32       /* at most */
};

typedef struct call {
    const nd_attention *a;
    const nd_row_ops *kernels;
    const nd_attention_fwd_args *args;
    int64_t span, spans; /* keys of a span; spans of a head */
    float *outputs;      /* (B, K, spans, G, D), not yet divided by the sums */
    float *max, *sum;    /* (B, K, spans, G) */
    float *scores;       /* (threads, G, span) */
} call;

/* Cuts the scratch; returns its bytes: fewer keys never need more. */
static size_t call_init(call *c, char *base, int threads, const nd_attention *a)
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

size_t nd_attention_one_scratch(int threads, const nd_attention *a)
{
    call unused;
    return call_init(&unused, NULL, threads, a);
}

/* One span of keys of one KV head: item = (b K + kv) spans + span. */
static void one_span(const call *c, int64_t item, float *scores)
{
    const nd_attention *a = c->a;
    const nd_row_ops *kernels = c->kernels;
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

static void some_spans(void *arg, int64_t begin, int64_t end)
{
    const call *c = arg;
    float *scores = c->scores + nd_team_thread() * nd_attention_group(c->a) * c->span;
    for (int64_t item = begin; item < end; item++) {
        one_span(c, item, scores);
    }
}

/* The spans of head h together: the first one's output becomes the sum of all. */
static void merge_head(const call *c, int64_t b, int64_t h)
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
    c->kernels->cast(nd_attention_row(c->args->out, b, 0, h), c->args->out.dtype, out, ND_DTYPE_F32,
                     D);
}

static void merge_heads(void *arg, int64_t begin, int64_t end)
{
    const call *c = arg;
    for (int64_t head = begin; head < end; head++) {
        merge_head(c, head / c->a->heads, head % c->a->heads);
    }
}

void nd_attention_one(nd_stream *stream, const nd_attention_fwd_args *args)
{
    const nd_attention *a = &args->attention;
    const int64_t D = a->head_dim;
    call c;
    ND_ASSERT(a->sq == 1);
    call_init(&c, args->scratch, stream->device->threads, a);
    c.kernels = nd_cpu_context_of(stream)->rows;
    c.args = args;
    nd_cpu_parallel(stream, a->batch * a->kv_heads * c.spans,
                    2 * nd_min(a->sk, c.span) * nd_attention_group(a) * D, some_spans, &c);
    nd_cpu_parallel(stream, a->batch * a->heads, c.spans * D, merge_heads, &c);
}
