// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/metrics.h"

/* Weights that a token is multiplied with: all but the input embedding; a tied embedding counts as
 * the head. */
static double dense_parameters(const nd_llama_shape *shape)
{
    double all = (double)nd_llama_shape_parameters(shape);
    return shape->tied ? all : all - (double)shape->vocab * (double)shape->hidden;
}

double nd_flops_per_token_causal(const nd_llama_shape *shape, int64_t sequence)
{
    double L = (double)shape->layers, H = (double)shape->heads, D = (double)shape->head_dim;
    return 6 * dense_parameters(shape) + 6 * L * H * D * (double)sequence;
}

/*
 * Per layer 18 C F + 12 D (H + K) + 12 H D S: no head, no factor C in the projections, attention
 * counted in full. It is kept as accelerate's examples have it, so that figures can be laid side by
 * side.
 */
double nd_flops_per_token_accelerate(const nd_llama_shape *shape, int64_t sequence)
{
    double C = (double)shape->hidden, F = (double)shape->ffn;
    double H = (double)shape->heads, K = (double)shape->kv_heads;
    double D = (double)(shape->hidden / shape->heads);
    return (double)shape->layers * (18 * C * F + 12 * D * (H + K) + 12 * H * D * (double)sequence);
}
