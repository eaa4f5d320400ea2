// SPDX-License-Identifier: Apache-2.0
/*
 * FP8 casts, scales and one linear of each recipe against torchao, delayed scales against a table
 * worked out from the formulas (scripts/goldens/fp8.py, delayed.py). Codes and scales must be equal
 * bit for bit, by the reference and by the CPU backend.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "runtime/tensor/fp8.h"
#include "tests/parity/golden_reader.h"
#include "tests/support/tempdir.h"

enum { M = 32, K = 48, N = 64, STEPS = 30, BACKENDS = 2 };

static nd_golden *golden;
static nd_device *device;
static nd_stream stream;
static const nd_ops *backends[BACKENDS];
static const nd_dtype formats[] = {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E5M2};
static const char *const format_names[] = {"e4m3", "e5m2"};

static void set_up(void)
{
    assert_ok(nd_device_open_cpu(2, &device));
    assert_ok(device->table->stream_init(device, &stream));
    assert_ok(nd_ops_ref(&backends[0]));
    assert_ok(nd_ops_cpu(device, &backends[1]));
}

static void tear_down(void)
{
    device->table->stream_fini(&stream);
    nd_device_close(device);
    nd_golden_close(golden);
}

TestSuite(fp8_op_goldens, .init = set_up, .fini = tear_down);

/* "prefix.name" without a buffer of the caller's; good until the eighth next call. */
static const char *join(const char *prefix, const char *name)
{
    static char texts[8][128];
    static int next;
    char text[sizeof texts[0]];
    snprintf(text, sizeof text, "%s.%s", prefix, name);
    return memcpy(texts[next++ % 8], text, sizeof text);
}

static void *new_memory(size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 256) / 256 * 256);
    cr_assert(p != NULL);
    memset(p, 0x55, bytes);
    return p;
}

/* casts and scales */

static void compare_codes(const char *name, const uint8_t *want, const uint8_t *got,
                          nd_dtype format, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        bool nan = isnan(nd_fp8_to_f32(format, want[i])) && isnan(nd_fp8_to_f32(format, got[i]));
        cr_assert(nan || got[i] == want[i], "%s[%lld] is 0x%02x, the golden 0x%02x", name,
                  (long long)i, got[i], want[i]);
    }
}

static void expect_codes(const char *name, const uint8_t *got, nd_dtype format, int64_t count)
{
    compare_codes(name, nd_golden_u8(golden, name, count), got, format, count);
}

static void check_cast(const nd_ops *ops, nd_tensor x, nd_dtype format, const char *name,
                       const uint8_t *want)
{
    float one = 1.0f;
    int64_t count = x.shape[0];
    uint8_t *codes = new_memory((size_t)count);
    nd_matrix out = {.stored = nd_tensor_1d(codes, format, count), .scale = &one};
    assert_ok(ND_CALL(ops, &stream, make_form, .out = out, .x = x));
    compare_codes(name, want, codes, format, count);
    free(codes);
}

/* The codes of all BF16 values, which the golden has once for each run of equal ones. */
static const uint8_t *codes_of_all(const char *format_name)
{
    static uint8_t all[65536];
    const char *name = join(format_name, "runs");
    const int64_t count = nd_golden_find(golden, name)->shape[0];
    const int32_t *begins = nd_golden_i32(golden, name, count);
    const uint8_t *codes = nd_golden_u8(golden, join(format_name, "bf16"), count);
    for (int64_t run = 0; run < count; run++) {
        const int32_t end = run + 1 < count ? begins[run + 1] : 65536;
        memset(all + begins[run], codes[run], (size_t)(end - begins[run]));
    }
    return all;
}

Test(fp8_op_goldens, codes_of_every_bf16_value_and_of_f32_ties)
{
    static nd_bf16 every[65536];
    assert_ok(nd_golden_open("fp8/casts.safetensors", &golden));
    for (int i = 0; i < 65536; i++) {
        every[i] = (nd_bf16)i;
    }
    const nd_safetensors_tensor *values = nd_golden_find(golden, "f32.values");
    cr_assert(values != NULL);
    int64_t count = values->shape[0];
    float *f32 = (float *)(uintptr_t)nd_golden_f32(golden, "f32.values", count);
    for (int b = 0; b < BACKENDS; b++) {
        for (int f = 0; f < 2; f++) {
            check_cast(backends[b], nd_tensor_1d(every, ND_DTYPE_BF16, 65536), formats[f],
                       format_names[f], codes_of_all(format_names[f]));
            const char *name = join(format_names[f], "f32");
            check_cast(backends[b], nd_tensor_1d(f32, ND_DTYPE_F32, count), formats[f], name,
                       nd_golden_u8(golden, name, count));
        }
    }
}

static void expect_scales(const char *name, const float *got, int64_t count)
{
    const float *want = nd_golden_f32(golden, name, count);
    for (int64_t i = 0; i < count; i++) {
        cr_assert(isnan(want[i]) ? isnan(got[i]) : got[i] == want[i],
                  "%s[%lld] is %.9g, the golden %.9g", name, (long long)i, (double)got[i],
                  (double)want[i]);
    }
}

Test(fp8_op_goldens, scales)
{
    assert_ok(nd_golden_open("fp8/casts.safetensors", &golden));
    int64_t count = nd_golden_find(golden, "scale.amax")->shape[0];
    const float *amax = nd_golden_f32(golden, "scale.amax", count);
    float *scale = new_memory((size_t)count * 4), *inverse = new_memory((size_t)count * 4);
    for (int i = 0; i < 4 * BACKENDS; i++) {
        const nd_ops *ops = backends[i / 4];
        const char *name = join("scale", format_names[i & 1]);
        bool power_of_two = i & 2;
        assert_ok(ND_CALL(ops, &stream, fp8_scale, .scale = scale, .inverse = inverse, .amax = amax,
                          .count = count, .format = formats[i & 1], .power_of_two = power_of_two));
        expect_scales(power_of_two ? join(name, "pow2") : name, scale, count);
        for (int64_t k = 0; k < count; k++) {
            cr_assert(isnan(scale[k]) || inverse[k] == 1.0f / scale[k]);
        }
    }
    free(scale);
    free(inverse);
}

/* delayed scaling */

/* The six sequences of amaxes, side by side as six tensors, of one case ("max.4.margin2.e4m3"). */
static void check_delayed(const nd_ops *ops, nd_amax_algorithm algorithm, int64_t length,
                          int margin, int format)
{
    static const char *const sequences[] = {"smooth", "zeros", "infinity", "nan", "tiny", "spikes"};
    enum { COUNT = 6 };
    float scale[COUNT], inverse[COUNT], limit[COUNT];
    float *amax = new_memory((size_t)length * COUNT * sizeof *amax);
    char name[64];
    snprintf(name, sizeof name, "%s.%d.margin%d.%s",
             algorithm == ND_AMAX_MAX ? "max" : "most_recent", (int)length, margin,
             format_names[format]);
    memset(amax, 0, (size_t)length * COUNT * sizeof *amax);
    for (int i = 0; i < COUNT; i++) {
        scale[i] = inverse[i] = 1.0f;
        limit[i] = ldexpf(nd_fp8_max(formats[format]), -margin);
    }
    nd_fp8_history history = {length, COUNT, amax, limit, scale, inverse};
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < COUNT; i++) {
            amax[i] = nd_golden_f32(golden, join("amax", sequences[i]), STEPS)[step];
        }
        assert_ok(ND_CALL(ops, &stream, fp8_delayed, .history = history, .algorithm = algorithm));
        for (int i = 0; i < COUNT; i++) {
            float want = nd_golden_f32(golden, join(name, sequences[i]), STEPS)[step];
            cr_assert(scale[i] == want && inverse[i] == 1.0f / want && amax[i] == 0.0f,
                      "%s.%s, step %d: %.9g, the table has %.9g", name, sequences[i], step,
                      (double)scale[i], (double)want);
        }
    }
    free(amax);
}

Test(fp8_op_goldens, delayed_scales)
{
    static const int64_t lengths[] = {1, 4, 1024};
    assert_ok(nd_golden_open("fp8/delayed.safetensors", &golden));
    for (int i = 0; i < 6 * BACKENDS; i++) {
        const nd_ops *ops = backends[i / 6];
        nd_amax_algorithm algorithm = i % 2 ? ND_AMAX_MAX : ND_AMAX_MOST_RECENT;
        check_delayed(ops, algorithm, lengths[i % 3], 0, 0);
        check_delayed(ops, algorithm, lengths[i % 3], 0, 1);
        check_delayed(ops, algorithm, lengths[i % 3], 2, 0);
    }
}

/* one linear of each recipe */

/* An operand of a product: a tensor, how it is cast, and the golden's name for the cast. */
typedef struct cast {
    const char *source, *name;
    nd_dtype format;
    nd_granularity granularity;
} cast;

typedef struct product {
    const char *result;
    cast a, b;
    bool a_transposed, b_transposed;
} product;

static nd_tensor source_of(const char *name)
{
    int64_t rows = name[0] == 'w' ? N : M, columns = name[0] == 'd' ? N : K;
    void *data = (void *)(uintptr_t)nd_golden_bf16(golden, name, rows * columns);
    return nd_tensor_2d(data, ND_DTYPE_BF16, rows, columns);
}

/* Casts, compares scale and codes with the golden's; the caller frees with free_cast. */
static nd_matrix make_cast(const nd_ops *ops, const char *recipe, const cast *c, bool power_of_two)
{
    nd_tensor x = source_of(c->source);
    int64_t rows = x.shape[0], columns = x.shape[1];
    int64_t groups = c->granularity == ND_PER_TENSOR ? 1
                     : c->granularity == ND_PER_ROW  ? rows
                                                     : columns;
    const char *name = join(recipe, c->name);
    float *amax = new_memory((size_t)groups * sizeof *amax);
    nd_matrix out = {
        .stored = nd_tensor_2d(new_memory((size_t)(rows * columns)), c->format, rows, columns),
        .scale = new_memory((size_t)groups * sizeof(float)),
        .inverse = new_memory((size_t)groups * sizeof(float)),
        .granularity = c->granularity};
    assert_ok(ND_CALL(ops, &stream, amax, .amax = amax, .x = x, .granularity = c->granularity));
    assert_ok(ND_CALL(ops, &stream, fp8_scale, .scale = out.scale, .inverse = out.inverse,
                      .amax = amax, .count = groups, .format = c->format,
                      .power_of_two = power_of_two));
    assert_ok(ND_CALL(ops, &stream, make_form, .out = out, .x = x));
    expect_scales(join(name, "scale"), out.scale, groups);
    expect_codes(join(name, "codes"), out.stored.data, c->format, rows * columns);
    free(amax);
    return out;
}

static void free_cast(nd_matrix x)
{
    free(x.stored.data);
    free(x.scale);
    free(x.inverse);
}

/*
 * Both sides round an F32 sum of at most 64 products to BF16, in other orders and with the scales
 * before or after the sum. The sums differ by less than 64 x 2^-23 of the largest result's size,
 * after which they may round to adjacent values, 2^-7 apart.
 */
static void expect_result(const char *name, const nd_bf16 *got, int64_t count)
{
    const nd_bf16 *want = nd_golden_bf16(golden, name, count);
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)nd_bf16_to_f32(want[i])));
    }
    for (int64_t i = 0; i < count; i++) {
        double g = nd_bf16_to_f32(got[i]), w = nd_bf16_to_f32(want[i]);
        cr_assert(fabs(g - w) <= 0x1p-7 * fabs(w) + 64 * 0x1p-23 * largest,
                  "%s[%lld] is %.9g, the golden %.9g", name, (long long)i, g, w);
    }
}

static void check_product(const nd_ops *ops, const char *recipe, const product *p,
                          bool power_of_two)
{
    nd_matrix a = make_cast(ops, recipe, &p->a, power_of_two);
    nd_matrix b = make_cast(ops, recipe, &p->b, power_of_two);
    int64_t m = a.stored.shape[p->a_transposed], k = a.stored.shape[!p->a_transposed];
    int64_t n = b.stored.shape[!p->b_transposed];
    nd_bf16 *c = new_memory((size_t)(m * n) * sizeof *c);
    void *scratch = new_memory(ops->product_scratch(device, m, n, k, ND_DTYPE_BF16));
    assert_ok(ND_CALL(ops, &stream, product, .c = nd_tensor_2d(c, ND_DTYPE_BF16, m, n), .a = a,
                      .a_transposed = p->a_transposed, .b = b, .b_transposed = p->b_transposed,
                      .scratch = scratch));
    expect_result(join(recipe, p->result), c, m * n);
    free(scratch);
    free(c);
    free_cast(a);
    free_cast(b);
}

#define E4M3   ND_DTYPE_F8_E4M3
#define E5M2   ND_DTYPE_F8_E5M2
#define TENSOR ND_PER_TENSOR
#define ROW    ND_PER_ROW
#define COLUMN ND_PER_COLUMN

Test(fp8_op_goldens, linears_of_every_recipe)
{
    static const struct {
        const char *name;
        bool power_of_two;
        int count;
        product products[3];
    } recipes[] = {
        {"tensorwise",
         false,
         3,
         {{"y", {"x", "x", E4M3, TENSOR}, {"w", "w", E4M3, TENSOR}, false, true},
          {"dx", {"dy", "dy", E5M2, TENSOR}, {"w", "w_dx", E4M3, TENSOR}, false, false},
          {"dw", {"dy", "dy_dw", E5M2, TENSOR}, {"x", "x_dw", E4M3, TENSOR}, true, false}}},
        {"rowwise",
         true,
         3,
         {{"y", {"x", "x", E4M3, ROW}, {"w", "w", E4M3, ROW}, false, true},
          {"dx", {"dy", "dy", E4M3, ROW}, {"w", "w_dx", E4M3, COLUMN}, false, false},
          {"dw", {"dy", "dy_dw", E4M3, COLUMN}, {"x", "x_dw", E4M3, COLUMN}, true, false}}},
        {"rowwise_with_gw_hp",
         true,
         2,
         {{"y", {"x", "x", E4M3, ROW}, {"w", "w", E4M3, ROW}, false, true},
          {"dx", {"dy", "dy", E4M3, ROW}, {"w", "w_dx", E4M3, TENSOR}, false, false}}}};
    assert_ok(nd_golden_open("fp8/linear.safetensors", &golden));
    for (int b = 0; b < BACKENDS; b++) {
        for (int i = 0; i < 3; i++) {
            for (int k = 0; k < recipes[i].count; k++) {
                check_product(backends[b], recipes[i].name, &recipes[i].products[k],
                              recipes[i].power_of_two);
            }
        }
    }
}

/* That of the recipe rowwise_with_gw_hp is a product in BF16. */
Test(fp8_op_goldens, a_weight_gradient_in_bf16)
{
    assert_ok(nd_golden_open("fp8/linear.safetensors", &golden));
    for (int b = 0; b < BACKENDS; b++) {
        nd_bf16 dw[N * K];
        assert_ok(ND_CALL(backends[b], &stream, product, .c = nd_tensor_2d(dw, ND_DTYPE_BF16, N, K),
                          .a = nd_rows(source_of("dy")), .a_transposed = true,
                          .b = nd_rows(source_of("x"))));
        expect_result("rowwise_with_gw_hp.dw", dw, N * K);
    }
}

/* With FP8 all-gather a weight's codes come from its F32 master. */
Test(fp8_op_goldens, codes_of_a_master_weight)
{
    assert_ok(nd_golden_open("fp8/linear.safetensors", &golden));
    float *master = (float *)(uintptr_t)nd_golden_f32(golden, "master.w", N * K);
    nd_tensor w = nd_tensor_1d(master, ND_DTYPE_F32, N * K);
    for (int b = 0; b < BACKENDS; b++) {
        float amax = 0.0f, scale, inverse;
        uint8_t codes[N * K];
        /* The weight in two shards, as two ranks have it. */
        nd_tensor shards[2] = {nd_tensor_1d(master, ND_DTYPE_F32, 1000),
                               nd_tensor_1d(master + 1000, ND_DTYPE_F32, N * K - 1000)};
        for (int s = 0; s < 2; s++) {
            assert_ok(ND_CALL(backends[b], &stream, amax, .amax = &amax, .x = shards[s],
                              .granularity = ND_PER_TENSOR, .merge = true));
        }
        assert_ok(ND_CALL(backends[b], &stream, fp8_scale, .scale = &scale, .inverse = &inverse,
                          .amax = &amax, .count = 1, .format = ND_DTYPE_F8_E4M3));
        expect_scales("master.scale", &scale, 1);
        nd_matrix out = {.stored = nd_tensor_1d(codes, ND_DTYPE_F8_E4M3, N * K), .scale = &scale};
        assert_ok(ND_CALL(backends[b], &stream, make_form, .out = out, .x = w));
        expect_codes("master.codes", codes, ND_DTYPE_F8_E4M3, N * K);
    }
}
