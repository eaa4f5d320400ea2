// SPDX-License-Identifier: Apache-2.0
/* The reports of an FP8 run: the health of each linear, and steps that are not finite. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/parity/fp8_job.h"
#include "tests/support/ranks.h"
#include "trainer/precision/precision.h"
#include "trainer/step/step.h"

static tempdir dir;

TEMPDIR_SUITE(fp8_health, tempdir_leave_empty, .timeout = 120);

/* Trains `steps` steps with a report every `interval`; the check must have been reached. */
static void run_checked(const mesh_case *mesh, mesh_job job, int64_t steps, int64_t interval,
                        nd_status (*check)(void *, nd_trainer *, int64_t))
{
    int checked = 0;
    job.steps = steps;
    job.health_interval = interval;
    job.before_step = check;
    job.context = &checked;
    mesh_trained(&job, mesh);
    cr_expect(checked);
}

/* In step 1 of delayed scaling the scales are 1: gradients and weights, small as they are,
 * underflow in part. That of step 2 is of the largest element of step 1. */
static nd_status check_underflow(void *context, nd_trainer *t, int64_t step)
{
    const nd_scales *s = &t->model->scales;
    const nd_health_entry x = nd_health_of(s, nd_site_input(s, 0, 0));
    static _Thread_local float amax;
    ND_CHECK(step != 2 || fabsf(x.scale * amax / 448.0f - 1.0f) <= 1e-6f, "scale %g after %g",
             (double)x.scale, (double)amax);
    amax = x.amax;
    if (step == 1) {
        nd_health_entry g = nd_health_of(s, nd_site_gradient(s, 1, 6));
        nd_health_entry w = nd_health_of(s, nd_site_weight(s, 1, 6));
        ND_CHECK(g.underflow > 0.005 && g.saturation == 0.0, "gradient %g %g", g.underflow,
                 g.saturation);
        ND_CHECK(w.underflow > 0.005 && w.saturation == 0.0, "weight %g %g", w.underflow,
                 w.saturation);
        *(int *)context = 1;
    }
    return ND_OK;
}

Test(fp8_health, health_counts_what_is_lost)
{
    static const mesh_case sharded = {"fsdp 2", 1, 2, 1, 1, 1};
    run_checked(&mesh_one, fp8_job(&dir, ND_FP8_DELAYED, false), 3, 1, check_underflow);
    run_checked(&sharded, fp8_job(&dir, ND_FP8_DELAYED, true), 3, 1, check_underflow);
}

static nd_status check_health(void *context, nd_trainer *t, int64_t step)
{
    const nd_scales *s = &t->model->scales;
    nd_health_summary all;
    if (step == 2 && t->rank->rank == 0) {
        ND_CHECK(s->counted == 2, "step %lld was counted", (long long)s->counted);
        nd_health_summarise(s, &all);
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            nd_health_entry w = nd_health_of(s, nd_site_weight(s, 1, linear));
            nd_health_entry g = nd_health_of(s, nd_site_gradient(s, 1, linear));
            ND_CHECK(w.amax > 0.1f && w.amax < 1.0f, "amax %g", (double)w.amax);
            ND_CHECK(fabsf(w.scale * w.amax - 448.0f) < 1e-3f, "scale %g", (double)w.scale);
            ND_CHECK(fabsf(g.scale * g.amax - 57344.0f) < 0.1f, "scale %g of a gradient, in E5M2",
                     (double)g.scale);
            /* The largest element times its own scale may be one rounding beyond the format. */
            ND_CHECK(w.saturation < 1e-3 && w.underflow < 0.01, "weight %g %g", w.saturation,
                     w.underflow);
            ND_CHECK(g.saturation < 1e-3 && g.underflow < 0.05 && g.amax > 0.0f, "gradient %g %g",
                     g.saturation, g.underflow);
            for (int layer = 0; layer < FP8_LAYERS; layer++) {
                g = nd_health_of(s, nd_site_gradient(s, layer, linear));
                ND_CHECK((double)g.amax <= all.worst[ND_OPERAND_GRADIENT][linear].amax,
                         "layer %d is worse", layer);
            }
        }
        *(int *)context = 1;
    }
    return ND_OK;
}

Test(fp8_health, health_of_every_linear)
{
    static const mesh_case mesh = {"fsdp 2 x tp 2", 1, 2, 1, 2, 1};
    run_checked(&mesh, fp8_job(&dir, ND_FP8_TENSORWISE, true), 3, 2, check_health);
}

enum {
    WEIGHTS = FP8_LAYERS * ND_LINEAR_COUNT, /* which are cast for each micro-batch */
    SITES = 2 * WEIGHTS + FP8_LAYERS * ND_INPUT_COUNT
};

typedef struct counted {
    float amax[SITES];
    int64_t elements[SITES], lost[SITES], all_lost;
} counted;

static nd_status note_all(void *context, nd_trainer *t, int64_t step)
{
    const nd_scales *s = &t->model->scales;
    counted *all = context;
    ND_CHECK(s->sites == SITES, "%lld sites", (long long)s->sites);
    for (int64_t i = 0; step == 2 && t->rank->rank == 0 && i < SITES; i++) {
        all->amax[i] = s->report[i].amax;
        all->elements[i] = s->report[i].counts[2];
        all->lost[i] = s->report[i].counts[0] + s->report[i].counts[1];
        all->all_lost += all->lost[i];
    }
    return ND_OK;
}

/* The report of step 2 does not depend on whether step 1 was counted. Its number of elements does
 * not depend on the number of micro-batches, nor on that of the ranks that share them out. */
Test(fp8_health, counts_are_of_one_step_and_of_all_micro_batches)
{
    static const mesh_case meshes[] = {{"one", 1, 1, 1, 1, 1},
                                       {"one", 1, 1, 1, 1, 1},
                                       {"one micro-batch", 1, 1, 1, 1, 4},
                                       {"hsdp 2 x 2", 2, 2, 1, 1, 1},
                                       {"cp 2", 1, 1, 2, 1, 1}};
    enum { MESHES = sizeof meshes / sizeof *meshes };
    static counted seen[MESHES];
    for (int i = 0; i < MESHES; i++) {
        mesh_job job = fp8_job(&dir, ND_FP8_TENSORWISE, false);
        job.steps = 3;
        job.health_interval = i == 0 ? 1 : 2;
        job.before_step = note_all;
        job.context = &seen[i];
        mesh_trained(&job, &meshes[i]);
    }
    cr_assert_arr_eq(seen[0].amax, seen[1].amax, sizeof seen[0].amax);
    cr_assert_gt(seen[0].elements[SITES - 1], 0);
    cr_assert_arr_eq(seen[0].elements, seen[1].elements, sizeof seen[0].elements);
    cr_assert_gt(seen[0].all_lost, 0);
    cr_assert_arr_eq(seen[0].lost, seen[1].lost, sizeof seen[0].lost);
    for (int i = 2; i < MESHES; i++) {
        cr_assert_arr_eq(seen[0].elements + WEIGHTS, seen[i].elements + WEIGHTS,
                         (SITES - WEIGHTS) * sizeof *seen[0].elements, "%s", meshes[i].name);
    }
}

/* Notes the health after step 1 of the input of the first block's q k v, and of a gradient. */
static nd_status note_two(void *context, nd_trainer *t, int64_t step)
{
    const nd_scales *s = &t->model->scales;
    nd_health_entry *seen = context;
    if (step == 1 && t->rank->rank == 0) {
        seen[0] = nd_health_of(s, nd_site_input(s, 0, 0));
        seen[1] = nd_health_of(s, nd_site_gradient(s, 1, 6));
    }
    return ND_OK;
}

/* The rowwise recipes round down to a power of two, delayed starts with 1. */
static void expect_scale(nd_fp8_recipe recipe, nd_health_entry of, bool gradient)
{
    const bool is_rowwise = recipe == ND_FP8_ROWWISE || recipe == ND_FP8_ROWWISE_GW_HP;
    const float most = gradient && !is_rowwise ? 57344.0f : 448.0f; /* E5M2, E4M3 */
    const float wanted = recipe == ND_FP8_DELAYED ? 1.0f
                         : is_rowwise             ? exp2f(floorf(log2f(most / of.amax)))
                                                  : most / of.amax;
    cr_expect_float_eq(of.scale / wanted, 1.0f, 1e-6f, "recipe %d: scale %.9g, not %.9g", recipe,
                       of.scale, wanted);
}

/*
 * The normed inputs of block 0 are the same bits on every mesh before the first update, so their
 * largest element over all ranks and micro-batches is one worker's. With 16 tokens a sequence each
 * rank and each micro-batch has another largest element than the whole.
 */
Test(fp8_health, health_is_of_all_ranks_and_micro_batches)
{
    static const mesh_case meshes[] = {{"one", 1, 1, 1, 1, 1},
                                       {"one micro-batch", 1, 1, 1, 1, 4},
                                       {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
                                       {"fsdp 2 x tp 2", 1, 2, 1, 2, 1}};
    for (int recipe = ND_FP8_TENSORWISE; recipe < (int)ND_FP8_RECIPE_COUNT; recipe++) {
        nd_health_entry all[4][2] = {0};
        const nd_health_entry *one = all[0];
        for (int i = 0; i < 4; i++) {
            mesh_job job = fp8_job(&dir, (nd_fp8_recipe)recipe, false);
            job.steps = 2;
            job.sequence = 16;
            job.health_interval = 1;
            job.before_step = note_two;
            job.context = all[i];
            mesh_trained(&job, &meshes[i]);
            cr_expect_gt(all[i]->amax, 1.0f, "%s: %g", meshes[i].name, all[i]->amax);
            cr_expect_eq(all[i]->amax, one->amax, "recipe %d, %s: amax %.9g, one worker %.9g",
                         recipe, meshes[i].name, all[i]->amax, one->amax);
            cr_expect_eq(all[i]->scale, one->scale, "recipe %d, %s: scale %.9g and %.9g", recipe,
                         meshes[i].name, all[i]->scale, one->scale);
            expect_scale((nd_fp8_recipe)recipe, all[i][1], true);
        }
        expect_scale((nd_fp8_recipe)recipe, *one, false);
    }
}

/* steps that are not finite */

typedef struct poison {
    nd_param_id id;
    int64_t layer;
    float value;
    int64_t step;    /* the weight is poisoned before it, and restored before the next */
    int64_t skipped; /* seen by rank 0 */
} poison;

static nd_status put_poison(void *context, nd_trainer *t, int64_t step)
{
    poison *p = context;
    const nd_layout *layout = t->model->layout;
    nd_flat_range range = nd_layout_shard_range(layout, nd_layout_param(layout, p->id, p->layer));
    float *first = t->model->fsdp.master + range.begin;
    static _Thread_local float kept;
    if (range.begin < range.end && step == p->step) {
        kept = *first;
        *first = p->value;
    } else if (range.begin < range.end && step == p->step + 1) {
        *first = kept;
    }
    nd_fsdp_weights_changed(&t->model->fsdp);
    if (t->rank->rank == 0) {
        p->skipped = t->position.skipped;
    }
    return ND_OK;
}

static void expect_stop(poison *p, const char *tensor)
{
    static const mesh_case meshes[] = {{"one", 1, 1, 1, 1, 1}, {"fsdp 2 x tp 2", 1, 2, 1, 2, 1}};
    for (int i = 0; i < 4; i++) {
        mesh_job job = fp8_job(&dir, ND_FP8_TENSORWISE, true);
        job.precision = i < 2 ? ND_PRECISION_FP8 : ND_PRECISION_BF16;
        job.steps = 3;
        job.before_step = put_poison;
        job.context = p;
        mesh_expect_failure(&job, &meshes[i % 2], ND_ERR_NUMERIC);
        const char *said = nd_error_last()->message;
        cr_expect(strstr(said, "step 2: the loss is"), "%s", said);
        cr_expect(strstr(said, tensor), "%s", said);
        cr_expect(strstr(said, "the weights are those of step 1"), "%s", said);
    }
}

Test(fp8_health, stops_at_the_first_tensor)
{
    poison weight = {ND_PARAM_UP, 2, NAN, 1, 0}, large = {ND_PARAM_NORM_1, 1, 3e38f, 1, 0};
    poison last = {ND_PARAM_NORM_2, FP8_LAYERS - 1, 3e38f, 1, 0}; /* in the last block */
    expect_stop(&weight, "not finite is the weight model.layers.2.mlp.up_proj.weight");
    expect_stop(&large, "not finite is the input of layer 2");
    expect_stop(&last, "not finite is the input of the final norm");
    poison head = {ND_PARAM_NORM_F, -1, 3e38f, 1, 0}; /* logits, which no test of inputs sees */
    expect_stop(&head, "not finite is the gradient of lm_head.weight");
}

Test(fp8_health, skips_alike_and_goes_on)
{
    static const mesh_case mesh = {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1};
    for (int recipe = ND_FP8_TENSORWISE; recipe < (int)ND_FP8_RECIPE_COUNT; recipe++) {
        poison p = {ND_PARAM_K, 1, NAN, 1, 0};
        mesh_job job = fp8_job(&dir, (nd_fp8_recipe)recipe, recipe == ND_FP8_TENSORWISE);
        job.steps = 4;
        job.nonfinite = ND_NONFINITE_SKIP;
        job.before_step = put_poison;
        job.context = &p;
        mesh_result result = mesh_trained(&job, &mesh);
        cr_expect(isfinite(result.loss[0]));
        cr_expect_not(isfinite(result.loss[1]) && isfinite(result.norm[1]));
        cr_expect(isfinite(result.loss[2]) && isfinite(result.norm[3]), "recipe %d: %g %g", recipe,
                  result.loss[2], result.norm[3]);
        cr_expect_eq(p.skipped, 1);
    }
}
