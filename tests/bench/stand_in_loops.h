// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BENCH_STAND_IN_LOOPS_H
#define ND_BENCH_STAND_IN_LOOPS_H
/*
 * Instructions of AVX-512 in place of AMX's, so that a CPU without AMX shows what a kernel on tiles
 * costs beside its products. A tile is stored as its 16 lines are, and loaded as their first
 * halves, of which a cycle takes two, as it does of the lines of a tile. A product occupies a port
 * for 16 cycles and lets other instructions pass, like TDPBF16PS: it is a VDIVPD of 512 bits, which
 * has that throughput on Ice Lake and later. Rounding to BF16, for which every CPU with AMX has
 * instructions, takes two of AVX-512, as those do, and keeps any bits. No product is computed:
 * stored tiles are zeros.
 *
 * A file that includes this before one of kernels/cpu/, with ND_AMX_STAND_IN, compiles that one so.
 */
#include <immintrin.h>
#include <stdint.h>

/* The code for AVX512_BF16, of which these are the instructions that kernels for AMX use. */
#define __AVX512BF16__                 1
#define _mm512_cvtneps_pbh(x)          nd_stand_in_round_16(x)
#define _mm512_cvtne2ps_pbh(high, low) nd_stand_in_round_32(high, low)
#define _mm512_dpbf16_ps(sum, a, b)    _mm512_fmadd_ps((__m512)(a), (__m512)(b), sum)

static inline __m256bh nd_stand_in_round_16(__m512 x)
{
    return (__m256bh)_mm512_cvtepi32_epi16((__m512i)x); /* two operations, as VCVTNEPS2BF16 */
}

static inline __m512bh nd_stand_in_round_32(__m512 high, __m512 low)
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000); /* two, as VCVTNE2PS2BF16 */
    return (__m512bh)_mm512_ternarylogic_epi32(odd, (__m512i)high,
                                               _mm512_srli_epi32((__m512i)low, 16), 0xca);
}

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
    __asm__ volatile(ND_FOUR_TIMES("vmovups (%0), %%ymm31\n"
                                   "vmovups (%0,%1), %%ymm31\n"
                                   "vmovups (%0,%1,2), %%ymm31\n"
                                   "vmovups (%0,%3), %%ymm31\n")
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
