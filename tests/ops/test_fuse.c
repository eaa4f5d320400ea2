// SPDX-License-Identifier: Apache-2.0
/* Amax and codes that ops make of a result while they store it (nd_fuse): those of a backend are,
 * bit for bit, those that the reference computes from the result that the same backend stores.
 * Whether it is stored makes no difference. */
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

/* Flags of a request: the amax and the codes of a result, with or without the stored result. */
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
    cr_assert(got->amax == amax || (isnan(got->amax) && isnan(amax)), "%s, %s: amax %.9g, not %.9g",
              j->backend->name, what, got->amax, amax);
}

static void norm_once(const job *j, bool add)
{
    const nd_side *side = &j->backend->side;
    nd_tensor x = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f), none = {0};
    nd_tensor delta = add ? nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f) : none;
    nd_tensor weight = nd_random_1d(j->dtype, j->C, 1.0f), plain = nd_clone(x);
    nd_tensor sum[2], rstd[2];
    fused got;
    fused_init(&got, j, x, 37.5f, 0.25f);
    for (int s = 0; s < 2; s++) {
        sum[s] = add ? nd_clone(x) : none;
        rstd[s] = s ? nd_clone(rstd[0]) : nd_random_1d(ND_DTYPE_F32, j->n, 1.0f);
        ND_RUN(side, rmsnorm_fwd, .y = s ? to(j, &got) : plain, .sum = sum[s], .rstd = rstd[s],
               .x = x, .delta = delta, .weight = weight, .eps = 1e-5f,
               .fuse = s ? got.fuse : (nd_fuse){0});
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
    const nd_side *side = &j->backend->side;
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
        ND_RUN(side, rmsnorm_bwd, .dx = s ? got.stored : plain, .dweight = dweight[s], .dy = dy,
               .dres = s && how == IN_PLACE ? got.stored : dres, .x = x, .weight = weight,
               .rstd = rstd, .amax = s ? got.fuse.amax : NULL);
    }
    nd_expect_same(j->backend->name, "rmsnorm_bwd dweight", dweight[1], dweight[0]);
    if (nan && j->n > 0) {
        cr_assert(isnan(got.amax), "%s, rmsnorm_bwd: an amax of %.9g", j->backend->name, got.amax);
    } else {
        expect_fused(j, "rmsnorm_bwd", &got, plain, x);
    }
    nd_case_free();
}

/* Gradients of gate and up with the same requests, or one of them merely stored; in the place of
 * gate and up where both are stored. */
typedef enum halves { BOTH, UP_ALONE, GATE_ALONE, HALVES } halves;

static void swiglu_once(const job *j, bool gelu, halves which, bool nan)
{
    enum { OUT, GATE, UP, RESULTS };
    static const float scales[RESULTS] = {37.5f, 5000.0f, 0.5f};
    const char *const names[RESULTS] = {"swiglu_fwd", "swiglu_bwd dgate", "swiglu_bwd dup"};
    const nd_side *side = &j->backend->side;
    job of[RESULTS] = {*j, *j, *j};
    nd_tensor gate = nd_random_2d(j->dtype, j->n, j->C, j->gap, 2.0f);
    nd_tensor up = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f);
    nd_tensor dout = nd_random_2d(j->dtype, j->n, j->C, j->gap, 1.0f);
    const nd_tensor like[RESULTS] = {gate, gate, up};
    nd_tensor plain[RESULTS];
    fused got[RESULTS];
    if (which != BOTH) {
        of[which == UP_ALONE ? GATE : UP].asked = STORED;
    }
    if (nan && j->n > 0) {
        nd_put(gate, j->n * j->C - 1, NAN);
    }
    for (int i = 0; i < RESULTS; i++) {
        plain[i] = nd_clone(gate);
        fused_init(&got[i], &of[i], like[i], scales[i], 1.0f);
    }
    const bool in_place = of[GATE].asked & of[UP].asked & STORED;
    ND_RUN(side, swiglu_fwd, .out = plain[OUT], .gate = gate, .up = up, .gelu = gelu);
    ND_RUN(side, swiglu_fwd, .out = to(j, &got[OUT]), .gate = gate, .up = up, .gelu = gelu,
           .fuse = got[OUT].fuse);
    ND_RUN(side, swiglu_bwd, .dgate = plain[GATE], .dup = plain[UP], .dout = dout, .gate = gate,
           .up = up, .gelu = gelu);
    ND_RUN(side, swiglu_bwd, .dgate = to(&of[GATE], &got[GATE]), .dup = to(&of[UP], &got[UP]),
           .dout = dout, .gate = in_place ? got[GATE].stored : gate,
           .up = in_place ? got[UP].stored : up, .gelu = gelu,
           .fuse = {got[GATE].fuse, got[UP].fuse});
    for (int i = 0; i < RESULTS; i++) {
        expect_fused(&of[i], names[i], &got[i], plain[i], like[i]);
    }
    nd_case_free();
}

static void check_fused(const nd_backend *backend)
{
    for (int i = 0; i < SHAPES * CHOICES * 4; i++) {
        int shape = i / 4 / CHOICES;
        job j = {.ref = &backend->ref,
                 .backend = backend,
                 .dtype = dtypes[i & 1],
                 .format = formats[i >> 1 & 1],
                 .n = shapes[shape].n,
                 .C = shapes[shape].C,
                 .gap = shapes[shape].gap,
                 .asked = choices[i / 4 % CHOICES]};
        norm_once(&j, i % 4 < 2);
        swiglu_once(&j, i % 4 > 0, (halves)(i % HALVES), i % 5 == 0);
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
    nd_backend self = {.name = "ref", .ref = backend->ref, .side = backend->ref};
    check_fused(&self);
}
