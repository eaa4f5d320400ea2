// SPDX-License-Identifier: Apache-2.0
/* Compiled once per instruction set with its -m flags and -DND_ISA=<name>: see meson.build. */
#include "kernels/cpu/tile.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/vector_math.h"
#if ND_VL == 16
#include "kernels/cpu/bf16_words.h"
#endif

#define PASTE_(a, b) a##_##b
#define PASTE(a, b)  PASTE_(a, b)

enum { R = ND_TILE, RV = ND_TILE / ND_VL }; /* columns of a score tile, and vectors of them */

typedef const float float_alias __attribute__((may_alias));
typedef float float_out __attribute__((may_alias));

__attribute__((unused)) static inline int smaller(int a, int b)
{
    return a < b ? a : b;
}

/* products */

/* Rows and column vectors of the register tile: with a row of B and one word of A it fills the
 * registers. */
#if ND_VL == 16
enum { MR = 6, NV = 4 };
#else
enum { MR = 6, NV = 2 };
#endif

static inline nd_vf multiply_add(bool bf16, nd_vf c, const nd_word *a, nd_vf b)
{
#if ND_VL == 16
    if (bf16) {
        return (nd_vf)nd_dot_bf16((__m512)c, _mm512_set1_epi32((int)*a), (__m512i)b);
    }
#endif
    return c + nd_v_set(*(float_alias *)a) * b;
}

/* c (mr, nv ND_VL) = a b (+ c), with c in registers: mr, nv and bf16 are constants where this is
 * inlined. */
static inline __attribute__((always_inline)) void micro(const bool bf16, const int mr, const int nv,
                                                        int words, const nd_word *a, int64_t lda,
                                                        const nd_word *b, int64_t ldb, float *c,
                                                        int64_t ldc, bool add)
{
    nd_vf sum[MR][NV];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            sum[i][j] = add ? nd_v_load(c + i * ldc + j * ND_VL) : (nd_vf){0};
        }
    }
    for (int l = 0; l < words; l++) {
        nd_vf row[NV];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            row[j] = nd_v_load((float_alias *)(b + l * ldb) + j * ND_VL);
        }
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
                sum[i][j] = multiply_add(bf16, sum[i][j], a + i * lda + l, row[j]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            nd_v_store(c + i * ldc + j * ND_VL, sum[i][j]);
        }
    }
}

/* All rows of nv column vectors. */
static inline __attribute__((always_inline)) void
column_panel(const bool bf16, const int nv, int m, int words, const nd_word *a, int64_t lda,
             const nd_word *b, int64_t ldb, float *c, int64_t ldc, bool add)
{
    int i = 0;
    for (; i + MR <= m; i += MR) {
        micro(bf16, MR, nv, words, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
    }
    ND_UP_TO_5(mr, m - i,
               micro(bf16, mr, nv, words, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add))
}

static inline __attribute__((always_inline)) void gemm_any(const bool bf16, int m, int n, int words,
                                                           const nd_word *a, int64_t lda,
                                                           const nd_word *b, int64_t ldb, float *c,
                                                           int64_t ldc, bool add)
{
    int j = 0;
    for (; j + NV * ND_VL <= n; j += NV * ND_VL) {
        column_panel(bf16, NV, m, words, a, lda, b + j, ldb, c + j, ldc, add);
    }
    /* n is a multiple of ND_TILE_PAD, so only 16 lanes leave a part of a panel. */
#if ND_VL == 16
    ND_UP_TO_3(nv, (n - j) / ND_VL,
               column_panel(bf16, nv, m, words, a, lda, b + j, ldb, c + j, ldc, add))
#endif
}

static void gemm_f32(int m, int n, int words, const nd_word *a, int64_t lda, const nd_word *b,
                     int64_t ldb, float *c, int64_t ldc, bool add)
{
    gemm_any(false, m, n, words, a, lda, b, ldb, c, ldc, add);
}

#include "kernels/cpu/tile_pack.inc"

/* softmax */

/* Scores of keys outside of each query's limits become -inf. */
static void mask_scores(float *scores, int keys, const nd_key_limits *limits)
{
    const nd_vf minus_infinity = nd_v_set(-INFINITY);
    for (int j = 0; j < keys; j++) {
        for (int v = 0; v < RV; v++) {
            float *at = scores + j * R + v * ND_VL;
            nd_vi first = (nd_vi) * (const nd_vi_unaligned *)(limits->first + v * ND_VL);
            nd_vi last = (nd_vi) * (const nd_vi_unaligned *)(limits->last + v * ND_VL);
            nd_vi visible = (nd_vi)(first <= j) & (nd_vi)(last >= j);
            nd_v_store(
                at, (nd_vf)(((nd_vi)nd_v_load(at) & visible) | ((nd_vi)minus_infinity & ~visible)));
        }
    }
}

/* Lane by lane x where mask is set, else y. */
static inline nd_vf choose(nd_vi mask, nd_vf x, nd_vf y)
{
    return (nd_vf)(((nd_vi)x & mask) | ((nd_vi)y & ~mask));
}

/* Updates the running maxima of column vector v and writes alpha. Lanes of *grown become -1 where a
 * maximum grew. Returns the finite shift of the exponents. */
static inline nd_vf shift_columns(const nd_softmax_step *s, int v, nd_vi *grown)
{
    const nd_vf minus_infinity = nd_v_set(-INFINITY);
    nd_vf top = minus_infinity, second = minus_infinity;
    int j = 0;
    for (; j + 1 < s->keys; j += 2) {
        top = nd_v_max(top, nd_v_load(s->scores + j * R + v * ND_VL));
        second = nd_v_max(second, nd_v_load(s->scores + (j + 1) * R + v * ND_VL));
    }
    if (j < s->keys) {
        top = nd_v_max(top, nd_v_load(s->scores + j * R + v * ND_VL));
    }
    nd_vf before = nd_v_load(s->max + v * ND_VL), now = nd_v_max(top, second) * s->scale;
    nd_vi grows = (nd_vi)(now > before + ND_TILE_MAX_GROWTH);
    nd_vf after = choose(grows, now, before);
    nd_vf shift = (nd_vf)((nd_vi)after & (nd_vi)(after != minus_infinity));
    nd_vf alpha = choose(grows, nd_v_exp2(before - shift), nd_v_set(1.0f));
    nd_v_store(s->max + v * ND_VL, after);
    nd_v_store(s->alpha + v * ND_VL, alpha);
    *grown |= grows;
    return shift;
}

static inline bool any_lane(nd_vi mask)
{
    int any = 0;
    for (int i = 0; i < ND_VL; i++) {
        any |= mask[i];
    }
    return any != 0;
}

static inline void add_sum(const nd_softmax_step *s, int v, nd_vf added)
{
    float *sum = s->sum + v * ND_VL;
    nd_v_store(sum, nd_v_load(sum) * nd_v_load(s->alpha + v * ND_VL) + added);
}

static bool softmax_f32(const nd_softmax_step *s)
{
    nd_vi grown = {0};
    if (s->limits) {
        mask_scores(s->scores, s->keys, s->limits);
    }
    for (int v = 0; v < RV; v++) {
        nd_vf shift = shift_columns(s, v, &grown), sum = {0};
        for (int j = 0; j < s->keys; j++) {
            nd_vf p = nd_v_exp2(nd_v_load(s->scores + j * R + v * ND_VL) * s->scale - shift);
            sum += p;
            nd_v_store((float_out *)s->p + j * R + v * ND_VL, p);
        }
        add_sum(s, v, sum);
    }
    return any_lane(grown);
}

#define LOG2_E 1.44269504f

static void dscore_f32(const nd_dscore_step *s)
{
    const float scale = s->scale;
    if (s->limits) {
        mask_scores(s->scores, s->keys, s->limits);
    }
    for (int v = 0; v < RV; v++) {
        nd_vf lse = nd_v_load(s->lse + v * ND_VL), delta = nd_v_load(s->delta + v * ND_VL) * scale;
        for (int j = 0; j < s->keys; j++) {
            const int64_t from = j * R + v * ND_VL, to = j * s->ld + v * ND_VL;
            nd_vf p = nd_v_exp2(nd_v_load(s->scores + from) * (scale * LOG2_E) - lse);
            nd_vf ds = p * (nd_v_load(s->dp + from) * scale - delta);
            nd_v_store((float_out *)s->p + to, p);
            nd_v_store((float_out *)s->ds_rows + to, ds);
            if (s->ds_columns != s->ds_rows) {
                nd_v_store((float_out *)s->ds_columns + from, ds);
            }
        }
    }
}

/* results */

static void scale_columns(float *c, int m, const float *factor)
{
    for (int i = 0; i < m; i++) {
        for (int v = 0; v < RV; v++) {
            float *at = c + i * R + v * ND_VL;
            nd_v_store(at, nd_v_load(at) * nd_v_load(factor + v * ND_VL));
        }
    }
}

static void store_row(void *y, nd_dtype dtype, const float *x, int count, float factor, bool add)
{
    if (dtype == ND_DTYPE_F32) {
        float *to = y;
        for (int j = 0; j < count; j++) {
            to[j] = add ? to[j] + x[j] * factor : x[j] * factor;
        }
        return;
    }
    nd_bf16 *to = y;
    int j = 0;
    for (; j + ND_VL <= count; j += ND_VL) {
        nd_v_store_bf16(to + j, nd_v_load(x + j) * factor);
    }
    for (; j < count; j++) {
        to[j] = nd_bf16_from_f32(x[j] * factor);
    }
}

static void store_transposed(void *y, nd_dtype dtype, int64_t stride, const float *x, int rows,
                             int columns, const float *factor, bool add, float *temporary)
{
    transpose((nd_word *)temporary, rows, (const nd_word *)x, R, rows, columns);
    for (int i = 0; i < columns; i++) {
        store_row((void *)row_of(y, dtype, stride, i), dtype, temporary + (int64_t)i * rows, rows,
                  factor ? factor[i] : 1.0f, add);
    }
}

const nd_tile_ops PASTE(nd_tiles_f32, ND_ISA) = {
    .name = "f32",
    .group = 1,
    .gemm = gemm_f32,
    .pack_a = pack_a_f32,
    .pack_b_transposed = pack_b_transposed_f32,
    .pack_b = pack_b_f32,
    .pack_a_transposed = pack_a_transposed_f32,
    .softmax = softmax_f32,
    .dscore = dscore_f32,
    .scale_columns = scale_columns,
    .store_transposed = store_transposed,
};

#include "kernels/cpu/tile_kernels_bf16.inc"
