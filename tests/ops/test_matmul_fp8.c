// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/dnnl_matmul.h"
#include "runtime/tensor/fp8.h"
#include "tests/ops/conformance.h"
#include "tests/support/forms.h"

typedef struct shape {
    int64_t m, n, k, gap;
} shape;

static const shape shapes[] = {{1, 1, 1, 0},    {1, 33, 17, 0},    {5, 7, 9, 3},
                               {64, 64, 64, 0}, {65, 40, 130, 8},  {17, 129, 300, 5},
                               {96, 31, 2, 0},  {300, 48, 64, 16}, {600, 20, 530, 0}};

enum { SHAPES = sizeof shapes / sizeof *shapes };

/* The origin of the scales of an operand. */
typedef enum scaling { TENSOR, POWERS_PER_LINE, ANY_PER_LINE, SCALINGS } scaling;

typedef struct operand {
    nd_matrix fp8;
    bool transposed;
} operand;

/* A random matrix cast by the reference: op(it) is (rows, columns), its lines being the axis that
 * is not summed. */
static operand cast_operand(const nd_side *ref, int64_t rows, int64_t columns, bool first,
                            int variant, scaling how, int64_t gap)
{
    operand o = {.transposed = variant & 1};
    nd_dtype format = variant & 2 ? ND_DTYPE_F8_E5M2 : ND_DTYPE_F8_E4M3;
    int64_t r = o.transposed ? columns : rows, c = o.transposed ? rows : columns;
    nd_granularity line = first != o.transposed ? ND_PER_ROW : ND_PER_COLUMN;
    o.fp8.granularity = how == TENSOR ? ND_PER_TENSOR : line;
    int64_t groups = how == TENSOR ? 1 : line == ND_PER_ROW ? r : c;
    nd_tensor x = nd_random_2d(ND_DTYPE_BF16, r, c, 0, 1.0f);
    nd_tensor amax = nd_random_1d(ND_DTYPE_F32, groups, 1.0f);
    o.fp8.stored = nd_blank_2d(format, r, c, gap);
    o.fp8.scale = nd_random_1d(ND_DTYPE_F32, groups, 1.0f).data;
    o.fp8.inverse = nd_random_1d(ND_DTYPE_F32, groups, 1.0f).data;
    ND_RUN(ref, amax, .amax = amax.data, .x = x, .granularity = o.fp8.granularity);
    ND_RUN(ref, fp8_scale, .scale = o.fp8.scale, .inverse = o.fp8.inverse, .amax = amax.data,
           .count = groups, .format = format, .power_of_two = how == POWERS_PER_LINE);
    ND_RUN(ref, make_form, .out = o.fp8, .x = x);
    return o;
}

static void *scratch_of(const nd_side *side, int64_t m, int64_t n, int64_t k)
{
    return nd_case_memory(side->ops->product_scratch(side->device, m, n, k, ND_DTYPE_BF16));
}

static void multiply_once(const nd_backend *backend, const shape *of, int variant, scaling ha,
                          scaling hb)
{
    int64_t m = of->m, n = of->n, k = of->k, gap = of->gap;
    float beta = variant & 16 ? 1.0f : 0.0f;
    nd_dtype out = variant & 32 ? ND_DTYPE_BF16 : ND_DTYPE_F32;
    /* One of the two may be E5M2. */
    int va = variant & 3, vb = variant >> 2 & 3;
    vb = va & 2 ? vb & 1 : vb;
    operand a = cast_operand(&backend->ref, m, k, true, va, ha, gap);
    operand b = cast_operand(&backend->ref, k, n, false, vb, hb, gap);
    nd_tensor c = nd_random_2d(out, m, n, gap, 1.0f), result[2];
    if (beta == 0.0f) {
        nd_case_poison(c);
    }
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        result[s] = nd_clone(c);
        ND_RUN(side, product, .c = result[s], .a = a.fp8, .a_transposed = a.transposed, .b = b.fp8,
               .b_transposed = b.transposed, .beta = beta, .scratch = scratch_of(side, m, n, k));
    }
    /*
     * As for matmul, k dequantised products of size about 1, each addition erring by half an eps of
     * a partial sum of at most about 4 sqrt(k): 2 k eps. Three more roundings of the whole for the
     * factors and one for c.
     */
    nd_tolerance tolerance = {.relative = 3.0 * nd_eps_f32,
                              .absolute = 2.0 * (double)(k + 4) * nd_eps_f32};
    nd_expect_close(backend->name, "matmul_fp8", result[1], result[0], tolerance);
    nd_case_free();
}

/* Each code times 1: widening is exact, and NaN and infinity arrive. */
TEST_EACH_BACKEND(matmul_fp8, every_code)
{
    float one = 1.0f;
    for (int f = 0; f < 4; f++) {
        nd_dtype format = f & 1 ? ND_DTYPE_F8_E5M2 : ND_DTYPE_F8_E4M3;
        bool left = f & 2;
        nd_tensor codes = nd_blank_2d(format, left ? 256 : 1, left ? 1 : 256, 0);
        nd_tensor unit = nd_blank_2d(ND_DTYPE_F8_E4M3, 1, 1, 0);
        nd_tensor c = nd_random_2d(ND_DTYPE_F32, codes.shape[0], codes.shape[1], 0, 1.0f);
        for (int i = 0; i < 256; i++) {
            ((uint8_t *)codes.data)[i] = (uint8_t)i;
        }
        *(uint8_t *)unit.data = 0x38; /* 1.0 */
        nd_matrix x = {.stored = codes, .scale = &one, .inverse = &one};
        nd_matrix y = {.stored = unit, .scale = &one, .inverse = &one};
        ND_RUN(&backend->side, product, .c = c, .a = left ? x : y, .b = left ? y : x,
               .scratch = scratch_of(&backend->side, c.shape[0], c.shape[1], 1));
        for (int i = 0; i < 256; i++) {
            float got = nd_get(c, i), want = nd_fp8_to_f32(format, (uint8_t)i);
            cr_assert(isnan(want) ? isnan(got) : got == want, "%s: code %d is %g, not %g",
                      backend->name, i, (double)got, (double)want);
        }
        nd_case_free();
    }
}

/* c = a b with a or b uncast, and with the codes that the backend's own make_form makes of it. */
static void multiply_uncast(const nd_backend *backend, operand x, nd_tensor values, operand other,
                            bool first, float beta, nd_tensor c[2])
{
    nd_matrix cast = x.fp8, uncast = x.fp8;
    uncast.stored = values;
    uncast.format = x.fp8.stored.dtype;
    ND_RUN(&backend->side, make_form, .out = cast, .x = values);
    for (int s = 0; s < 2; s++) {
        nd_matrix of_x = s ? uncast : cast;
        ND_RUN(&backend->side, product, .c = c[s], .a = first ? of_x : other.fp8,
               .a_transposed = first ? x.transposed : other.transposed,
               .b = first ? other.fp8 : of_x,
               .b_transposed = first ? other.transposed : x.transposed, .beta = beta);
    }
}

/* Numbers whose scales current scaling could have found: none beyond the largest code, which some
 * have. */
static nd_tensor values_in_range(const nd_matrix *x, int64_t gap)
{
    const int64_t rows = x->stored.shape[0], columns = x->stored.shape[1];
    nd_tensor values = nd_random_2d(ND_DTYPE_BF16, rows, columns, gap, 1.5f);
    const float most = nd_fp8_max(x->stored.dtype);
    for (int64_t i = 0; i < rows * columns; i++) {
        const int64_t group = x->granularity == ND_PER_ROW      ? i / columns
                              : x->granularity == ND_PER_COLUMN ? i % columns
                                                                : 0;
        const float scale = x->scale[group], value = nd_get(values, i);
        if (fabsf(value * scale) > most) {
            nd_put(values, i, copysignf(most / scale, value));
        }
    }
    return values;
}

static bool casts(const nd_backend *backend)
{
    return products_cast(backend->side.ops, backend->side.device);
}

/* Operands that the product casts give the bits that their codes give. */
TEST_EACH_BACKEND(matmul_fp8, operands_cast_by_the_product)
{
    if (!casts(backend)) {
        return;
    }
    for (int c = 0; c < SHAPES * 8 * SCALINGS; c++) {
        const int64_t m = shapes[c % SHAPES].m, n = shapes[c % SHAPES].n, k = shapes[c % SHAPES].k;
        const int variant = c / SHAPES % 8;
        const bool first = variant & 4;
        const scaling how = (scaling)(c / SHAPES / 8);
        const int64_t gap = shapes[c % SHAPES].gap;
        operand x = first ? cast_operand(&backend->ref, m, k, true, variant & 3, how, gap)
                          : cast_operand(&backend->ref, k, n, false, variant & 3, how, gap);
        const scaling of_other = (scaling)(c % SCALINGS);
        operand other = first ? cast_operand(&backend->ref, k, n, false, 0, of_other, gap)
                              : cast_operand(&backend->ref, m, k, true, 0, of_other, gap);
        nd_tensor values = values_in_range(&x.fp8, gap);
        nd_tensor result[2] = {nd_random_2d(c % 2 ? ND_DTYPE_BF16 : ND_DTYPE_F32, m, n, gap, 1.0f)};
        result[1] = nd_clone(result[0]);
        if (c % 4 >= 2) { /* both are cast by the product */
            other.fp8.stored = values_in_range(&other.fp8, gap);
            other.fp8.format = ND_DTYPE_F8_E4M3;
        }
        multiply_uncast(backend, x, values, other, first, c % 3 ? 1.0f : 0.0f, result);
        nd_expect_same(backend->name, "c", result[1], result[0]);
        nd_case_free();
    }
}

/* Every BF16 number that a scale leaves in the range of codes, times 1. */
TEST_EACH_BACKEND(matmul_fp8, every_number_cast_by_the_product)
{
    static const float scales[] = {1.0f, 3.3f, 0x1p-9f, 0x1p120f, 0x1p-120f, 0.0f, NAN};
    enum { NUMBERS = 1 << 16, SCALES = sizeof scales / sizeof *scales };
    for (int i = 0; casts(backend) && i < 4 * SCALES; i++) {
        const bool first = i & 1;
        float scale = scales[i / 4], one = 1.0f;
        const int64_t rows = first ? NUMBERS : 1, columns = first ? 1 : NUMBERS;
        nd_tensor values = nd_blank_2d(ND_DTYPE_BF16, rows, columns, 0), c[2];
        operand x = {.fp8 = {.scale = &scale, .inverse = &one}}, unit = x;
        x.fp8.stored = nd_blank_2d(i & 2 ? ND_DTYPE_F8_E5M2 : ND_DTYPE_F8_E4M3, rows, columns, 0);
        unit.fp8.stored = nd_blank_2d(ND_DTYPE_F8_E4M3, 1, 1, 0);
        *(uint8_t *)unit.fp8.stored.data = 0x38; /* 1.0 */
        for (int number = 0; number < NUMBERS; number++) {
            ((nd_bf16 *)values.data)[number] = (nd_bf16)number;
        }
        c[0] = nd_blank_2d(ND_DTYPE_F32, rows, columns, 0);
        c[1] = nd_clone(c[0]);
        multiply_uncast(backend, x, values, unit, first, 0.0f, c);
        for (int number = 0; number < NUMBERS; number++) {
            const float got = nd_get(c[1], number), want = nd_get(c[0], number);
            if (fabsf(nd_get(values, number) * scale) > nd_fp8_max(x.fp8.stored.dtype)) {
                continue;
            }
            cr_assert(isnan(want) ? isnan(got) : memcmp(&got, &want, sizeof got) == 0,
                      "%s: %s of BF16 %04x times %g is %g, not %g", backend->name,
                      nd_dtype_name(x.fp8.stored.dtype), number, (double)scale, (double)got,
                      (double)want);
        }
        nd_case_free();
    }
}

/* An operand in parts, and the other one, x, which the product casts too. As b of y = x w^T the
 * parts are rows of w, as a of dw = dy^T x columns of dy. */
typedef struct parts_case {
    const nd_backend *backend;
    bool weights;
    int64_t k, all, gap;
    nd_dtype format;
    float beta;
    nd_matrix x, parts;
    nd_tensor before; /* c */
} parts_case;

static nd_tensor lines_of(nd_tensor all, bool rows, int64_t at, int64_t count)
{
    return rows ? nd_tensor_rows(all, at, count) : nd_tensor_columns(all, at, count);
}

static void multiply_parts(const parts_case *t, nd_tensor c, nd_matrix x, nd_matrix parts,
                           nd_kept_form *kept)
{
    const nd_side *side = &t->backend->side;
    const bool weights = t->weights;
    parts.kept = kept;
    ND_RUN(side, product, .c = c, .a = weights ? x : parts, .a_transposed = !weights,
           .b = weights ? parts : x, .b_transposed = weights, .beta = t->beta,
           .scratch = scratch_of(side, c.shape[0], c.shape[1], t->k));
}

/* c by a product for each part, whose numbers and scales it draws. */
static nd_tensor multiply_one_by_one(parts_case *t, const int64_t *lines)
{
    nd_tensor c = nd_clone(t->before), scale = nd_random_1d(ND_DTYPE_F32, ND_FP8_PARTS, 1.0f);
    int64_t at = 0;
    t->parts = (nd_matrix){.stored = t->weights ? nd_blank_2d(ND_DTYPE_BF16, t->all, t->k, t->gap)
                                                : nd_blank_2d(ND_DTYPE_BF16, t->k, t->all, t->gap),
                           .format = t->format,
                           .scale = scale.data,
                           .inverse = nd_clone(scale).data};
    for (int p = 0; p < ND_FP8_PARTS && lines[p] > 0; at += lines[p++]) {
        const int variant = 1 | (t->format == ND_DTYPE_F8_E5M2 ? 2 : 0);
        operand part =
            t->weights
                ? cast_operand(&t->backend->ref, t->k, lines[p], false, variant, TENSOR, t->gap)
                : cast_operand(&t->backend->ref, lines[p], t->k, true, variant, TENSOR, t->gap);
        const nd_tensor values = values_in_range(&part.fp8, t->gap);
        nd_matrix one = {.stored = lines_of(t->parts.stored, t->weights, at, lines[p]),
                         .format = t->format,
                         .scale = part.fp8.scale,
                         .inverse = part.fp8.inverse};
        for (int64_t i = 0; i < nd_tensor_count(values); i++) {
            nd_put(one.stored, i, nd_get(values, i));
        }
        t->parts.scale[p] = *one.scale;
        t->parts.inverse[p] = *one.inverse;
        t->parts.lines[t->parts.parts++] = lines[p];
        multiply_parts(t, lines_of(c, !t->weights, at, lines[p]), t->x, one, NULL);
    }
    return c;
}

/* Weights that are kept from one product to the next. */
static void check_kept_parts(const parts_case *t, nd_tensor want)
{
    const nd_side *side = &t->backend->side;
    const size_t kept = kept_bytes(side->ops, side->device, 1, t->k, t->all, true, t->format);
    if (t->weights && kept > 0) {
        nd_kept_form form = {.memory = nd_case_memory(kept)};
        for (int i = 0; i < 2; i++) {
            const nd_tensor c = nd_clone(t->before);
            multiply_parts(t, c, t->x, t->parts, &form);
            nd_expect_same(t->backend->name, "c of kept weights", c, want);
        }
    }
}

static void check_parts_of(const nd_backend *backend, bool weights, int variant)
{
    static const int64_t lines[][ND_FP8_PARTS] = {
        {1, 1, 0}, {40, 7, 33}, {32, 64, 32}, {300, 20, 0}, {5, 800, 70}};
    const int64_t *of = lines[variant % 5], all = of[0] + of[1] + of[2];
    const int64_t k = 1 + variant * 97 % 1600, others = 1 + variant * 31 % 90, gap = variant % 3;
    const nd_dtype type = variant % 2 ? ND_DTYPE_BF16 : ND_DTYPE_F32;
    operand x = weights ? cast_operand(&backend->ref, others, k, true, 0, TENSOR, gap)
                        : cast_operand(&backend->ref, k, others, false, 0, TENSOR, gap);
    parts_case t = {.backend = backend,
                    .weights = weights,
                    .k = k,
                    .all = all,
                    .gap = gap,
                    .format = weights || variant % 7 == 0 ? ND_DTYPE_F8_E4M3 : ND_DTYPE_F8_E5M2,
                    .beta = variant % 4 < 2 ? 1.0f : 0.0f,
                    .x = x.fp8};
    t.x.stored = values_in_range(&x.fp8, gap);
    t.x.format = ND_DTYPE_F8_E4M3;
    t.before = weights ? nd_random_2d(type, others, all, gap, 1.0f)
                       : nd_random_2d(type, all, others, gap, 1.0f);
    const nd_tensor want = multiply_one_by_one(&t, of), c = nd_clone(t.before);
    multiply_parts(&t, c, t.x, t.parts, NULL);
    nd_expect_same(backend->name, weights ? "y" : "dw", c, want);
    check_kept_parts(&t, want);
    nd_case_free();
}

TEST_EACH_BACKEND(matmul_fp8, parts_give_the_bits_of_a_product_for_each)
{
    for (int i = 0; casts(backend) && i < 40; i++) {
        check_parts_of(backend, i % 2, i / 2);
    }
}

/* A NaN or infinite scale reaches the result; one that is no small power of two is applied without
 * loss. */
TEST_BEST_BACKEND(matmul_fp8, odd_scales)
{
    static const float inverses[] = {NAN, INFINITY, 0x1p-100f, 0x1p100f, 0x1p-140f, 0.0f, 0x1p64f};
    for (int i = 0; i < 7; i++) {
        operand a = cast_operand(&backend->ref, 48, 32, true, 0, POWERS_PER_LINE, 0);
        operand b = cast_operand(&backend->ref, 32, 16, false, 0, TENSOR, 0);
        nd_tensor result[2];
        a.fp8.inverse[5] = inverses[i];
        *b.fp8.inverse = 0.5f;
        for (int s = 0; s < 2; s++) {
            const nd_side *side = &backend->sides[s];
            result[s] = s ? nd_clone(result[0]) : nd_random_2d(ND_DTYPE_F32, 48, 16, 0, 1.0f);
            ND_RUN(side, product, .c = result[s], .a = a.fp8, .b = b.fp8,
                   .scratch = scratch_of(side, 48, 16, 32));
        }
        /* The codes' sums are exact in F32; a subnormal result may be lost. */
        nd_expect_close(backend->name, "matmul_fp8", result[1], result[0],
                        (nd_tolerance){.relative = 64.0 * nd_eps_f32, .absolute = 1e-38});
        nd_case_free();
    }
}

TEST_BEST_BACKEND(matmul_fp8, no_rows)
{
    operand a = cast_operand(&backend->ref, 4, 8, true, 0, TENSOR, 0),
            b = cast_operand(&backend->ref, 8, 3, false, 0, TENSOR, 0);
    nd_tensor c = nd_random_2d(ND_DTYPE_F32, 4, 3, 0, 1.0f), before = nd_clone(c);
    a.fp8.stored = nd_tensor_rows(a.fp8.stored, 0, 0);
    ND_RUN(&backend->side, product, .c = nd_tensor_rows(c, 0, 0), .a = a.fp8, .b = b.fp8);
    nd_expect_same(backend->name, "c", c, before);
    nd_case_free();
}

/*
 * oneDNN has a fallback, "ref", that is thousands of times slower than its other implementations;
 * no product may get it.
 */
Test(matmul_fp8, every_product_has_a_quick_implementation)
{
    nd_dnnl *dnnl;
    if (nd_dnnl_effective_isa() < ND_CPU_ISA_AVX512_BF16) {
        return; /* oneDNN multiplies in F32 only */
    }
    ND_OK_OR_FAIL(nd_dnnl_create(&dnnl));
    for (int c = 0; c < 16 * 4; c++) {
        static const int64_t extents[4][3] = {
            {1024, 512, 1408}, {96, 48, 32}, {256, 1408, 512}, {17, 5, 33}};
        const int64_t *e = extents[c / 16];
        nd_dnnl_product p = {.m = e[0],
                             .n = e[1],
                             .k = e[2],
                             .ldc = e[1],
                             .a_transposed = c & 1,
                             .b_transposed = c & 2,
                             .accumulate = c & 4,
                             .in = ND_DTYPE_BF16,
                             .out = c & 8 ? ND_DTYPE_F32 : ND_DTYPE_BF16};
        p.lda = p.a_transposed ? p.m : p.k;
        p.ldb = p.b_transposed ? p.k : p.n;
        char name[64];
        ND_OK_OR_FAIL(nd_dnnl_implementation(dnnl, &p, name));
        cr_assert(strncmp(name, "ref", 3) != 0, "case %d: %s", c, name);
    }
    nd_dnnl_destroy(dnnl);
}

TEST_EACH_DRAW(matmul_fp8, drawn)
{
    const shape drawn = {draw_extent(d, 100), draw_extent(d, 100), draw_extent(d, 300),
                         draw_range(d, 0, 20)};
    for (int i = 0; i < 4; i++) {
        multiply_once(backend, i > 0 ? &shapes[d->seed % SHAPES] : &drawn,
                      (int)draw_range(d, 0, 63), (scaling)draw_range(d, 0, SCALINGS - 1),
                      (scaling)draw_range(d, 0, SCALINGS - 1));
    }
}
