// SPDX-License-Identifier: Apache-2.0
/* Compiled once per instruction set with its -m flags and -DND_ISA=<name>: see meson.build. */
#include "tests/bench/peak_loops.h"

#include "kernels/cpu/vector_math.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)

/* Sums that are worked on in turn: more than the latency of the instruction times its ports, and no
 * more than there are registers beside the operands. */
#if ND_VL == 16
enum { SUMS = 24 };
#else
enum { SUMS = 12 };
#endif

#ifdef __AVX512BF16__

enum { PRODUCTS = 2, CYCLE_VECTORS = 1 };
static const char instruction[] = "VDPBF16PS";

static inline nd_vf operand(float x)
{
    const uint32_t half = nd_bf16_from_f32(x);
    const nd_vu words = (half << 16 | half) - (nd_vu){0};
    return (nd_vf)words;
}

#define MULTIPLY_ADD(sum, a, b)                                                                    \
    __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))

#else

enum { PRODUCTS = 1, CYCLE_VECTORS = 2 };

static inline nd_vf operand(float x)
{
    return nd_v_set(x);
}

#if ND_VL == 4
/* Two instructions for one vector of products, on two ports. */
static const char instruction[] = "MULPS + ADDPS";
#define MULTIPLY_ADD(sum, a, b)                                                                    \
    do {                                                                                           \
        nd_vf product;                                                                             \
        __asm__ volatile("movaps %2, %1\n\tmulps %3, %1\n\taddps %1, %0"                           \
                         : "+x"(sum), "=&x"(product)                                               \
                         : "x"(a), "x"(b));                                                        \
    } while (0)
#else
static const char instruction[] = "VFMADD231PS";
#define MULTIPLY_ADD(sum, a, b)                                                                    \
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#endif

#endif

static bool run(int64_t steps)
{
    const float expected = (float)steps * (float)PRODUCTS * 1.5f * 1.25f;
    const nd_vf a = operand(1.5f), b = operand(1.25f);
    nd_vf sums[SUMS];
    bool right = true;
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++) {
        sums[i] = (nd_vf){0};
    }
    for (int64_t s = 0; s < steps; s++) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) {
            MULTIPLY_ADD(sums[i], a, b);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++) {
        for (int j = 0; j < ND_VL; j++) {
            right = right && sums[i][j] == expected;
        }
    }
    return right;
}

#ifdef __AVX512BF16__
const nd_peak_products PASTE(nd_peak_bf16, ND_ISA) = {
#else
const nd_peak_products PASTE(nd_peak_f32, ND_ISA) = {
#endif
    .instruction = instruction,
    .step_flops = 2.0 * SUMS * ND_VL * PRODUCTS,
    .cycle_flops = 2.0 * ND_VL * PRODUCTS * (ND_VL == 4 ? 1 : CYCLE_VECTORS),
    .cycle_flops_zen4 = 2.0 * ND_VL * PRODUCTS * (ND_VL == 8 ? CYCLE_VECTORS : 1),
    .run = run,
};

#ifndef __AVX512BF16__

enum { PARTS = 8 }; /* sums of `read`, so that additions do not wait */

static double read_all(const float *a, int64_t n)
{
    nd_vf sums[PARTS] = {{0}};
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += PARTS * ND_VL) {
#pragma GCC unroll 8
        for (int j = 0; j < PARTS; j++) {
            sums[j] += *(const nd_vf *)(a + i + j * ND_VL);
        }
    }
    for (int j = 0; j < PARTS * ND_VL; j++) {
        sum += (double)sums[j / ND_VL][j % ND_VL];
    }
    return sum;
}

static void copy(float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i += ND_VL) {
        *(nd_vf *)(a + i) = *(const nd_vf *)(b + i);
        __asm__ volatile("" : : : "memory"); /* else the compiler calls memcpy */
    }
}

static void triad(float *a, const float *b, const float *c, float x, int64_t n)
{
    const nd_vf factor = nd_v_set(x);
    for (int64_t i = 0; i < n; i += ND_VL) {
        *(nd_vf *)(a + i) = *(const nd_vf *)(b + i) + factor * *(const nd_vf *)(c + i);
    }
}

const nd_peak_passes PASTE(nd_peak_passes, ND_ISA) = {read_all, copy, triad};

#endif
