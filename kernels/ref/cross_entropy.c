// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

enum { NOT_COUNTED = -100 };

nd_status nd_ref_ce_stats(nd_stream *stream, const nd_ce_stats_args *args)
{
    const nd_tensor row_max = args->row_max, row_sum = args->row_sum, target = args->target,
                    logits = args->logits, labels = args->labels;
    int64_t valid = args->valid;
    int64_t n = logits.shape[0], V = logits.shape[1];
    ND_ASSERT(nd_is_act(logits) && nd_is_2d(logits, n, V) && valid >= 0 && valid <= V);
    ND_ASSERT(nd_is_vector(row_max, ND_DTYPE_F32, n) && nd_is_vector(row_sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(target, ND_DTYPE_F32, n) && nd_is_vector(labels, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = i * logits.stride[0];
        float before = args->merge ? ((float *)row_max.data)[i] : -INFINITY, max = before;
        for (int64_t v = 0; v < valid; v++) {
            max = fmaxf(max, nd_ref_get(logits, row + v));
        }
        double sum = args->merge ? ((float *)row_sum.data)[i] : 0.0;
        sum *= max > before ? exp((double)before - max) : 1.0;
        /* -inf less -inf is NaN, but less 0 it adds nothing, and NaN still reaches the sum. */
        const double base = max == -INFINITY ? 0.0 : max;
        for (int64_t v = 0; v < valid; v++) {
            sum += exp((double)nd_ref_get(logits, row + v) - base);
        }
        int64_t column = ((const int32_t *)labels.data)[i] - args->first;
        ((float *)row_max.data)[i] = max;
        ((float *)row_sum.data)[i] = (float)sum;
        float logit = column >= 0 && column < valid ? nd_ref_get(logits, row + column) : 0.0f;
        ((float *)target.data)[i] = args->merge ? ((float *)target.data)[i] + logit : logit;
    }
    return ND_OK;
}

nd_status nd_ref_ce_rescale(nd_stream *stream, const nd_ce_rescale_args *args)
{
    const nd_tensor row_sum = args->row_sum, row_max = args->row_max, global_max = args->global_max;
    int64_t n = nd_tensor_count(row_sum);
    float *sum = row_sum.data;
    const float *max = row_max.data, *global = global_max.data;
    ND_ASSERT(nd_is_vector(row_sum, ND_DTYPE_F32, n) && nd_is_vector(row_max, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(global_max, ND_DTYPE_F32, n));
    for (int64_t i = 0; i < n; i++) {
        /* A slice without a logit above -inf has the maximum -inf and the sum 0, or NaN. */
        sum[i] = max[i] == -INFINITY ? sum[i] : (float)(sum[i] * exp((double)max[i] - global[i]));
    }
    return ND_OK;
}

nd_status nd_ref_ce_loss(nd_stream *stream, const nd_ce_loss_args *args)
{
    const nd_tensor max = args->max, sum = args->sum, target = args->target, labels = args->labels;
    int64_t n = nd_tensor_count(labels);
    ND_ASSERT(nd_is_vector(labels, ND_DTYPE_I32, n) && nd_is_vector(max, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(sum, ND_DTYPE_F32, n) && nd_is_vector(target, ND_DTYPE_F32, n));
    double loss = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (((const int32_t *)labels.data)[i] != NOT_COUNTED) {
            loss += log((double)((const float *)sum.data)[i]) + ((const float *)max.data)[i] -
                    ((const float *)target.data)[i];
        }
    }
    *args->loss_sum += loss;
    return ND_OK;
}

nd_status nd_ref_ce_bwd(nd_stream *stream, const nd_ce_bwd_args *args)
{
    const nd_tensor logits = args->logits, max = args->max, sum = args->sum, labels = args->labels;
    int64_t valid = args->valid;
    int64_t n = logits.shape[0], V = logits.shape[1];
    float scale = (float)(1.0 / (double)*args->count);
    ND_ASSERT(nd_is_act(logits) && nd_is_2d(logits, n, V) && valid >= 0 && valid <= V);
    ND_ASSERT(nd_is_vector(max, ND_DTYPE_F32, n) && nd_is_vector(sum, ND_DTYPE_F32, n));
    ND_ASSERT(nd_is_vector(labels, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int32_t label = ((const int32_t *)labels.data)[i];
        for (int64_t v = 0; v < V; v++) {
            int64_t at = i * logits.stride[0] + v;
            double gradient = 0.0;
            if (label != NOT_COUNTED && v < valid) {
                double shifted = (double)nd_ref_get(logits, at) - ((const float *)max.data)[i];
                double p = exp(shifted) / ((const float *)sum.data)[i];
                gradient = (p - (v == label - args->first ? 1.0 : 0.0)) * scale;
            }
            nd_ref_put(logits, at, gradient);
        }
    }
    return ND_OK;
}
