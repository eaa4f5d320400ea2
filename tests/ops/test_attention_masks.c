// SPDX-License-Identifier: Apache-2.0
/* The effect of first_key and window on attention on the CPU: which products there are, and bits.
 * test_attention.c shows that the numbers are right. */
#include <criterion/criterion.h>
#include <stdatomic.h>

#include "kernels/cpu/context.h"
#include "runtime/base/math.h"
#include "tests/ops/attend.h"

/* first_key of documents that begin at these rows. */
static nd_tensor documents(const nd_attention *a, const int64_t *begins, int count)
{
    nd_tensor t = nd_random_ids(a->batch * a->sq, 0, 1);
    for (int64_t i = 0; i < a->batch * a->sq; i++) {
        int64_t first = 0;
        for (int n = 0; n < count && begins[n] <= i % a->sq; n++) {
            first = begins[n] + a->diag;
        }
        ((int32_t *)t.data)[i] = (int32_t)first;
    }
    return t;
}

/* multiplications of the products of tiles */

static _Atomic int64_t multiplications;
static const nd_tile_ops *counted;

static void count_gemm(int m, int n, int words, const nd_word *a, int64_t lda, const nd_word *b,
                       int64_t ldb, float *c, int64_t ldc, bool add)
{
    atomic_fetch_add(&multiplications, (int64_t)m * n * words);
    counted->gemm(m, n, words, a, lda, b, ldb, c, ldc, add);
}

/* Tiles of `rows` queries and `keys` keys in which some query sees a key. */
static int64_t seen_tiles(const nd_attention *a, nd_tensor first_key, int64_t rows, int64_t keys)
{
    int64_t tiles = 0;
    for (int64_t at = 0; at < a->batch * (a->sq / rows) * (a->sk / keys); at++) {
        const int64_t key0 = at % (a->sk / keys) * keys, block = at / (a->sk / keys);
        const int64_t b = block / (a->sq / rows), q0 = block % (a->sq / rows) * rows;
        bool seen = false;
        for (int64_t i = q0; i < q0 + rows; i++) {
            const int64_t first = ((const int32_t *)first_key.data)[b * a->sq + i];
            const int64_t last = i + a->diag;
            const int64_t least = a->window > 0 ? nd_max(first, last - a->window + 1) : first;
            seen |= nd_max(least, key0) <= nd_min(last, key0 + keys - 1);
        }
        tiles += seen;
    }
    return tiles * a->heads;
}

/* The forward has two products for each piece of 32 keys, the backward five for each tile of 64. */
static void expect_products(const nd_attention *a, const int64_t *begins, int count)
{
    enum { ROWS = 64, PIECE = 32 };
    nd_side side;
    nd_tensor in[ND_ATTEND_INPUTS], results[ND_ATTEND_RESULTS];
    nd_side_open_cpu(&side, 2);
    nd_attend_draw(a, ND_DTYPE_F32, in);
    in[ND_ATTEND_FIRST_KEY] = documents(a, begins, count);
    nd_cpu_context *context = nd_cpu_context_of(&side.stream);
    nd_tile_ops counting = *context->tiles_f32;
    counted = context->tiles_f32;
    counting.gemm = count_gemm;
    context->tiles_f32 = &counting;
    const int64_t forward = 2 * PIECE * seen_tiles(a, in[ND_ATTEND_FIRST_KEY], ROWS, PIECE);
    const int64_t backward = 5 * ROWS * seen_tiles(a, in[ND_ATTEND_FIRST_KEY], ROWS, ROWS);
    multiplications = 0;
    nd_attend(&side, a, in, results);
    cr_expect_eq(multiplications, (forward + backward) * ROWS * a->head_dim,
                 "%d documents: %lld multiplications, %lld of a forward and %lld of a backward",
                 count, (long long)multiplications, (long long)(forward * ROWS * a->head_dim),
                 (long long)(backward * ROWS * a->head_dim));
    context->tiles_f32 = counted;
    nd_side_close(&side);
    nd_case_free();
}

Test(attention_masks, tiles_that_nothing_sees_are_not_multiplied)
{
    static const int64_t one[] = {0}, even[] = {0, 128, 256, 384, 512, 640, 768, 896, 1024, 1152};
    static const int64_t odd[] = {0, 3, 70, 71, 390, 391, 800, 1001, 1279};
    static const nd_attention square = {2, 1280, 1280, 4, 2, 16, 0, 0.25f};
    static const nd_attention narrow = {1, 1280, 1280, 2, 2, 16, 0, 0.25f, 100};
    static const nd_attention behind = {1, 640, 1280, 2, 1, 16, 640, 0.25f, 200};
    expect_products(&square, one, 1);
    expect_products(&square, even, 10);
    expect_products(&square, odd, 9);
    expect_products(&narrow, odd, 9);
    expect_products(&behind, odd, 7);
}

/* A window has the bits of the first keys that it means; first keys of 0 have those of none. */
TEST_EACH_BACKEND(attention_masks, a_window_is_a_first_key)
{
    static const nd_attention plain = {2, 150, 220, 4, 2, 16, 70, 0.25f};
    for (int d = 0; d < 2 * 2; d++) {
        nd_attention a = plain;
        nd_tensor in[ND_ATTEND_INPUTS], want[ND_ATTEND_RESULTS], got[ND_ATTEND_RESULTS];
        nd_attend_draw(&a, d % 2 ? ND_DTYPE_BF16 : ND_DTYPE_F32, in);
        a.window = d / 2 ? 90 : 0;
        nd_attend(&backend->side, &a, in, want);
        in[ND_ATTEND_FIRST_KEY] = nd_random_ids(a.batch * a.sq, 0, 1);
        for (int64_t i = 0; i < a.batch * a.sq && a.window > 0; i++) {
            ((int32_t *)in[ND_ATTEND_FIRST_KEY].data)[i] =
                (int32_t)(i % a.sq + a.diag - a.window + 1);
        }
        a.window = 0;
        nd_attend(&backend->side, &a, in, got);
        for (int r = 0; r < ND_ATTEND_RESULTS; r++) {
            nd_expect_same(backend->name, nd_attend_names[r], got[r], want[r]);
        }
        nd_case_free();
    }
}

Test(attention_masks, same_bits_with_any_number_of_threads)
{
    static const nd_attention cases[] = {{2, 700, 700, 4, 2, 16, 0, 0.25f},
                                         {1, 130, 1200, 2, 1, 64, 1070, 0.125f, 300},
                                         {3, 90, 90, 4, 4, 8, 0, 0.35f, 20}};
    static const int64_t begins[] = {5, 64, 65, 80, 129, 400, 640};
    for (int c = 0; c < 3 * 2; c++) {
        nd_attend_with_all_threads(&cases[c / 2], c % 2 ? ND_DTYPE_BF16 : ND_DTYPE_F32,
                                   documents(&cases[c / 2], begins, 7));
    }
}
