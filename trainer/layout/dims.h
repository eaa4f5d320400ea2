// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAYOUT_DIMS_H
#define ND_LAYOUT_DIMS_H
/* The extents of one rank's step, all derived from shape, mesh and configuration. Letters:
 * docs/tour.md. */
#include "runtime/config/config.h"
#include "trainer/layout/shape.h"
#include "runtime/tensor/dtype.h"

enum { ND_MAX_CHUNKS = 2 }; /* zig-zag: a context-parallel rank holds two chunks of the sequence */

typedef struct nd_dims {
    int64_t B;                        /* micro-batch: sequences */
    int64_t S;                        /* global sequence length */
    int64_t s;                        /* S / cp: local sequence length */
    int64_t T;                        /* B s: local tokens */
    int64_t Tl;                       /* T / tp: tokens between the tensor-parallel regions */
    int64_t chunks;                   /* 1, or 2 with context parallel */
    int64_t chunk;                    /* s / chunks: tokens of one chunk */
    int64_t C, D, L;                  /* hidden, head size, layers */
    int64_t H, K, F;                  /* local query heads, KV heads, ffn: global / tp */
    int64_t QKV;                      /* (H + 2 K) D: columns of the fused projection */
    int64_t vocab;                    /* global vocabulary */
    int64_t V;                        /* local rows: vocabulary padded to tp, / tp */
    int64_t vocab_first, vocab_valid; /* first row held here, rows that are real */
    int64_t head_rows;                /* tokens per tp peer of one head chunk */
    nd_dtype act;                     /* BF16, or F32 in precision fp32 */
} nd_dims;

nd_dims nd_dims_of(const nd_llama_shape *shape, const nd_mesh *mesh, nd_coord coord,
                   const nd_config *config, bool gpu);

#endif
