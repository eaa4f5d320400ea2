// SPDX-License-Identifier: Apache-2.0
/* What an FP8 step makes and keeps: counters, memory, state. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/parity/fp8_job.h"
#include "tests/parity/golden_run.h"
#include "tests/support/ranks.h"

static tempdir dir;

/* codes made */

static nd_status count_casts(void *context, nd_trainer *t)
{
    if (t->rank->rank == 0) {
        *(nd_cast_counts *)context = t->model->scales.casts;
    }
    return ND_OK;
}

/* The default filter: 7 L - 1 linears. Weights once a step, gradients once a micro-batch. */
Test(fp8_step, seven_linears_of_each_layer_but_the_first)
{
    static const mesh_case one = {"one worker", 1, 1, 1, 1, 1};
    nd_cast_counts casts = {0};
    mesh_job job = fp8_job(&dir, ND_FP8_TENSORWISE, true);
    job.observe = count_casts;
    job.context = &casts;
    fp8_run(&job, &one, ND_OK);
    cr_expect_eq(casts.weights, 7 * FP8_LAYERS - 1, "%ld", (long)casts.weights);
    cr_expect_eq(casts.gradients, 4 * (7 * FP8_LAYERS - 1), "%ld", (long)casts.gradients);
    /* Four inputs a layer; in backward again the attention output, and the first layer's, kept in
     * BF16 for q. */
    cr_expect_eq(casts.inputs, 4 * (5 * FP8_LAYERS + 1), "%ld", (long)casts.inputs);
    tempdir_remove(&dir);
}

/* memory */

static size_t planned(nd_precision precision, nd_fp8_recipe recipe, bool all_gather,
                      nd_recompute recompute, size_t *activations)
{
    nd_config config = {.train = {.sequence_length = 1024, .micro_batch_size = 2}};
    nd_rank rank = {.world_size = 2, .mesh = {{1, 1, 2, 1, 1}}, .config = &config};
    nd_trainer *trainer;
    config.train.precision = precision;
    config.train.gradient_accumulation_steps = 1;
    config.data.validation_path = "";
    config.fp8.recipe = recipe;
    config.fp8.all_gather = all_gather;
    config.fp8.amax_history_length = 16;
    config.parallel.recompute = recompute;
    config.parallel.reshard_after_forward = true;
    config.resolved_mesh = rank.mesh;
    rank.shape = fp8_shape();
    rank.shape.hidden = 256;
    rank.shape.ffn = 704;
    rank.shape.head_dim = 32;
    cr_assert_eq(nd_device_open_cpu(1, &rank.device), ND_OK);
    cr_assert_eq(nd_ops_cpu(rank.device, &rank.ops), ND_OK);
    cr_assert_eq(nd_trainer_create(&rank, &trainer), ND_OK, "%s", nd_error_last()->message);
    size_t total = trainer->plan.total;
    *activations = nd_memplan_class_bytes(&trainer->plan, ND_MEM_ACTIVATIONS);
    nd_trainer_destroy(trainer);
    nd_device_close(rank.device);
    return total;
}

/* Kept as codes, h1, h2 and act take half: of a layer's T (8 C + QKV + ...) elements T (2 C + F)
 * bytes less. */
Test(fp8_step, less_memory_than_bf16)
{
    size_t bf16_kept, kept;
    size_t bf16 =
        planned(ND_PRECISION_BF16, ND_FP8_TENSORWISE, false, ND_RECOMPUTE_NONE, &bf16_kept);
    const int64_t tokens = 2048, saved = tokens * (2 * 256 + 704);
    for (int all_gather = 0; all_gather < 2; all_gather++) {
        for (int delayed = 0; delayed < 2; delayed++) {
            size_t fp8 = planned(ND_PRECISION_FP8, delayed ? ND_FP8_DELAYED : ND_FP8_TENSORWISE,
                                 all_gather, ND_RECOMPUTE_NONE, &kept);
            cr_expect_lt(fp8, bf16, "%zu bytes, bf16 %zu", fp8, bf16);
            /* The first layer's h1 stays in BF16 for its q. */
            cr_expect_eq(bf16_kept - kept, (size_t)(FP8_LAYERS * saved - tokens * 256), "%zu",
                         bf16_kept - kept);
        }
    }
    (void)planned(ND_PRECISION_FP8, ND_FP8_ROWWISE, false, ND_RECOMPUTE_NONE, &kept);
    cr_expect_eq(kept, bf16_kept, "rowwise keeps what its weight gradient needs");
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
Test(fp8_step, delayed_goes_on_from_its_state)
{
    double losses[3];
    for (int with = 0; with < 2; with++) {
        golden_run first, second;
        nd_step_result result;
        golden_run_open(&first, "fp8/model",
                        (golden_options){ND_PRECISION_FP8, ND_FP8_DELAYED, false});
        golden_run_open(&second, "fp8/model",
                        (golden_options){ND_PRECISION_FP8, ND_FP8_DELAYED, false});
        for (int step = 0; step < 4; step++) {
            nd_step_batch batch = golden_run_batch(&first, step);
            if (step == 3) {
                copy_state(&second, &first, with);
            }
            assert_ok(nd_trainer_step(first.trainer, &batch, &result));
            losses[0] = result.loss;
        }
        nd_step_batch batch = golden_run_batch(&second, 3);
        assert_ok(nd_trainer_step(second.trainer, &batch, &result));
        losses[1 + with] = result.loss;
        golden_run_close(&first);
        golden_run_close(&second);
    }
    cr_expect_eq(memcmp(&losses[0], &losses[2], 8), 0, "%.17g, %.17g", losses[0], losses[2]);
    cr_expect_neq(memcmp(&losses[0], &losses[1], 8), 0);
}

Test(fp8_step, current_scaling_has_no_state)
{
    golden_run f;
    nd_scale_state state[3];
    golden_run_open(&f, "fp8/model", (golden_options){ND_PRECISION_FP8, ND_FP8_TENSORWISE, true});
    cr_expect_eq(nd_scales_state(&f.trainer->model->scales, state), 0);
    golden_run_close(&f);
}

/*
 * The scales that delayed scaling uses in step 2 are those of step 1's amaxes: FMAX / amax; in step
 * 1 they are 1. The amax of the weights is that of the weights of step 1, and two micro-batches
 * give the larger of theirs.
 */
Test(fp8_step, delayed_scales_follow_the_amaxes_of_the_step)
{
    golden_run f;
    nd_step_result result;
    golden_run_open(&f, "fp8/model", (golden_options){ND_PRECISION_FP8, ND_FP8_DELAYED, false});
    nd_scales *s = &f.trainer->model->scales;
    int64_t site = nd_site_weight(s, 1, 6);
    nd_flat_range w = s->weights[site];
    float amax = 0.0f;
    for (int64_t i = w.begin; i < w.end; i++) {
        amax = fmaxf(amax, fabsf(f.trainer->model->fsdp.master[i]));
    }
    amax = nd_bf16_to_f32(nd_bf16_from_f32(amax));
    cr_expect_eq(s->scale[site], 1.0f);
    nd_step_batch batch = golden_run_batch(&f, 0);
    assert_ok(nd_trainer_step(f.trainer, &batch, &result));
    cr_expect_eq(s->scale[site], 448.0f / amax, "%.9g, %.9g", s->scale[site], 448.0f / amax);
    int64_t gradient = nd_site_gradient(s, 1, 6);
    cr_expect_gt(s->scale[gradient], 57344.0f, "gradients are below 1");
    float before = s->scale[gradient];
    assert_ok(nd_model_load_batch(f.trainer->model, batch.inputs, batch.labels, batch.positions));
    assert_ok(nd_model_forward(f.trainer->model, false)); /* validation takes no amax */
    cr_expect_eq(s->amax[nd_site_input(s, 1, 0)], 0.0f);
    cr_expect_eq(s->scale[gradient], before);
    golden_run_close(&f);
}
