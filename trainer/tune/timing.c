// SPDX-License-Identifier: Apache-2.0
#include "trainer/tune/timing.h"

#include <math.h>
#include <stdlib.h>

#include "runtime/base/clock.h"
#include "runtime/base/rng.h"
#include "trainer/model/linear.h"
#include "trainer/tune/measure.h"
#include "trainer/weights/weights.h"

/* A linear. */

/* A model whose down_proj has these extents; nothing else of it counts. */
static nd_shape shape_of(nd_linear_extents e)
{
    const int64_t head_dim = 16;
    return (nd_shape){.vocab = 16,
                      .hidden = e.n,
                      .ffn = e.k,
                      .layers = 1,
                      .heads = e.n / head_dim,
                      .kv_heads = e.n / head_dim,
                      .head_dim = head_dim,
                      .max_positions = e.m,
                      .rms_eps = 1e-5,
                      .init_std = 0.02,
                      .rope = {.theta = 10000.0}};
}

typedef struct linear_bench {
    nd_config config;
    nd_rank rank; /* alone in the world, with this configuration */
    nd_calls bf16, fp8[ND_FP8_RECIPE_COUNT], all;
} linear_bench;

static void init_linear(linear_bench *t, const nd_rank *rank, nd_linear_extents e)
{
    static char everything[] = "*";
    *t = (linear_bench){.config = *rank->config, .rank = *rank};
    t->config.train.precision = ND_PRECISION_FP8;
    t->config.train.micro_batch_size = t->config.train.gradient_accumulation_steps = 1;
    t->config.train.sequence_length = e.m;
    t->config.parallel.recompute = ND_RECOMPUTE_NONE;
    t->config.fp8.all_gather = false;
    t->config.fp8.health_interval = 0;
    t->config.fp8.filter = everything;
    t->config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    t->rank.config = &t->config;
    t->rank.mesh = t->config.resolved_mesh;
    t->rank.coord = (nd_coord){{0}};
    t->rank.rank = 0;
    t->rank.world_size = 1;
    t->rank.shape = shape_of(e);
}

static nd_status list_calls(linear_bench *t, const nd_fp8_recipe *recipes, int count)
{
    nd_linear_choice choice = {.forced = true};
    ND_TRY(nd_dry_run(&t->rank, &choice, &t->bf16));
    ND_TRY(nd_calls_add_all(&t->all, &t->bf16));
    choice.fp8[ND_INPUT_DOWN][0] = 1;
    for (int i = 0; i < count; i++) {
        t->config.fp8.recipe = recipes[i];
        ND_TRY(nd_dry_run(&t->rank, &choice, &t->fp8[i]));
        ND_TRY(nd_calls_add_all(&t->all, &t->fp8[i]));
    }
    return ND_OK;
}

/* True for a call of down_proj in any precision: only these differ between the steps. */
static bool counts(const linear_bench *t, const nd_call *call, int recipes)
{
    const nd_call_entry *bf16 = nd_calls_find(&t->bf16, call);
    for (int i = 0; i < recipes; i++) {
        const nd_call_entry *fp8 = nd_calls_find(&t->fp8[i], call);
        if ((bf16 ? bf16->times : 0) != (fp8 ? fp8->times : 0)) {
            return true;
        }
    }
    return false;
}

static nd_status time_calls(linear_bench *t, const nd_timing *ask, int recipes, bool *stopped)
{
    nd_bench bench;
    nd_status status = ND_OK;
    ND_TRY(ask->room(ask->context, (double)nd_bench_bytes(&t->rank, &t->all)));
    ND_TRY(nd_bench_open(&bench, &t->rank, &t->all));
    for (int i = 0; i < t->all.count; i++) {
        t->all.entries[i].seconds = -1.0;
    }
    for (int round = 0; round < ask->repeats; round++) {
        for (int i = 0; i < t->all.count && status == ND_OK && !*stopped; i++) {
            nd_call_entry *entry = &t->all.entries[i];
            double seconds = 0.0;
            *stopped = ask->stop();
            if (!*stopped && counts(t, &entry->call, recipes)) {
                status = nd_bench_time(&bench, &entry->call, &seconds);
                entry->seconds = entry->seconds < 0.0 ? seconds : fmin(entry->seconds, seconds);
            }
        }
    }
    nd_bench_close(&bench);
    return status;
}

nd_status nd_time_linear(const nd_timing *ask, const nd_fp8_recipe *recipes, int count,
                         nd_linear_extents e, nd_linear_times *out)
{
    linear_bench t;
    nd_status status = ND_OK;
    ND_ASSERT(count > 0 && count <= ND_FP8_RECIPE_COUNT && ask->repeats > 0);
    if (e.m % 16 != 0 || e.k % 16 != 0 || e.n % 16 != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "a linear of %lld x %lld x %lld cannot run in FP8, which needs multiples of "
                       "16 in each of the three",
                       (long long)e.m, (long long)e.k, (long long)e.n);
    }
    init_linear(&t, ask->rank, e);
    ND_TRY_OUT(list_calls(&t, recipes, count));
    out->stopped = false;
    ND_TRY_OUT(time_calls(&t, ask, count, &out->stopped));
    if (out->stopped) {
        goto out;
    }
    out->bf16 = nd_calls_difference(&t.all, &t.bf16, &t.fp8[0], true);
    for (int i = 0; i < count; i++) {
        out->fp8[i] = out->bf16 + nd_calls_difference(&t.all, &t.fp8[i], &t.bf16, false);
    }
out:
    nd_calls_free(&t.bf16);
    nd_calls_free(&t.all);
    for (int i = 0; i < ND_FP8_RECIPE_COUNT; i++) {
        nd_calls_free(&t.fp8[i]);
    }
    return status;
}

/* A layer. */

typedef struct layer_bench {
    nd_rank *rank;
    nd_memplan plan;
    nd_model *model;
    int32_t *ids;   /* (T): tokens, labels and positions in one */
    void *gradient; /* (Tl, C) in the dtype of the residual stream: what backward begins with */
} layer_bench;

static nd_status make_layer_inputs(layer_bench *b)
{
    const nd_model *m = b->model;
    const int64_t T = m->dims.T, elements = m->dims.Tl * m->dims.C;
    ND_TRY(ND_ALLOC(T, &b->ids));
    for (int64_t i = 0; i < T; i++) {
        b->ids[i] = (int32_t)(i % m->dims.vocab);
    }
    ND_TRY(ND_ALLOC(nd_tensor_bytes(m->work.dx), (char **)&b->gradient));
    for (int64_t i = 0; i < elements; i++) {
        float value = 0.01f * nd_rng_normal(1, 3, (uint64_t)i);
        if (m->work.dx.dtype == ND_DTYPE_F32) {
            ((float *)b->gradient)[i] = value;
        } else {
            ((nd_bf16 *)b->gradient)[i] = nd_bf16_from_f32(value);
        }
    }
    return ND_OK;
}

static nd_status open_layer(layer_bench *b, const nd_timing *timing)
{
    nd_rank *r = b->rank;
    /* Each run has new weights, so packed weights, which are not planned here, would serve one. */
    const nd_model_options options = {0};
    nd_memplan_init(&b->plan);
    ND_TRY(nd_dry_run_prepare(r, &options));
    ND_TRY(nd_model_create(r, &options, &b->plan, &b->model));
    ND_TRY(nd_model_plan_weights(b->model, false, &b->plan));
    ND_TRY(timing->room(timing->context, (double)b->plan.total));
    ND_TRY(nd_memplan_commit(&b->plan, r->device));
    ND_TRY(nd_model_start(b->model));
    ND_TRY(nd_weights_init(&b->model->fsdp, r->shape.init_std, r->config->train.seed));
    return make_layer_inputs(b);
}

/* Everything that was enqueued is done, on all ranks. */
static nd_status meet(nd_rank *r)
{
    ND_TRY(nd_stream_sync(&r->stream));
    return nd_comm_barrier(r->groups.by_kind[ND_GROUP_WORLD]);
}

/* One forward and backward of the block, and the seconds of this rank. */
static nd_status run_layer(layer_bench *b, double seconds[2])
{
    static const nd_layer_range block = {0, 1};
    nd_rank *r = b->rank;
    nd_model *m = b->model;
    nd_residual residual;
    float *amax;
    nd_activation_set *set = nd_model_take_set(m);
    ND_TRY(nd_model_load_batch(m, set, b->ids, b->ids, b->ids));
    nd_fsdp_begin_step(&m->fsdp, 0);
    nd_fsdp_weights_changed(&m->fsdp);
    ND_TRY(nd_embed_forward(m, set, &residual));
    ND_TRY(meet(r));
    double begin = nd_clock_seconds();
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    ND_TRY(nd_blocks_forward(m, set, block, ND_PASS_TRAIN, NULL, &residual));
    ND_TRY(nd_stream_sync(&r->stream));
    seconds[0] = nd_clock_seconds() - begin;
    ND_TRY(nd_copy(&r->stream, m->work.dx.data, b->gradient, nd_tensor_bytes(m->work.dx)));
    ND_TRY(nd_gradient_prepare((nd_block_call){m, set, block.end - 1, ND_PASS_BACKWARD},
                               ND_INPUT_DOWN, &amax));
    if (amax) { /* in a step the norm above has found it */
        ND_OP(r, ND_TRACE_CAST, amax, .amax = amax, .x = m->work.dx, .granularity = ND_PER_TENSOR);
    }
    ND_TRY(meet(r));
    begin = nd_clock_seconds();
    ND_TRY(nd_blocks_backward(m, set, block, NULL));
    ND_TRY(nd_fsdp_grad_finish(&m->fsdp));
    ND_TRY(nd_stream_sync(&r->stream));
    seconds[1] = nd_clock_seconds() - begin;
    ND_TRY(nd_scales_advance(&m->scales));
    return nd_model_give_back(m, set);
}

/* The largest values of all ranks. */
static nd_status agree(nd_rank *r, double seconds[2], bool *stop)
{
    double values[3] = {seconds[0], seconds[1], *stop};
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, values, 3,
                              ND_DTYPE_F64, ND_REDOP_MAX, NULL));
    seconds[0] = values[0];
    seconds[1] = values[1];
    *stop = values[2] > 0;
    return ND_OK;
}

static nd_status repeat_layer(layer_bench *b, const nd_timing *timing, double *times,
                              nd_layer_times *out)
{
    const int repeats = timing->repeats;
    double *forward = times, *backward = times + repeats;
    for (int i = -1; i < repeats; i++) {
        double seconds[2];
        ND_TRY(run_layer(b, seconds));
        out->stopped = timing->stop();
        ND_TRY(agree(b->rank, seconds, &out->stopped));
        if (out->stopped) {
            return ND_OK;
        }
        if (i >= 0) {
            forward[i] = seconds[0];
            backward[i] = seconds[1];
        }
    }
    out->forward = nd_bench_median(forward, repeats);
    out->backward = nd_bench_median(backward, repeats);
    return ND_OK;
}

nd_status nd_time_layer(const nd_timing *timing, nd_layer_times *out)
{
    layer_bench b = {.rank = timing->rank};
    double *times = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(timing->repeats > 0 && timing->rank->shape.layers == 1);
    *out = (nd_layer_times){0};
    ND_TRY_OUT(ND_ALLOC(2 * (int64_t)timing->repeats, &times));
    ND_TRY_OUT(open_layer(&b, timing));
    status = repeat_layer(&b, timing, times, out);
out:
    free(times);
    free(b.ids);
    free(b.gradient);
    nd_model_destroy(b.model);
    nd_memplan_fini(&b.plan);
    return status;
}
