// SPDX-License-Identifier: Apache-2.0
/* Operands that are kept packed: products with such a form have the bits of products without, read
 * it until it is cleared, and stay in its memory. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "runtime/base/math.h"
#include "tests/ops/conformance.h"
#include "tests/support/forms.h"

/* c of a product with this form, or without one. */
static nd_tensor product_with(const nd_backend *backend, const nd_product_args *args, nd_tensor c,
                              nd_kept_form *form)
{
    nd_stream stream = backend->side.stream;
    nd_product_args x = *args;
    x.c = nd_clone(c);
    x.b.kept = form;
    ND_OK_OR_FAIL(backend->side.ops->product(&stream, &x));
    return x.c;
}

/* A form is read until the caller clears `made`, and gives the bits of a product without it. */
static void packed_once(const nd_backend *backend, nd_dtype out, const int64_t *shape, int flags)
{
    const nd_ops *ops = backend->side.ops;
    const int64_t m = shape[0], n = shape[1], k = shape[2], gap = llabs(shape[3]);
    const bool at = flags & 1, bt = flags & 2;
    const size_t bytes = kept_bytes(ops, backend->side.device, 1, k, n, bt, ND_DTYPE_BF16);
    if (bytes == 0) {
        return;
    }
    const nd_tensor b = nd_random_2d(ND_DTYPE_BF16, bt ? n : k, bt ? k : n, gap, 1.0f);
    const nd_tensor next = nd_random_2d(ND_DTYPE_BF16, bt ? n : k, bt ? k : n, gap, 1.0f);
    const nd_tensor c = nd_random_2d(out, m, n, nd_max(shape[3], 0), 1.0f);
    const nd_tensor a = nd_random_2d(ND_DTYPE_BF16, at ? k : m, at ? m : k, gap, 1.0f);
    const nd_product_args old = {.a = nd_rows(a),
                                 .a_transposed = at,
                                 .b = nd_rows(b),
                                 .b_transposed = bt,
                                 .beta = flags & 4 ? 1.0f : 0.0f};
    nd_product_args new = old;
    nd_kept_form form = {.memory = nd_case_memory(bytes)};
    new.b = nd_rows(next);
    const nd_tensor want = product_with(backend, &old, c, NULL);
    nd_expect_same(backend->name, "making a form", product_with(backend, &old, c, &form), want);
    cr_assert(form.made, "%s: the form is not made", backend->name);
    nd_expect_same(backend->name, "reading a form", product_with(backend, &new, c, &form), want);
    form.made = false;
    nd_expect_same(backend->name, "making it anew", product_with(backend, &new, c, &form),
                   product_with(backend, &new, c, NULL));
    nd_case_free();
}

/* m, n, k and elements between rows: tails of rows and columns, one panel and several, several
 * blocks of k, of rows and of columns. */
static const int64_t shapes[][4] = {{1, 1, 2, 0},   {5, 64, 30, 3},    {7, 65, 64, 0},
                                    {96, 31, 2, 5}, {3, 130, 2052, 0}, {1060, 65, 4, 0},
                                    {490, 5, 4, 0}, {1, 513, 34, 1},   {66, 257, 34, 2},
                                    {5, 7, 9, 3},   {6, 10, 1037, 4}};

TEST_EACH_BACKEND(packed, forms_give_the_same_bits)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int flags = 0; flags < 8; flags++) {
            const bool bf16 = (i + (size_t)flags / 2) % 2;
            packed_once(backend, bf16 ? ND_DTYPE_BF16 : ND_DTYPE_F32, shapes[i], flags);
        }
    }
}

/* Codes without NaN: neither format has one below 0x78. */
static nd_matrix random_codes(nd_dtype format, int64_t rows, int64_t columns, float *scales)
{
    const nd_tensor ids = nd_random_ids(rows * columns, 0, 0x78);
    nd_matrix x = {
        .stored = nd_blank_2d(format, rows, columns, 0), .scale = scales, .inverse = scales + 1};
    for (int64_t i = 0; i < rows * columns; i++) {
        ((uint8_t *)x.stored.data)[i] = (uint8_t)(((int32_t *)ids.data)[i] ^ (i % 3 ? 0 : 0x80));
    }
    return x;
}

/* A form holds codes without scales: it serves another scale too. */
static void packed_codes_once(const nd_backend *backend, nd_dtype format, bool b_transposed)
{
    enum { M = 37, N = 131, K = 1058 };
    const nd_ops *ops = backend->side.ops;
    const size_t bytes = kept_bytes(ops, backend->side.device, M, K, N, b_transposed, format);
    float scales[] = {4.0f, 0.25f};
    nd_stream stream = backend->side.stream;
    if (bytes == 0) {
        return;
    }
    nd_kept_form form = {.memory = nd_case_memory(bytes)};
    nd_product_args args = {
        .a = random_codes(ND_DTYPE_F8_E4M3, M, K, scales),
        .b = random_codes(format, b_transposed ? N : K, b_transposed ? K : N, scales),
        .b_transposed = b_transposed};
    for (int i = 0; i < 2; i++) {
        const nd_tensor want = nd_random_2d(ND_DTYPE_BF16, M, N, 0, 0.0f), got = nd_clone(want);
        scales[1] *= 3.0f;
        args.c = want;
        args.b.kept = NULL;
        ND_OK_OR_FAIL(ops->product(&stream, &args));
        args.c = got;
        args.b.kept = &form;
        ND_OK_OR_FAIL(ops->product(&stream, &args));
        cr_assert(form.made, "%s: the form is not made", backend->name);
        nd_expect_same(backend->name, "a product of codes", got, want);
    }
    nd_case_free();
}

TEST_EACH_BACKEND(packed, codes_give_the_same_bits)
{
    for (int i = 0; i < 4; i++) {
        packed_codes_once(backend, i & 1 ? ND_DTYPE_F8_E4M3 : ND_DTYPE_F8_E5M2, i & 2);
    }
}

/* Beside many rows the packing of b is not worth its memory, unless it is asked for. */
TEST_EACH_BACKEND(packed, forms_are_kept_for_few_rows)
{
    enum { MANY = 1 << 20 };
    const nd_side *side = &backend->side;
    const size_t few = kept_bytes(side->ops, side->device, 1, 64, 64, true, ND_DTYPE_BF16);
    cr_expect_eq(kept_bytes(side->ops, side->device, MANY, 64, 64, true, ND_DTYPE_BF16), 0);
    ((nd_cpu_context *)side->device->native)->packing = ND_CPU_PACKING_KEPT;
    cr_expect_eq(kept_bytes(side->ops, side->device, MANY, 64, 64, true, ND_DTYPE_BF16), few);
}

/* There is a form wherever our own products are. */
TEST_EACH_BACKEND(packed, forms_are_of_our_own_products)
{
    enum { M = 3, N = 70, K = 66 };
    const nd_ops *ops = backend->side.ops;
    const size_t bytes = kept_bytes(ops, backend->side.device, M, K, N, true, ND_DTYPE_BF16);
    cr_expect_eq(kept_bytes(backend->ref.ops, backend->ref.device, M, K, N, true, ND_DTYPE_BF16),
                 0);
    cr_expect_eq(kept_bytes(ops, backend->side.device, M, K, N, true, ND_DTYPE_F32), 0);
    if (strcmp(ops->name, "cpu") != 0) {
        return;
    }
    cr_expect_eq(bytes > 0, ((nd_cpu_context *)backend->side.device->native)->gemm != NULL, "%s",
                 backend->name);
}

Test(packed, forms_may_be_switched_off)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    setenv("ND_CPU_PACKED", "anew", 1);
    ND_OK_OR_FAIL(nd_device_open_cpu(1, &device));
    ND_OK_OR_FAIL(nd_ops_cpu(device, &ops));
    cr_expect_eq(kept_bytes(ops, device, 1, 64, 64, true, ND_DTYPE_BF16), 0);
    nd_device_close(device);
    setenv("ND_CPU_PACKED", "sometimes", 1);
    ND_OK_OR_FAIL(nd_device_open_cpu(1, &device));
    cr_expect_eq(nd_ops_cpu(device, &ops), ND_ERR_CONFIG);
    cr_expect_str_eq(nd_error_last()->message,
                     "ND_CPU_PACKED is \"sometimes\"; it may be kept or anew");
    nd_device_close(device);
    unsetenv("ND_CPU_PACKED");
}
