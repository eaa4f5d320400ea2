// SPDX-License-Identifier: Apache-2.0
/* Compiled for AVX-512, with and without AVX512_BF16, with -DND_ISA=<name>: see meson.build. */
#include "kernels/cpu/gemm.h"

#include <immintrin.h>

#include "kernels/cpu/bf16_words.h"
#include "kernels/cpu/fp8_values.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)

enum {
    COLUMNS = 64, /* of a panel of B */
    PANEL = 96,   /* rows of a panel of A */
    MR = 6,       /* sums take MR x NV of 32 registers */
    NV = 4,
    AHEAD = 16, /* words that are fetched before they are needed */
    LINE = 64   /* bytes of a cache line */
};

#define INLINE static inline __attribute__((always_inline))

/* ND_PACK_...: rows that the packing fetches before it needs them, and into which cache. The times
 * are those of nd_gemm_kernels: 32 elements in units of one cycle with AVX512_BF16, of two without.
 * Those of packing were measured in whole steps on Zen 4, where A comes from memory and B, which
 * was fetched before, from the caches. A cast adds 0.33 cycles an element. */
#if defined(__AVX512BF16__)
enum { ND_PACK_AHEAD = 64, ND_PACK_CACHE = 2, A_TIME = 12, B_TIME = 10, CAST_TIME = 11 };
#else
enum { ND_PACK_AHEAD = 16, ND_PACK_CACHE = 1, A_TIME = 5, B_TIME = 4, CAST_TIME = 5 };
#endif
enum { ND_PACKED_WORDS = 1 };
#include "kernels/cpu/gemm_pack.inc"

typedef uint32_t any_word __attribute__((aligned(2), may_alias));

/* products */

INLINE __m512 widen(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE void store(const nd_gemm_tile *t, int64_t i, int j, __m512 sum)
{
    __mmask16 lanes = lanes_of(t->columns, j);
    int64_t at = i * t->c_row + j * VL;
    if (t->from) {
        const float *from = t->from + i * t->from_row + j * VL;
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, from));
    }
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(nd_gemm_row_factor(t, i)));
    if (t->column_factors) {
        sum = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(lanes, t->column_factors + j * VL));
    }
    if (t->bf16) {
        nd_bf16 *c = (nd_bf16 *)t->c + at;
        if (t->add) {
            sum = _mm512_add_ps(sum, widen(_mm256_maskz_loadu_epi16(lanes, c)));
        }
        _mm256_mask_storeu_epi16(c, lanes, nd_round_16(sum));
    } else {
        float *c = (float *)t->c + at;
        if (t->add) {
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, c));
        }
        _mm512_mask_storeu_ps(c, lanes, sum);
    }
}

/* True where c takes whole vectors of sums as they are, or after those of earlier k are added. */
INLINE bool is_plain(const nd_gemm_tile *t)
{
    return t->columns == COLUMNS && t->factor == 1.0f && !t->row_factors && !t->column_factors &&
           !t->add;
}

INLINE void store_plain(const int mr, const int nv, const nd_gemm_tile *t, int64_t first,
                        const bool bf16, const bool from, __m512 sum[MR][NV])
{
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const int64_t row = first + i, at = row * t->c_row;
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            __m512 x = sum[i][j];
            if (from) {
                x = _mm512_add_ps(x, _mm512_loadu_ps(t->from + row * t->from_row + j * VL));
            }
            if (bf16) {
                nd_bf16 *c = (nd_bf16 *)t->c + at + j * VL;
                _mm256_storeu_si256((__m256i *)c, nd_round_16(x));
            } else {
                _mm512_storeu_ps((float *)t->c + at + j * VL, x);
            }
        }
    }
}

/* mr rows of nv vectors. */
INLINE void store_all(const int mr, const int nv, const nd_gemm_tile *t, int64_t first,
                      __m512 sum[MR][NV])
{
    if (nv == NV && is_plain(t)) {
        if (t->from && t->bf16) {
            store_plain(mr, nv, t, first, true, true, sum);
        } else if (t->from) {
            store_plain(mr, nv, t, first, false, true, sum);
        } else if (t->bf16) {
            store_plain(mr, nv, t, first, true, false, sum);
        } else {
            store_plain(mr, nv, t, first, false, false, sum);
        }
        return;
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            store(t, first + i, j, sum[i][j]);
        }
    }
}

/* Prefetches the lines of c that the sums of these rows go to. */
INLINE void prefetch_c(const int mr, const int nv, const nd_gemm_tile *t, int64_t first)
{
    const int64_t size = t->bf16 ? 2 : 4;
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const char *c = (const char *)t->c + (first + i) * t->c_row * size;
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            _mm_prefetch(c + j * VL * size, _MM_HINT_T0);
        }
    }
}

/* This is left of nd_gemm_tile.ahead. */
typedef struct ahead {
    const char *row;
    int64_t stride;
    int rows, bytes, at; /* at: of the row's bytes, those that are fetched */
    int lines;           /* fetched at a time */
} ahead;

/* steps: in how many all of it is fetched. */
INLINE ahead ahead_of(const nd_gemm_tile *t, int64_t steps)
{
    const nd_gemm_ahead *x = &t->ahead;
    const int64_t lines = (int64_t)x->rows * ((x->bytes + LINE - 1) / LINE);
    return (ahead){.row = x->data,
                   .stride = x->stride,
                   .rows = x->rows,
                   .bytes = x->bytes,
                   .lines = (int)((lines + steps - 1) / steps)};
}

INLINE void fetch(ahead *x)
{
    for (int i = 0; i < x->lines && x->rows > 0; i++) {
        _mm_prefetch(x->row + x->at, _MM_HINT_T0);
        x->at += LINE;
        if (x->at >= x->bytes) {
            x->at = 0;
            x->row += x->stride;
            x->rows--;
        }
    }
}

/* Adds words [begin, end) of mr rows, and prefetches what lies at `wanted` and at every `step`
 * elements after it. */
INLINE void add_words(const int mr, const int nv, const nd_gemm_tile *t, const nd_bf16 *a,
                      int begin, int end, const nd_bf16 *wanted, int64_t step, __m512 sum[MR][NV])
{
    const int64_t a_row = t->a_row, a_word = t->a_word;
    const nd_gemm_word *b = t->b + (int64_t)begin * COLUMNS;
    a += begin * a_word;
    for (int l = begin; l < end; l++, a += a_word, b += COLUMNS, wanted += step) {
        __m512i row[NV];
        _mm_prefetch((const char *)wanted, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            row[j] = _mm512_loadu_si512(b + j * VL);
        }
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            __m512i word = _mm512_set1_epi32((int)*(const any_word *)(a + i * a_row));
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
                sum[i][j] = nd_dot_bf16(sum[i][j], word, row[j]);
            }
        }
    }
}

/* Rows [first, first + mr), nv vectors of columns: mr and nv are constants where this is inlined.
 * What is needed next of A is fetched meanwhile, and some of what is packed next. */
INLINE void micro(const int mr, const int nv, const nd_gemm_tile *t, int64_t first, ahead *packed)
{
    const nd_bf16 *a = t->a + first * t->a_row, *next = a + MR * t->a_row;
    __m512 sum[MR][NV];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            sum[i][j] = _mm512_setzero_ps();
        }
    }
    prefetch_c(mr, nv, t, first);
    for (int i = 0; i < MR; i++) {
        int begin = t->words * i / MR, end = t->words * (i + 1) / MR;
        fetch(packed);
        if (t->a_word == 2) { /* a row of the next group, in as many steps */
            add_words(mr, nv, t, a, begin, end, next + i * t->a_row, 2 * MR, sum);
        } else { /* a panel: these rows, a little ahead */
            add_words(mr, nv, t, a, begin, end, a + (begin + AHEAD) * t->a_word, t->a_word, sum);
        }
    }
    store_all(mr, nv, t, first, sum);
}

INLINE void all_rows(const int nv, const nd_gemm_tile *t)
{
    ahead packed = ahead_of(t, MR * ((t->rows + MR - 1) / MR));
    int64_t i = 0;
    for (; i + MR <= t->rows; i += MR) {
        micro(MR, nv, t, i, &packed);
    }
    ND_UP_TO_5(mr, t->rows - i, micro(mr, nv, t, i, &packed))
}

static void multiply(const nd_gemm_tile *t)
{
    if (t->columns > 3 * VL) {
        all_rows(NV, t);
    } else {
        ND_UP_TO_3(nv, (t->columns + VL - 1) / VL, all_rows(nv, t))
    }
}

PACK(pack_b_rows, pack_rows_of, COLUMNS, )
PACK(pack_b_columns, pack_columns_of, COLUMNS, )
PACK(pack_a_rows, pack_rows_of, PANEL, )
PACK(pack_a_columns, pack_columns_of, PANEL, )

const nd_gemm_kernels PASTE(nd_gemm, ND_ISA) = {
    .rows = MR,
    .columns = COLUMNS,
    .panel = PANEL,
    .words = ND_PACKED_WORDS,
    .a_row = 2,
    .a_word = 2 * PANEL,
    .k_block = 1024,        /* 64 columns of B are then 128 KiB, in the second cache */
    .most_rows = 1056,      /* the packing of B is below 1 percent */
    .most_packed = 480,     /* below 1 MiB */
    .shared_columns = 512,  /* 1 MiB */
    .partial_columns = 256, /* 1 MiB */
    .a_time = A_TIME,
    .b_time = B_TIME,
    .b_read_time = 1,
    .cast_time = CAST_TIME,
    .multiply = multiply,
    .pack_b_rows = pack_b_rows,
    .pack_b_columns = pack_b_columns,
    .pack_a_rows = pack_a_rows,
    .pack_a_columns = pack_a_columns};
