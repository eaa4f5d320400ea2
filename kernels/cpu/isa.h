// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_ISA_H
#define ND_CPU_ISA_H
/*
 * The instruction sets that this process may use. Our own kernels are compiled once per set
 * (meson.build here) and chosen at run time, so one binary runs on any x86-64; oneDNN gets the same
 * limit. Where ND_CPU_ISA is not set, oneDNN's own variable ONEDNN_MAX_CPU_ISA limits both.
 *
 * The environment variable ND_CPU_ISA (baseline, avx2, avx512, avx512_bf16, amx) lowers the level,
 * for tests and for comparing machines; a level that the CPU lacks is a configuration error.
 * amx_emulated works on any CPU and is for tests: the kernels for AMX run with its tile
 * instructions in plain C (amx.h), slowly, and everything else runs at the CPU's own level, up to
 * avx512_bf16.
 *
 * ND_CPU_PRODUCTS (own, onednn) chooses what multiplies BF16 and FP8, for comparing the two. Our
 * own kernels need AVX-512, and are used there unless it says otherwise. With onednn the library
 * multiplies BF16 where the CPU has AVX512_BF16; else BF16, and FP8 everywhere, is widened to F32,
 * which is slow.
 */
#include <stdbool.h>

#include "runtime/base/status.h"

typedef enum nd_cpu_isa {
    ND_CPU_ISA_BASELINE = 0, /* x86-64: SSE2 */
    ND_CPU_ISA_AVX2,         /* AVX2 and FMA */
    ND_CPU_ISA_AVX512,       /* AVX-512 F, BW, DQ, VL */
    ND_CPU_ISA_AVX512_BF16,  /* and BF16 dot products */
    ND_CPU_ISA_AMX,          /* and BF16 tiles */
    ND_CPU_ISA_AMX_EMULATED, /* the same in C; never detected */
    ND_CPU_ISA_COUNT
} nd_cpu_isa;

const char *nd_cpu_isa_name(nd_cpu_isa isa);

/* Returns what the CPU has. */
nd_cpu_isa nd_cpu_isa_detect(void);

/* The level to use: the CPU's own one, or the one that ND_CPU_ISA names. */
nd_status nd_cpu_isa_choose(nd_cpu_isa *out);

/* Says in *own whether products of BF16 and FP8 are our own at this level. */
nd_status nd_cpu_products_choose(nd_cpu_isa isa, bool *own);

/* The level of the kernels without tiles when a process uses `isa`: avx512_bf16 at most. */
nd_cpu_isa nd_cpu_isa_of_vectors(nd_cpu_isa isa);

#endif
