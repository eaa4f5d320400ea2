// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TENSOR_DTYPE_H
#define ND_TENSOR_DTYPE_H
/* Element types, their sizes and names, and exact scalar conversions (round to nearest, ties to
 * even). */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum nd_dtype {
    ND_DTYPE_F32 = 0,
    ND_DTYPE_BF16,
    ND_DTYPE_F64,
    ND_DTYPE_I64,
    ND_DTYPE_I32,
    ND_DTYPE_U8,      /* bytes; FP8 codes on the wire */
    ND_DTYPE_F8_E4M3, /* e4m3fn: max 448, no infinity */
    ND_DTYPE_F8_E5M2, /* max 57344 */
    ND_DTYPE_COUNT
} nd_dtype;

size_t nd_dtype_size(nd_dtype dtype);      /* bytes of one element */
const char *nd_dtype_name(nd_dtype dtype); /* "f32", "bf16", ... */

typedef uint16_t nd_bf16; /* the upper half of an IEEE binary32 */

static inline float nd_bf16_to_f32(nd_bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* IEEE binary16, all cases exact: normal, subnormal, zero, infinity, NaN. */
static inline float nd_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31,
             mantissa = half & 1023;
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline nd_bf16 nd_bf16_from_f32(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (nd_bf16)(bits >> 16 | 0x40); /* quiet NaN, sign kept */
    }
    return (nd_bf16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

#endif
