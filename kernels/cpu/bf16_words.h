// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_BF16_WORDS_H
#define ND_CPU_BF16_WORDS_H
/*
 * Words of two BF16 in the 16 lanes of AVX-512: products and rounding, by the instructions of
 * AVX512_BF16 where the file is compiled for them, and by F32 arithmetic elsewhere, so that what is
 * written for such words runs on every CPU with AVX-512. The instructions take subnormal operands
 * and results for zero; F32 arithmetic keeps them. Other numbers give the same bits.
 */
#include <immintrin.h>

#include "kernels/cpu/vector_math.h"

/* sum + the product of the odd (upper) halves, rounded; + that of the even ones, rounded. */
static inline __m512 nd_dot_bf16(__m512 sum, __m512i a, __m512i b)
{
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, odd)),
                          _mm512_castsi512_ps(_mm512_and_si512(b, odd)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                           _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
#endif
}

/* 16 values, rounded to nearest even. */
static inline __m256i nd_round_16(__m512 x)
{
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    return _mm512_cvtepi32_epi16((__m512i)nd_v_round_bf16((nd_vf)x));
#endif
}

/* 32 values, those of `low` first. */
static inline __m512i nd_round_32(__m512 high, __m512 low)
{
#if defined(__AVX512BF16__)
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(nd_round_16(low)), nd_round_16(high), 1);
#endif
}

#endif
