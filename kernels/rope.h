// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_ROPE_H
#define ND_KERNELS_ROPE_H
/* Rotary frequencies as transformers has them: default, linear, dynamic, llama3, yarn and longrope
 * scaling, computed in F64, stored as F32. */
#include <stdbool.h>
#include <stdint.h>

typedef enum nd_rope_type {
    ND_ROPE_DEFAULT = 0,
    ND_ROPE_LINEAR,
    ND_ROPE_LLAMA3,
    ND_ROPE_DYNAMIC,
    ND_ROPE_YARN,
    ND_ROPE_LONGROPE,
    ND_ROPE_TYPES
} nd_rope_type;

enum { ND_ROPE_LONG_PAIRS = 128 };

typedef struct nd_rope_config {
    nd_rope_type type;
    double theta;
    double factor, low_freq_factor, high_freq_factor; /* llama3 (factor: linear too) */
    int64_t original_max_positions;                   /* llama3, yarn, longrope */
    /* yarn; 0 in the other types */
    double beta_fast, beta_slow;
    double attention_factor; /* cos and sin are multiplied by it; longrope too */
    int64_t exact_range;     /* 1: the ends of the ramp are not rounded to whole pairs */
    double query_beta;       /* queries also times 1 + this ln(1 + floor(p / original_max)) */
    /* longrope: what a pair is slowed by, in tables of up to original_max_positions and above */
    float short_factor[ND_ROPE_LONG_PAIRS], long_factor[ND_ROPE_LONG_PAIRS];
} nd_rope_config;

/* Radians by which a position turns the dimensions `pair` and head_dim / 2 + pair. Of longrope:
 * before its factors slow them. */
double nd_rope_frequency(const nd_rope_config *config, int64_t head_dim, int64_t pair);
/*
 * cos, sin: (positions, head_dim / 2), row p = cos/sin(p inv_freq). llama3 scaling: wavelengths
 * above original_max / low_freq_factor are slowed by `factor`, below original_max /
 * high_freq_factor kept, between smoothed (transformers, modeling_rope_utils, "llama3"). dynamic
 * scaling begins behind max_position_embeddings, where no sequence gets. yarn: pairs that turn more
 * than beta_fast times within the original positions are kept, those that turn less than beta_slow
 * times are slowed, with a ramp by their number between (Peng et al., 2023; "yarn" there).
 * longrope: a frequency for each pair (Ding et al., 2024; "longrope" there); all positions have
 * those of the table's length. queries: the table of queries, which differs with query_beta.
 */
void nd_rope_table(const nd_rope_config *config, int64_t head_dim, int64_t positions, bool queries,
                   float *cos_out, float *sin_out);

#endif
