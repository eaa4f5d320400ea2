// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_ROW_KERNELS_H
#define ND_CPU_ROW_KERNELS_H
/*
 * Kernels over one row (or one flat range) of contiguous elements, in one table per instruction
 * set; row_kernels.c implements them and is compiled once per set. They know neither tensors nor
 * threads. Formulas are in kernels/ops.h.
 *
 * Rows are BF16 when `bf16`, else F32. All arithmetic is F32 with fused multiply-adds where the CPU
 * has them. Sums run in a fixed number of lanes that are combined in a fixed order. A NaN or an
 * infinity reaches the result; subnormal numbers may count as zero, but not in `cast`.
 */
#include "kernels/ops.h"

/* out[v][r] = x[v] . rows[r], for `vectors` vectors and `count` rows of k elements. */
typedef struct nd_row_dots {
    const void *x, *rows; /* BF16 when `bf16`, else F32 */
    int64_t vectors, x_stride, count, stride, k;
    bool bf16;
    float *out;
    int64_t out_stride;
} nd_row_dots;

/* out[v] = the sum over r of weights[v][r] rows[r], for `vectors` sums of `count` rows of k
 * elements. */
typedef struct nd_row_sums {
    const float *weights;
    int64_t vectors, weight_stride;
    const void *rows; /* BF16 when `bf16`, else F32 */
    int64_t count, stride, k;
    bool bf16;
    float *out;
    int64_t out_stride;
} nd_row_sums;

typedef struct nd_row_ops {
    /* sum = x + delta; returns its rstd, or with delta NULL that of x, and sum is not touched. */
    float (*norm_rstd)(void *sum, const void *x, const void *delta, int64_t C, float eps,
                       bool bf16);
    /* y (n) = (weight + plus) x rstd. */
    void (*norm_scale)(void *y, const void *x, const void *weight, float plus, float rstd,
                       int64_t n, bool bf16);
    /* The sum of (weight + plus) x y; weight NULL: of x y. */
    float (*norm_dot)(const void *x, const void *y, const void *weight, float plus, int64_t C,
                      bool bf16);
    /* dweight (C) += dy x rstd; dres may be NULL. mean: of (weight + plus) dy x. */
    void (*norm_bwd)(void *dx, float *dweight, const void *dy, const void *dres, const void *x,
                     const void *weight, float plus, float rstd, float mean, int64_t C, bool bf16);
    /* One head: (2 half) elements; sign -1 is the inverse rotation. */
    void (*rope)(void *out, const void *x, const float *cosine, const float *sine, int64_t half,
                 float sign, bool bf16);
    void (*swiglu_fwd)(void *out, const void *gate, const void *up, int64_t F, bool bf16,
                       bool gelu);
    void (*swiglu_bwd)(void *dgate, void *dup, const void *dout, const void *gate, const void *up,
                       int64_t F, bool bf16, bool gelu);
    /* Maximum and sum of exp(logit - maximum), of earlier logits (-inf and 0 of none), become those
     * of these n logits too. */
    void (*ce_stats)(float *max, float *sum, const void *logits, int64_t n, bool bf16);
    /* logits = exp(logit - max) factor, in place. */
    void (*ce_bwd)(void *logits, float max, float factor, int64_t n, bool bf16);
    /* acc (n) += x. */
    void (*accumulate)(float *acc, const void *x, int64_t n, bool bf16);
    /* Exact widening, or rounding to nearest even; between equal dtypes a copy of the bits. */
    void (*cast)(void *out, nd_dtype out_dtype, const void *x, nd_dtype x_dtype, int64_t n);
    /* out = scale x + plus; plus may be NULL. */
    void (*axpy)(void *out, const void *x, const void *plus, float scale, int64_t n, bool bf16);
    /* acc = acc keep + x take. */
    void (*blend)(float *acc, float keep, const void *x, float take, int64_t n, bool bf16);
    double (*sum_squares)(const float *x, int64_t n);
    /* The values of nd_rng_normal, times deviation. */
    void (*random_normal)(float *out, float deviation, uint64_t seed, uint64_t stream,
                          uint64_t first, int64_t n);
    /* copy: NULL, or the updated p, rounded as `cast` does. Returns the bits of the largest
     * updated |p|, as amax. */
    uint32_t (*adamw)(const nd_adamw *o, bool decay, float *p, float *m, float *v,
                      const float *grad, nd_bf16 *copy, int64_t n);
    uint32_t (*sgd)(const nd_adamw *o, bool decay, float *p, const float *grad, nd_bf16 *copy,
                    int64_t n);

    /* The bits of the largest |x|. As integers sizes are ordered as numbers are, with NaN above
     * infinity. */
    uint32_t (*amax)(const void *x, int64_t n, bool bf16);
    /* amax (n) = the larger of itself and |x|, element by element. */
    void (*amax_columns)(float *amax, const void *x, int64_t n, bool bf16);
    /* codes (n) of x scale; `scale` is one number or, with `each`, n of them. e4m3 or else E5M2. */
    void (*cast_fp8)(uint8_t *codes, const void *x, const float *scale, bool each, int64_t n,
                     bool e4m3, bool bf16);
    /* Adds the elements that become 0, and those that are limited. */
    void (*count_fp8)(int64_t counts[2], const void *x, const float *scale, bool each, int64_t n,
                      bool e4m3, bool bf16);
    void (*widen_fp8)(float *out, const uint8_t *codes, int64_t n, bool e4m3);
    /* c (n) = sum row columns[j] (+ c); columns NULL: 1. */
    void (*scaled_sum)(void *c, const float *sum, float row, const float *columns, bool accumulate,
                       int64_t n, bool bf16);
    void (*dots)(const nd_row_dots *dots);
    void (*row_sums)(const nd_row_sums *sums);
} nd_row_ops;

extern const nd_row_ops nd_rows_baseline, nd_rows_avx2, nd_rows_avx512, nd_rows_avx512_bf16;

#endif
