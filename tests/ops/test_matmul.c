// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "tests/ops/conformance.h"

/* m, n, k, and elements between rows; with a minus, between those of a and b alone. */
static const int64_t shapes[][4] = {
    {1, 1, 1, 0},
    {1, 33, 17, 0},
    {5, 7, 9, 3},
    {64, 64, 64, 0},
    {65, 40, 130, 8},
    {17, 129, 300, 5},
    {96, 31, 2, 0},
    {1, 16, 512, 0},
    /* one row or column with gaps, which oneDNN 3.7 takes for dense */
    {7, 1, 9, 3},
    {1, 7, 9, 3},
    {1, 1, 5, 2},
    {33, 20, 67, 4},
    /* beyond the tiles in which older instruction sets multiply BF16: rows, columns, k */
    {520, 3, 5, 0},
    {3, 520, 5, 0},
    {3, 5, 1030, 0},
    /* beyond the blocks of our own BF16 product: rows, packed rows, k, columns */
    {1060, 20, 34, 0},
    {490, 12, 1030, 2},
    {13, 70, 2052, 0},
    {7, 300, 1100, 0},
    /* gaps, k odd (so never our own): more rows than are copied at a time */
    {1040, 6, 35, 3},
    {6, 10, 1037, 4},
    {6, 10, 1037, -4},
    /* beyond two of our blocks at once */
    {1060, 130, 4, 0},
    {1060, 2, 1030, 0},
    {490, 530, 4, 0}};

typedef struct types {
    nd_dtype in, out;
} types;

static const types pairs[] = {
    {ND_DTYPE_F32, ND_DTYPE_F32}, {ND_DTYPE_BF16, ND_DTYPE_BF16}, {ND_DTYPE_BF16, ND_DTYPE_F32}};

static void matmul_once(const nd_backend *backend, types t, const int64_t *shape, int flags)
{
    int64_t m = shape[0], n = shape[1], k = shape[2], gap = llabs(shape[3]);
    bool at = flags & 1, bt = flags & 2, few = flags & 8;
    float beta = flags & 4 ? 1.0f : 0.0f;
    nd_tensor a = nd_random_2d(t.in, at ? k : m, at ? m : k, gap, 1.0f);
    nd_tensor b = nd_random_2d(t.in, bt ? n : k, bt ? k : n, gap, 1.0f);
    nd_tensor c = nd_random_2d(t.out, m, n, nd_max(shape[3], 0), 1.0f), result[2];
    if (beta == 0.0f) {
        nd_case_poison(c);
    }
    for (int s = 0; s < 2; s++) {
        result[s] = nd_clone(c);
        ND_RUN(&backend->sides[s], product, .c = result[s], .a = nd_rows(a), .a_transposed = at,
               .b = nd_rows(b), .b_transposed = bt, .beta = beta, .few_rows = few);
    }
    /*
     * k products of size about 1. Each of the k additions errs by half an eps of a partial sum of
     * at most about 4 sqrt(k), and the errors add at random: 2 k eps. One more for the addition of
     * c.
     *
     * A tensor core cuts, rather than rounds, a partial sum after each 16 products: k / 16 eps of
     * the result, all to one side. And cuBLASLt rounds a product to BF16 before it adds a BF16 c:
     * half an eps of at most the result's size and that of c, which is a draw of at most about 4.
     */
    nd_tolerance tolerance = {.absolute = 2.0 * (double)(k + 4) * nd_eps_f32};
    if (nd_has_tensor_cores(backend)) {
        bool rounded = t.out == ND_DTYPE_BF16 && beta != 0.0f;
        tolerance.relative = (double)k / 16.0 * nd_eps_f32 + (rounded ? nd_eps_bf16 / 2.0 : 0.0);
        tolerance.absolute += rounded ? 4.0 * nd_eps_bf16 / 2.0 : 0.0;
    }
    char name[96];
    snprintf(name, sizeof name, "%s to %s matmul (%lld, %lld), k %lld, gap %lld, flags %d",
             nd_dtype_name(t.in), nd_dtype_name(t.out), (long long)m, (long long)n, (long long)k,
             (long long)gap, flags);
    nd_expect_close(backend->name, name, result[1], result[0], tolerance);
    nd_case_free();
}

enum { SMALL_SHAPES = 15, SHAPES = sizeof shapes / sizeof *shapes };

/* With all transposes, types and beta. */
static void check_shapes(const nd_backend *backend, const int64_t (*of)[4], int count,
                         int more_flags)
{
    for (int i = 0; i < count * 8; i++) {
        for (size_t pair = 0; pair < sizeof pairs / sizeof pairs[0]; pair++) {
            matmul_once(backend, pairs[pair], of[i / 8], i % 8 | more_flags);
        }
    }
}

static void check_small(const nd_backend *backend)
{
    check_shapes(backend, shapes, SMALL_SHAPES, 0);
}

Test(matmul, small_shapes_at_each_instruction_set)
{
    nd_each_backend(check_small);
}

Test(matmul, small_shapes_by_onednn)
{
    setenv("ND_CPU_PRODUCTS", "onednn", 1);
    nd_each_backend(check_small);
    unsetenv("ND_CPU_PRODUCTS");
}

TEST_BEST_BACKEND(matmul, large_shapes)
{
    check_shapes(backend, shapes + SMALL_SHAPES, SHAPES - SMALL_SHAPES, 0);
}

/* Around the rows, columns and lanes that the products of few rows take at a time. */
static const int64_t few[][4] = {{1, 1, 1, 0},    {1, 67, 33, 0}, {2, 5, 300, 3},
                                 {8, 131, 70, 1}, {9, 4, 16, 0},  {7, 258, 515, 0}};

TEST_EACH_BACKEND(matmul, few_rows_at_each_instruction_set)
{
    check_shapes(backend, few, sizeof few / sizeof *few, 8);
}

/* A text has the same bits beside one other and beside seven. */
TEST_EACH_BACKEND(matmul, few_rows_do_not_depend_on_each_other)
{
    enum { M = 8, N = 37, K = 83 };
    if (strcmp(backend->side.ops->name, "cpu") != 0) {
        return; /* the order of sums is a backend's own */
    }
    for (size_t pair = 0; pair < sizeof pairs / sizeof *pairs; pair++) {
        nd_tensor a = nd_random_2d(pairs[pair].in, M, K, 0, 1.0f);
        nd_tensor b = nd_random_2d(pairs[pair].in, N, K, 0, 1.0f);
        nd_tensor all = nd_random_2d(pairs[pair].out, M, N, 0, 1.0f), one = nd_clone(all);
        ND_RUN(&backend->side, product, .c = all, .a = nd_rows(a), .b = nd_rows(b),
               .b_transposed = true, .few_rows = true);
        for (int64_t i = 0; i < M; i++) {
            ND_RUN(&backend->side, product, .c = nd_tensor_rows(one, i, 1),
                   .a = nd_rows(nd_tensor_rows(a, i, 1)), .b = nd_rows(b), .b_transposed = true,
                   .few_rows = true);
        }
        cr_expect_eq(memcmp(all.data, one.data, nd_tensor_bytes(all)), 0, "%s, pair %zu",
                     backend->name, pair);
        /* With beta 1, as behind biases, the same sum is added to what is there. */
        ND_RUN(&backend->side, product, .c = one, .a = nd_rows(a), .b = nd_rows(b),
               .b_transposed = true, .beta = 1.0f, .few_rows = true);
        for (int64_t i = 0; i < M * N && pairs[pair].out == ND_DTYPE_F32; i++) {
            const float sum = ((float *)all.data)[i];
            cr_expect_eq(((float *)one.data)[i], sum + sum, "%s, pair %zu: element %ld",
                         backend->name, pair, (long)i);
        }
        nd_case_free();
    }
}

TEST_EACH_DRAW(matmul, drawn)
{
    const int64_t shape[] = {draw_extent(d, 100), draw_extent(d, 100), draw_extent(d, 300),
                             draw_range(d, -8, 8)};
    matmul_once(backend, pairs[draw_range(d, 0, 2)], shape, (int)draw_range(d, 0, 15));
}
