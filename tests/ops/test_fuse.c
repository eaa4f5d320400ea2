// SPDX-License-Identifier: Apache-2.0
/* What ops do with a result while they store it (nd_fuse): the amax and the codes of a result of a
 * backend are, bit for bit, those that the reference computes from the result that the same backend
 * stores. Whether it is stored makes no difference. */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
static const nd_dtype formats[] = {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E5M2};
/* Scalars, packs, rows of several packs or pieces, gaps of whole packs and of less, no row. */
static const struct {
    int64_t n, C, gap;
} shapes[] = {{1, 1, 0},    {5, 13, 3},   {33, 64, 0},   {9, 1056, 16},
              {40, 520, 8}, {2, 8208, 0}, {3, 4099, 13}, {0, 16, 0}};

enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* What is requested in addition to a stored result, or instead of it. */
typedef enum asked { AMAX = 1, CODES = 2, STORED = 4 } asked;

static const int choices[] = {AMAX | STORED, CODES | STORED, CODES, AMAX | CODES | STORED,
                              AMAX | CODES};

enum { CHOICES = sizeof choices / sizeof choices[0] };

typedef struct job {
    const nd_side *ref;
    const nd_backend *backend;
    nd_dtype dtype, format;
    int64_t n, C, gap;
    int asked;
} job;

typedef struct fused {
    nd_tensor stored, codes, codes_before;
    float amax, scale, before;
    nd_fuse fuse;
} fused;

/* A result like `like`, whose memory must not change where it is not stored. */
static void fused_init(fused *f, const job *j, nd_tensor like, float scale, float before)
{
    *f = (fused){.stored = nd_clone(like), .amax = before, .scale = scale, .before = before};
    f->codes = nd_blank_2d(j->format, j->n, j->C, j->gap);
    f->codes_before = nd_clone(f->codes);
    f->fuse.amax = j->asked & AMAX ? &f->amax : NULL;
    if (j->asked & CODES) {
        f->fuse.codes = f->codes;
        f->fuse.scale = &f->scale;
    }
}

static nd_tensor to(const job *j, const fused *f)
{
    nd_tensor t = f->stored;
    t.data = j->asked & STORED ? t.data : NULL;
    return t;
}

/* want: the result of the op without a fuse; like: what fused_init got. */
static void expect_fused(const job *j, const char *what, const fused *got, nd_tensor want,
                         nd_tensor like)
{
    nd_tensor codes = got->codes_before;
    float scale = got->scale, inverse = 1.0f / scale, amax = got->before;
    nd_matrix cast = {.stored = codes, .scale = &scale, .inverse = &inverse};
    if (j->asked & CODES) {
        ND_RUN(j->ref, make_form, .out = cast, .x = want);
    }
    if (j->asked & AMAX) {
        ND_RUN(j->ref, amax, .amax = &amax, .x = want, .granularity = ND_PER_TENSOR, .merge = true);
    }
    nd_expect_same(j->backend->name, what, got->stored, j->asked & STORED ? want : like);
    nd_expect_same(j->backend->name, what, got->codes, codes);
    cr_assert(got->amax == amax, "%s, %s: amax %.9g, not %.9g", j->backend->name, what, got->amax,
              amax);
}

static void norm_once(const job *j, bool add)
{
    const nd_ops *ops = j->backend->side.ops;
    nd_stream stream = j->backend->side.stream;
    nd_tensor x = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f), none = {0};
    nd_tensor delta = add ? nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f) : none;
    nd_tensor weight = nd_random_1d(j->dtype, j->C, 1.0f), plain = nd_clone(x);
    nd_tensor sum[2], rstd[2];
    fused got;
    fused_init(&got, j, x, 37.5f, 0.25f);
    for (int s = 0; s < 2; s++) {
        sum[s] = add ? nd_clone(x) : none;
        rstd[s] = s ? nd_clone(rstd[0]) : nd_random_1d(ND_DTYPE_F32, j->n, 1.0f);
        ND_OK_OR_FAIL(ND_CALL(ops, &stream, rmsnorm_fwd, .y = s ? to(j, &got) : plain,
                              .sum = sum[s], .rstd = rstd[s], .x = x, .delta = delta,
                              .weight = weight, .eps = 1e-5f, .fuse = s ? got.fuse : (nd_fuse){0}));
    }
    expect_fused(j, "rmsnorm_fwd", &got, plain, x);
    nd_expect_same(j->backend->name, "rmsnorm_fwd rstd", rstd[1], rstd[0]);
    if (add) {
        nd_expect_same(j->backend->name, "rmsnorm_fwd sum", sum[1], sum[0]);
    }
    nd_case_free();
}

/* Where dx goes, and what is added to it. */
typedef enum residual { APART, IN_PLACE, ABSENT, RESIDUALS } residual;

/* The amax of dx, also of one that has a NaN. */
static void norm_backward_once(const job *j, residual how, bool nan)
{
    const nd_ops *ops = j->backend->side.ops;
    nd_stream stream = j->backend->side.stream;
    nd_tensor x = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f);
    nd_tensor dy = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f);
    nd_tensor dres = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f);
    nd_tensor weight = nd_random_1d(j->dtype, j->C, 1.0f);
    nd_tensor rstd = nd_random_1d(ND_DTYPE_F32, j->n, 1.0f), plain = nd_clone(x), dweight[2];
    fused got;
    if (nan && j->n > 0) {
        nd_put(dres, j->n * j->C - 1, NAN);
    }
    fused_init(&got, j, how == IN_PLACE ? dres : x, 37.5f, 0.25f);
    if (how == ABSENT) {
        dres = (nd_tensor){0};
    }
    for (int s = 0; s < 2; s++) {
        dweight[s] = s ? nd_clone(dweight[0]) : nd_random_1d(ND_DTYPE_F32, j->C, 1.0f);
    }
    for (int s = 0; s < 2; s++) {
        ND_OK_OR_FAIL(ND_CALL(ops, &stream, rmsnorm_bwd, .dx = s ? got.stored : plain,
                              .dweight = dweight[s], .dy = dy,
                              .dres = s && how == IN_PLACE ? got.stored : dres, .x = x,
                              .weight = weight, .rstd = rstd, .amax = s ? got.fuse.amax : NULL));
    }
    nd_expect_same(j->backend->name, "rmsnorm_bwd dweight", dweight[1], dweight[0]);
    if (nan && j->n > 0) {
        cr_assert(isnan(got.amax), "%s, rmsnorm_bwd: an amax of %.9g", j->backend->name, got.amax);
    } else {
        expect_fused(j, "rmsnorm_bwd", &got, plain, x);
    }
    nd_case_free();
}

static void swiglu_once(const job *j, bool gelu)
{
    const nd_ops *ops = j->backend->side.ops;
    nd_stream stream = j->backend->side.stream;
    nd_tensor gate = nd_random_2d(j->dtype, j->n, j->C, j->gap, 2.0f);
    nd_tensor up = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f);
    nd_tensor dout = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f), plain[3];
    static const float scales[3] = {37.5f, 5000.0f, 0.5f};
    fused got[3];
    for (int i = 0; i < 3; i++) {
        plain[i] = nd_clone(gate);
        fused_init(&got[i], j, gate, scales[i], 1.0f);
    }
    ND_OK_OR_FAIL(
        ND_CALL(ops, &stream, swiglu_fwd, .out = plain[0], .gate = gate, .up = up, .gelu = gelu));
    ND_OK_OR_FAIL(ND_CALL(ops, &stream, swiglu_fwd, .out = to(j, &got[0]), .gate = gate, .up = up,
                          .gelu = gelu, .fuse = got[0].fuse));
    ND_OK_OR_FAIL(ND_CALL(ops, &stream, swiglu_bwd, .dgate = plain[1], .dup = plain[2],
                          .dout = dout, .gate = gate, .up = up, .gelu = gelu));
    ND_OK_OR_FAIL(ND_CALL(ops, &stream, swiglu_bwd, .dgate = to(j, &got[1]), .dup = to(j, &got[2]),
                          .dout = dout, .gate = gate, .up = up, .gelu = gelu,
                          .fuse = {got[1].fuse, got[2].fuse}));
    expect_fused(j, "swiglu_fwd", &got[0], plain[0], gate);
    expect_fused(j, "swiglu_bwd dgate", &got[1], plain[1], gate);
    expect_fused(j, "swiglu_bwd dup", &got[2], plain[2], gate);
    nd_case_free();
}

static void check_fused(const nd_side *ref, const nd_backend *backend)
{
    for (int i = 0; i < SHAPES * CHOICES * 4; i++) {
        int shape = i / 4 / CHOICES;
        job j = {.ref = ref,
                 .backend = backend,
                 .dtype = dtypes[i & 1],
                 .format = formats[i >> 1 & 1],
                 .n = shapes[shape].n,
                 .C = shapes[shape].C,
                 .gap = shapes[shape].gap,
                 .asked = choices[i / 4 % CHOICES]};
        norm_once(&j, i % 4 < 2);
        swiglu_once(&j, i % 4 > 0);
        if (j.asked == (AMAX | STORED)) {
            for (residual how = APART; how < RESIDUALS; how++) {
                norm_backward_once(&j, how, false);
            }
            norm_backward_once(&j, i % 4 < 2 ? APART : IN_PLACE, true);
        }
    }
}

Test(fuse, codes_and_amax_are_those_of_the_stored_result)
{
    nd_each_backend(check_fused);
}

/* The fused results of the reference, compared with its other ops. */
TEST_BEST_BACKEND(fuse, of_the_reference)
{
    nd_backend self = {.name = "ref", .side = *ref};
    check_fused(ref, &self);
}

/* In place, with an amax for only one of the two results; the other amax is not touched. A NaN
 * becomes the amax. */
TEST_EACH_BACKEND(fuse, one_of_two_results_and_nan)
{
    const nd_ops *ops = backend->side.ops;
    nd_stream stream = backend->side.stream, ref_stream = ref->stream;
    nd_tensor gu = nd_random_2d(ND_DTYPE_BF16, 20, 1024, 0, 1.0f), gu_again = nd_clone(gu);
    nd_tensor gate = nd_tensor_columns(gu, 0, 512), up = nd_tensor_columns(gu, 512, 512);
    nd_tensor dgate = nd_tensor_columns(gu_again, 0, 512),
              dup = nd_tensor_columns(gu_again, 512, 512);
    nd_tensor dout = nd_random_2d(ND_DTYPE_BF16, 20, 512, 0, 1.0f), out = nd_clone(dout);
    float amax[2] = {0.0f, 0.0f}, want;
    nd_fuse fuse = {.amax = &amax[0]};
    ND_OK_OR_FAIL(ND_CALL(ops, &stream, swiglu_bwd, .dgate = gate, .dup = up, .dout = dout,
                          .gate = gate, .up = up, .fuse = {[1] = fuse}));
    ND_OK_OR_FAIL(ND_CALL(ops, &stream, swiglu_bwd, .dgate = dgate, .dup = dup, .dout = dout,
                          .gate = dgate, .up = dup));
    nd_expect_same(backend->name, "swiglu_bwd in place", gu, gu_again);
    ND_OK_OR_FAIL(
        ND_CALL(ref->ops, &ref_stream, amax, .amax = &want, .x = up, .granularity = ND_PER_TENSOR));
    cr_assert(amax[0] == want && want > 0.0f, "%s: amax %.9g, not %.9g", backend->name, amax[0],
              want);
    nd_put(gate, 20 * 512 - 1, NAN);
    fuse.amax = &amax[1];
    ND_OK_OR_FAIL(
        ND_CALL(ops, &stream, swiglu_fwd, .out = out, .gate = gate, .up = up, .fuse = fuse));
    cr_assert(isnan(amax[1]), "%s: an amax of %.9g", backend->name, amax[1]);
}

/* Rows of several pieces, of which up's gradient is left as codes alone and gate's is stored. */
TEST_EACH_BACKEND(fuse, codes_of_one_of_two_results)
{
    for (int d = 0; d < 2; d++) {
        job j = {.ref = ref,
                 .backend = backend,
                 .dtype = dtypes[d],
                 .format = ND_DTYPE_F8_E5M2,
                 .n = 2,
                 .C = 8208,
                 .asked = CODES};
        nd_tensor gate = nd_random_2d(j.dtype, j.n, j.C, 0, 2.0f);
        nd_tensor up = nd_random_2d(j.dtype, j.n, j.C, 0, 1.0f);
        nd_tensor dout = nd_random_2d(j.dtype, j.n, j.C, 0, 1.0f);
        nd_tensor plain[2] = {nd_clone(gate), nd_clone(gate)}, dgate = nd_clone(gate);
        fused dup;
        fused_init(&dup, &j, gate, 0.5f, 0.0f);
        ND_RUN(&backend->side, swiglu_bwd, .dgate = plain[0], .dup = plain[1], .dout = dout,
               .gate = gate, .up = up);
        ND_RUN(&backend->side, swiglu_bwd, .dgate = dgate, .dup = to(&j, &dup), .dout = dout,
               .gate = gate, .up = up, .fuse = {[1] = dup.fuse});
        nd_expect_same(backend->name, "swiglu_bwd dgate", dgate, plain[0]);
        expect_fused(&j, "swiglu_bwd dup", &dup, plain[1], gate);
        nd_case_free();
    }
}
