// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/tile.h"
#include "kernels/ops.h"
#include "tests/bench/bench_ops.h"

extern const nd_gemm_kernels nd_gemm_amx_stand_in;
extern const nd_tile_ops nd_tiles_bf16_stand_in;

const char *nd_bench_machine(const nd_device *device)
{
    const nd_cpu_context *context = device->native;
    return context->tiles_bf16 == &nd_tiles_bf16_stand_in ? "amx_stand_in" : nd_ops_machine(device);
}

const char *nd_bench_products(const nd_device *device)
{
    const nd_cpu_context *context = device->native;
    return context->tiles_bf16 == &nd_tiles_bf16_stand_in ? "stand-in for AMX, nothing computed"
                                                          : nd_ops_products(device);
}

nd_status nd_bench_use_stand_in(nd_device *device)
{
    nd_cpu_context *context = device->native;
    if (nd_cpu_isa_detect() < ND_CPU_ISA_AVX512) {
        return nd_fail(ND_ERR_CONFIG,
                       "--stand-in is made of AVX-512, but this CPU has %s; leave it out",
                       nd_cpu_isa_name(nd_cpu_isa_detect()));
    }
    context->tiles_bf16 = &nd_tiles_bf16_stand_in;
    nd_gemm_destroy(context->gemm);
    context->gemm = NULL;
    return nd_gemm_create(&nd_gemm_amx_stand_in, context->team, &context->gemm);
}
