// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BENCH_STAND_IN_LOOPS_H
#define ND_BENCH_STAND_IN_LOOPS_H
/*
 * Instructions of AVX-512 in place of AMX's, so that a CPU without AMX shows what a kernel on tiles
 * costs beside its products. A tile is loaded and stored as its 16 lines are. A product occupies
 * one port for 16 cycles and lets other instructions pass, like TDPBF16PS: it is a VDIVPD of 512
 * bits, which has that throughput on Ice Lake and later. Nothing is computed: stored tiles are
 * zeros.
 *
 * A file that includes this before one of kernels/cpu/, with ND_AMX_STAND_IN, compiles that one so.
 */
#include <stdint.h>

#define nd_amx_configure(config)        ((void)(config))
#define nd_amx_release()                ((void)0)
#define nd_amx_zero(tile)               ((void)0)
#define nd_amx_load(tile, from, stride) nd_stand_in_load(from, stride)
#define nd_amx_store(tile, to, stride)  nd_stand_in_store(to, stride)
#define nd_amx_multiply(c, a, b)        nd_stand_in_multiply()

/* `four` instructions for lines 0 to 3, four times. */
#define ND_FOUR_TIMES(four) four "add %2, %0\n" four "add %2, %0\n" four "add %2, %0\n" four

static inline __attribute__((always_inline)) void nd_stand_in_load(const void *from, int64_t stride)
{
    __asm__ volatile(ND_FOUR_TIMES("vmovups (%0), %%zmm31\n"
                                   "vmovups (%0,%1), %%zmm31\n"
                                   "vmovups (%0,%1,2), %%zmm31\n"
                                   "vmovups (%0,%3), %%zmm31\n")
                     : "+r"(from)
                     : "r"(stride), "r"(4 * stride), "r"(3 * stride)
                     : "xmm31", "memory");
}

static inline __attribute__((always_inline)) void nd_stand_in_store(void *to, int64_t stride)
{
    __asm__ volatile(
        "vxorps %%xmm31, %%xmm31, %%xmm31\n" ND_FOUR_TIMES("vmovups %%zmm31, (%0)\n"
                                                           "vmovups %%zmm31, (%0,%1)\n"
                                                           "vmovups %%zmm31, (%0,%1,2)\n"
                                                           "vmovups %%zmm31, (%0,%3)\n")
        : "+r"(to)
        : "r"(stride), "r"(4 * stride), "r"(3 * stride)
        : "xmm31", "memory");
}

static inline __attribute__((always_inline)) void nd_stand_in_multiply(void)
{
    static const double one = 1.0;
    __asm__ volatile("vbroadcastsd %0, %%zmm30\n"
                     "vdivpd %%zmm30, %%zmm30, %%zmm29\n"
                     :
                     : "m"(one)
                     : "xmm29", "xmm30");
}

#endif
