// SPDX-License-Identifier: Apache-2.0
/*
 * Delayed scaling from step to step, on one worker: which amaxes enter the history and which do
 * not, the scales that come of them, and the state that a run must carry to go on.
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
static float *amaxes_of(golden_run *f, nd_step_batch batch, int64_t valid)
{
    nd_scales *s = scales_of(f);
    nd_step_result result;
    batch.valid = valid; /* gradients are those of a step with so many labels */
    assert_ok(nd_scales_forget(s));
    assert_ok(nd_trainer_gradients(f->trainer, &batch, &result));
    return copy_of(s->amax, s->sites);
}

/*
 * The amax of a site over two micro-batches is the larger of what each has alone, whichever comes
 * first. The scales of the next step are FMAX / 2^margin / amax, with FMAX of the gradients' own
 * format, and the amaxes stand in the history's last row.
 */
Test(fp8_delayed, a_step_gives_the_largest_amaxes_of_its_micro_batches)
{
    golden_run f, one;
    open_delayed(&f, (golden_options){.margin = MARGIN, .accumulation = 2});
    open_delayed(&one, (golden_options){.margin = MARGIN});
    nd_scales *s = scales_of(&f);
    nd_step_batch both = golden_run_batch(&f, 0);
    int64_t inputs = nd_site_input(s, 0, 0), gradients = nd_site_gradient(s, 0, 0);
    int first_larger = 0, second_larger = 0, seen = 0;
    float *a = amaxes_of(&one, golden_run_batch(&one, 0), both.valid);
    float *b = amaxes_of(&one, golden_run_batch(&one, 1), both.valid);
    float *amax = amaxes_of(&f, both, both.valid);
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
    golden_run_close(&one);
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
            const nd_flat_range part = nd_scales_part(s, site);
            for (int64_t i = part.begin; i < part.end; i++) {
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
    nd_scale_state state[3];
    cr_expect_eq(nd_scales_state(s, state), recipe == ND_FP8_DELAYED ? 3 : 0);
    (void)train(&f, 0);
    nd_cast_counts before = s->casts;
    nd_step_batch batch = golden_run_batch(&f, 1);
    nd_model *m = f.trainer->model;
    nd_activation_set *set = nd_model_take_set(m);
    assert_ok(nd_model_load_batch(m, set, batch.inputs, batch.labels, batch.positions));
    assert_ok(nd_model_forward(m, set, ND_PASS_EVAL));
    assert_ok(nd_model_give_back(m, set));
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
    float *weight = fsdp->master + nd_scales_part(s, nd_site_weight(s, 1, 1)).begin;
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

/* A step on the data of golden step `number` of which no label counts. */
static nd_step_result train_without_labels(golden_run *f, int64_t number)
{
    nd_step_batch batch = golden_run_batch(f, number);
    const int64_t count = f->config.train.sequence_length * nd_step_blocks(&f->config);
    int32_t *none = malloc((size_t)count * sizeof *none);
    nd_step_result result;
    for (int64_t i = 0; i < count; i++) {
        none[i] = ND_LABEL_IGNORED;
    }
    batch.labels = none;
    batch.valid = 0;
    assert_ok(nd_trainer_step(f->trainer, &batch, &result));
    free(none);
    return result;
}

/* Its scales and history are those of before, and the next steps have the bits of a run that never
 * made it. After the first skipped step the weights are written anew, after the second they are
 * not, so that their amaxes must still be there. */
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
    for (int64_t step = 3; step < 7; step++) {
        cr_assert(step != 5 || train_without_labels(&f, step).skipped);
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

typedef struct state_list {
    float *data[8];
    int64_t counts[8];
    int count;
} state_list;

static state_list list_state(const golden_run *run)
{
    const nd_trainer_state state = nd_trainer_state_of(run->trainer);
    state_list list = {0};
    for (int i = 0; i < state.shard_count; i++) {
        list.data[list.count] = state.shards[i];
        list.counts[list.count++] = run->trainer->model->layout->shard_total;
    }
    for (int i = 0; i < state.scale_count; i++) {
        list.data[list.count] = state.scales[i].data;
        list.counts[list.count++] = state.scales[i].count;
    }
    return list;
}

/* All but one array, by number; -1: all. */
static void copy_state(golden_run *to, const golden_run *from, int without)
{
    const state_list there = list_state(from), here = list_state(to);
    cr_assert_eq(here.count, there.count);
    for (int i = 0; i < here.count; i++) {
        cr_assert_eq(here.counts[i], there.counts[i]);
        if (i != without) {
            memcpy(here.data[i], there.data[i], (size_t)here.counts[i] * 4);
        }
    }
    nd_trainer_resume_at(to->trainer, from->trainer->position);
}

/* The loss of step 5 of a run that goes on in another trainer after step 3. */
static double loss_after_resuming(int without)
{
    golden_run first, second;
    double loss;
    open_delayed(&first, (golden_options){.history_max = true});
    open_delayed(&second, (golden_options){.history_max = true});
    second.config.train.nonfinite = ND_NONFINITE_SKIP; /* a wrong scale may give NaN */
    for (int step = 0; step < 3; step++) {
        (void)train(&first, step);
    }
    copy_state(&second, &first, without);
    cr_expect_eq(second.trainer->position.step, 3);
    cr_expect_eq(second.trainer->position.tokens_seen, first.trainer->position.tokens_seen);
    cr_expect_gt(second.trainer->position.tokens_seen, 0);
    (void)train(&second, 3);
    loss = train(&second, 4).loss;
    golden_run_close(&first);
    golden_run_close(&second);
    return loss;
}

/* nd_trainer_state_of lists all that a run needs to go on with the same bits, and nothing that it
 * does not need. */
Test(fp8_delayed, a_run_goes_on_from_its_state)
{
    golden_run whole;
    double wanted = 0.0;
    open_delayed(&whole, (golden_options){.history_max = true});
    for (int step = 0; step < 5; step++) {
        wanted = train(&whole, step).loss;
    }
    const int count = list_state(&whole).count;
    cr_assert_eq(count, 6);
    golden_run_close(&whole);
    double got = loss_after_resuming(-1);
    cr_expect_eq(memcmp(&got, &wanted, 8), 0, "%.17g, %.17g", got, wanted);
    for (int i = 0; i < count; i++) {
        got = loss_after_resuming(i);
        cr_expect_neq(memcmp(&got, &wanted, 8), 0, "array %d is not needed", i);
    }
}
