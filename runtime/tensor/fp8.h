// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TENSOR_FP8_H
#define ND_TENSOR_FP8_H
/*
 * Exact scalar conversions of FP8 codes. E4M3 (e4m3fn): bias 7, no infinity, NaN is S.1111.111.
 * E5M2: bias 15, infinity and NaN as in IEEE. Source: Micikevicius et al., FP8 Formats for Deep
 * Learning (2022).
 */
#include <math.h>
#include <stdbool.h>

#include "runtime/tensor/dtype.h"

static inline bool nd_dtype_is_fp8(nd_dtype dtype)
{
    return dtype == ND_DTYPE_F8_E4M3 || dtype == ND_DTYPE_F8_E5M2;
}

/* FMAX: the largest finite value. */
static inline float nd_fp8_max(nd_dtype dtype)
{
    return dtype == ND_DTYPE_F8_E4M3 ? 448.0f : 57344.0f;
}

/* Limits x to +-FMAX, then rounds to nearest even. NaN gives S.11..1, signs are kept. */
static inline uint8_t nd_fp8_from_f32(nd_dtype dtype, float x)
{
    bool e4m3 = dtype == ND_DTYPE_F8_E4M3;
    uint8_t sign = signbit(x) ? 0x80 : 0;
    float size = fabsf(x);
    uint32_t bits;
    if (isnan(x)) {
        return sign | 0x7f;
    }
    if (size < (e4m3 ? 0x1p-6f : 0x1p-14f)) {
        /* Subnormal: added to 2^23 units of the last place, it is rounded to whole units in the low
         * bits. */
        float sum = size + (e4m3 ? 0x1p14f : 0x1p7f);
        memcpy(&bits, &sum, sizeof bits);
        return (uint8_t)(sign | (bits & 0xf));
    }
    size = size < nd_fp8_max(dtype) ? size : nd_fp8_max(dtype);
    memcpy(&bits, &size, sizeof bits);
    int shift = e4m3 ? 20 : 21;
    uint32_t rounded = (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
    uint32_t rebias = e4m3 ? (127 - 7) << 3 : (127 - 15) << 2;
    return (uint8_t)(sign | (rounded - rebias));
}

static inline float nd_fp8_to_f32(nd_dtype dtype, uint8_t code)
{
    int fraction_bits = dtype == ND_DTYPE_F8_E4M3 ? 3 : 2,
        bias = dtype == ND_DTYPE_F8_E4M3 ? 7 : 15;
    int exponent = (code & 0x7f) >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
    float size;
    if (dtype == ND_DTYPE_F8_E4M3 && (code & 0x7f) == 0x7f) {
        size = NAN;
    } else if (dtype == ND_DTYPE_F8_E5M2 && exponent == 31) {
        size = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
        size = ldexpf((float)fraction, 1 - bias - fraction_bits);
    } else {
        size = ldexpf((float)(fraction + (1 << fraction_bits)), exponent - bias - fraction_bits);
    }
    return code & 0x80 ? -size : size;
}

#endif
