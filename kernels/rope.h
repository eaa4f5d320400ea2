// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_ROPE_H
#define ND_KERNELS_ROPE_H
/* Rotary frequencies of Hugging Face Llama: default, linear and llama3 scaling, computed in F64,
 * stored as F32. */
#include <stdint.h>

#include "runtime/config/llama_shape.h"

/*
 * cos, sin: (positions, head_dim / 2), row p = cos/sin(p inv_freq). llama3 scaling: wavelengths
 * above original_max / low_freq_factor are slowed by `factor`, below original_max /
 * high_freq_factor kept, between smoothed (transformers, modeling_rope_utils, "llama3").
 */
void nd_rope_table(const nd_rope_config *config, int64_t head_dim, int64_t positions,
                   float *cos_out, float *sin_out);

#endif
