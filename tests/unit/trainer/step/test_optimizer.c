// SPDX-License-Identifier: Apache-2.0
/* Updates of flat shards, against the plain formulas in F64. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/step/parts.h"

enum { LAYERS = 3, MASTER = 1, GRADIENT, MOMENT_1, MOMENT_2 };

static const float untouched = 12345.0f;
static const double lr = 0x1p-6;

typedef struct optimizer_case {
    const char *name;
    nd_mesh mesh;
    nd_optimizer_kind kind;
    double max_grad_norm, grad_norm;
    double factor; /* that follows from them */
    int64_t step;
    nd_precision precision;
    bool zero2;
} optimizer_case;

typedef struct update {
    double p, m, v;
} update;

/* Second moments are not negative. */
static double moment2_of(const nd_param *p, int64_t e)
{
    return fabs((double)mesh_param_value(MOMENT_2, p, e));
}

/* Matrices decay, norms do not. */
static bool decays(const nd_param *p)
{
    return !strstr(p->name, "norm.weight");
}

/* torch.optim.AdamW and torch.optim.SGD (without momentum) after clip_grad_norm_. */
static update formula(const optimizer_case *c, const nd_config *config, const nd_param *p,
                      int64_t e)
{
    double b1 = config->optimizer.betas[0], b2 = config->optimizer.betas[1];
    double wd = decays(p) ? config->optimizer.weight_decay : 0.0;
    double g = (double)mesh_param_value(GRADIENT, p, e) * c->factor;
    update u = {.p = (double)mesh_param_value(MASTER, p, e),
                .m = (double)mesh_param_value(MOMENT_1, p, e),
                .v = moment2_of(p, e)};
    if (c->kind == ND_OPTIMIZER_SGD) {
        u.p -= lr * (g + wd * u.p);
        return u;
    }
    u.p -= lr * wd * u.p;
    u.m = b1 * u.m + (1.0 - b1) * g;
    u.v = b2 * u.v + (1.0 - b2) * g * g;
    double m = u.m / (1.0 - pow(b1, (double)c->step)), v = u.v / (1.0 - pow(b2, (double)c->step));
    u.p -= lr * m / (sqrt(v) + config->optimizer.eps);
    return u;
}

typedef struct checking {
    const optimizer_case *of;
    mesh_shards *s;
    unsigned char *held; /* [shard_total] */
} checking;

/* An update takes about ten steps, each of which F32 rounds by at most 2^-24 of its result; none of
 * them exceeds `largest`, the old value and what is added to it. */
static bool near(float found, double expected, double largest)
{
    return fabs((double)found - expected) <= 10.0 * 0x1p-24 * largest;
}

static nd_status check_span(void *context, const nd_span *span)
{
    checking *k = context;
    const nd_fsdp *fsdp = &k->s->fsdp;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t e = nd_span_global(span, i), at = span->begin + i;
        update u = formula(k->of, fsdp->rank->config, span->param, e);
        double moved = fabs(u.p - (double)mesh_param_value(MASTER, span->param, e));
        k->held[at] = 1;
        ND_CHECK(near(fsdp->master[at], u.p, 1.0 + 2.0 * moved),
                 "element %lld of %s is %.9g, not %.9g", (long long)e, span->param->name,
                 (double)fsdp->master[at], u.p);
        if (fsdp->moment1) {
            ND_CHECK(near(fsdp->moment1[at], u.m, 1.0) && near(fsdp->moment2[at], u.v, 1.0),
                     "moments of element %lld of %s are %.9g and %.9g, not %.9g and %.9g",
                     (long long)e, span->param->name, (double)fsdp->moment1[at],
                     (double)fsdp->moment2[at], u.m, u.v);
        }
    }
    return ND_OK;
}

/* Rows that pad a vocabulary belong to a range; their gradients are 0, and so they stay 0. */
static bool pads_vocabulary(const nd_layout *layout, int64_t at)
{
    for (int i = 0; i < layout->param_count; i++) {
        nd_flat_range range = nd_layout_shard_range(layout, &layout->params[i]);
        if (at >= range.begin && at < range.end) {
            return true;
        }
    }
    return false;
}

static nd_status check_padding(const checking *k)
{
    const mesh_shards *s = k->s;
    for (int64_t at = 0; at < s->layout->shard_total; at++) {
        ND_CHECK(k->held[at] || pads_vocabulary(s->layout, at) || s->fsdp.master[at] == untouched,
                 "padding at %lld of the flat shard was updated", (long long)at);
    }
    return ND_OK;
}

static nd_status fill_state(mesh_shards *s)
{
    nd_fsdp *fsdp = &s->fsdp;
    for (int64_t i = 0; i < s->layout->shard_total; i++) {
        fsdp->master[i] = untouched;
    }
    ND_TRY(mesh_fill(s->layout, MASTER, fsdp->master));
    ND_TRY(mesh_fill(s->layout, GRADIENT, fsdp->grad));
    if (fsdp->moment1) {
        ND_TRY(mesh_fill(s->layout, MOMENT_1, fsdp->moment1));
        ND_TRY(mesh_fill(s->layout, MOMENT_2, fsdp->moment2));
        for (int64_t i = 0; i < s->layout->shard_total; i++) {
            fsdp->moment2[i] = fabsf(fsdp->moment2[i]);
        }
    }
    return ND_OK;
}

/* Checks that the new weights are gathered next, whether the update wrote BF16 copies or not. */
static nd_status check_gathered(mesh_shards *s, const optimizer_case *c)
{
    const nd_config *config = s->rank->config;
    for (int i = 0; i < s->layout->param_count; i++) {
        const nd_param *p = &s->layout->params[i];
        const bool own = s->layout->shards == 1 || c->zero2 || p->unit->kind != ND_UNIT_BLOCK;
        ND_TRY(nd_fsdp_acquire(&s->fsdp, p->unit));
        ND_CHECK((nd_fsdp_resident(&s->fsdp, p->unit->shard_offset) != NULL) ==
                     (own && c->precision == ND_PRECISION_BF16),
                 "the update %s a copy of %s", own ? "writes no" : "writes", p->name);
        nd_tensor w = nd_fsdp_weight(&s->fsdp, p->id, p->id, p->layer);
        for (int64_t n = 0; n < p->local_rows * p->local_cols; n++) {
            int64_t row = p->row_begin + n / p->local_cols;
            if (row >= p->rows) {
                break;
            }
            update u = formula(c, config, p, row * p->cols + p->col_begin + n % p->local_cols);
            double found = (double)mesh_get(w, 0, n);
            double bound = (w.dtype == ND_DTYPE_BF16 ? 0x1p-8 : 0x1p-20) * (1.0 + fabs(u.p));
            ND_CHECK(fabs(found - u.p) <= bound, "gathered element %lld of %s is %g, not %g",
                     (long long)n, p->name, found, u.p);
        }
        nd_fsdp_release(&s->fsdp, p->unit);
    }
    return ND_OK;
}

static nd_status body(nd_rank *rank, void *context)
{
    const optimizer_case *c = context;
    checking k = {.of = c};
    nd_optimizer optimizer = {0};
    nd_status status = ND_OK;
    ND_TRY(mesh_shards_open(rank, false, &k.s));
    mesh_shards *s = k.s;
    ND_TRY_OUT(nd_optimizer_init(&optimizer, &s->fsdp));
    ND_TRY_OUT(ND_ALLOC(s->layout->shard_total, &k.held));
    ND_TRY_OUT(fill_state(s));
    for (int u = 0; u < s->layout->unit_count; u++) { /* copies of the old weights */
        ND_TRY_OUT(nd_fsdp_acquire(&s->fsdp, &s->layout->units[u]));
        nd_fsdp_release(&s->fsdp, &s->layout->units[u]);
    }
    ND_TRY_OUT(nd_optimizer_step(&optimizer, NULL, c->step, lr, c->grad_norm));
    ND_TRY_OUT(mesh_each_span(s->layout, check_span, &k));
    ND_TRY_OUT(check_padding(&k));
    status = check_gathered(s, c);
out:
    free(k.held);
    nd_optimizer_fini(&optimizer);
    return status;
}

static void run(const optimizer_case *c)
{
    mesh_ranks job = mesh_ranks_of(c->mesh, LAYERS, false, body, c);
    job.config.train.precision = c->precision;
    job.config.parallel.reshard_after_forward = !c->zero2;
    job.config.optimizer.name = c->kind;
    job.config.optimizer.betas[0] = 0.875; /* F32 holds these and 1 minus these */
    job.config.optimizer.betas[1] = 0.96875;
    job.config.optimizer.eps = 0x1p-8;
    job.config.optimizer.weight_decay = 0.125;
    job.config.optimizer.max_grad_norm = c->max_grad_norm;
    expect_ranks(&job, "%s", c->name);
}

/* Gradients of norm 4 in F32 on one rank. */
static void run_one(const char *name, nd_optimizer_kind kind, int64_t step, double most,
                    double factor)
{
    run(&(optimizer_case){
        name, {{1, 1, 1, 1, 1}}, kind, most, 4.0, factor, step, ND_PRECISION_FP32, false});
}

Test(optimizer, adamw)
{
    run_one("first step", ND_OPTIMIZER_ADAMW, 1, 0.0, 1.0);
    run_one("second step", ND_OPTIMIZER_ADAMW, 2, 0.0, 1.0);
    run_one("late step", ND_OPTIMIZER_ADAMW, 1000, 0.0, 1.0);
    run_one("clipped", ND_OPTIMIZER_ADAMW, 3, 1.0, 1.0 / (4.0 + 1e-6));
    run_one("below the limit", ND_OPTIMIZER_ADAMW, 3, 5.0, 1.0);
}

Test(optimizer, sgd)
{
    run_one("not clipped", ND_OPTIMIZER_SGD, 1, 0.0, 1.0);
    run_one("clipped", ND_OPTIMIZER_SGD, 1, 0.5, 0.5 / (4.0 + 1e-6));
}

/* Shards whose borders lie within parameters; BF16 copies that the update writes (zero2, one
 * shard) and those that are cast when a unit is gathered. */
Test(optimizer, shards)
{
    static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}},
                                     {{1, 1, 2, 1, 1}},
                                     {{1, 1, 3, 1, 1}},
                                     {{1, 1, 2, 1, 2}},
                                     {{1, 1, 1, 2, 1}}};
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++) {
        for (int variant = 0; variant < 8; variant++) {
            run(&(optimizer_case){
                "shards", meshes[m], variant & 1 ? ND_OPTIMIZER_SGD : ND_OPTIMIZER_ADAMW, 1.0, 4.0,
                1.0 / (4.0 + 1e-6), 2, variant & 2 ? ND_PRECISION_BF16 : ND_PRECISION_FP32,
                .zero2 = variant & 4});
        }
    }
}
