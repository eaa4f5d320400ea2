// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_VECTOR_MATH_H
#define ND_CPU_VECTOR_MATH_H
/*
 * One vector of floats of the instruction set that the including file is compiled for, and the few
 * functions on it that the CPU kernels share. Files that use it are compiled once per instruction
 * set (kernels/cpu/meson.build), each time with the -m flags of that set; nothing here may be
 * included by a file that is compiled once.
 *
 *   AVX-512: 16 lanes, AVX2: 8, x86-64 baseline (SSE2): 4.
 *
 * Plain arithmetic is GCC's vector arithmetic (+ - * on nd_vf). row_kernels.c, tile_kernels.c and
 * gemm_kernels.c allow contraction to FMA; gemm_amx.c does not. bf16 stores round to nearest even.
 * nd_v_exp and nd_v_exp2: relative error below 2e-7 for results that are normal numbers; results
 * below 2^-126 are 0, exp(-inf) = 0 exactly, NaN stays NaN; arguments must not be above 88 (127 for
 * exp2).
 */
#include <immintrin.h>
#include <stdint.h>

#include "runtime/tensor/dtype.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ND_VL 16
#elif defined(__AVX2__) && defined(__FMA__)
#define ND_VL 8
#else
#define ND_VL 4
#endif

typedef float nd_vf __attribute__((vector_size(ND_VL * 4)));
typedef int32_t nd_vi __attribute__((vector_size(ND_VL * 4)));
typedef uint32_t nd_vu __attribute__((vector_size(ND_VL * 4)));
typedef float nd_vf_unaligned __attribute__((vector_size(ND_VL * 4), aligned(4), may_alias));
typedef uint16_t nd_vh __attribute__((vector_size(ND_VL * 2)));
typedef uint16_t nd_vh_unaligned __attribute__((vector_size(ND_VL * 2), aligned(2), may_alias));

/* Runs a statement with `name` as a constant that is equal to `value`, where that is 1 to 3 or 1 to
 * 5; else nothing. */
#define ND_CASE(name, number, ...)                                                                 \
    case number: {                                                                                 \
        enum { name = number };                                                                    \
        __VA_ARGS__;                                                                               \
    } break
#define ND_CASES_OF_3(name, ...)                                                                   \
    ND_CASE(name, 1, __VA_ARGS__);                                                                 \
    ND_CASE(name, 2, __VA_ARGS__);                                                                 \
    ND_CASE(name, 3, __VA_ARGS__)
#define ND_UP_TO_3(name, value, ...)                                                               \
    switch (value) {                                                                               \
        ND_CASES_OF_3(name, __VA_ARGS__);                                                          \
    }
#define ND_UP_TO_5(name, value, ...)                                                               \
    switch (value) {                                                                               \
        ND_CASES_OF_3(name, __VA_ARGS__);                                                          \
        ND_CASE(name, 4, __VA_ARGS__);                                                             \
        ND_CASE(name, 5, __VA_ARGS__);                                                             \
    }

static inline nd_vf nd_v_set(float x)
{
    return x - (nd_vf){0};
}

static inline nd_vf nd_v_load(const float *p)
{
    return (nd_vf) * (const nd_vf_unaligned *)p;
}

static inline void nd_v_store(float *p, nd_vf x)
{
    *(nd_vf_unaligned *)p = (nd_vf_unaligned)x;
}

/* a b + c, rounded once where the CPU has that. Unlike an expression, it is so in every loop. */
static inline nd_vf nd_v_multiply_add(nd_vf a, nd_vf b, nd_vf c)
{
#if ND_VL == 16
    return (nd_vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ND_VL == 8
    return (nd_vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Maximum and minimum; b when either is NaN. */
static inline nd_vf nd_v_max(nd_vf a, nd_vf b)
{
#if ND_VL == 16
    return (nd_vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif ND_VL == 8
    return (nd_vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (nd_vf)_mm_max_ps((__m128)a, (__m128)b);
#endif
}

static inline nd_vf nd_v_min(nd_vf a, nd_vf b)
{
#if ND_VL == 16
    return (nd_vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif ND_VL == 8
    return (nd_vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return (nd_vf)_mm_min_ps((__m128)a, (__m128)b);
#endif
}

static inline nd_vf nd_v_sqrt(nd_vf x)
{
#if ND_VL == 16
    return (nd_vf)_mm512_sqrt_ps((__m512)x);
#elif ND_VL == 8
    return (nd_vf)_mm256_sqrt_ps((__m256)x);
#else
    return (nd_vf)_mm_sqrt_ps((__m128)x);
#endif
}

/* Sum and maximum of the lanes, always in the same order: the sum adds the upper half of the lanes
 * to the lower one until one is left. */
static inline float nd_v_sum(nd_vf x)
{
#if ND_VL == 16
    __m512 whole = (__m512)x;
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(whole),
                                _mm512_castps512_ps256(_mm512_shuffle_f32x4(whole, whole, 0x0e)));
#elif ND_VL == 8
    __m256 half = (__m256)x;
#endif
#if ND_VL >= 8
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    __m128 s = (__m128)x;
#endif
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline float nd_v_max_lane(nd_vf x)
{
    float s[ND_VL], m;
    nd_v_store(s, x);
    m = s[0];
    for (int i = 1; i < ND_VL; i++) {
        m = s[i] > m ? s[i] : m;
    }
    return m;
}

/* Widens ND_VL bf16 values. */
static inline nd_vf nd_v_load_bf16(const nd_bf16 *p)
{
#if ND_VL == 16
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    return (nd_vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
#elif ND_VL == 8
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    return (nd_vf)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
#else
    __m128i h = _mm_loadl_epi64((const __m128i *)p);
    return (nd_vf)_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), h));
#endif
}

/* The upper halves after rounding to nearest even, one per 32-bit lane; a NaN stays a NaN. */
static inline nd_vi nd_v_round_bf16(nd_vf x)
{
    nd_vu bits = (nd_vu)x, nan = (nd_vu)(x != x);
    nd_vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (nd_vi)((rounded & ~nan) | ((bits >> 16 | 0x40) & nan));
}

static inline void nd_v_store_bf16_exact(nd_bf16 *p, nd_vf x)
{
#if ND_VL == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)nd_v_round_bf16(x)));
#else
    *(nd_vh_unaligned *)p = (nd_vh_unaligned) __builtin_convertvector(nd_v_round_bf16(x), nd_vh);
#endif
}

/* Rounds like nd_v_store_bf16_exact, but the instruction for it, where there is one, flushes
 * subnormal numbers to zero. */
static inline void nd_v_store_bf16(nd_bf16 *p, nd_vf x)
{
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    nd_v_store_bf16_exact(p, x);
#endif
}

/* The value that nd_v_store_bf16 leaves. */
static inline nd_vf nd_v_rounded_to_bf16(nd_vf x)
{
#if defined(__AVX512BF16__)
    __m512i half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
    return (nd_vf)_mm512_slli_epi32(half, 16);
#else
    return (nd_vf)(nd_v_round_bf16(x) << 16);
#endif
}

/* 2^n p for n = rounded - magic held in the low mantissa bits of `rounded`; 0 where x <= -126. */
static inline nd_vf nd_v_scale_by_power(nd_vf p, nd_vf n, nd_vf rounded, nd_vf x)
{
#if ND_VL == 16
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
    return (nd_vf)_mm512_mask_scalef_ps(_mm512_setzero_ps(), normal, (__m512)p, (__m512)n);
#else
    nd_vu scaled = (nd_vu)p + ((nd_vu)rounded << 23);
    return (nd_vf)(scaled & ~(nd_vu)(x <= -126.0f));
#endif
}

/*
 * 2^x by rounding to an integer (adding 1.5 x 2^23 leaves it in the low mantissa bits) and a
 * polynomial on [-1/2, 1/2]. Coefficients: least maximal relative error of degree 6 with p(0) = 1.
 * Where x <= -126 only the last step matters.
 */
static inline nd_vf nd_v_exp2(nd_vf x)
{
    const float magic = 12582912.0f;
    nd_vf rounded = x + magic;
    nd_vf n = rounded - magic;
    nd_vf f = x - n;
    nd_vf p = f * 1.5353362e-4f + 1.3398874e-3f;
    p = p * f + 9.6184369e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return nd_v_scale_by_power(p, n, rounded, x);
}

/* nd_v_exp2 for results that are rounded to BF16: the polynomial has degree 4, and the relative
 * error is below 4e-6. */
static inline nd_vf nd_v_exp2_short(nd_vf x)
{
    const float magic = 12582912.0f;
    nd_vf rounded = x + magic;
    nd_vf n = rounded - magic;
    nd_vf f = x - n;
    nd_vf p = f * 9.7829126e-3f + 5.5976884e-2f;
    p = p * f + 2.4020711e-1f;
    p = p * f + 6.9311360e-1f;
    p = p * f + 1.0f;
    return nd_v_scale_by_power(p, n, rounded, x);
}

/* e^x = 2^n e^r, r = x - n ln 2 with ln 2 in two parts (Cody and Waite), the polynomial being that
 * of e^r. */
static inline nd_vf nd_v_exp(nd_vf x)
{
    const float magic = 12582912.0f;
    nd_vf clamped = nd_v_max(nd_v_set(-88.0f), x);
    nd_vf rounded = clamped * 1.44269504f + magic;
    nd_vf n = rounded - magic;
    nd_vf r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    nd_vf p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665795e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 5.0000000e-1f;
    p = p * r * r + r + 1.0f;
    return nd_v_scale_by_power(p, n, rounded, x * 1.44269504f);
}

#endif
