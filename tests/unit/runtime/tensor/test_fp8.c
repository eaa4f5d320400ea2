// SPDX-License-Identifier: Apache-2.0
/* FP8 codes against their definition: values worked out from the bit fields, roundings by a search
 * of the nearest value. */
#include <criterion/criterion.h>
#include <math.h>

#include "runtime/tensor/fp8.h"

static const nd_dtype formats[] = {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E5M2};

/* (-1)^s 2^(e - bias) 1.m, and 2^(1 - bias) 0.m for e = 0. */
static double defined_value(nd_dtype format, int code)
{
    int m_bits = format == ND_DTYPE_F8_E4M3 ? 3 : 2, bias = format == ND_DTYPE_F8_E4M3 ? 7 : 15;
    int e = (code & 0x7f) >> m_bits;
    double m = (double)(code & ((1 << m_bits) - 1)) / (1 << m_bits);
    double size = e == 0 ? m * pow(2.0, 1 - bias) : (1.0 + m) * pow(2.0, e - bias);
    return code & 0x80 ? -size : size;
}

/* Codes 0 to this one are finite. */
static int last_finite(nd_dtype format)
{
    return format == ND_DTYPE_F8_E4M3 ? 0x7e : 0x7b;
}

Test(fp8_codes, values_of_all_codes)
{
    for (int f = 0; f < 2; f++) {
        for (int code = 0; code < 256; code++) {
            float value = nd_fp8_to_f32(formats[f], (uint8_t)code);
            if ((code & 0x7f) <= last_finite(formats[f])) {
                cr_assert(value == (float)defined_value(formats[f], code));
                cr_assert(!signbit(value) == !(code >> 7));
                cr_assert(nd_bf16_to_f32(nd_bf16_from_f32(value)) == value, "exact in BF16");
                cr_assert(nd_fp8_from_f32(formats[f], value) == code);
            } else if (formats[f] == ND_DTYPE_F8_E5M2 && (code & 3) == 0) {
                cr_assert(isinf(value) && (value < 0) == (code >> 7));
            } else {
                cr_assert(isnan(value));
            }
        }
        cr_assert(nd_fp8_to_f32(formats[f], (uint8_t)last_finite(formats[f])) ==
                  nd_fp8_max(formats[f]));
    }
}

/* The finite code whose value is nearest to x >= 0, of two equally near ones the even one. */
static int nearest(nd_dtype format, double x)
{
    int best = 0;
    for (int code = 1; code <= last_finite(format); code++) {
        double old = fabs(x - defined_value(format, best));
        double new = fabs(x - defined_value(format, code));
        best = new < old || (new == old &&code % 2 == 0) ? code : best;
    }
    return best;
}

Test(fp8_codes, every_bf16_number_gets_the_nearest_code)
{
    for (int f = 0; f < 2; f++) {
        for (int bits = 0; bits <= 0x7f80; bits++) {
            float x = nd_bf16_to_f32((nd_bf16)bits);
            int want = nearest(formats[f], (double)fminf(x, nd_fp8_max(formats[f])));
            cr_assert(nd_fp8_from_f32(formats[f], x) == want, "format %d, %g", f, (double)x);
            cr_assert(nd_fp8_from_f32(formats[f], -x) == (want | 0x80), "format %d, -%g", f,
                      (double)x);
        }
        cr_assert(nd_fp8_from_f32(formats[f], NAN) == 0x7f);
        cr_assert(nd_fp8_from_f32(formats[f], -NAN) == 0xff);
    }
}

/* Midpoints between adjacent values go to the even one; what is next to a midpoint goes to its own
 * side. */
Test(fp8_codes, ties_go_to_even)
{
    for (int f = 0; f < 2; f++) {
        for (int code = 0; code < last_finite(formats[f]); code++) {
            double low = defined_value(formats[f], code);
            float tie = (float)((low + defined_value(formats[f], code + 1)) / 2);
            cr_assert(nd_fp8_from_f32(formats[f], tie) == code + code % 2);
            cr_assert(nd_fp8_from_f32(formats[f], nextafterf(tie, 0.0f)) == code);
            cr_assert(nd_fp8_from_f32(formats[f], nextafterf(tie, INFINITY)) == code + 1);
        }
    }
}
