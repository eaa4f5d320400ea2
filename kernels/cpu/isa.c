// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/isa.h"

#include <cpuid.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *const names[ND_CPU_ISA_COUNT] = {"baseline",    "avx2", "avx512",
                                                    "avx512_bf16", "amx",  "amx_emulated"};

const char *nd_cpu_isa_name(nd_cpu_isa isa)
{
    return names[isa];
}

/* CPUID leaf 7: EDX bits 24 (AMX-TILE) and 22 (AMX-BF16). */
static bool shows_amx_bf16(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1);
}

/* Leaf 0x1d: EAX is the last palette of tiles. A virtual machine may show AMX without any, and its
 * tile instructions then end a process. The kernel must grant the 8 KiB tile state as well. */
static bool may_use_amx_bf16(void)
{
    const long arch_request_permission = 0x1023, tile_data = 18;
    unsigned a, b, c, d;
    if (!shows_amx_bf16() || !__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) || a < 1) {
        return false;
    }
    return syscall(SYS_arch_prctl, arch_request_permission, tile_data) == 0;
}

nd_cpu_isa nd_cpu_isa_detect(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return ND_CPU_ISA_BASELINE;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
        return ND_CPU_ISA_AVX2;
    }
    if (!__builtin_cpu_supports("avx512bf16")) {
        return ND_CPU_ISA_AVX512;
    }
    return may_use_amx_bf16() ? ND_CPU_ISA_AMX : ND_CPU_ISA_AVX512_BF16;
}

nd_status nd_cpu_isa_choose(nd_cpu_isa *out)
{
    nd_cpu_isa detected = nd_cpu_isa_detect();
    const char *wanted = getenv("ND_CPU_ISA");
    if (!wanted || !*wanted) {
        *out = detected;
        return ND_OK;
    }
    for (int i = 0; i < ND_CPU_ISA_COUNT; i++) {
        if (strcmp(wanted, names[i]) != 0) {
            continue;
        }
        if (i == ND_CPU_ISA_AMX && i > (int)detected && shows_amx_bf16()) {
            return nd_fail(
                ND_ERR_CONFIG,
                "ND_CPU_ISA asks for amx, which this CPU shows, but Linux or the virtual "
                "machine does not let processes use its tiles, or it lacks "
                "AVX512_BF16; unset it or name %s or a lower level",
                names[detected]);
        }
        if (i > (int)detected && i != ND_CPU_ISA_AMX_EMULATED) {
            return nd_fail(
                ND_ERR_CONFIG,
                "ND_CPU_ISA asks for %s, but this CPU has %s at most; unset it or name a "
                "lower level",
                wanted, names[detected]);
        }
        *out = (nd_cpu_isa)i;
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "ND_CPU_ISA is \"%s\"; it may be baseline, avx2, avx512, avx512_bf16, amx or "
                   "amx_emulated",
                   wanted);
}

nd_status nd_cpu_products_choose(nd_cpu_isa isa, bool *own)
{
    const bool can = isa >= ND_CPU_ISA_AVX512;
    const char *wanted = getenv("ND_CPU_PRODUCTS");
    if (!wanted || !*wanted) {
        *own = can;
        return ND_OK;
    }
    if (strcmp(wanted, "own") != 0 && strcmp(wanted, "onednn") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ND_CPU_PRODUCTS is \"%s\"; it may be own or onednn, or unset", wanted);
    }
    *own = strcmp(wanted, "own") == 0;
    if (*own && !can) {
        return isa < nd_cpu_isa_detect()
                   ? nd_fail(ND_ERR_CONFIG,
                             "ND_CPU_PRODUCTS asks for ndtrain's own products, which need AVX-512, "
                             "but ND_CPU_ISA or ONEDNN_MAX_CPU_ISA limits this process to %s; "
                             "unset one of them",
                             names[isa])
                   : nd_fail(ND_ERR_CONFIG,
                             "ND_CPU_PRODUCTS asks for ndtrain's own products, which need AVX-512, "
                             "but this CPU has %s at most; unset ND_CPU_PRODUCTS",
                             names[isa]);
    }
    return ND_OK;
}

nd_cpu_isa nd_cpu_isa_of_vectors(nd_cpu_isa isa)
{
    const nd_cpu_isa own = isa == ND_CPU_ISA_AMX_EMULATED ? nd_cpu_isa_detect() : isa;
    return own < ND_CPU_ISA_AVX512_BF16 ? own : ND_CPU_ISA_AVX512_BF16;
}
