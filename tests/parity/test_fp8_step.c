// SPDX-License-Identifier: Apache-2.0
/* Tests how many casts an FP8 step makes, by counters, and how much memory it plans. */
#include <criterion/criterion.h>

#include "tests/parity/fp8_job.h"
#include "tests/support/forms.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"

static tempdir dir;

TEMPDIR_SUITE(fp8_step, tempdir_leave_empty);

/* operands that are cast, by ops or by products */

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
    nd_cast_counts casts = {0};
    mesh_job job = fp8_job(&dir, ND_FP8_TENSORWISE, true);
    job.observe = count_casts;
    job.context = &casts;
    mesh_trained(&job, &mesh_one);
    cr_expect_eq(casts.weights, 7 * FP8_LAYERS - 1, "%ld", (long)casts.weights);
    cr_expect_eq(casts.gradients, 4 * (7 * FP8_LAYERS - 1), "%ld", (long)casts.gradients);
    /* Four inputs a layer; in backward again the attention output, and the first layer's, kept in
     * BF16 for q. */
    cr_expect_eq(casts.inputs, 4 * (5 * FP8_LAYERS + 1), "%ld", (long)casts.inputs);
}

/* Codes that ops make, and buffers for them. */
typedef struct made {
    nd_ops ops;
    const nd_ops *real;
    int casts;
} made;

static made of_one;

static nd_status counted_make_form(nd_stream *stream, const nd_make_form_args *args)
{
    of_one.casts += args->x.axes == 2; /* the others are of flat shards */
    return of_one.real->make_form(stream, args);
}

static nd_status count_codes(void *context, nd_trainer *t, int64_t step)
{
    of_one = (made){.ops = *t->rank->ops, .real = t->rank->ops};
    of_one.ops.make_form = counted_make_form;
    t->rank->ops = &of_one.ops;
    return ND_OK;
}

static nd_status expect_no_buffers(void *context, nd_trainer *t)
{
    void *const *f = t->model->work.fp8;
    const bool by_products = products_cast(t->rank->ops, t->rank->device);
    ND_CHECK(by_products == !f[ND_FP8_X] && by_products == !f[ND_FP8_DY] &&
                 by_products == !f[ND_FP8_W],
             "buffers for codes of x, dy, w: %d %d %d", f[ND_FP8_X] != NULL, f[ND_FP8_DY] != NULL,
             f[ND_FP8_W] != NULL);
    return ND_OK;
}

/* Where products cast, ops make only the codes that blocks keep: those of three inputs of a layer,
 * but for the first one, whose q reads BF16. */
Test(fp8_step, products_cast_what_is_not_kept)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    cr_assert_eq(nd_ops_cpu(device, &ops), ND_OK);
    const bool by_products = products_cast(ops, device);
    nd_device_close(device);
    mesh_job job = fp8_job(&dir, ND_FP8_TENSORWISE, false);
    job.before_step = count_codes;
    job.end = expect_no_buffers;
    mesh_trained(&job, &mesh_one);
    const int inputs = 3 * FP8_LAYERS - 1;
    const int again = FP8_LAYERS + 1, weights = 2 * (7 * FP8_LAYERS - 1);
    const int gradients = 7 * FP8_LAYERS - 1, others = FP8_LAYERS + 1;
    cr_expect_eq(of_one.casts,
                 4 * (by_products ? inputs : inputs + others + again + weights + gradients), "%d",
                 of_one.casts);
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
    cr_assert_eq(nd_trainer_create(&rank, NULL, &trainer), ND_OK, "%s", nd_error_last()->message);
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
