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

static float logit_at(nd_tensor logits, int64_t i, int64_t column)
{
    const void *logit = nd_at(logits, i, column);
    return logits.dtype == ND_DTYPE_F32 ? *(const float *)logit
                                        : nd_bf16_to_f32(*(const nd_bf16 *)logit);
}

/* Column of row i's label, or -1 when it is not counted or in another slice. */
static int64_t column_of(nd_tensor labels, int64_t first, int64_t valid, int64_t i)
{
    const int32_t label = ((const int32_t *)labels.data)[i];
    const int64_t column = label - first;
    return label != NOT_COUNTED && column >= 0 && column < valid ? column : -1;
}

static void stats_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_ce_stats_args *w = args;
    float *max = w->row_max.data, *sum = w->row_sum.data, *target = w->target.data;
    for (int64_t i = begin; i < end; i++) {
        const int64_t column = column_of(w->labels, w->first, w->valid, i);
        const float logit = column >= 0 ? logit_at(w->logits, i, column) : 0.0f;
        if (!w->merge) {
            max[i] = -INFINITY;
            sum[i] = 0.0f;
        }
        rows->ce_stats(max + i, sum + i, nd_row(w->logits, i), w->valid,
                       w->logits.dtype == ND_DTYPE_BF16);
        target[i] = w->merge ? target[i] + logit : logit;
    }
}

nd_status nd_cpu_ce_stats(nd_stream *stream, const nd_ce_stats_args *args)
{
    const nd_tensor logits = args->logits;
    int64_t n = logits.shape[0], V = logits.shape[1];
    ND_ASSERT(nd_is_act(logits) && nd_is_2d(logits, n, V));
    ND_ASSERT(args->valid >= 0 && args->valid <= V);
    ND_ASSERT(nd_is_vector(args->row_max, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(args->row_sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(args->target, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(args->labels, ND_DTYPE_I32, n));
    nd_cpu_each(stream, n, WORK * V, stats_rows, args);
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

typedef struct losses {
    const nd_ce_loss_args *args;
    int64_t n;
    double *partials;
} losses;

static void loss_blocks(const nd_row_ops *rows, const void *arg, int64_t begin, int64_t end)
{
    const losses *w = arg;
    const float *max = w->args->max.data, *sum = w->args->sum.data;
    const float *target = w->args->target.data;
    for (int64_t block = begin; block < end; block++) {
        double loss = 0.0;
        for (int64_t i = block * LOSS_BLOCK; i < nd_min((block + 1) * LOSS_BLOCK, w->n); i++) {
            if (((const int32_t *)w->args->labels.data)[i] != NOT_COUNTED) {
                loss += log((double)sum[i]) + (double)max[i] - (double)target[i];
            }
        }
        w->partials[block] = loss;
    }
}

nd_status nd_cpu_ce_loss(nd_stream *stream, const nd_ce_loss_args *args)
{
    const int64_t n = nd_tensor_count(args->labels), blocks = nd_ceil_div(n, LOSS_BLOCK);
    const losses w = {args, n, nd_cpu_context_of(stream)->partials};
    ND_ASSERT(nd_is_vector(args->labels, ND_DTYPE_I32, n));
    ND_ASSERT(nd_is_vector(args->max, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(args->sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(args->target, ND_DTYPE_F32, n));
    ND_ASSERT(blocks <= ND_CPU_PARTIALS);
    nd_cpu_each(stream, blocks, LOSS_BLOCK * 16, loss_blocks, &w);
    double loss = 0.0;
    for (int64_t block = 0; block < blocks; block++) {
        loss += w.partials[block];
    }
    *args->loss_sum += loss;
    return ND_OK;
}

static void store_logit(nd_tensor logits, int64_t i, int64_t column, float value)
{
    void *logit = nd_at(logits, i, column);
    if (logits.dtype == ND_DTYPE_F32) {
        *(float *)logit = value;
    } else {
        *(nd_bf16 *)logit = nd_bf16_from_f32(value);
    }
}

static void backward_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_ce_bwd_args *w = args;
    const float *max = w->max.data, *sum = w->sum.data;
    const float scale = (float)(1.0 / (double)*w->count);
    const int64_t V = w->logits.shape[1];
    const size_t size = nd_dtype_size(w->logits.dtype);
    for (int64_t i = begin; i < end; i++) {
        char *row = nd_row(w->logits, i);
        const int64_t column = column_of(w->labels, w->first, w->valid, i);
        if (((const int32_t *)w->labels.data)[i] == NOT_COUNTED) {
            memset(row, 0, (size_t)V * size);
            continue;
        }
        /* The label's own gradient is computed from its logit, not from its rounded softmax. */
        const float logit = column >= 0 ? logit_at(w->logits, i, column) : 0.0f;
        rows->ce_bwd(row, max[i], scale / sum[i], w->valid, size == 2);
        memset(row + (size_t)w->valid * size, 0, (size_t)(V - w->valid) * size);
        if (column >= 0) {
            const float p = expf(logit - max[i]) / sum[i];
            store_logit(w->logits, i, column, (p - 1.0f) * scale);
        }
    }
}

nd_status nd_cpu_ce_bwd(nd_stream *stream, const nd_ce_bwd_args *args)
{
    const nd_tensor logits = args->logits;
    int64_t n = logits.shape[0], V = logits.shape[1];
    ND_ASSERT(nd_is_act(logits) && nd_is_2d(logits, n, V));
    ND_ASSERT(args->valid >= 0 && args->valid <= V);
    ND_ASSERT(nd_is_vector(args->max, ND_DTYPE_F32, n) && nd_is_vector(args->sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(args->labels, ND_DTYPE_I32, n));
    nd_cpu_each(stream, n, WORK * V, backward_rows, args);
    return ND_OK;
}
