// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_UNIT_TRAINER_CKPT_HF_SHAPE_H
#define TESTS_UNIT_TRAINER_CKPT_HF_SHAPE_H
#include "trainer/layout/layout.h"

/* Two layers, GQA, llama3 RoPE; no two extents are equal. */
static inline nd_shape hf_small_shape(bool tied)
{
    return (nd_shape){.vocab = 256,
                      .hidden = 24,
                      .ffn = 40,
                      .layers = 2,
                      .heads = 4,
                      .kv_heads = 2,
                      .head_dim = 6,
                      .max_positions = 512,
                      .rms_eps = 1e-5,
                      .init_std = 0.02,
                      .tied = tied,
                      .rope = {.type = ND_ROPE_LLAMA3,
                               .theta = 500000,
                               .factor = 8,
                               .low_freq_factor = 1,
                               .high_freq_factor = 4,
                               .original_max_positions = 64},
                      .bos_id = -1,
                      .eos_id = -1};
}

#endif
