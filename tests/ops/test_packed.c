// SPDX-License-Identifier: Apache-2.0
/* Operands that are kept packed, by a product or by the op that makes them: products with such a
 * form have the bits of products without, read it until it is cleared, and stay in its memory. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "runtime/base/math.h"
#include "tests/ops/conformance.h"

/* c of a product with this form, or without one. */
static nd_tensor product_with(const nd_backend *backend, const nd_matmul_args *args, nd_tensor c,
                              nd_packed_form *form)
{
    nd_stream stream = backend->side.stream;
    nd_matmul_args x = *args;
    x.c = nd_clone(c);
    x.b_packed = form;
    ND_OK_OR_FAIL(backend->side.ops->matmul(&stream, &x));
    return x.c;
}

/* A form is read until the caller clears `made`, and gives the bits of a product without it. */
static void packed_once(const nd_backend *backend, nd_dtype out, const int64_t *shape, int flags)
{
    const nd_ops *ops = backend->side.ops;
    const int64_t m = shape[0], n = shape[1], k = shape[2], gap = llabs(shape[3]);
    const bool at = flags & 1, bt = flags & 2;
    const size_t bytes = ops->matmul_packed_bytes(backend->side.device, 1, k, n, bt, ND_DTYPE_BF16);
    if (bytes == 0) {
        return;
    }
    const nd_tensor b = nd_random_2d(ND_DTYPE_BF16, bt ? n : k, bt ? k : n, gap, 1.0f);
    const nd_tensor next = nd_random_2d(ND_DTYPE_BF16, bt ? n : k, bt ? k : n, gap, 1.0f);
    const nd_tensor c = nd_random_2d(out, m, n, nd_max(shape[3], 0), 1.0f);
    const nd_matmul_args old = {.a = nd_random_2d(ND_DTYPE_BF16, at ? k : m, at ? m : k, gap, 1.0f),
                                .a_transposed = at,
                                .b = b,
                                .b_transposed = bt,
                                .beta = flags & 4 ? 1.0f : 0.0f};
    nd_matmul_args new = old;
    nd_packed_form form = {.memory = aligned_alloc(64, (bytes + 63) / 64 * 64)};
    cr_assert_not_null(form.memory);
    memset(form.memory, 0xff, bytes); /* NaN, which no result may show */
    new.b = next;
    const nd_tensor want = product_with(backend, &old, c, NULL);
    nd_expect_same(backend->name, "making a form", product_with(backend, &old, c, &form), want);
    cr_assert(form.made, "%s: the form is not made", backend->name);
    nd_expect_same(backend->name, "reading a form", product_with(backend, &new, c, &form), want);
    form.made = false;
    nd_expect_same(backend->name, "making it anew", product_with(backend, &new, c, &form),
                   product_with(backend, &new, c, NULL));
    free(form.memory);
    nd_case_free();
}

/* m, n, k and elements between rows: tails of rows and columns, one panel and several, several
 * blocks of k, of rows and of columns. */
static const int64_t shapes[][4] = {{1, 1, 2, 0},   {5, 64, 30, 3},    {7, 65, 64, 0},
                                    {96, 31, 2, 5}, {3, 130, 2052, 0}, {1060, 65, 4, 0},
                                    {490, 5, 4, 0}, {1, 513, 34, 1},   {66, 257, 34, 2},
                                    {5, 7, 9, 3},   {6, 10, 1037, 4}};

static void check_packed(const nd_side *ref, const nd_backend *backend)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int flags = 0; flags < 8; flags++) {
            const bool bf16 = (i + (size_t)flags / 2) % 2;
            packed_once(backend, bf16 ? ND_DTYPE_BF16 : ND_DTYPE_F32, shapes[i], flags);
        }
    }
}

Test(packed, forms_give_the_same_bits)
{
    nd_each_backend(check_packed);
}

/* Codes without NaN: neither format has one below 0x78. */
static nd_fp8 random_codes(nd_dtype format, int64_t rows, int64_t columns, float *scales)
{
    const nd_tensor ids = nd_random_ids(rows * columns, 0, 0x78);
    nd_fp8 x = {
        .codes = nd_blank_2d(format, rows, columns, 0), .scale = scales, .inverse = scales + 1};
    for (int64_t i = 0; i < rows * columns; i++) {
        ((uint8_t *)x.codes.data)[i] = (uint8_t)(((int32_t *)ids.data)[i] ^ (i % 3 ? 0 : 0x80));
    }
    return x;
}

/* A form holds codes without scales: it serves another scale too. */
static void packed_codes_once(const nd_backend *backend, nd_dtype format, bool b_transposed)
{
    enum { M = 37, N = 131, K = 1058 };
    const nd_ops *ops = backend->side.ops;
    const size_t bytes =
        ops->matmul_packed_bytes(backend->side.device, M, K, N, b_transposed, format);
    float scales[] = {4.0f, 0.25f};
    nd_stream stream = backend->side.stream;
    if (bytes == 0) {
        return;
    }
    nd_packed_form form = {.memory = aligned_alloc(64, (bytes + 63) / 64 * 64)};
    cr_assert_not_null(form.memory);
    memset(form.memory, 0xff, bytes);
    nd_matmul_fp8_args args = {
        .a = random_codes(ND_DTYPE_F8_E4M3, M, K, scales),
        .b = random_codes(format, b_transposed ? N : K, b_transposed ? K : N, scales),
        .b_transposed = b_transposed};
    for (int i = 0; i < 2; i++) {
        const nd_tensor want = nd_random_2d(ND_DTYPE_BF16, M, N, 0, 0.0f), got = nd_clone(want);
        scales[1] *= 3.0f;
        args.c = want;
        args.b_packed = NULL;
        ND_OK_OR_FAIL(ops->matmul_fp8(&stream, &args));
        args.c = got;
        args.b_packed = &form;
        ND_OK_OR_FAIL(ops->matmul_fp8(&stream, &args));
        cr_assert(form.made, "%s: the form is not made", backend->name);
        nd_expect_same(backend->name, "a product of codes", got, want);
    }
    free(form.memory);
    nd_case_free();
}

static void check_packed_codes(const nd_side *ref, const nd_backend *backend)
{
    for (int i = 0; i < 4; i++) {
        packed_codes_once(backend, i & 1 ? ND_DTYPE_F8_E4M3 : ND_DTYPE_F8_E5M2, i & 2);
    }
}

Test(packed, codes_give_the_same_bits)
{
    nd_each_backend(check_packed_codes);
}

/* Beside many rows the packing of b is not worth its memory, unless it is asked for. */
static void check_packed_rows(const nd_side *ref, const nd_backend *backend)
{
    enum { MANY = 1 << 20 };
    const nd_side *side = &backend->side;
    const size_t few = side->ops->matmul_packed_bytes(side->device, 1, 64, 64, true, ND_DTYPE_BF16);
    cr_expect_eq(side->ops->matmul_packed_bytes(side->device, MANY, 64, 64, true, ND_DTYPE_BF16),
                 0);
    ((nd_cpu_context *)side->device->native)->packing = ND_CPU_PACKING_KEPT;
    cr_expect_eq(side->ops->matmul_packed_bytes(side->device, MANY, 64, 64, true, ND_DTYPE_BF16),
                 few);
}

Test(packed, forms_are_kept_for_few_rows)
{
    nd_each_backend(check_packed_rows);
}

/* A form is of the bytes that are asked for, and there is one wherever our own products are. */
static void check_packed_bytes(const nd_side *ref, const nd_backend *backend)
{
    enum { M = 3, N = 70, K = 66 };
    const nd_ops *ops = backend->side.ops;
    const size_t bytes =
        ops->matmul_packed_bytes(backend->side.device, M, K, N, true, ND_DTYPE_BF16);
    cr_expect_eq(ref->ops->matmul_packed_bytes(ref->device, M, K, N, true, ND_DTYPE_BF16), 0);
    cr_expect_eq(ops->matmul_packed_bytes(backend->side.device, M, K, N, true, ND_DTYPE_F32), 0);
    if (strcmp(ops->name, "cpu") != 0) {
        return;
    }
    cr_expect_eq(bytes > 0, ((nd_cpu_context *)backend->side.device->native)->gemm != NULL, "%s",
                 backend->name);
    if (bytes > 0) {
        nd_stream stream = backend->side.stream;
        unsigned char *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
        nd_packed_form form = {.memory = memory};
        cr_assert_not_null(memory);
        memset(memory + bytes, 0x5a, 64);
        ND_OK_OR_FAIL(ND_CALL(ops, &stream, matmul, .c = nd_random_2d(ND_DTYPE_F32, M, N, 0, 0.0f),
                              .a = nd_random_2d(ND_DTYPE_BF16, M, K, 0, 1.0f),
                              .b = nd_random_2d(ND_DTYPE_BF16, N, K, 0, 1.0f), .b_transposed = true,
                              .b_packed = &form));
        for (size_t i = bytes; i < (bytes + 63) / 64 * 64 + 1; i++) {
            cr_assert_eq(memory[i], 0x5a, "%s: byte %zu behind a form", backend->name, i - bytes);
        }
        free(memory);
        nd_case_free();
    }
}

Test(packed, forms_have_the_bytes_that_are_asked_for)
{
    nd_each_backend(check_packed_bytes);
}

/* activations */

/* The forms of an activation (rows, columns), which an op makes, in memory full of NaN. */
typedef struct activation {
    nd_packed_form as_a, as_b;
} activation;

static activation blank_forms(const nd_side *side, int64_t rows, int64_t columns)
{
    activation x = {0};
    for (int use = 0; use < 2; use++) {
        nd_packed_form *form = use ? &x.as_b : &x.as_a;
        const size_t bytes = side->ops->activation_packed_bytes(side->device, rows, columns,
                                                                ND_DTYPE_BF16, use == 1);
        form->memory = aligned_alloc(64, nd_round_up_bytes(bytes, 64));
        cr_assert_not_null(form->memory);
        memset(form->memory, 0xff, bytes);
    }
    return x;
}

static void free_forms(activation *x)
{
    free(x->as_a.memory);
    free(x->as_b.memory);
}

/* y = x w^T and dw = dy^T x have the same bits with the forms as with the rows. */
static void expect_products(const nd_backend *backend, const char *what, nd_tensor rows,
                            const activation *x)
{
    enum { OUT = 21 };
    const nd_ops *ops = backend->side.ops;
    nd_stream stream = backend->side.stream;
    const int64_t n = rows.shape[0], K = rows.shape[1];
    const nd_tensor w = nd_random_2d(ND_DTYPE_BF16, OUT, K, 0, 1.0f);
    const nd_tensor dy = nd_random_2d(ND_DTYPE_BF16, n, OUT, 0, 1.0f);
    nd_tensor y[2] = {nd_random_2d(ND_DTYPE_BF16, n, OUT, 0, 0.0f)};
    nd_tensor dw[2] = {nd_random_2d(ND_DTYPE_F32, OUT, K, 0, 0.0f)};
    nd_packed_form as_b = x->as_b;
    y[1] = nd_clone(y[0]);
    dw[1] = nd_clone(dw[0]);
    cr_assert(x->as_a.made && x->as_b.made, "%s, %s: forms are not made", backend->name, what);
    for (int packed = 0; packed < 2; packed++) {
        nd_tensor x_rows = rows;
        x_rows.data = packed ? NULL : rows.data;
        ND_OK_OR_FAIL(ND_CALL(ops, &stream, matmul, .c = y[packed], .a = x_rows, .b = w,
                              .b_transposed = true, .a_packed = packed ? &x->as_a : NULL));
        ND_OK_OR_FAIL(ND_CALL(ops, &stream, matmul, .c = dw[packed], .a = dy, .a_transposed = true,
                              .b = x_rows, .b_packed = packed ? &as_b : NULL));
    }
    nd_expect_same(backend->name, what, y[1], y[0]);
    nd_expect_same(backend->name, what, dw[1], dw[0]);
}

/* An op is called once for its rows and once for their forms, in place of rows or beside them. */
static void norm_packs(const nd_backend *backend, int64_t n, int64_t C, bool add, bool stored)
{
    const nd_ops *ops = backend->side.ops;
    nd_stream stream = backend->side.stream;
    const nd_tensor x = nd_random_2d(ND_DTYPE_BF16, n, C, 3, 1.0f), y = nd_clone(x);
    const nd_tensor delta = add ? nd_random_2d(ND_DTYPE_BF16, n, C, 0, 1.0f) : (nd_tensor){0};
    const nd_tensor weight = nd_random_1d(ND_DTYPE_BF16, C, 1.0f);
    nd_tensor sum[2], rstd[2], packed = nd_clone(x);
    activation forms = blank_forms(&backend->side, n, C);
    packed.data = stored ? packed.data : NULL;
    for (int i = 0; i < 2; i++) {
        sum[i] = add ? nd_clone(x) : (nd_tensor){0};
        rstd[i] = i ? nd_clone(rstd[0]) : nd_random_1d(ND_DTYPE_F32, n, 1.0f);
        ND_OK_OR_FAIL(
            ND_CALL(ops, &stream, rmsnorm_fwd, .y = i ? packed : y, .sum = sum[i], .rstd = rstd[i],
                    .x = x, .delta = delta, .weight = weight, .eps = 1e-5f,
                    .fuse = {.as_a = i ? &forms.as_a : NULL, .as_b = i ? &forms.as_b : NULL}));
    }
    expect_products(backend, "rmsnorm_fwd", y, &forms);
    nd_expect_same(backend->name, "rmsnorm_fwd rstd", rstd[1], rstd[0]);
    if (add) {
        nd_expect_same(backend->name, "rmsnorm_fwd sum", sum[1], sum[0]);
    }
    if (stored) {
        nd_expect_same(backend->name, "rmsnorm_fwd, stored too", packed, y);
    }
    free_forms(&forms);
    nd_case_free();
}

static void swiglu_packs(const nd_backend *backend, int64_t n, int64_t F, bool stored)
{
    const nd_ops *ops = backend->side.ops;
    nd_stream stream = backend->side.stream;
    const nd_tensor gate = nd_random_2d(ND_DTYPE_BF16, n, F, 5, 2.0f), out = nd_clone(gate);
    const nd_tensor up = nd_random_2d(ND_DTYPE_BF16, n, F, 5, 1.0f);
    nd_tensor packed = nd_clone(gate);
    activation forms = blank_forms(&backend->side, n, F);
    packed.data = stored ? packed.data : NULL;
    for (int i = 0; i < 2; i++) {
        ND_OK_OR_FAIL(
            ND_CALL(ops, &stream, swiglu_fwd, .out = i ? packed : out, .gate = gate, .up = up,
                    .fuse = {.as_a = i ? &forms.as_a : NULL, .as_b = i ? &forms.as_b : NULL}));
    }
    expect_products(backend, "swiglu_fwd", out, &forms);
    if (stored) {
        nd_expect_same(backend->name, "swiglu_fwd, stored too", packed, out);
    }
    free_forms(&forms);
    nd_case_free();
}

/* Also the delta of the backward, which reads the outputs from their form. */
static void attention_packs(const nd_backend *backend, const nd_attention *a)
{
    const nd_side *side = &backend->side;
    nd_stream stream = side->stream;
    const int64_t n = a->batch * a->sq, width = a->heads * a->head_dim;
    const int64_t of_q[] = {a->batch, a->sq, a->heads, a->head_dim};
    const int64_t of_k[] = {a->batch, a->sk, a->kv_heads, a->head_dim};
    const nd_tensor q = nd_random(ND_DTYPE_BF16, 4, of_q, 0, 1.0f), out = nd_clone(q);
    const nd_tensor k = nd_random(ND_DTYPE_BF16, 4, of_k, 0, 1.0f);
    const nd_tensor v = nd_random(ND_DTYPE_BF16, 4, of_k, 0, 1.0f);
    const nd_tensor dout = nd_random(ND_DTYPE_BF16, 4, of_q, 0, 1.0f);
    nd_tensor lse[2], delta[2], none = out;
    activation forms = blank_forms(side, n, width);
    void *scratch = aligned_alloc(
        256, nd_round_up_bytes(side->ops->attention_scratch(side->device, a, ND_DTYPE_BF16, false),
                               256));
    cr_assert_not_null(scratch);
    none.data = NULL;
    for (int i = 0; i < 2; i++) {
        lse[i] = i ? nd_clone(lse[0]) : nd_random_1d(ND_DTYPE_F32, n * a->heads, 1.0f);
        delta[i] = i ? nd_clone(delta[0]) : nd_random_1d(ND_DTYPE_F32, n * a->heads, 1.0f);
        ND_OK_OR_FAIL(
            ND_CALL(side->ops, &stream, attention_fwd, .attention = *a, .out = i ? none : out,
                    .lse = lse[i], .q = q, .k = k, .v = v,
                    .fuse = {.as_a = i ? &forms.as_a : NULL, .as_b = i ? &forms.as_b : NULL},
                    .scratch = scratch));
        ND_OK_OR_FAIL(ND_CALL(side->ops, &stream, attention_delta, .attention = *a,
                              .delta = delta[i], .out = i ? none : out, .dout = dout,
                              .out_packed = i ? &forms.as_b : NULL));
    }
    nd_expect_same(backend->name, "attention_fwd lse", lse[1], lse[0]);
    nd_expect_same(backend->name, "attention_delta", delta[1], delta[0]);
    expect_products(backend, "attention_fwd", nd_tensor_2d(out.data, ND_DTYPE_BF16, n, width),
                    &forms);
    free(scratch);
    free_forms(&forms);
    nd_case_free();
}

/* Whole blocks of rows and parts of one; several pieces of columns; odd ones. */
static void check_activations(const nd_side *ref, const nd_backend *backend)
{
    static const int64_t extents[][2] = {{1, 2}, {31, 64}, {64, 1056}, {70, 33}, {33, 2080}};
    static const nd_attention attentions[] = {
        {.batch = 1, .sq = 70, .sk = 70, .heads = 2, .kv_heads = 1, .head_dim = 64},
        {.batch = 2, .sq = 96, .sk = 96, .heads = 3, .kv_heads = 3, .head_dim = 32},
        {.batch = 1, .sq = 33, .sk = 50, .heads = 2, .kv_heads = 2, .head_dim = 256, .diag = 17},
        {.batch = 2, .sq = 64, .sk = 64, .heads = 4, .kv_heads = 2, .head_dim = 16},
        {.batch = 2, .sq = 40, .sk = 40, .heads = 2, .kv_heads = 2, .head_dim = 32}};
    const nd_side *side = &backend->side;
    const bool packs =
        side->ops->activation_packed_bytes(side->device, 32, 32, ND_DTYPE_BF16, true) > 0;
    const bool tiles = strstr(backend->name, "amx");
    cr_expect_eq(packs, tiles, "%s", backend->name);
    cr_expect_eq(side->ops->activation_packed_bytes(side->device, 32, 32, ND_DTYPE_F32, true), 0);
    for (int i = 0; packs && i < (int)(sizeof extents / sizeof *extents); i++) {
        norm_packs(backend, extents[i][0], extents[i][1], i % 2, i % 3 == 0);
        swiglu_packs(backend, extents[i][0], extents[i][1], i % 3 == 1);
    }
    for (int i = 0; i < (int)(sizeof attentions / sizeof *attentions); i++) {
        nd_attention a = attentions[i];
        a.scale = 0.25f;
        /* Heads and sequences that are no whole parts are left to the products. */
        const bool whole = a.head_dim % 32 == 0 && (a.batch == 1 || a.sq % 32 == 0);
        cr_expect_eq(side->ops->attention_packs(side->device, &a, ND_DTYPE_BF16), packs && whole,
                     "%s, attention %d", backend->name, i);
        if (packs && whole) {
            attention_packs(backend, &a);
        }
    }
}

Test(packed, activations_give_the_same_bits)
{
    nd_each_backend(check_activations);
}

Test(packed, forms_may_be_switched_off)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    setenv("ND_CPU_PACKED", "anew", 1);
    ND_OK_OR_FAIL(nd_device_open_cpu(1, &device));
    ND_OK_OR_FAIL(nd_ops_cpu(device, &ops));
    cr_expect_eq(ops->matmul_packed_bytes(device, 1, 64, 64, true, ND_DTYPE_BF16), 0);
    cr_expect_eq(ops->activation_packed_bytes(device, 64, 64, ND_DTYPE_BF16, true), 0);
    nd_device_close(device);
    setenv("ND_CPU_PACKED", "sometimes", 1);
    ND_OK_OR_FAIL(nd_device_open_cpu(1, &device));
    cr_expect_eq(nd_ops_cpu(device, &ops), ND_ERR_CONFIG);
    cr_expect_str_eq(nd_error_last()->message,
                     "ND_CPU_PACKED is \"sometimes\"; it may be kept or anew");
    nd_device_close(device);
    unsetenv("ND_CPU_PACKED");
}
