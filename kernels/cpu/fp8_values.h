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
    __m512 largest;
    __m512i least; /* bits of the smallest normal number */
    __m512i up;    /* to the bits of a number whose last place is as wide as that of a code */
} nd_fp8_grid;

static inline nd_fp8_grid nd_fp8_grid_of(bool e4m3)
{
    return (nd_fp8_grid){_mm512_set1_ps(e4m3 ? 448.0f : 57344.0f),
                         _mm512_castps_si512(_mm512_set1_ps(e4m3 ? 0x1p-6f : 0x1p-14f)),
                         _mm512_set1_epi32((e4m3 ? 20 : 21) << 23)};
}

/* The value of the code of x: rounded to nearest even, by adding a power of two of which the last
 * place is that of the code, and at most the largest; NaN stays NaN. */
static inline __m512 nd_fp8_nearest(__m512 x, const nd_fp8_grid *g)
{
    const __m512i bits = _mm512_castps_si512(x), sign = _mm512_set1_epi32((int)0x80000000);
    /* The second operand where one is NaN. */
    const __m512 size =
        _mm512_min_ps(g->largest, _mm512_castsi512_ps(_mm512_andnot_si512(sign, bits)));
    const __m512i exponent = _mm512_max_epi32(
        _mm512_and_si512(_mm512_castps_si512(size), _mm512_set1_epi32(0x7f800000)), g->least);
    const __m512 power = _mm512_castsi512_ps(_mm512_add_epi32(exponent, g->up));
    const __m512i rounded = _mm512_castps_si512(_mm512_sub_ps(_mm512_add_ps(size, power), power));
    const int choose = 0xca; /* by each bit of the first operand */
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, bits, rounded, choose));
}

/* The values of the codes of 32 BF16, which are multiplied by scales before: those of even and of
 * odd elements. */
static inline __m512i nd_fp8_nearest_bf16(__m512i x, __m512 even, __m512 odd, const nd_fp8_grid *g)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    const __m512 of_even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), even);
    const __m512 of_odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)), odd);
    const __m512i low = _mm512_castps_si512(nd_fp8_nearest(of_even, g));
    const __m512i high = _mm512_castps_si512(nd_fp8_nearest(of_odd, g));
    const int choose = 0xca;
    return _mm512_ternarylogic_epi32(upper, high, _mm512_srli_epi32(low, 16), choose);
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

/* 32 codes. The index instructions look at the low six bits of a lane. */
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
