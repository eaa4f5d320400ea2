// SPDX-License-Identifier: Apache-2.0
/*
 * kernels/ref against PyTorch. The goldens are exact to half a unit in the last place (made in
 * F64), so a tolerance is what F32 rounding in the op itself can add up to: `roundings` x u x the
 * largest magnitude of the result, u = 2^-24, with the count of roundings in the longest chain
 * explained at each call. A wrong formula is off by many orders more.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "kernels/rope.h"
#include "tests/parity/golden_reader.h"
#include "tests/support/tempdir.h"

static const double U = 5.9604644775390625e-08; /* 2^-24 */
static nd_golden *golden;
static nd_device *device;
static nd_stream stream;
static const nd_ops *ops;

static void set_up(void)
{
    assert_ok(nd_golden_open("ops/ops.safetensors", &golden));
    assert_ok(nd_device_open_cpu(1, &device));
    assert_ok(device->table->stream_init(device, &stream));
    assert_ok(nd_ops_ref(&ops));
}

static void tear_down(void)
{
    device->table->stream_fini(&stream);
    nd_device_close(device);
    nd_golden_close(golden);
}

TestSuite(op_goldens, .init = set_up, .fini = tear_down);

static float *f32(const char *name)
{
    return (float *)(uintptr_t)nd_golden_f32(golden, name, -1); /* inputs are only read */
}

static int32_t *i32(const char *name)
{
    return (int32_t *)(uintptr_t)nd_golden_i32(golden, name, -1);
}

/* Views of golden inputs, and of fresh outputs filled with a value that no correct op leaves. */
static nd_tensor in1(const char *name, int64_t n)
{
    return nd_tensor_1d(f32(name), ND_DTYPE_F32, n);
}

static nd_tensor in2(const char *name, int64_t n, int64_t m)
{
    return nd_tensor_2d(f32(name), ND_DTYPE_F32, n, m);
}

static float *fresh(int64_t count, float value)
{
    float *p = malloc((size_t)count * sizeof(*p));
    for (int64_t i = 0; i < count; i++) {
        p[i] = value;
    }
    return p;
}

static nd_tensor out1(int64_t n)
{
    return nd_tensor_1d(fresh(n, 1e30f), ND_DTYPE_F32, n);
}

static nd_tensor out2(int64_t n, int64_t m)
{
    return nd_tensor_2d(fresh(n * m, 1e30f), ND_DTYPE_F32, n, m);
}

/* Compares with the golden and frees the output. Infinities must be equal. */
static void expect(nd_tensor got, const char *name, double roundings)
{
    int64_t count = nd_tensor_count(got);
    const float *want = nd_golden_f32(golden, name, count), *value = got.data;
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = isfinite(want[i]) ? fmax(largest, fabs((double)want[i])) : largest;
    }
    for (int64_t i = 0; i < count; i++) {
        bool good = isfinite(want[i]) ? fabs((double)value[i] - want[i]) <= roundings * U * largest
                                      : value[i] == want[i];
        cr_assert(good, "%s[%lld] is %.9g, the golden %.9g, allowed %.2g apart", name, (long long)i,
                  (double)value[i], (double)want[i], roundings * U * largest);
    }
    free(got.data);
}

Test(op_goldens, rmsnorm)
{
    enum { N = 7, C = 24 };
    nd_tensor y = out2(N, C), sum = out2(N, C), rstd = out1(N);
    nd_tensor weight = in1("rmsnorm.weight", C);
    assert_ok(ND_CALL(ops, &stream, rmsnorm_fwd, .y = y, .sum = sum, .rstd = rstd,
                      .x = in2("rmsnorm.x", N, C), .delta = in2("rmsnorm.delta", N, C),
                      .weight = weight, .eps = 1e-5f));
    nd_tensor dx = out2(N, C);
    nd_tensor dweight = nd_tensor_1d(fresh(C, 0), ND_DTYPE_F32, C);
    assert_ok(ND_CALL(ops, &stream, rmsnorm_bwd, .dx = dx, .dweight = dweight,
                      .dy = in2("rmsnorm.dy", N, C), .dres = in2("rmsnorm.dres", N, C),
                      .x = in2("rmsnorm.sum", N, C), .weight = weight,
                      .rstd = in1("rmsnorm.rstd", N)));
    expect(sum, "rmsnorm.sum", 1);
    /* C squares and sums, a root, two products. */
    expect(rstd, "rmsnorm.rstd", C + 4);
    expect(y, "rmsnorm.y", C + 6);
    /* The row's sum of dy w x has C terms, each as large as the result; then it is scaled by x
     * rstd^3 / C. */
    expect(dx, "rmsnorm.dx", 4 * C);
    expect(dweight, "rmsnorm.dweight", 4 * N);
}

static void check_rope(const char *kind, nd_rope_config config)
{
    enum { N = 11, H = 3, D = 16, P = 160 };
    char name[64];
    /*
     * Table. transformers rounds inv_freq and the angle to F32 first (a power, a quotient and, with
     * llama3 scaling, a dozen more operations: 16 roundings), so its angle is off by 16 u times the
     * angle.
     */
    float *cos_table = fresh(P * D / 2, 1e30f), *sin_table = fresh(P * D / 2, 1e30f);
    nd_rope_table(&config, D, P, false, cos_table, sin_table);
    const float *want_cos = f32((snprintf(name, sizeof(name), "rope.%s.cos", kind), name));
    const float *want_sin = f32((snprintf(name, sizeof(name), "rope.%s.sin", kind), name));
    const float *inv_freq = f32((snprintf(name, sizeof(name), "rope.%s.inv_freq", kind), name));
    for (int i = 0; i < P * D / 2; i++) {
        double allowed = 16 * U * (i / (D / 2)) * (double)inv_freq[i % (D / 2)] + 2 * U;
        cr_assert_float_eq(cos_table[i], want_cos[i], allowed, "%s cos %d", kind, i);
        cr_assert_float_eq(sin_table[i], want_sin[i], allowed, "%s sin %d", kind, i);
    }
    /* Rotation by the golden table: two products and a sum. */
    nd_rope_view table = {want_cos, want_sin, P};
    nd_tensor positions = nd_tensor_1d(i32("rope.positions"), ND_DTYPE_I32, N);
    nd_tensor x = nd_tensor_3d(f32("rope.x"), ND_DTYPE_F32, N, H, D);
    nd_tensor dout = nd_tensor_3d(f32("rope.dout"), ND_DTYPE_F32, N, H, D);
    nd_tensor y = nd_tensor_3d(fresh(N * H * D, 1e30f), ND_DTYPE_F32, N, H, D);
    nd_tensor dx = nd_tensor_3d(fresh(N * H * D, 1e30f), ND_DTYPE_F32, N, H, D);
    assert_ok(
        ND_CALL(ops, &stream, rope, .out = y, .x = x, .positions = positions, .table = table));
    assert_ok(ND_CALL(ops, &stream, rope, .out = dx, .x = dout, .positions = positions,
                      .table = table, .inverse = true));
    expect(y, (snprintf(name, sizeof(name), "rope.%s.out", kind), name), 4);
    expect(dx, (snprintf(name, sizeof(name), "rope.%s.dx", kind), name), 4);
    free(cos_table);
    free(sin_table);
}

Test(op_goldens, rope)
{
    check_rope("default", (nd_rope_config){.type = ND_ROPE_DEFAULT, .theta = 10000.0});
    check_rope("linear", (nd_rope_config){.type = ND_ROPE_LINEAR, .theta = 10000.0, .factor = 4.0});
    check_rope("llama3", (nd_rope_config){.type = ND_ROPE_LLAMA3,
                                          .theta = 500000.0,
                                          .factor = 8.0,
                                          .low_freq_factor = 1.0,
                                          .high_freq_factor = 4.0,
                                          .original_max_positions = 64});
}

Test(op_goldens, swiglu)
{
    enum { N = 5, F = 13 };
    nd_tensor out = out2(N, F), dgate = out2(N, F), dup = out2(N, F);
    nd_tensor gate = in2("swiglu.gate", N, F), up = in2("swiglu.up", N, F);
    assert_ok(ND_CALL(ops, &stream, swiglu_fwd, .out = out, .gate = gate, .up = up));
    assert_ok(ND_CALL(ops, &stream, swiglu_bwd, .dgate = dgate, .dup = dup,
                      .dout = in2("swiglu.dout", N, F), .gate = gate, .up = up));
    /* exp, sum, quotient, two products; the derivative has four more. */
    expect(out, "swiglu.out", 8);
    expect(dgate, "swiglu.dgate", 16);
    expect(dup, "swiglu.dup", 8);
}

static void check_attention(const char *kind)
{
    char name[64];
#define NAME(field) (snprintf(name, sizeof(name), "attention.%s." field, kind), name)
    const int32_t *e = nd_golden_i32(golden, NAME("extents"), 7);
    nd_attention a = {.batch = e[0],
                      .sq = e[1],
                      .sk = e[2],
                      .heads = e[3],
                      .kv_heads = e[4],
                      .head_dim = e[5],
                      .diag = e[6],
                      .scale = (float)(1.0 / sqrt((double)e[5]))};
    int64_t q_count = a.batch * a.sq * a.heads * a.head_dim;
    int64_t k_count = a.batch * a.sk * a.kv_heads * a.head_dim;
    int64_t row_count = a.batch * a.heads * a.sq;
#define QUERY_VIEW(data) nd_tensor_4d(data, ND_DTYPE_F32, a.batch, a.sq, a.heads, a.head_dim)
#define KEY_VIEW(data)   nd_tensor_4d(data, ND_DTYPE_F32, a.batch, a.sk, a.kv_heads, a.head_dim)
#define ROW_VIEW(data)   nd_tensor_3d(data, ND_DTYPE_F32, a.batch, a.heads, a.sq)
    nd_tensor q = QUERY_VIEW(f32(NAME("q"))), dout = QUERY_VIEW(f32(NAME("dout")));
    nd_tensor k = KEY_VIEW(f32(NAME("k"))), v = KEY_VIEW(f32(NAME("v")));
    nd_tensor out = QUERY_VIEW(fresh(q_count, 1e30f)), dq = QUERY_VIEW(fresh(q_count, 1e30f));
    nd_tensor dk = KEY_VIEW(fresh(k_count, 1e30f)), dv = KEY_VIEW(fresh(k_count, 1e30f));
    nd_tensor lse = ROW_VIEW(fresh(row_count, 1e30f)), delta = ROW_VIEW(fresh(row_count, 1e30f));
    size_t forward = ops->attention_scratch(device, &a, ND_DTYPE_F32, false);
    size_t backward = ops->attention_scratch(device, &a, ND_DTYPE_F32, true);
    void *scratch = malloc((forward > backward ? forward : backward) + 1);
    assert_ok(ND_CALL(ops, &stream, attention_fwd, .attention = a, .out = out, .lse = lse, .q = q,
                      .k = k, .v = v, .scratch = scratch));
    assert_ok(ND_CALL(ops, &stream, attention_delta, .attention = a, .delta = delta,
                      .out = QUERY_VIEW(f32(NAME("out"))), .dout = dout));
    assert_ok(ND_CALL(ops, &stream, attention_bwd, .attention = a, .dq = dq, .dk = dk, .dv = dv,
                      .q = q, .k = k, .v = v, .out = QUERY_VIEW(f32(NAME("out"))), .dout = dout,
                      .lse = ROW_VIEW(f32(NAME("lse"))), .delta = ROW_VIEW(f32(NAME("delta"))),
                      .scratch = scratch));
    /*
     * A score is off by (D + 1) u times sum |q k| scale, which is below 8 here, so a probability is
     * off by 8 (D + 1) u of itself; a sum over at most Sk keys adds Sk. The backward multiplies two
     * such factors and sums over D.
     */
    double score = 8.0 * (double)(a.head_dim + 1), sum = (double)(a.sk + a.sq);
    expect(out, NAME("out"), 2 * score + sum);
    expect(lse, NAME("lse"), score + sum);
    expect(delta, NAME("delta"), 4.0 * (double)a.head_dim);
    expect(dq, NAME("dq"), 4 * (score + sum) + 4.0 * (double)a.head_dim);
    expect(dk, NAME("dk"), 4 * (score + sum) + 4.0 * (double)a.head_dim);
    expect(dv, NAME("dv"), 4 * (score + sum));
    free(scratch);
}

/* "bottom_right" is aligned at the end; the first queries of "first_rows_blind" see nothing. */
Test(op_goldens, attention)
{
    static const char *const kinds[] = {"causal", "bottom_right", "unmasked", "first_rows_blind"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        check_attention(kinds[i]);
    }
}

enum { CE_ROWS = 9, CE_COLUMNS = 13, CE_VALID = 11 };

/*
 * Cross entropy of the golden's logits held as `slices` column slices, as vocabulary-parallel ranks
 * hold them: the ranks' maxima and sums are combined here.
 */
static void check_cross_entropy(int slices, const int64_t *begin)
{
    enum { N = CE_ROWS };
    nd_tensor logits = nd_tensor_2d(fresh(N * CE_COLUMNS, 0), ND_DTYPE_F32, N, CE_COLUMNS);
    memcpy(logits.data, f32("cross_entropy.logits"), sizeof(float) * N * CE_COLUMNS);
    nd_tensor labels = nd_tensor_1d(i32("cross_entropy.labels"), ND_DTYPE_I32, N);
    nd_tensor max = nd_tensor_1d(fresh(N, -INFINITY), ND_DTYPE_F32, N);
    nd_tensor sum = nd_tensor_1d(fresh(N, 0), ND_DTYPE_F32, N);
    nd_tensor target = nd_tensor_1d(fresh(N, 0), ND_DTYPE_F32, N);
    nd_tensor part_max[2], part_sum[2], part_target[2];
    float *m = max.data, *s = sum.data, *t = target.data;
    for (int i = 0; i < slices; i++) {
        part_max[i] = out1(N), part_sum[i] = out1(N), part_target[i] = out1(N);
        int64_t valid = (begin[i + 1] < CE_VALID ? begin[i + 1] : CE_VALID) - begin[i];
        nd_tensor slice = nd_tensor_columns(logits, begin[i], begin[i + 1] - begin[i]);
        assert_ok(ND_CALL(ops, &stream, ce_stats, .row_max = part_max[i], .row_sum = part_sum[i],
                          .target = part_target[i], .logits = slice, .labels = labels,
                          .first = begin[i], .valid = valid));
        for (int row = 0; row < N; row++) {
            m[row] = fmaxf(m[row], ((float *)part_max[i].data)[row]);
        }
    }
    for (int i = 0; i < slices; i++) {
        assert_ok(ND_CALL(ops, &stream, ce_rescale, .row_sum = part_sum[i], .row_max = part_max[i],
                          .global_max = max));
        for (int row = 0; row < N; row++) {
            s[row] += ((float *)part_sum[i].data)[row];
            t[row] += ((float *)part_target[i].data)[row];
        }
        free(part_max[i].data), free(part_sum[i].data), free(part_target[i].data);
    }
    /* The logarithm turns a relative error of the sum (columns + 4 roundings) into an absolute one;
     * max and target are exact, but up to 16 in size. */
    double loss = 0;
    assert_ok(ND_CALL(ops, &stream, ce_loss, .loss_sum = &loss, .max = max, .sum = sum,
                      .target = target, .labels = labels));
    cr_assert_float_eq(loss / (N - 2), *f32("cross_entropy.loss"), 32 * U * 16);
    for (int i = 0; i < slices; i++) {
        int64_t valid = (begin[i + 1] < CE_VALID ? begin[i + 1] : CE_VALID) - begin[i];
        nd_tensor slice = nd_tensor_columns(logits, begin[i], begin[i + 1] - begin[i]);
        int64_t count = N - 2;
        assert_ok(ND_CALL(ops, &stream, ce_bwd, .logits = slice, .max = max, .sum = sum,
                          .labels = labels, .first = begin[i], .valid = valid, .count = &count));
    }
    /* exp of a difference of up to 32, the sum, a quotient, a product. */
    expect(logits, "cross_entropy.dlogits", 32 + CE_COLUMNS + 4);
    free(max.data), free(sum.data), free(target.data);
}

Test(op_goldens, cross_entropy)
{
    check_cross_entropy(1, (int64_t[]){0, CE_COLUMNS});
    check_cross_entropy(2, (int64_t[]){0, 6, CE_COLUMNS});
}

Test(op_goldens, embedding)
{
    enum { V = 10, C = 6, N = 8 };
    nd_tensor ids = nd_tensor_1d(i32("embedding.ids"), ND_DTYPE_I32, N);
    nd_tensor out = out2(N, C);
    nd_tensor dtable = nd_tensor_2d(fresh(V * C, 0), ND_DTYPE_F32, V, C);
    assert_ok(ND_CALL(ops, &stream, embedding_fwd, .out = out, .ids = ids,
                      .table = in2("embedding.table", V, C), .first = 0));
    assert_ok(ND_CALL(ops, &stream, embedding_bwd, .dtable = dtable, .ids = ids,
                      .dout = in2("embedding.dout", N, C), .first = 0));
    expect(out, "embedding.out", 0);
    expect(dtable, "embedding.dtable", N);
}

static void check_optimizers(const char *group, bool decay)
{
    enum { COUNT = 6, STEPS = 5 };
    char name[64];
    const float *start = f32((snprintf(name, sizeof(name), "%s.start", group), name));
    const float *grads = f32((snprintf(name, sizeof(name), "%s.grads", group), name));
    nd_tensor p = out1(COUNT), q = out1(COUNT);
    nd_tensor m = nd_tensor_1d(fresh(COUNT, 0), ND_DTYPE_F32, COUNT);
    nd_tensor v = nd_tensor_1d(fresh(COUNT, 0), ND_DTYPE_F32, COUNT);
    memcpy(p.data, start, sizeof(float) * COUNT);
    memcpy(q.data, start, sizeof(float) * COUNT);
    /* Two ranges, so that an op that mistakes a range's end is seen. */
    nd_flat_range ranges[] = {{0, 4, decay}, {4, COUNT, decay}};
    for (int step = 1; step <= STEPS; step++) {
        float half[COUNT];
        for (int i = 0; i < COUNT; i++) {
            half[i] = 0.5f * grads[(step - 1) * COUNT + i]; /* exact; grad_scale undoes it */
        }
        nd_adamw rule = {.lr = 1e-2f,
                         .beta1 = 0.9f,
                         .beta2 = 0.95f,
                         .eps = 1e-8f,
                         .weight_decay = 0.1f,
                         .grad_scale = 2.0f,
                         .bias1 = (float)(1 - pow(0.9, step)),
                         .bias2 = (float)(1 - pow(0.95, step))};
        assert_ok(ND_CALL(ops, &stream, adamw, .hyper = rule, .p = p.data, .m = m.data, .v = v.data,
                          .grad = half, .ranges = ranges, .range_count = 2));
        assert_ok(ND_CALL(ops, &stream, sgd, .hyper = rule, .p = q.data, .grad = half,
                          .ranges = ranges, .range_count = 2));
    }
    /* Per step a dozen roundings; 0.95 as a float makes 1 - beta2 wrong by 19 u of itself. */
    expect(p, (snprintf(name, sizeof(name), "%s.adamw.p", group), name), 12 * STEPS);
    expect(m, (snprintf(name, sizeof(name), "%s.adamw.m", group), name), 12 * STEPS);
    expect(v, (snprintf(name, sizeof(name), "%s.adamw.v", group), name), 12 * STEPS + 19);
    expect(q, (snprintf(name, sizeof(name), "%s.sgd.p", group), name), 4 * STEPS);
}

Test(op_goldens, optimizers)
{
    check_optimizers("optimizer_decay", true);
    check_optimizers("optimizer_plain", false);
}
