// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/tile.h"
#include "kernels/ops.h"
#include "tests/bench/bench_ops.h"

extern const nd_gemm_kernels nd_gemm_amx_stand_in;
void nd_tile_begin_amx_stand_in(void);
void nd_tile_end_amx_stand_in(void);
void nd_tile_gemm_amx_stand_in(int m, int n, int words, const nd_word *a, int64_t lda,
                               const nd_word *b, int64_t ldb, float *c, int64_t ldc, bool add);

/* nd_tiles_bf16_amx_emulated_avx512 with the products of the stand-in. */
static nd_tile_ops tiles;

const char *nd_bench_machine(const nd_device *device)
{
    const nd_cpu_context *context = device->native;
    return context->tiles_bf16 == &tiles ? "amx_stand_in" : nd_ops_machine(device);
}

nd_status nd_bench_use_stand_in(nd_device *device)
{
    nd_cpu_context *context = device->native;
    if (nd_cpu_isa_detect() < ND_CPU_ISA_AVX512) {
        return nd_fail(ND_ERR_CONFIG,
                       "--stand-in is made of AVX-512, but this CPU has %s; leave it out",
                       nd_cpu_isa_name(nd_cpu_isa_detect()));
    }
    tiles = nd_tiles_bf16_amx_emulated_avx512;
    tiles.begin = nd_tile_begin_amx_stand_in;
    tiles.end = nd_tile_end_amx_stand_in;
    tiles.gemm = nd_tile_gemm_amx_stand_in;
    context->tiles_bf16 = &tiles;
    nd_gemm_destroy(context->gemm);
    context->gemm = NULL;
    return nd_gemm_create(&nd_gemm_amx_stand_in, context->team, &context->gemm);
}
