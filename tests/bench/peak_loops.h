// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BENCH_PEAK_LOOPS_H
#define ND_BENCH_PEAK_LOOPS_H
/*
 * Loops that reach one limit of a core each: products of registers with registers, and passes over
 * arrays. peak_vectors.c and peak_tiles.c are compiled once per instruction set; a loop may be
 * called only on a CPU that has its set. All threads call a loop at once, each with arrays of its
 * own.
 *
 * Products: every step multiplies 1.5 by 1.25 in each place and adds the result to sums that lie in
 * registers. Their instructions are statements of the assembler, so the compiler can neither drop
 * nor join them, and all sums are compared with what the number of steps gives, which is exact up
 * to ND_PEAK_STEPS_MOST.
 */
#include <stdbool.h>
#include <stdint.h>

enum { ND_PEAK_STEPS_MOST = 1 << 19 };

typedef struct nd_peak_products {
    const char *instruction;
    double step_flops;
    /* Operations a cycle that instruction tables (uops.info) allow a core: FMA, and multiplication
     * with addition, on two ports; VDPBF16PS once a cycle; TDPBF16PS every 16 cycles. 0: unknown,
     * as the loop has no such instruction. Zen 4 makes FMA of 512 bits once a cycle. */
    double cycle_flops, cycle_flops_zen4;
    /* `steps` steps, at most ND_PEAK_STEPS_MOST, from sums of zero. False: a sum is wrong. */
    bool (*run)(int64_t steps);
} nd_peak_products;

/* F32 in vectors of the set. */
extern const nd_peak_products nd_peak_f32_baseline, nd_peak_f32_avx2, nd_peak_f32_avx512;
/* Pairs of BF16, summed in F32. */
extern const nd_peak_products nd_peak_bf16_avx512_bf16, nd_peak_bf16_amx, nd_peak_bf16_amx_emulated;

/* Passes over arrays of n floats, n a multiple of ND_PEAK_FLOATS, aligned to 64 bytes. */
enum { ND_PEAK_FLOATS = 128 };

typedef struct nd_peak_passes {
    double (*read)(const float *a, int64_t n); /* the sum; exact where all are 1 and n < 2^29 */
    void (*copy)(float *a, const float *b, int64_t n);                           /* a = b */
    void (*triad)(float *a, const float *b, const float *c, float x, int64_t n); /* a = b + x c */
} nd_peak_passes;

extern const nd_peak_passes nd_peak_passes_baseline, nd_peak_passes_avx2, nd_peak_passes_avx512;

#endif
