// SPDX-License-Identifier: Apache-2.0
/*
 * What delayed scaling follows from step to step, on one worker: which amaxes enter the history and
 * which do not, the scales that come of them, and what a run must carry to go on.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/parity/golden_run.h"
#include "tests/support/tempdir.h"

enum { MARGIN = 2, HISTORY = 16 };

static void open_delayed(golden_run *f, golden_options options)
{
    options.precision = ND_PRECISION_FP8;
    options.recipe = ND_FP8_DELAYED;
    golden_run_open(f, "fp8/model", options);
}

static nd_scales *scales_of(golden_run *f)
{
    return &f->trainer->model->scales;
}

/* A step on the data of golden step `number`. */
static nd_step_result train(golden_run *f, int64_t number)
{
    nd_step_batch batch = golden_run_batch(f, number);
    nd_step_result result;
    assert_ok(nd_trainer_step(f->trainer, &batch, &result));
    return result;
}

static float *copy_of(const float *from, int64_t count)
{
    float *copy = malloc((size_t)count * sizeof *copy);
    return memcpy(copy, from, (size_t)count * sizeof *copy);
}

/* which amaxes enter */

/* The amaxes (sites) of this step before it is over. The caller frees them. */
static float *amaxes_of(golden_run *f, nd_step_batch batch, int64_t micros, int64_t valid)
{
    nd_scales *s = scales_of(f);
    nd_step_result result;
    f->config.train.gradient_accumulation_steps = micros;
    batch.valid = valid; /* gradients are those of a step with so many labels */
    assert_ok(nd_scales_forget(s));
    assert_ok(nd_trainer_gradients(f->trainer, &batch, &result));
    return copy_of(s->amax, s->sites);
}

/*
 * Of two micro-batches the amax of a site is the larger of what each has alone, whichever comes
 * first. The scales of the next step are FMAX / 2^margin / amax, with FMAX of the gradients' own
 * format, and the amaxes stand in the history's last row.
 */
Test(fp8_delayed, a_step_gives_the_largest_amaxes_of_its_micro_batches)
{
    golden_run f;
    open_delayed(&f, (golden_options){.margin = MARGIN, .accumulation = 2});
    nd_scales *s = scales_of(&f);
    nd_step_batch both = golden_run_batch(&f, 0);
    int64_t inputs = nd_site_input(s, 0, 0), gradients = nd_site_gradient(s, 0, 0);
    int first_larger = 0, second_larger = 0, seen = 0;
    float *a = amaxes_of(&f, both, 1, both.valid);
    float *b = amaxes_of(&f, golden_run_batch(&f, 1), 1, both.valid);
    float *amax = amaxes_of(&f, both, 2, both.valid);
    for (int64_t i = 0; i < s->sites; i++) {
        cr_expect_eq(amax[i], fmaxf(a[i], b[i]), "site %ld: %.9g of %.9g and %.9g", (long)i,
                     amax[i], a[i], b[i]);
        cr_expect_eq(s->scale[i], 1.0f);
        first_larger += i >= inputs && a[i] > b[i];
        second_larger += i >= inputs && b[i] > a[i];
    }
    cr_expect(first_larger > 0 && second_larger > 0, "%d, %d", first_larger, second_larger);
    (void)train(&f, 0);
    for (int64_t i = 0; i < s->sites; i++) {
        float limit = (i < gradients ? 448.0f : 57344.0f) / (1 << MARGIN);
        float scale = amax[i] > 0.0f ? limit / amax[i] : 1.0f; /* 0: a linear in BF16 */
        seen += amax[i] > 0.0f;
        cr_expect_eq(s->scale[i], scale, "site %ld: scale %.9g, not %.9g", (long)i, s->scale[i],
                     scale);
        cr_expect_eq(s->inverse[i], 1.0f / scale);
        cr_expect_eq(s->amax[i], 0.0f);
        cr_expect_eq(s->amax[(HISTORY - 1) * s->sites + i], amax[i]);
    }
    /* Four layers: 7 L - 1 weights and gradients, 4 L inputs. */
    cr_expect_eq(seen, 2 * 27 + 16, "%d", seen);
    free(a);
    free(b);
    free(amax);
    golden_run_close(&f);
}

/* A weight's amax is that of the values that are cast: the F32 ones, or their BF16 copies. */
Test(fp8_delayed, weights_enter_as_they_are_cast)
{
    for (int all_gather = 0; all_gather < 2; all_gather++) {
        golden_run f;
        open_delayed(&f, (golden_options){.all_gather = all_gather});
        nd_scales *s = scales_of(&f);
        for (int64_t step = 0; step < 3; step++) {
            float amax = 0.0f;
            int64_t site = nd_site_weight(s, 1, 6);
            for (int64_t i = s->weights[site].begin; i < s->weights[site].end; i++) {
                amax = fmaxf(amax, fabsf(f.trainer->model->fsdp.master[i]));
            }
            amax = all_gather ? amax : nd_bf16_to_f32(nd_bf16_from_f32(amax));
            (void)train(&f, step);
            cr_expect_eq(s->scale[site], 448.0f / amax, "step %ld: %.9g, not %.9g", (long)step,
                         s->scale[site], 448.0f / amax);
        }
        golden_run_close(&f);
    }
}

/* which do not */

static void expect_no_amax(const nd_scales *s, const char *when)
{
    for (int64_t i = nd_site_input(s, 0, 0); i < s->sites; i++) {
        cr_expect_eq(s->amax[i], 0.0f, "%s: amax %.9g of site %ld", when, s->amax[i], (long)i);
    }
}

/*
 * A forward pass without training after a step: its casts, and no amax of it. `delayed` validates
 * in BF16 when weights are gathered in BF16; what has codes only, and other recipes, in FP8.
 */
static void expect_validation(nd_fp8_recipe recipe, bool all_gather, bool in_fp8)
{
    golden_run f;
    golden_run_open(&f, "fp8/model",
                    (golden_options){ND_PRECISION_FP8, recipe, .all_gather = all_gather});
    nd_scales *s = scales_of(&f);
    (void)train(&f, 0);
    nd_cast_counts before = s->casts;
    nd_step_batch batch = golden_run_batch(&f, 1);
    assert_ok(nd_model_load_batch(f.trainer->model, batch.inputs, batch.labels, batch.positions));
    assert_ok(nd_model_forward(f.trainer->model, false));
    long inputs = (long)(s->casts.inputs - before.inputs);
    long weights = (long)(s->casts.weights - before.weights);
    cr_expect_eq(inputs, in_fp8 ? 4 * 4 : 0, "recipe %d, %d: %ld inputs", recipe, all_gather,
                 inputs);
    cr_expect_eq(weights, in_fp8 ? 7 * 4 - 1 : 0, "recipe %d, %d: %ld weights", recipe, all_gather,
                 weights);
    cr_expect_eq(s->casts.gradients, before.gradients);
    if (recipe == ND_FP8_DELAYED) {
        expect_no_amax(s, all_gather ? "validation in FP8" : "validation in BF16");
    }
    golden_run_close(&f);
}

Test(fp8_delayed, validation_takes_no_amax_and_casts_as_documented)
{
    expect_validation(ND_FP8_DELAYED, false, false);
    expect_validation(ND_FP8_DELAYED, true, true);
    expect_validation(ND_FP8_TENSORWISE, false, true);
    expect_validation(ND_FP8_TENSORWISE, true, true);
    expect_validation(ND_FP8_ROWWISE, false, true);
}

/* The weight that makes a step not finite; returns what it was. */
static float put_weight(golden_run *f, float value)
{
    nd_fsdp *fsdp = &f->trainer->model->fsdp;
    nd_scales *s = scales_of(f);
    float *weight = fsdp->master + s->weights[nd_site_weight(s, 1, 1)].begin;
    float was = *weight;
    *weight = value;
    nd_fsdp_weights_changed(fsdp);
    return was;
}

static void compare_states(golden_run *f, float *const then[3], bool whole)
{
    nd_scale_state now[3];
    int64_t sites = scales_of(f)->sites;
    cr_assert_eq(nd_scales_state(scales_of(f), now), 3);
    for (int i = 0; i < 3; i++) {
        /* Row 0 of the history is the step under way: a skipped one leaves amaxes of weights. */
        int64_t first = i == 2 && !whole ? sites : 0;
        cr_expect_eq(
            memcmp(now[i].data + first, then[i] + first, (size_t)(now[i].count - first) * 4), 0,
            "%s", now[i].name);
    }
}

static void keep_state(golden_run *f, float *kept[3])
{
    nd_scale_state state[3];
    cr_assert_eq(nd_scales_state(scales_of(f), state), 3);
    for (int i = 0; i < 3; i++) {
        kept[i] = copy_of(state[i].data, state[i].count);
    }
}

static void free_state(float *kept[3])
{
    for (int i = 0; i < 3; i++) {
        free(kept[i]);
    }
}

/* Its scales and history are those of before, and the next steps have the bits of a run that never
 * made it. */
static void expect_no_trace_of_a_skipped_step(bool all_gather)
{
    golden_run f, never;
    float *kept[3];
    open_delayed(&f, (golden_options){.all_gather = all_gather});
    open_delayed(&never, (golden_options){.all_gather = all_gather});
    f.config.train.nonfinite = ND_NONFINITE_SKIP;
    for (int64_t step = 0; step < 2; step++) {
        (void)train(&f, step);
        (void)train(&never, step);
    }
    keep_state(&f, kept);
    float was = put_weight(&f, NAN);
    cr_assert(train(&f, 2).skipped);
    compare_states(&f, kept, false);
    expect_no_amax(scales_of(&f), "skipped");
    free_state(kept);
    (void)put_weight(&f, was);
    for (int64_t step = 3; step < 5; step++) {
        nd_step_result got = train(&f, step), wanted = train(&never, step);
        cr_expect_eq(memcmp(&got.loss, &wanted.loss, sizeof got.loss), 0, "%.17g, %.17g", got.loss,
                     wanted.loss);
        keep_state(&never, kept);
        compare_states(&f, kept, true);
        free_state(kept);
    }
    golden_run_close(&f);
    golden_run_close(&never);
}

Test(fp8_delayed, a_skipped_step_leaves_no_trace)
{
    expect_no_trace_of_a_skipped_step(false);
    expect_no_trace_of_a_skipped_step(true);
}

/* state */

static void copy_state(golden_run *to, const golden_run *from, bool scales)
{
    size_t bytes = (size_t)to->trainer->model->layout->shard_total * 4;
    nd_fsdp *a = &to->trainer->model->fsdp;
    const nd_fsdp *b = &from->trainer->model->fsdp;
    nd_scale_state there[3], here[3];
    memcpy(a->master, b->master, bytes);
    memcpy(a->moment1, b->moment1, bytes);
    memcpy(a->moment2, b->moment2, bytes);
    nd_fsdp_weights_changed(a);
    to->trainer->step = from->trainer->step;
    int count = nd_scales_state(&from->trainer->model->scales, there);
    cr_assert_eq(count, 3);
    cr_assert_eq(nd_scales_state(&to->trainer->model->scales, here), 3);
    for (int i = 0; scales && i < count; i++) {
        cr_assert_eq(here[i].count, there[i].count);
        memcpy(here[i].data, there[i].data, (size_t)here[i].count * 4);
    }
}

/* What nd_scales_state lists is all that delayed scaling needs to go on with the same bits, and it
 * is needed. */
Test(fp8_delayed, a_run_goes_on_from_its_state)
{
    double losses[3];
    for (int with = 0; with < 2; with++) {
        golden_run first, second;
        open_delayed(&first, (golden_options){0});
        open_delayed(&second, (golden_options){0});
        for (int step = 0; step < 4; step++) {
            if (step == 3) {
                copy_state(&second, &first, with);
            }
            losses[0] = train(&first, step).loss;
        }
        losses[1 + with] = train(&second, 3).loss;
        golden_run_close(&first);
        golden_run_close(&second);
    }
    cr_expect_eq(memcmp(&losses[0], &losses[2], 8), 0, "%.17g, %.17g", losses[0], losses[2]);
    cr_expect_neq(memcmp(&losses[0], &losses[1], 8), 0);
}

Test(fp8_delayed, current_scaling_has_no_state)
{
    golden_run f;
    nd_scale_state state[3];
    golden_run_open(&f, "fp8/model", (golden_options){ND_PRECISION_FP8, ND_FP8_TENSORWISE, true});
    cr_expect_eq(nd_scales_state(&f.trainer->model->scales, state), 0);
    golden_run_close(&f);
}
