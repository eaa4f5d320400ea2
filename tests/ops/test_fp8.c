// SPDX-License-Identifier: Apache-2.0
/* amax, FP8 scales and codes: every result is the reference's bit for bit. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/ops/conformance.h"
#include "tests/support/forms.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
static const nd_dtype formats[] = {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E5M2};
static const nd_granularity granularities[] = {ND_PER_TENSOR, ND_PER_ROW, ND_PER_COLUMN};

typedef struct shape {
    int64_t rows, columns, gap;
} shape;

static const shape shapes[] = {{1, 1, 0},   {3, 5, 0},     {1, 700, 0},  {70, 3, 4},
                               {64, 64, 0}, {65, 130, 16}, {33, 17, 3},  {5, 1000, 24},
                               {300, 1, 0}, {129, 257, 0}, {2, 20000, 8}};

enum { SHAPES = sizeof shapes / sizeof *shapes };

static int64_t groups_of(nd_granularity granularity, int64_t rows, int64_t columns)
{
    return granularity == ND_PER_TENSOR ? 1 : granularity == ND_PER_ROW ? rows : columns;
}

/* Draws of many sizes, with zeros and, when `special`, infinities and NaN. */
static nd_tensor values(nd_dtype dtype, int64_t rows, int64_t columns, int64_t gap, bool special)
{
    static const float odd[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, -3e38f};
    nd_tensor t = nd_random_2d(dtype, rows, columns, gap, 1.0f);
    for (int64_t i = 0; i < rows * columns; i++) {
        uint64_t draw = nd_rng_u64(77, (uint64_t)(rows * columns), (uint64_t)i);
        float size = exp2f((float)(draw % 24) - 16.0f);
        nd_put(t, i, draw % 29 == 0 ? odd[draw / 29 % (special ? 7 : 2)] : nd_get(t, i) * size);
    }
    return t;
}

static nd_tensor zeros(int64_t n0, int64_t n1)
{
    nd_tensor t = nd_blank_2d(ND_DTYPE_F32, n0, n1, 0);
    memset(t.data, 0, nd_tensor_bytes(t));
    return t;
}

/* amax */

static void amax_once(const nd_backend *backend, nd_tensor x, nd_granularity g, bool merge)
{
    int64_t groups = x.axes == 1 ? 1 : groups_of(g, x.shape[0], x.shape[1]);
    nd_tensor amax = nd_random_1d(ND_DTYPE_F32, groups, 0.5f), result[2];
    for (int64_t i = 0; i < groups; i++) {
        nd_put(amax, i, i % 11 == 10 ? NAN : fabsf(nd_get(amax, i)));
    }
    for (int s = 0; s < 2; s++) {
        result[s] = nd_clone(amax);
        ND_RUN(&backend->sides[s], amax, .amax = result[s].data, .x = x, .granularity = g,
               .merge = merge);
    }
    nd_expect_same(backend->name, "amax", result[1], result[0]);
}

/* A NaN is the amax wherever it lies, and the amax of nothing is 0. */
TEST_EACH_BACKEND(fp8, amax_of_not_a_number_and_of_nothing)
{
    float amax = 7.0f;
    for (int64_t at = 0; at < 301; at += 20) {
        nd_tensor x = nd_random_1d(ND_DTYPE_BF16, 301, 1.0f);
        nd_put(x, at, NAN);
        ND_RUN(&backend->side, amax, .amax = &amax, .x = x, .granularity = ND_PER_TENSOR);
        cr_assert(isnan(amax));
        nd_put(x, at, -INFINITY);
        ND_RUN(&backend->side, amax, .amax = &amax, .x = x, .granularity = ND_PER_TENSOR,
               .merge = true);
        cr_assert(isnan(amax), "a NaN that was there is kept");
        ND_RUN(&backend->side, amax, .amax = &amax, .x = x, .granularity = ND_PER_TENSOR);
        cr_assert(isinf(amax) && amax > 0);
    }
    nd_tensor nothing = nd_tensor_1d(NULL, ND_DTYPE_F32, 0);
    ND_RUN(&backend->side, amax, .amax = &amax, .x = nothing, .merge = true);
    cr_assert(isinf(amax));
    ND_RUN(&backend->side, amax, .amax = &amax, .x = nothing);
    cr_assert(amax == 0.0f);
    nd_case_free();
}

/* scales */

static void scales_once(const nd_backend *backend, int64_t count)
{
    static const float odd[] = {0.0f,     -0.0f, 1e-45f, 1e-13f,     1e-12f,     1.1e-12f, 3e38f,
                                INFINITY, NAN,   448.0f, 447.99997f, 448.00003f, 0.4375f};
    nd_tensor amax = nd_random_1d(ND_DTYPE_F32, count, 3.0f);
    for (int64_t i = 0; i < count; i++) {
        nd_put(amax, i, i < 13 ? odd[i] : fabsf(nd_get(amax, i)));
    }
    for (int flags = 0; flags < 4; flags++) {
        nd_tensor scale[2], inverse[2];
        for (int s = 0; s < 2; s++) {
            scale[s] = nd_clone(amax);
            inverse[s] = nd_clone(amax);
            ND_RUN(&backend->sides[s], fp8_scale, .scale = scale[s].data,
                   .inverse = inverse[s].data, .amax = amax.data, .count = count,
                   .format = formats[flags & 1], .power_of_two = flags & 2);
        }
        nd_expect_same(backend->name, "scale", scale[1], scale[0]);
        nd_expect_same(backend->name, "inverse", inverse[1], inverse[0]);
    }
    nd_case_free();
}

typedef struct delayed {
    nd_tensor amax, limit, scale, inverse;
} delayed;

static nd_fp8_history history_of(const delayed *d, int64_t length, int64_t count)
{
    return (nd_fp8_history){.length = length,
                            .count = count,
                            .amax = d->amax.data,
                            .limit = d->limit.data,
                            .scale = d->scale.data,
                            .inverse = d->inverse.data};
}

/* The amaxes of this step: mostly numbers, and every value that needs care. */
static void new_amaxes(nd_tensor amax, int64_t count, int step)
{
    static const float odd[] = {0.0f, 0.0f, INFINITY, NAN, 1e-44f, 1e-39f};
    for (int64_t i = 0; i < count; i++) {
        uint64_t draw = nd_rng_u64(5, (uint64_t)step, (uint64_t)i);
        nd_put(amax, i, draw % 3 == 0 ? odd[draw / 3 % 6] : (float)(draw % 1000) / 64.0f);
    }
}

static void delayed_once(const nd_backend *backend, int64_t length, int64_t count,
                         nd_amax_algorithm algorithm)
{
    enum { STEPS = 12 };
    delayed sides[2];
    for (int s = 0; s < 2; s++) {
        sides[s] =
            (delayed){zeros(length, count), zeros(1, count), zeros(1, count), zeros(1, count)};
        for (int64_t i = 0; i < count; i++) {
            nd_put(sides[s].limit, i, i % 2 ? 448.0f : 57344.0f / 4.0f);
            nd_put(sides[s].scale, i, 1.0f);
        }
    }
    for (int step = 0; step < STEPS; step++) {
        for (int s = 0; s < 2; s++) {
            nd_fp8_history history = history_of(&sides[s], length, count);
            new_amaxes(sides[s].amax, count, step);
            ND_RUN(&backend->sides[s], fp8_delayed, .history = history, .algorithm = algorithm);
        }
        nd_expect_same(backend->name, "history", sides[1].amax, sides[0].amax);
        nd_expect_same(backend->name, "scale", sides[1].scale, sides[0].scale);
        nd_expect_same(backend->name, "inverse", sides[1].inverse, sides[0].inverse);
    }
    nd_case_free();
}

/* codes */

typedef struct form {
    bool codes, transposed, amax;
} form;

static const form forms[] = {{true, false, false},
                             {false, true, false},
                             {true, true, false},
                             {true, false, true},
                             {true, true, true}};

/* Casts x, rows or a flat shard, on both sides and compares all that is written. */
static void cast_once(const nd_backend *backend, nd_tensor x, nd_dtype format, nd_granularity g,
                      form f, float deviation)
{
    const bool flat = x.axes == 1;
    const int64_t rows = flat ? 1 : x.shape[0], columns = x.shape[flat ? 0 : 1];
    if (f.transposed && !reads_transposed(backend->side.ops, backend->side.device)) {
        return;
    }
    nd_tensor scale = nd_random_1d(ND_DTYPE_F32, groups_of(g, rows, columns), deviation);
    nd_tensor amax = zeros(1, 1);
    nd_tensor plain = nd_blank_2d(format, rows, columns, 5);
    nd_tensor transposed = nd_blank_2d(format, columns, rows, 3), result[2][3];
    for (int64_t i = 0; i < nd_tensor_count(scale) && deviation == 0.0f; i++) {
        nd_put(scale, i, 1.0f);
    }
    for (int s = 0; s < 2; s++) {
        result[s][0] = nd_clone(plain);
        result[s][1] = nd_clone(transposed);
        result[s][2] = nd_clone(amax);
        nd_matrix out = {.scale = scale.data, .granularity = g};
        out.stored = f.codes ? result[s][0] : (nd_tensor){0};
        if (flat) {
            out.stored = nd_tensor_1d(result[s][0].data, format, columns);
        }
        ND_RUN(&backend->sides[s], make_form, .out = out,
               .transposed = f.transposed ? result[s][1] : (nd_tensor){0},
               .amax = f.amax ? result[s][2].data : NULL, .x = x);
    }
    nd_expect_same(backend->name, "codes", result[1][0], result[0][0]);
    nd_expect_same(backend->name, "transposed codes", result[1][1], result[0][1]);
    nd_expect_same(backend->name, "amax", result[1][2], result[0][2]);
}

/* All numbers that BF16 has, NaN and infinities too. */
static nd_tensor every_bf16(void)
{
    nd_tensor x = nd_random_2d(ND_DTYPE_BF16, 256, 256, 7, 1.0f);
    for (int i = 0; i < 65536; i++) {
        ((nd_bf16 *)x.data)[i / 256 * x.stride[0] + i % 256] = (nd_bf16)i;
    }
    return x;
}

/* F32 numbers half-way between two codes, the numbers adjacent to them, and arbitrary bits. */
static nd_tensor f32_near_ties(nd_dtype format)
{
    nd_tensor x = nd_random_2d(ND_DTYPE_F32, 64, 128, 0, 1.0f);
    for (int i = 0; i < 64 * 128; i++) {
        int shift = format == ND_DTYPE_F8_E4M3 ? 20 : 21;
        uint64_t draw = nd_rng_u64(9, 9, (uint64_t)i);
        uint32_t bits = (uint32_t)draw;
        if (i % 4 != 3) {
            /* Half a unit in the last place, for exponents 2^-20 to 2^19, and the adjacent numbers.
             * */
            bits = (bits >> shift << shift) | 1u << (shift - 1);
            bits = (bits & 0x807fffff) | (uint32_t)(107 + draw / 7919 % 40) << 23;
            bits += (uint32_t)(i % 4) - 1;
        }
        memcpy((float *)x.data + i, &bits, sizeof bits);
    }
    return x;
}

/* The ties of the subnormals: odd multiples of half the smallest, and the adjacent numbers. */
static nd_tensor f32_near_subnormal_ties(nd_dtype format)
{
    nd_tensor x = nd_random_2d(ND_DTYPE_F32, 6, 48, 0, 1.0f);
    float half = format == ND_DTYPE_F8_E4M3 ? 0x1p-10f : 0x1p-17f;
    for (int i = 0; i < 6 * 48; i++) {
        float tie = half * (float)(i / 6 - 24);
        nd_put(x, i, i % 3 == 0 ? tie : nextafterf(tie, i % 3 == 1 ? INFINITY : -INFINITY));
    }
    return x;
}

TEST_EACH_BACKEND(fp8, codes_of_every_bf16_number_and_of_ties)
{
    for (int f = 0; f < 2; f++) {
        for (int how = 0; how < 5; how++) {
            cast_once(backend, every_bf16(), formats[f], ND_PER_TENSOR, forms[how], 0.0f);
            cast_once(backend, f32_near_ties(formats[f]), formats[f], ND_PER_TENSOR, forms[how],
                      0.0f);
            cast_once(backend, f32_near_subnormal_ties(formats[f]), formats[f], ND_PER_TENSOR,
                      forms[how], 0.0f);
            nd_case_free();
        }
    }
}

static void transpose_once(const nd_backend *backend, int64_t rows, int64_t columns, int64_t gap)
{
    if (!reads_transposed(backend->side.ops, backend->side.device)) {
        return;
    }
    nd_tensor codes = nd_blank_2d(ND_DTYPE_F8_E5M2, rows, columns, gap);
    nd_tensor out = nd_blank_2d(ND_DTYPE_F8_E5M2, columns, rows, 11), result[2];
    for (int64_t i = 0; i < rows * columns; i++) {
        ((uint8_t *)codes.data)[i / columns * codes.stride[0] + i % columns] =
            (uint8_t)nd_rng_u64(3, 3, (uint64_t)i);
    }
    for (int s = 0; s < 2; s++) {
        result[s] = nd_clone(out);
        ND_RUN(&backend->sides[s], make_form, .transposed = result[s], .x = codes);
    }
    nd_expect_same(backend->name, "transposed", result[1], result[0]);
    nd_case_free();
}

static void count_once(const nd_backend *backend, nd_tensor x, nd_dtype format, nd_granularity g)
{
    int64_t counts[2][2] = {{5, 6}, {5, 6}};
    nd_tensor scale = nd_random_1d(ND_DTYPE_F32, groups_of(g, x.shape[0], x.shape[1]), 50.0f);
    const nd_matrix as = {.format = format, .scale = scale.data, .granularity = g};
    for (int s = 0; s < 2; s++) {
        ND_RUN(&backend->sides[s], fp8_count, .counts = counts[s], .x = x, .as = as);
    }
    for (int i = 0; i < 2; i++) {
        cr_assert(counts[1][i] == counts[0][i], "%s: count %d is %lld, the reference has %lld",
                  backend->name, i, (long long)counts[1][i], (long long)counts[0][i]);
    }
}

static void every_op_once(nd_draw *d, const nd_backend *backend, shape of)
{
    const nd_dtype dtype = dtypes[draw_range(d, 0, 1)], format = formats[draw_range(d, 0, 1)];
    nd_tensor x = values(dtype, of.rows, of.columns, of.gap, draw_once_in(d, 2));
    for (int g = 0; g < 3; g++) {
        amax_once(backend, x, granularities[g], draw_once_in(d, 2));
        count_once(backend, x, format, granularities[g]);
        cast_once(backend, x, format, granularities[g], forms[draw_range(d, 0, 4)], 50.0f);
    }
    const nd_tensor flat = nd_random_1d(dtype, of.rows * of.columns - 1, 1.0f);
    amax_once(backend, flat, ND_PER_TENSOR, draw_once_in(d, 2));
    cast_once(backend, flat, format, ND_PER_TENSOR, forms[0], 17.5f);
    transpose_once(backend, of.rows, of.columns, of.gap);
}

TEST_EACH_DRAW(fp8, drawn)
{
    every_op_once(d, backend, shapes[d->seed % SHAPES]);
    every_op_once(d, backend,
                  (shape){draw_extent(d, 80), draw_extent(d, 300), draw_range(d, 0, 20)});
    scales_once(backend, draw_extent(d, 400));
    for (int algorithm = 0; algorithm < 2; algorithm++) {
        delayed_once(backend, DRAW(d, 1, 2, 3, 5, 40), DRAW(d, 1, 15, 16, 17, draw_extent(d, 60)),
                     algorithm ? ND_AMAX_MAX : ND_AMAX_MOST_RECENT);
    }
}
