// SPDX-License-Identifier: Apache-2.0
/*
 * The reference's backward ops against finite differences of its forward ops, in F32 storage.
 *
 * Each case has a loss <weights, outputs> in F64 and compares d loss / d x with the four-point
 * difference (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12 h, h = 2^-5. Its truncation error is h^4 /
 * 30 times a fifth derivative, about 3e-8 times a number that is below 1000 for these inputs;
 * outputs are rounded to F32, which adds some 1.5 x 2^-24 / h times the root of the number of
 * outputs that depend on x, about 3e-6 x 8. Together: 1e-4.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "kernels/rope.h"
#include "tests/ops/conformance.h"

static const double tolerance = 1e-4;

static nd_side ref;
static nd_stream stream;

static void open_ref(void)
{
    nd_side_open_ref(&ref);
    stream = ref.stream;
}

static void close_ref(void)
{
    nd_case_free();
    nd_side_close(&ref);
}

TestSuite(gradients, .init = open_ref, .fini = close_ref);

static double weighted(nd_tensor weights, nd_tensor outputs)
{
    double sum = 0.0;
    for (int64_t i = 0; i < nd_tensor_count(weights); i++) {
        double w = nd_get(weights, i);
        sum += w != 0.0 ? w * nd_get(outputs, i) : 0.0;
    }
    return sum;
}

typedef double (*loss_fn)(const void *job);

/* Checks `gradient` of every element of x; loss(job) reads x. */
static void expect_gradient(const char *what, loss_fn loss, const void *job, nd_tensor x,
                            nd_tensor gradient)
{
    const float h = 0.03125f;
    for (int64_t i = 0; i < nd_tensor_count(x); i++) {
        float at = nd_get(x, i);
        double f[5];
        for (int step = -2; step <= 2; step++) {
            nd_put(x, i, at + (float)step * h);
            f[step + 2] = loss(job);
        }
        nd_put(x, i, at);
        /* The steps that F32 made of at + h and at - h may differ from h by half an ulp of x: 2^-24
         * / h of the result. */
        double expected = (8.0 * (f[3] - f[1]) - (f[4] - f[0])) / (12.0 * (double)h);
        double allowed = tolerance * (1.0 + fabs(expected));
        cr_assert(fabs(nd_get(gradient, i) - expected) <= allowed,
                  "%s: element %lld is %.7g, finite differences give %.7g", what, (long long)i,
                  (double)nd_get(gradient, i), expected);
    }
}

static nd_tensor zeros_like(nd_tensor t)
{
    nd_tensor z = nd_clone(t);
    for (int64_t i = 0; i < nd_tensor_count(z); i++) {
        nd_put(z, i, 0.0f);
    }
    return z;
}

static nd_tensor random2(int64_t n, int64_t C)
{
    return nd_random_2d(ND_DTYPE_F32, n, C, 0, 1.0f);
}

/* RMSNorm: y and the residual sum both count */

typedef struct norm_job {
    nd_tensor x, delta, weight, y, sum, rstd, dy, dres;
} norm_job;

static double norm_loss(const void *arg)
{
    const norm_job *j = arg;
    ND_RUN(&ref, rmsnorm_fwd, .y = j->y, .sum = j->sum, .rstd = j->rstd, .x = j->x,
           .delta = j->delta, .weight = j->weight, .plus = 1.0f, .eps = 1e-2f);
    return weighted(j->dy, j->y) + weighted(j->dres, j->sum);
}

Test(gradients, rmsnorm)
{
    enum { N = 3, C = 10 };
    norm_job j = {.x = random2(N, C),
                  .delta = random2(N, C),
                  .weight = nd_random_1d(ND_DTYPE_F32, C, 1.0f),
                  .y = random2(N, C),
                  .sum = random2(N, C),
                  .rstd = nd_random_1d(ND_DTYPE_F32, N, 1.0f),
                  .dy = random2(N, C),
                  .dres = random2(N, C)};
    nd_tensor dx = random2(N, C), dweight = zeros_like(j.weight);
    norm_loss(&j);
    ND_RUN(&ref, rmsnorm_bwd, .dx = dx, .dweight = dweight, .dy = j.dy, .dres = j.dres, .x = j.sum,
           .weight = j.weight, .plus = 1.0f, .rstd = j.rstd);
    expect_gradient("rmsnorm dx", norm_loss, &j, j.x, dx);
    expect_gradient("rmsnorm d delta", norm_loss, &j, j.delta, dx);
    expect_gradient("rmsnorm dweight", norm_loss, &j, j.weight, dweight);
}

/* SwiGLU */

typedef struct swiglu_job {
    nd_tensor gate, up, out, dout;
    bool gelu;
} swiglu_job;

static double swiglu_loss(const void *arg)
{
    const swiglu_job *j = arg;
    ND_RUN(&ref, swiglu_fwd, .out = j->out, .gate = j->gate, .up = j->up, .gelu = j->gelu);
    return weighted(j->dout, j->out);
}

Test(gradients, swiglu)
{
    swiglu_job j = {random2(4, 9), random2(4, 9), random2(4, 9), random2(4, 9)};
    nd_tensor dgate = random2(4, 9), dup = random2(4, 9);
    for (int gelu = 0; gelu < 2; gelu++) {
        j.gelu = gelu;
        ND_RUN(&ref, swiglu_bwd, .dgate = dgate, .dup = dup, .dout = j.dout, .gate = j.gate,
               .up = j.up, .gelu = gelu);
        expect_gradient("swiglu dgate", swiglu_loss, &j, j.gate, dgate);
        expect_gradient("swiglu dup", swiglu_loss, &j, j.up, dup);
    }
}

/* RoPE: the inverse rotation is the gradient */

typedef struct rope_job {
    nd_tensor x, positions, out, dout;
    nd_rope_view table;
} rope_job;

static double rope_loss(const void *arg)
{
    const rope_job *j = arg;
    ND_RUN(&ref, rope, .out = j->out, .x = j->x, .positions = j->positions, .table = j->table);
    return weighted(j->dout, j->out);
}

Test(gradients, rope)
{
    enum { N = 4, HEADS = 2, D = 6, POSITIONS = 20 };
    float cosines[POSITIONS * D / 2], sines[POSITIONS * D / 2];
    const nd_rope_config config = {.type = ND_ROPE_DEFAULT, .theta = 100.0};
    const int64_t shape[] = {N, HEADS, D};
    nd_rope_table(&config, D, POSITIONS, false, cosines, sines);
    rope_job j = {.x = nd_random(ND_DTYPE_F32, 3, shape, 0, 1.0f),
                  .positions = nd_random_ids(N, 0, POSITIONS),
                  .out = nd_random(ND_DTYPE_F32, 3, shape, 0, 1.0f),
                  .dout = nd_random(ND_DTYPE_F32, 3, shape, 0, 1.0f),
                  .table = {cosines, sines, POSITIONS}};
    nd_tensor dx = nd_random(ND_DTYPE_F32, 3, shape, 0, 1.0f);
    ND_RUN(&ref, rope, .out = dx, .x = j.dout, .positions = j.positions, .table = j.table,
           .inverse = true);
    expect_gradient("rope dx", rope_loss, &j, j.x, dx);
}

/* embedding */

typedef struct embedding_job {
    nd_tensor table, ids, out, dout;
} embedding_job;

static double embedding_loss(const void *arg)
{
    const embedding_job *j = arg;
    ND_RUN(&ref, embedding_fwd, .out = j->out, .ids = j->ids, .table = j->table, .first = 2);
    return weighted(j->dout, j->out);
}

Test(gradients, embedding)
{
    embedding_job j = {random2(5, 3), nd_random_ids(9, 0, 9), random2(9, 3), random2(9, 3)};
    nd_tensor dtable = zeros_like(j.table);
    ND_RUN(&ref, embedding_bwd, .dtable = dtable, .ids = j.ids, .dout = j.dout, .first = 2);
    expect_gradient("embedding dtable", embedding_loss, &j, j.table, dtable);
}

/* cross entropy over a slice with padding, with rows that are not counted */

typedef struct ce_job {
    nd_tensor logits, labels, max, sum, target;
    int64_t first, valid;
} ce_job;

static double ce_loss(const void *arg)
{
    const ce_job *j = arg;
    double loss = 0.0;
    ND_RUN(&ref, ce_stats, .row_max = j->max, .row_sum = j->sum, .target = j->target,
           .logits = j->logits, .labels = j->labels, .first = j->first, .valid = j->valid);
    ND_RUN(&ref, ce_loss, .loss_sum = &loss, .max = j->max, .sum = j->sum, .target = j->target,
           .labels = j->labels);
    return 0.5 * loss;
}

Test(gradients, cross_entropy)
{
    enum { N = 6, V = 12, VALID = 10, FIRST = 7 };
    nd_tensor row = nd_random_1d(ND_DTYPE_F32, N, 1.0f);
    ce_job j = {.logits = nd_random_2d(ND_DTYPE_F32, N, V, 0, 2.0f),
                .labels = nd_random_ids(N, FIRST, FIRST + VALID),
                .max = row,
                .sum = nd_clone(row),
                .target = nd_clone(row),
                .first = FIRST,
                .valid = VALID};
    ((int32_t *)j.labels.data)[2] = -100;
    ce_loss(&j);
    nd_tensor dlogits = nd_clone(j.logits);
    int64_t count = 2;
    ND_RUN(&ref, ce_bwd, .logits = dlogits, .max = j.max, .sum = j.sum, .labels = j.labels,
           .first = FIRST, .valid = VALID, .count = &count);
    expect_gradient("cross entropy dlogits", ce_loss, &j, j.logits, dlogits);
}

/* attention, whole and as two blocks merged by LSE */

typedef struct attention_job {
    nd_attention a;
    nd_tensor q, k, v, out, lse, dout, first_key;
} attention_job;

static double attention_loss(const void *arg)
{
    const attention_job *j = arg;
    double scratch[64];
    cr_assert(ref.ops->attention_scratch(ref.device, &j->a, ND_DTYPE_F32, false) <= sizeof scratch);
    ND_RUN(&ref, attention_fwd, .attention = j->a, .out = j->out, .lse = j->lse, .q = j->q,
           .k = j->k, .v = j->v, .first_key = j->first_key, .scratch = scratch);
    return weighted(j->dout, j->out);
}

static nd_tensor heads(int64_t B, int64_t S, int64_t H, int64_t D)
{
    return nd_random(ND_DTYPE_F32, 4, (int64_t[]){B, S, H, D}, 0, 1.0f);
}

static void check_attention(nd_attention a, nd_tensor first_key)
{
    int64_t B = a.batch, H = a.heads, K = a.kv_heads, D = a.head_dim;
    attention_job j = {.a = a,
                       .q = heads(B, a.sq, H, D),
                       .k = heads(B, a.sk, K, D),
                       .v = heads(B, a.sk, K, D),
                       .out = heads(B, a.sq, H, D),
                       .lse = nd_random(ND_DTYPE_F32, 3, (int64_t[]){B, H, a.sq}, 0, 1.0f),
                       .dout = heads(B, a.sq, H, D),
                       .first_key = first_key};
    nd_tensor delta = nd_clone(j.lse), dq = nd_clone(j.q), dk = nd_clone(j.k), dv = nd_clone(j.v);
    double scratch[64];
    attention_loss(&j);
    ND_RUN(&ref, attention_delta, .attention = a, .delta = delta, .out = j.out, .dout = j.dout);
    ND_RUN(&ref, attention_bwd, .attention = a, .dq = dq, .dk = dk, .dv = dv, .q = j.q, .k = j.k,
           .v = j.v, .out = j.out, .dout = j.dout, .lse = j.lse, .delta = delta,
           .first_key = first_key, .scratch = scratch);
    expect_gradient("attention dq", attention_loss, &j, j.q, dq);
    expect_gradient("attention dk", attention_loss, &j, j.k, dk);
    expect_gradient("attention dv", attention_loss, &j, j.v, dv);
}

Test(gradients, attention)
{
    static const int32_t first[] = {0, 0, 2, 2, 9, 0, 1, 1, 3, 4}; /* row 4 sees nothing */
    const nd_tensor none = {0}, first_key = nd_tensor_1d((void *)first, ND_DTYPE_I32, 10);
    check_attention((nd_attention){2, 5, 5, 4, 2, 6, 0, 0.4f}, none);
    check_attention((nd_attention){1, 3, 7, 2, 1, 4, 7, 0.5f}, none);
    check_attention((nd_attention){1, 4, 9, 2, 2, 4, 5, 0.5f}, none);
    check_attention((nd_attention){1, 6, 4, 2, 1, 4, -2, 0.5f}, none);
    check_attention((nd_attention){2, 5, 5, 4, 2, 6, 0, 0.4f}, first_key);
    check_attention((nd_attention){2, 5, 5, 4, 2, 6, 0, 0.4f, .window = 2}, none);
    check_attention((nd_attention){2, 5, 7, 2, 1, 4, 2, 0.5f, .window = 3}, first_key);
}

/* A causal block and a prefix, merged, are the causal attention over both, whichever comes
 * first. */
Test(gradients, attention_of_two_blocks)
{
    enum { S = 7, PREFIX = 4, H = 2, D = 6 };
    const nd_attention whole = {1, S, PREFIX + S, H, H, D, PREFIX, 0.4f};
    const nd_attention part[2] = {{1, S, PREFIX, H, H, D, PREFIX, 0.4f},
                                  {1, S, S, H, H, D, 0, 0.4f}};
    nd_tensor q = heads(1, S, H, D), k = heads(1, PREFIX + S, H, D), v = heads(1, PREFIX + S, H, D);
    nd_tensor out = heads(1, S, H, D),
              lse = nd_random(ND_DTYPE_F32, 3, (int64_t[]){1, H, S}, 0, 1.0f);
    nd_tensor partial = nd_clone(out), partial_lse = nd_clone(lse);
    double scratch[64];
    ND_RUN(&ref, attention_fwd, .attention = whole, .out = out, .lse = lse, .q = q, .k = k, .v = v,
           .scratch = scratch);
    for (int first = 0; first < 2; first++) {
        nd_tensor acc = zeros_like(out), acc_lse = nd_clone(lse);
        for (int64_t i = 0; i < nd_tensor_count(acc_lse); i++) {
            nd_put(acc_lse, i, -INFINITY);
        }
        for (int n = 0; n < 2; n++) {
            int p = n ^ first;
            int64_t begin = p ? PREFIX * H * D : 0;
            nd_tensor pk = heads(1, part[p].sk, H, D), pv = nd_clone(pk);
            for (int64_t i = 0; i < nd_tensor_count(pk); i++) {
                nd_put(pk, i, nd_get(k, begin + i));
                nd_put(pv, i, nd_get(v, begin + i));
            }
            ND_RUN(&ref, attention_fwd, .attention = part[p], .out = partial, .lse = partial_lse,
                   .q = q, .k = pk, .v = pv, .scratch = scratch);
            ND_RUN(&ref, lse_merge, .attention = part[p], .acc = acc, .acc_lse = acc_lse,
                   .out = partial, .lse = partial_lse);
        }
        /* Values of about 1, rounded to F32 a few times. */
        nd_expect_close("ref", "merged out", acc, out, (nd_tolerance){.absolute = 8 * nd_eps_f32});
        nd_expect_close("ref", "merged lse", acc_lse, lse,
                        (nd_tolerance){.absolute = 8 * nd_eps_f32});
    }
}

/* products: dA = dC B^T and dB = A^T dC through the op's own transposes */

typedef struct matmul_job {
    nd_tensor a, b, c, dc;
} matmul_job;

static double matmul_loss(const void *arg)
{
    const matmul_job *j = arg;
    ND_RUN(&ref, product, .c = j->c, .a = nd_rows(j->a), .b = nd_rows(j->b), .b_transposed = true);
    return weighted(j->dc, j->c);
}

Test(gradients, matmul)
{
    enum { M = 4, N = 5, K = 3 };
    matmul_job j = {random2(M, K), random2(N, K), random2(M, N), random2(M, N)};
    nd_tensor da = random2(M, K), db = zeros_like(j.b);
    ND_RUN(&ref, product, .c = da, .a = nd_rows(j.dc), .b = nd_rows(j.b));
    ND_RUN(&ref, product, .c = db, .a = nd_rows(j.dc), .a_transposed = true, .b = nd_rows(j.a),
           .beta = 1.0f);
    expect_gradient("matmul da", matmul_loss, &j, j.a, da);
    expect_gradient("matmul db", matmul_loss, &j, j.b, db);
}
