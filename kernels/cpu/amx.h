// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_AMX_H
#define ND_CPU_AMX_H
/*
 * The tile instructions of AMX as our kernels use them. A file that uses them is compiled twice
 * (meson.build here): for CPUs that have them, where each is one instruction, and with
 * ND_AMX_EMULATED, where each is a function of amx_emulated.c that does the same in plain C. Both
 * leave the same bits, so the kernels are tested on every machine.
 *
 * A thread has eight tiles of at most 16 rows of 64 bytes. Before anything else it gives them their
 * extents by nd_amx_configure, which also sets them to zero, and it calls nd_amx_release when it is
 * done: other code of the thread (oneDNN) configures tiles of its own. Tile numbers are constants.
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and
 * the instructions' pages in volume 2.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

enum {
    ND_AMX_TILES = 8,
    ND_AMX_ROWS = 16,     /* of a tile, at most */
    ND_AMX_ROW_BYTES = 64 /* at most: 16 words, F32 or pairs of BF16 */
};

/* The extents of the tiles, as LDTILECFG reads them. A tile that is not used has no rows and no
 * bytes. */
typedef struct nd_amx_config {
    uint8_t palette, start_row; /* 1, 0 */
    uint8_t reserved[14];       /* zeros, as all behind ND_AMX_TILES are */
    uint16_t row_bytes[16];
    uint8_t rows[16];
} nd_amx_config;

_Static_assert(sizeof(nd_amx_config) == 64, "LDTILECFG reads 64 bytes");

#if defined(ND_AMX_EMULATED)

/*
 * nd_amx_load, nd_amx_store: rows of the tile from or to memory; `stride` in bytes.
 * nd_amx_multiply: c (m, n) F32 += a (m, k) b (k, n) of pairs of BF16, where row m of a has the
 * pairs of k, and row k of b those of n. For each sum the products of the even halves are added up
 * in order, and those of the odd ones, both from zero; then their sum is added to c. Every addition
 * rounds to nearest even; subnormal operands and results are zeros.
 * What the CPU refuses with an exception (extents that do not fit, a tile that is not configured)
 * ends the process.
 */
void nd_amx_configure(const nd_amx_config *config);
void nd_amx_release(void);
void nd_amx_zero(int tile);
void nd_amx_load(int tile, const void *from, int64_t stride);
void nd_amx_store(int tile, void *to, int64_t stride);
void nd_amx_multiply(int c, int a, int b);

#elif !defined(ND_AMX_STAND_IN) /* a benchmark defines its own (tests/bench/stand_in_loops.h) */

/* They are statements of the assembler, since the compiler's intrinsics do not say that they read
 * and write memory. */
#define ND_AMX_TEXT_(x) #x
#define ND_AMX_TMM(x)   "%%tmm" ND_AMX_TEXT_(x)

static inline void nd_amx_configure(const nd_amx_config *config)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*config) : "memory");
}

static inline void nd_amx_release(void)
{
    __asm__ volatile("tilerelease" : : : "memory");
}

#define nd_amx_zero(tile) __asm__ volatile("tilezero " ND_AMX_TMM(tile) : : :)
#define nd_amx_load(tile, from, stride)                                                            \
    __asm__ volatile("tileloadd (%0,%1,1), " ND_AMX_TMM(tile)                                      \
                     :                                                                             \
                     : "r"((const void *)(from)), "r"((int64_t)(stride))                           \
                     : "memory")
#define nd_amx_store(tile, to, stride)                                                             \
    __asm__ volatile("tilestored " ND_AMX_TMM(tile) ", (%0,%1,1)"                                  \
                     :                                                                             \
                     : "r"((void *)(to)), "r"((int64_t)(stride))                                   \
                     : "memory")
#define nd_amx_multiply(c, a, b)                                                                   \
    __asm__ volatile("tdpbf16ps " ND_AMX_TMM(b) ", " ND_AMX_TMM(a) ", " ND_AMX_TMM(c) : : :)

#endif

/* Products whose sums are mr x nv tiles, 1 or 2 each and constants where these are inlined: tiles 0
 * to 3 are the sums, row by row, 4 and 5 A, 6 and 7 B. */
#define ND_AMX_INLINE static inline __attribute__((always_inline))

/* Each tile of sums that is used: TILE(number, row, column). */
#define ND_AMX_EACH_SUM(TILE)                                                                      \
    do {                                                                                           \
        TILE(0, 0, 0);                                                                             \
        if (nv > 1) {                                                                              \
            TILE(1, 0, 16);                                                                        \
        }                                                                                          \
        if (mr > 1) {                                                                              \
            TILE(2, 16, 0);                                                                        \
            if (nv > 1) {                                                                          \
                TILE(3, 16, 16);                                                                   \
            }                                                                                      \
        }                                                                                          \
    } while (0)

/* Sums begin at `from`, or at 0 where that is NULL; stride in elements. */
ND_AMX_INLINE void nd_amx_load_sums(const int mr, const int nv, const float *from, int64_t stride)
{
#define ND_AMX_ZERO(tile, i, j) nd_amx_zero(tile)
#define ND_AMX_LOAD(tile, i, j) nd_amx_load(tile, from + (i)*stride + (j), 4 * stride)
    if (from) {
        ND_AMX_EACH_SUM(ND_AMX_LOAD);
    } else {
        ND_AMX_EACH_SUM(ND_AMX_ZERO);
    }
#undef ND_AMX_LOAD
#undef ND_AMX_ZERO
}

ND_AMX_INLINE void nd_amx_store_sums(const int mr, const int nv, float *to, int64_t stride)
{
#define ND_AMX_STORE(tile, i, j) nd_amx_store(tile, to + (i)*stride + (j), 4 * stride)
    ND_AMX_EACH_SUM(ND_AMX_STORE);
#undef ND_AMX_STORE
}

/* Adds a step of k. a, below: the first and the second tile of A, with rows `a_bytes` apart; b:
 * words of k, `b_bytes` apart, with both tiles side by side. */
ND_AMX_INLINE void nd_amx_add_step(const int mr, const int nv, const uint32_t *a,
                                   const uint32_t *below, int64_t a_bytes, const uint32_t *b,
                                   int64_t b_bytes)
{
    nd_amx_load(4, a, a_bytes);
    nd_amx_load(6, b, b_bytes);
    nd_amx_multiply(0, 4, 6);
    if (nv > 1) {
        nd_amx_load(7, b + ND_AMX_ROWS, b_bytes);
        nd_amx_multiply(1, 4, 7);
    }
    if (mr > 1) {
        nd_amx_load(5, below, a_bytes);
        nd_amx_multiply(2, 5, 6);
        if (nv > 1) {
            nd_amx_multiply(3, 5, 7);
        }
    }
}

#endif
