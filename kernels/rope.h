// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_ROPE_H
#define ND_KERNELS_ROPE_H
/* Rotary frequencies of Hugging Face Llama: default, linear and llama3 scaling, computed in F64,
 * stored as F32. */
#include <stdint.h>

typedef enum nd_rope_type { ND_ROPE_DEFAULT = 0, ND_ROPE_LINEAR, ND_ROPE_LLAMA3 } nd_rope_type;

typedef struct nd_rope_config {
    nd_rope_type type;
    double theta;
    double factor, low_freq_factor, high_freq_factor; /* llama3 (factor: linear too) */
    int64_t original_max_positions;
} nd_rope_config;

/* Radians by which a position turns the dimensions `pair` and head_dim / 2 + pair. */
double nd_rope_frequency(const nd_rope_config *config, int64_t head_dim, int64_t pair);
/*
 * cos, sin: (positions, head_dim / 2), row p = cos/sin(p inv_freq). llama3 scaling: wavelengths
 * above original_max / low_freq_factor are slowed by `factor`, below original_max /
 * high_freq_factor kept, between smoothed (transformers, modeling_rope_utils, "llama3").
 */
void nd_rope_table(const nd_rope_config *config, int64_t head_dim, int64_t positions,
                   float *cos_out, float *sin_out);

#endif
