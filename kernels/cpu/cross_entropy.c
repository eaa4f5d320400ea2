// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"

enum {
    NOT_COUNTED = -100,
    WORK = 4,        /* a logit costs about four elements of a plain sum */
    LOSS_BLOCK = 256 /* rows whose losses are summed first */
};

typedef struct cross_entropy {
    const nd_row_ops *rows;
    nd_tensor logits; /* (n, V) */
    const int32_t *labels;
    float *max, *sum, *target;
    int64_t n, first, valid;
    float scale;
    bool merge;
    double *partials;
} cross_entropy;

static float logit_at(const cross_entropy *w, int64_t i, int64_t column)
{
    const void *row = nd_row(w->logits, i);
    return w->logits.dtype == ND_DTYPE_F32 ? ((const float *)row)[column]
                                           : nd_bf16_to_f32(((const nd_bf16 *)row)[column]);
}

/* Column of row i's label, or -1 when it is not counted or in another slice. */
static int64_t column_of(const cross_entropy *w, int64_t i)
{
    int64_t column = w->labels[i] - w->first;
    return w->labels[i] != NOT_COUNTED && column >= 0 && column < w->valid ? column : -1;
}

static void stats_rows(void *arg, int64_t begin, int64_t end)
{
    const cross_entropy *w = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t column = column_of(w, i);
        float logit = column >= 0 ? logit_at(w, i, column) : 0.0f;
        if (!w->merge) {
            w->max[i] = -INFINITY;
            w->sum[i] = 0.0f;
        }
        w->rows->ce_stats(w->max + i, w->sum + i, nd_row(w->logits, i), w->valid,
                          w->logits.dtype == ND_DTYPE_BF16);
        w->target[i] = w->merge ? w->target[i] + logit : logit;
    }
}

nd_status nd_cpu_ce_stats(nd_stream *stream, const nd_ce_stats_args *args)
{
    const nd_tensor row_max = args->row_max, row_sum = args->row_sum, target = args->target,
                    logits = args->logits, labels = args->labels;
    int64_t valid = args->valid;
    int64_t n = logits.shape[0], V = logits.shape[1];
    ND_ASSERT(nd_is_act(logits) && nd_is_2d(logits, n, V) && valid >= 0 && valid <= V);
    ND_ASSERT(nd_is_vector(row_max, ND_DTYPE_F32, n) && nd_is_vector(row_sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(target, ND_DTYPE_F32, n) && nd_is_vector(labels, ND_DTYPE_I32, n));
    cross_entropy w = {.rows = nd_cpu_context_of(stream)->rows,
                       .logits = logits,
                       .labels = labels.data,
                       .max = row_max.data,
                       .sum = row_sum.data,
                       .target = target.data,
                       .first = args->first,
                       .valid = valid,
                       .merge = args->merge};
    nd_cpu_parallel(stream, n, WORK * V, stats_rows, &w);
    return ND_OK;
}

nd_status nd_cpu_ce_rescale(nd_stream *stream, const nd_ce_rescale_args *args)
{
    const nd_tensor row_sum = args->row_sum, row_max = args->row_max, global_max = args->global_max;
    int64_t n = nd_tensor_count(row_sum);
    float *sum = row_sum.data;
    const float *max = row_max.data, *global = global_max.data;
    ND_ASSERT(nd_is_vector(row_sum, ND_DTYPE_F32, n) && nd_is_vector(row_max, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(global_max, ND_DTYPE_F32, n));
    for (int64_t i = 0; i < n; i++) {
        /* A slice without a logit above -inf has the maximum -inf and the sum 0, or NaN. */
        sum[i] = max[i] == -INFINITY ? sum[i] : sum[i] * expf(max[i] - global[i]);
    }
    return ND_OK;
}

static void loss_blocks(void *arg, int64_t begin, int64_t end)
{
    const cross_entropy *w = arg;
    for (int64_t block = begin; block < end; block++) {
        int64_t last = (block + 1) * LOSS_BLOCK < w->n ? (block + 1) * LOSS_BLOCK : w->n;
        double loss = 0.0;
        for (int64_t i = block * LOSS_BLOCK; i < last; i++) {
            if (w->labels[i] != NOT_COUNTED) {
                loss += log((double)w->sum[i]) + (double)w->max[i] - (double)w->target[i];
            }
        }
        w->partials[block] = loss;
    }
}

nd_status nd_cpu_ce_loss(nd_stream *stream, const nd_ce_loss_args *args)
{
    const nd_tensor max = args->max, sum = args->sum, target = args->target, labels = args->labels;
    int64_t n = nd_tensor_count(labels), blocks = nd_ceil_div(n, LOSS_BLOCK);
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(nd_is_vector(labels, ND_DTYPE_I32, n) && nd_is_vector(max, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(sum, ND_DTYPE_F32, n) && nd_is_vector(target, ND_DTYPE_F32, n));
    ND_ASSERT(blocks <= ND_CPU_PARTIALS);
    cross_entropy w = {.labels = labels.data,
                       .max = max.data,
                       .sum = sum.data,
                       .target = target.data,
                       .n = n,
                       .partials = context->partials};
    nd_cpu_parallel(stream, blocks, LOSS_BLOCK * 16, loss_blocks, &w);
    double loss = 0.0;
    for (int64_t block = 0; block < blocks; block++) {
        loss += context->partials[block];
    }
    *args->loss_sum += loss;
    return ND_OK;
}

static void store_logit(const cross_entropy *w, int64_t i, int64_t column, float value)
{
    void *row = nd_row(w->logits, i);
    if (w->logits.dtype == ND_DTYPE_F32) {
        ((float *)row)[column] = value;
    } else {
        ((nd_bf16 *)row)[column] = nd_bf16_from_f32(value);
    }
}

static void backward_rows(void *arg, int64_t begin, int64_t end)
{
    const cross_entropy *w = arg;
    int64_t V = w->logits.shape[1];
    size_t size = w->logits.dtype == ND_DTYPE_BF16 ? 2 : 4;
    for (int64_t i = begin; i < end; i++) {
        char *row = nd_row(w->logits, i);
        int64_t column = column_of(w, i);
        if (w->labels[i] == NOT_COUNTED) {
            memset(row, 0, (size_t)V * size);
            continue;
        }
        /* The label's own gradient is computed from its logit, not from its rounded softmax. */
        float logit = column >= 0 ? logit_at(w, i, column) : 0.0f;
        w->rows->ce_bwd(row, w->max[i], w->scale / w->sum[i], w->valid, size == 2);
        memset(row + (size_t)w->valid * size, 0, (size_t)(V - w->valid) * size);
        if (column >= 0) {
            float p = expf(logit - w->max[i]) / w->sum[i];
            store_logit(w, i, column, (p - 1.0f) * w->scale);
        }
    }
}

nd_status nd_cpu_ce_bwd(nd_stream *stream, const nd_ce_bwd_args *args)
{
    const nd_tensor logits = args->logits, max = args->max, sum = args->sum, labels = args->labels;
    int64_t valid = args->valid;
    int64_t n = logits.shape[0], V = logits.shape[1];
    ND_ASSERT(nd_is_act(logits) && nd_is_2d(logits, n, V) && valid >= 0 && valid <= V);
    ND_ASSERT(nd_is_vector(max, ND_DTYPE_F32, n) && nd_is_vector(sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(labels, ND_DTYPE_I32, n));
    cross_entropy w = {.rows = nd_cpu_context_of(stream)->rows,
                       .logits = logits,
                       .labels = labels.data,
                       .max = max.data,
                       .sum = sum.data,
                       .first = args->first,
                       .valid = valid,
                       .scale = (float)(1.0 / (double)*args->count)};
    nd_cpu_parallel(stream, n, WORK * V, backward_rows, &w);
    return ND_OK;
}
