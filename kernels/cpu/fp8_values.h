// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_FP8_VALUES_H
#define ND_CPU_FP8_VALUES_H
/* The numbers of FP8 codes, lane by lane: as F32 on every instruction set, and with AVX-512 as
 * BF16, which holds each of them exactly, by looking them up. Formats: tensor/fp8.h. */
#include "kernels/cpu/vector_math.h"

/* One code per 32-bit lane. */
static inline nd_vf nd_fp8_values(nd_vu code, bool e4m3)
{
    nd_vu size = code & 0x7f, sign = (code & 0x80) << 24;
    nd_vu normal = (size << (e4m3 ? 20 : 21)) + (e4m3 ? 120u << 23 : 112u << 23);
    nd_vu subnormal =
        (nd_vu)(__builtin_convertvector((nd_vi)size, nd_vf) * (e4m3 ? 0x1p-9f : 0x1p-16f));
    nd_vu small = (nd_vu)(size < (e4m3 ? 8 : 4));
    nd_vu special = (nd_vu)(size >= (e4m3 ? 0x7f : 0x7c)); /* NaN; E5M2: infinity too */
    return (nd_vf)(sign | (normal & ~small) | (subnormal & small) | (special & 0x7f800000));
}

#if ND_VL == 16
/* The values of the codes of a format, for rounding to them. */
typedef struct nd_fp8_grid {
    __m512i least; /* bits of the smallest normal number */
    __m512i up;    /* from the exponent of x to the bits of nd_fp8_nearest's addend */
} nd_fp8_grid;

static inline nd_fp8_grid nd_fp8_grid_of(bool e4m3)
{
    const int half = 1 << 22; /* of the mantissa */
    return (nd_fp8_grid){_mm512_castps_si512(_mm512_set1_ps(e4m3 ? 0x1p-6f : 0x1p-14f)),
                         _mm512_set1_epi32(((e4m3 ? 20 : 21) << 23) + half)};
}

/* The value of the code of x, which is at most the largest one, or NaN: rounded to nearest even by
 * adding 1.5 times a power of two, whose last place, and that of its sum with any such x of either
 * sign, is that of the code. -0 becomes 0, of which no product's sum differs. */
static inline __m512 nd_fp8_nearest(__m512 x, const nd_fp8_grid *g)
{
    const __m512i exponent = _mm512_max_epi32(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000)), g->least);
    const __m512 addend = _mm512_castsi512_ps(_mm512_add_epi32(exponent, g->up));
    return _mm512_sub_ps(_mm512_add_ps(x, addend), addend);
}

/* 32 numbers as F32. */
typedef struct nd_evens_and_odds {
    __m512 even, odd;
} nd_evens_and_odds;

/* The product, rounded: not part of a fused operation, whatever the file is compiled with. */
static inline __m512 nd_scaled(__m512 x, __m512 scale)
{
    __m512 product = _mm512_mul_ps(x, scale);
    __asm__("" : "+v"(product));
    return product;
}

/* The values of the codes of 32 BF16, which are multiplied by scales before. */
static inline nd_evens_and_odds nd_fp8_nearest_32(__m512i x, nd_evens_and_odds scale,
                                                  const nd_fp8_grid *g)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(x, upper));
    return (nd_evens_and_odds){nd_fp8_nearest(nd_scaled(even, scale.even), g),
                               nd_fp8_nearest(nd_scaled(odd, scale.odd), g)};
}

/* For nd_e4m3_codes_32, by the last four bits of the exponent of a size: a power of two whose last
 * place is that of the code, as in nd_fp8_nearest, and as many such places as the code counts for
 * the powers of two below. */
static inline __m512 nd_e4m3_addends(void)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i least = _mm512_set1_epi32(127 - 6);
    const __m512i above = _mm512_and_si512(_mm512_sub_epi32(lane, least), _mm512_set1_epi32(15));
    const __m512i power = _mm512_add_epi32(_mm512_add_epi32(above, least), _mm512_set1_epi32(20));
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_slli_epi32(power, 23), _mm512_slli_epi32(above, 3)));
}

/* The code of the size of x, which is no NaN, in the last bits of the sum. */
static inline __m512i nd_e4m3_size(__m512 x, __m512 addends)
{
    const int smaller = 2, without_sign = 2 << 2;
    const __m512 size = _mm512_range_ps(x, _mm512_set1_ps(448.0f), smaller | without_sign);
    const __m512i normal =
        _mm512_max_epi32(_mm512_castps_si512(size), _mm512_castps_si512(_mm512_set1_ps(0x1p-6f)));
    return _mm512_castps_si512(
        _mm512_add_ps(size, _mm512_permutexvar_ps(_mm512_srli_epi32(normal, 23), addends)));
}

/* The E4M3 codes of 32 BF16 times a factor, one in each 16 bits: as nd_fp8_from_f32. */
static inline __m512i nd_e4m3_codes_32(__m512i x, __m512 factor, __m512 addends)
{
    const int add_masked = 0xf8; /* the first operand, or both others */
    const __m512i upper = _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000));
    const __m512 even = nd_scaled(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), factor);
    const __m512 odd = nd_scaled(_mm512_castsi512_ps(upper), factor);
    __m512i codes =
        _mm512_ternarylogic_epi32(_mm512_slli_epi32(nd_e4m3_size(odd, addends), 16),
                                  nd_e4m3_size(even, addends), _mm512_set1_epi32(0x7f), add_masked);
    if (_mm512_cmp_ps_mask(even, odd, _CMP_UNORD_Q)) {
        const __mmask16 evens = _mm512_cmp_ps_mask(even, even, _CMP_UNORD_Q);
        const __mmask16 odds = _mm512_cmp_ps_mask(odd, odd, _CMP_UNORD_Q);
        codes = _mm512_mask_or_epi32(codes, evens, codes, _mm512_set1_epi32(0x7f));
        codes = _mm512_mask_or_epi32(codes, odds, codes, _mm512_set1_epi32(0x7f0000));
    }
    codes = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi32(_mm512_castps_si512(even), 24),
                                      _mm512_set1_epi32(0x80), add_masked);
    return _mm512_ternarylogic_epi32(codes, _mm512_srli_epi32(_mm512_castps_si512(odd), 8),
                                     _mm512_set1_epi32(0x800000), add_masked);
}

/* The BF16 values of codes 0 to 127. */
typedef struct nd_fp8_table {
    __m512i part[4];
} nd_fp8_table;

static inline nd_fp8_table nd_fp8_table_of(bool e4m3)
{
    nd_fp8_table t;
    for (uint32_t p = 0; p < 4; p++) {
        nd_vu lane;
        for (uint32_t l = 0; l < 16; l++) {
            lane[l] = 32 * p + l;
        }
        nd_vu low = (nd_vu)nd_fp8_values(lane, e4m3) >> 16,
              high = (nd_vu)nd_fp8_values(lane + 16, e4m3) >> 16;
        t.part[p] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)low)),
                                       _mm512_cvtepi32_epi16((__m512i)high), 1);
    }
    return t;
}

/* 32 codes side by side. The index instructions look at the low six bits of a lane. */
static inline __m512i nd_fp8_values_bf16(__m256i codes, const nd_fp8_table *t)
{
    __m512i code = _mm512_cvtepu8_epi16(codes);
    __m512i low = _mm512_permutex2var_epi16(t->part[0], code, t->part[1]);
    __m512i high = _mm512_permutex2var_epi16(t->part[2], code, t->part[3]);
    __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(_mm512_mask_blend_epi16(upper, low, high), sign);
}
#endif

#endif
