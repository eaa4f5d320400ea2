// SPDX-License-Identifier: Apache-2.0
#include "trainer/tune/timing.h"

#include <stdlib.h>

#include "runtime/base/clock.h"
#include "runtime/base/rng.h"
#include "trainer/model/linear.h"
#include "trainer/weights/weights.h"

typedef struct layer_bench {
    nd_rank *rank;
    nd_memplan plan;
    nd_model *model;
    int32_t *ids;   /* (T): tokens, labels and positions in one */
    void *gradient; /* (Tl, C) in the dtype of the residual stream: what backward begins with */
} layer_bench;

static void close_bench(layer_bench *b)
{
    free(b->ids);
    free(b->gradient);
    nd_model_destroy(b->model);
    nd_memplan_fini(&b->plan);
}

static nd_status make_inputs(layer_bench *b)
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

static nd_status open_bench(layer_bench *b, const nd_layer_timing *timing)
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
    return make_inputs(b);
}

/* Everything that was enqueued is done, on all ranks. */
static nd_status meet(nd_rank *r)
{
    ND_TRY(nd_stream_sync(&r->stream));
    return nd_comm_barrier(r->groups.by_kind[ND_GROUP_WORLD]);
}

/* One forward and backward of the block, and the seconds of this rank. */
static nd_status run_once(layer_bench *b, double seconds[2])
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

/* The largest values of all ranks; they travel in the numbers of a step, on the device. */
static nd_status agree(layer_bench *b, double seconds[2], bool *stop)
{
    nd_rank *r = b->rank;
    nd_comm *world = r->groups.by_kind[ND_GROUP_WORLD];
    nd_step_numbers *there = b->model->numbers;
    nd_step_numbers here = {.loss_sum = seconds[0], .squares = seconds[1], .stop = *stop};
    ND_TRY(nd_copy(&r->stream, there, &here, sizeof here));
    ND_TRY(nd_comm_all_reduce(world, &r->stream, &there->loss_sum, 2, ND_DTYPE_F64, ND_REDOP_MAX,
                              NULL));
    ND_TRY(
        nd_comm_all_reduce(world, &r->stream, &there->stop, 1, ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    ND_TRY(nd_copy(&r->stream, &here, there, sizeof here));
    ND_TRY(nd_stream_sync(&r->stream));
    seconds[0] = here.loss_sum;
    seconds[1] = here.squares;
    *stop = here.stop != 0;
    return ND_OK;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static nd_status repeat(layer_bench *b, const nd_layer_timing *timing, double *times,
                        nd_layer_times *out)
{
    const int repeats = timing->repeats;
    double *forward = times, *backward = times + repeats;
    for (int i = -1; i < repeats; i++) {
        double seconds[2];
        ND_TRY(run_once(b, seconds));
        out->stopped = timing->stop();
        ND_TRY(agree(b, seconds, &out->stopped));
        if (out->stopped) {
            return ND_OK;
        }
        if (i >= 0) {
            forward[i] = seconds[0];
            backward[i] = seconds[1];
        }
    }
    qsort(forward, (size_t)repeats, sizeof *forward, by_value);
    qsort(backward, (size_t)repeats, sizeof *backward, by_value);
    out->forward = forward[repeats / 2];
    out->backward = backward[repeats / 2];
    return ND_OK;
}

nd_status nd_time_layer(const nd_layer_timing *timing, nd_layer_times *out)
{
    layer_bench b = {.rank = timing->rank};
    double *times = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(timing->repeats > 0 && timing->rank->shape.layers == 1);
    *out = (nd_layer_times){0};
    ND_TRY_OUT(ND_ALLOC(2 * (int64_t)timing->repeats, &times));
    ND_TRY_OUT(open_bench(&b, timing));
    status = repeat(&b, timing, times, out);
out:
    free(times);
    close_bench(&b);
    return status;
}
