// SPDX-License-Identifier: Apache-2.0
/* Compiled for AVX-512, with and without AVX512_BF16, with -DND_ISA=<name>: see meson.build. */
#include "kernels/cpu/gemm.h"

#include <immintrin.h>

#include "kernels/cpu/bf16_words.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)

enum {
    VL = 16,
    MR = ND_GEMM_ROWS, /* sums take MR x NV of 32 registers */
    NV = ND_GEMM_COLUMNS / VL,
    AHEAD = 16 /* rows or words that are fetched before they are needed */
};

#define INLINE static inline __attribute__((always_inline))

typedef uint32_t any_word __attribute__((aligned(2), may_alias));

/* products */

/* Lanes of vector j that exist among `columns`. */
INLINE __mmask16 lanes_of(int columns, int j)
{
    int left = columns - j * VL;
    return left >= VL ? 0xffff : (__mmask16)((1u << left) - 1);
}

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
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(t->factor));
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

/* Adds words [begin, end) of mr rows, and prefetches what lies at `wanted` and at every `step`
 * elements after it. */
INLINE void add_words(const int mr, const int nv, const nd_gemm_tile *t, const nd_bf16 *a,
                      int begin, int end, const nd_bf16 *wanted, int64_t step, __m512 sum[MR][NV])
{
    const int64_t a_row = t->a_row, a_word = t->a_word;
    const nd_gemm_word *b = t->b + (int64_t)begin * ND_GEMM_COLUMNS;
    a += begin * a_word;
    for (int l = begin; l < end; l++, a += a_word, b += ND_GEMM_COLUMNS, wanted += step) {
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
 * What is needed next of A is fetched meanwhile. */
INLINE void micro(const int mr, const int nv, const nd_gemm_tile *t, int64_t first)
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
        if (t->a_word == 2) { /* a row of the next group, in as many steps */
            add_words(mr, nv, t, a, begin, end, next + i * t->a_row, 2 * MR, sum);
        } else { /* a panel: these rows, a little ahead */
            add_words(mr, nv, t, a, begin, end, a + (begin + AHEAD) * t->a_word, t->a_word, sum);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            store(t, first + i, j, sum[i][j]);
        }
    }
}

INLINE void all_rows(const int nv, const nd_gemm_tile *t)
{
    int64_t i = 0;
    for (; i + MR <= t->rows; i += MR) {
        micro(MR, nv, t, i);
    }
    switch (t->rows - i) {
    case 5:
        micro(5, nv, t, i);
        break;
    case 4:
        micro(4, nv, t, i);
        break;
    case 3:
        micro(3, nv, t, i);
        break;
    case 2:
        micro(2, nv, t, i);
        break;
    case 1:
        micro(1, nv, t, i);
        break;
    default:
        break;
    }
}

static void multiply(const nd_gemm_tile *t)
{
    switch ((t->columns + VL - 1) / VL) {
    case 4:
        all_rows(4, t);
        break;
    case 3:
        all_rows(3, t);
        break;
    case 2:
        all_rows(2, t);
        break;
    default:
        all_rows(1, t);
        break;
    }
}

/* packing */

/* One round of the transposition of 16 x 16 words: lanes of rows `step` apart change places. */
INLINE void exchange(__m512i v[VL], const int step)
{
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(step));
    /* Index 16 + i is lane i of the second operand. */
    __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(VL - step));
    __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(step)), upper,
                                         lane, _mm512_set1_epi32(VL));
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        if ((i & step) == 0) {
            __m512i a = v[i], b = v[i + step];
            v[i] = _mm512_permutex2var_epi32(a, low, b);
            v[i + step] = _mm512_permutex2var_epi32(a, high, b);
        }
    }
}

/* Words [0, words) of 16 rows become 16 columns of b; words <= 16. Rows from `rows` on are zero. */
INLINE void pack_block(nd_gemm_word *b, const nd_bf16 *x, int64_t stride, int rows, int words)
{
    __mmask16 lanes = lanes_of(words, 0);
    __m512i v[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        v[i] = _mm512_setzero_si512();
        if (i < rows) {
            v[i] = _mm512_maskz_loadu_epi32(lanes, x + i * stride);
        }
    }
    exchange(v, 1);
    exchange(v, 2);
    exchange(v, 4);
    exchange(v, 8);
#pragma GCC unroll 16
    for (int l = 0; l < VL; l++) {
        if (l < words) {
            _mm512_storeu_si512(b + l * ND_GEMM_COLUMNS, v[l]);
        }
    }
}

static void pack_rows(nd_gemm_word *b, const nd_bf16 *x, int64_t stride, int columns, int words)
{
    for (int j = 0; j < columns; j += VL) {
        for (int l = 0; l < words; l += VL) {
            pack_block(b + l * ND_GEMM_COLUMNS + j, x + j * stride + 2 * l, stride,
                       columns - j < VL ? columns - j : VL, words - l < VL ? words - l : VL);
        }
    }
}

/* Words (x[2l][j], x[2l + 1][j]) in rows of `width`, a multiple of 32 and a constant; zero behind
 * `columns`. */
INLINE void pack_rows_in_pairs(const int width, nd_gemm_word *to, const nd_bf16 *x, int64_t stride,
                               int columns, int words)
{
    enum { HALVES = 2 * VL };
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(VL));
    __mmask32 lanes[ND_GEMM_PANEL / HALVES];
    for (int j = 0; j < width / HALVES; j++) {
        int left = columns - j * HALVES;
        lanes[j] = left >= HALVES ? 0xffffffff : left > 0 ? (1u << left) - 1 : 0;
    }
    for (int l = 0; l < words; l++, to += width, x += 2 * stride) {
#pragma GCC unroll 3
        for (int j = 0; j < width / HALVES; j++) {
            const nd_bf16 *even = x + j * HALVES, *odd = even + stride;
            _mm_prefetch((const char *)(even + AHEAD * stride), _MM_HINT_T0);
            _mm_prefetch((const char *)(odd + AHEAD * stride), _MM_HINT_T0);
            __m512i a = _mm512_maskz_loadu_epi16(lanes[j], even);
            __m512i b = _mm512_maskz_loadu_epi16(lanes[j], odd);
            _mm512_storeu_si512(to + j * HALVES, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + j * HALVES + VL, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

static void pack_pairs(nd_gemm_word *b, const nd_bf16 *x, int64_t stride, int columns, int words)
{
    pack_rows_in_pairs(ND_GEMM_COLUMNS, b, x, stride, columns, words);
}

static void pack_panel(nd_gemm_word *a, const nd_bf16 *x, int64_t stride, int rows, int words)
{
    pack_rows_in_pairs(ND_GEMM_PANEL, a, x, stride, rows, words);
}

const nd_gemm_kernels PASTE(nd_gemm, ND_ISA) = {.multiply = multiply,
                                                .pack_rows = pack_rows,
                                                .pack_pairs = pack_pairs,
                                                .pack_panel = pack_panel};
