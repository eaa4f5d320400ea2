// SPDX-License-Identifier: Apache-2.0
/* Compiled once per instruction set with its -m flags and -DND_ISA=<name>: see meson.build. */
#include "kernels/cpu/row_kernels.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/fp8_values.h"
#include "kernels/cpu/vector_math.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)
#define INLINE       static inline __attribute__((always_inline))

/* Sums and maxima run in this many vectors, which hides the latency of the additions. */
enum { UNROLL = 4 };

/*
 * Runs a statement for every vector of a row of n: `i` is its first element, `lanes` how many of
 * its lanes exist: all ND_VL, as a constant, but at the end.
 */
#define EACH_VECTOR(n, ...)                                                                        \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + ND_VL <= (n); i += ND_VL) {                                                     \
            enum { lanes = ND_VL };                                                                \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
        if (i < (n)) {                                                                             \
            int lanes = (int)((n)-i);                                                              \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

/* Reduces a row: the statement works on lane set `u` of UNROLL, always in the same order. */
#define EACH_VECTOR_UNROLLED(n, ...)                                                               \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        while (i + UNROLL * ND_VL <= (n)) {                                                        \
            for (int u = 0; u < UNROLL; u++, i += ND_VL) {                                         \
                enum { lanes = ND_VL };                                                            \
                __VA_ARGS__;                                                                       \
            }                                                                                      \
        }                                                                                          \
        for (int u = 0; i < (n); u++, i += ND_VL) {                                                \
            int lanes = (n)-i < ND_VL ? (int)((n)-i) : ND_VL;                                      \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

/* Elements [i, i + lanes) of a row, zeros above. */
INLINE nd_vf load(const void *row, int64_t i, int lanes, bool bf16)
{
    if (lanes == ND_VL) {
        return bf16 ? nd_v_load_bf16((const nd_bf16 *)row + i) : nd_v_load((const float *)row + i);
    }
#if ND_VL == 16
    __mmask16 mask = (__mmask16)((1u << lanes) - 1);
    if (bf16) {
        __m256i h = _mm256_maskz_loadu_epi16(mask, (const nd_bf16 *)row + i);
        return (nd_vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
    return (nd_vf)_mm512_maskz_loadu_ps(mask, (const float *)row + i);
#else
    float part[ND_VL] = {0};
    for (int l = 0; l < lanes; l++) {
        part[l] =
            bf16 ? nd_bf16_to_f32(((const nd_bf16 *)row)[i + l]) : ((const float *)row)[i + l];
    }
    return nd_v_load(part);
#endif
}

/* Like load, but with -inf above: neutral for a maximum, and its exponential is 0. */
INLINE nd_vf load_or_minus_infinity(const void *row, int64_t i, int lanes, bool bf16)
{
    nd_vf x = load(row, i, lanes, bf16);
    if (lanes == ND_VL) {
        return x;
    }
    float part[ND_VL];
    nd_v_store(part, x);
    for (int l = lanes; l < ND_VL; l++) {
        part[l] = -INFINITY;
    }
    return nd_v_load(part);
}

INLINE void store(void *row, int64_t i, int lanes, bool bf16, nd_vf x)
{
    if (lanes == ND_VL) {
        if (bf16) {
            nd_v_store_bf16((nd_bf16 *)row + i, x);
        } else {
            nd_v_store((float *)row + i, x);
        }
        return;
    }
    float part[ND_VL];
    nd_v_store(part, x);
    for (int l = 0; l < lanes; l++) {
        if (bf16) {
            ((nd_bf16 *)row)[i + l] = nd_bf16_from_f32(part[l]);
        } else {
            ((float *)row)[i + l] = part[l];
        }
    }
}

INLINE float sum_of(const nd_vf s[UNROLL])
{
    return nd_v_sum((s[0] + s[1]) + (s[2] + s[3]));
}

/* Runs a statement with `name` as a constant that is equal to the bool `value`, so that each gets
 * its own loop. */
#define AS_CONSTANT(name, value, ...)                                                              \
    do {                                                                                           \
        if (value) {                                                                               \
            enum { name = true };                                                                  \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            enum { name = false };                                                                 \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)
#define EACH_TYPE(is_bf16, ...) AS_CONSTANT(bf16, is_bf16, __VA_ARGS__)

/* Calls fn(..., bf16) with a constant. */
#define BY_TYPE(fn, bf16, ...) ((bf16) ? fn(__VA_ARGS__, true) : fn(__VA_ARGS__, false))

INLINE nd_vu bits_of_size(nd_vf x)
{
    return (nd_vu)x & 0x7fffffff;
}

/* Sizes as integers: below 2^31, so that signed comparison, which every instruction set has, will
 * do. */
INLINE nd_vu larger_bits(nd_vu a, nd_vu b)
{
#if ND_VL == 16
    return (nd_vu)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif ND_VL == 8
    return (nd_vu)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    nd_vu above = (nd_vu)((nd_vi)a > (nd_vi)b);
    return (a & above) | (b & ~above);
#endif
}

INLINE uint32_t largest_lane(nd_vu x)
{
    uint32_t largest = 0;
    for (int l = 0; l < ND_VL; l++) {
        largest = x[l] > largest ? x[l] : largest;
    }
    return largest;
}

#include "kernels/cpu/row_dot.inc"
#include "kernels/cpu/row_exp.inc"
#include "kernels/cpu/row_flat.inc"
#include "kernels/cpu/row_fp8.inc"
#include "kernels/cpu/row_norm.inc"

const nd_row_ops PASTE(nd_rows, ND_ISA) = {
    .norm_rstd = norm_rstd,
    .norm_scale = norm_scale,
    .norm_dot = norm_dot,
    .norm_bwd = norm_bwd,
    .rope = rope,
    .swiglu_fwd = swiglu_fwd,
    .swiglu_bwd = swiglu_bwd,
    .ce_stats = ce_stats,
    .ce_bwd = ce_bwd,
    .accumulate = accumulate,
    .cast = cast,
    .axpy = axpy,
    .blend = blend,
    .sum_squares = sum_squares,
    .random_normal = random_normal,
    .adamw = adamw,
    .sgd = sgd,
    .amax = amax,
    .amax_columns = amax_columns,
    .cast_fp8 = cast_fp8,
    .count_fp8 = count_fp8,
    .widen_fp8 = widen_fp8,
    .scaled_sum = scaled_sum,
    .dots = dots,
    .row_sums = row_sums,
};
