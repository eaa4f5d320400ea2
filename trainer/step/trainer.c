// SPDX-License-Identifier: Apache-2.0
#include "trainer/step/trainer.h"

#include <math.h>
#include <stdlib.h>

#include "runtime/base/log.h"
#include "runtime/device/cuda.h"
#include "trainer/step/budget.h"
#include "trainer/step/nonfinite.h"
#include "trainer/report/terminal.h"
#include "trainer/step/schedule.h"
#include "trainer/precision/health.h"
#include "trainer/dry/dry_run.h"

nd_status nd_trainer_check_precision(const nd_config *config, const nd_llama_shape *shape)
{
    nd_filter filter;
    ND_TRY(nd_filter_init(&filter, config, shape));
    nd_status status = nd_filter_check(&filter, config, shape, &config->resolved_mesh);
    nd_filter_fini(&filter);
    return status;
}

nd_loader_options nd_trainer_loader_options(const nd_rank *rank, bool validation)
{
    const nd_config *config = rank->config;
    return (nd_loader_options){
        .sequence = config->train.sequence_length,
        .micro_batch = config->train.micro_batch_size,
        .accumulation = validation ? 1 : config->train.gradient_accumulation_steps,
        .dp_size = nd_mesh_group_size(&rank->mesh, ND_GROUP_DP),
        .dp_index = nd_mesh_group_index(&rank->mesh, ND_GROUP_DP, rank->rank),
        .cp_size = rank->mesh.size[ND_AXIS_CP],
        .cp_index = rank->coord.at[ND_AXIS_CP],
        .seed = config->data.shuffle_seed,
        .validation = validation,
    };
}

static nd_status create(nd_rank *rank, nd_trainer **out)
{
    nd_trainer *t = NULL;
    nd_status status = ND_OK;
    if (rank->config->kernels.cuda_graphs && !nd_rank_is_gpu(rank)) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.cuda_graphs is true, but this run is on the CPU, as no GPU is "
                       "visible; set kernels.cuda_graphs: false (--cuda-graphs false)");
    }
    ND_TRY(ND_ALLOC(1, &t));
    t->rank = rank;
    nd_memplan_init(&t->plan);
    ND_TRY_OUT(nd_dry_run_prepare(rank));
    ND_TRY_OUT(nd_model_create(rank, &t->plan, &t->model));
    ND_TRY_OUT(nd_gradsync_init(&t->sync, &t->model->fsdp, &t->plan));
    ND_TRY_OUT(nd_optimizer_init(&t->optimizer, &t->model->fsdp));
    if (rank->config->kernels.cuda_graphs) {
        ND_TRY_OUT(nd_dry_run_graphs(rank, &t->planned_graphs));
    }
    nd_beside_plan(rank, &t->planned_graphs, &t->plan);
    *out = t;
out:
    if (status != ND_OK) {
        nd_trainer_destroy(t);
    }
    return status;
}

/* Room that a copy of all weights leaves: it saves a cast a unit, and is not worth a run that ends
 * for want of memory because a library or the driver took more than was estimated. */
static const size_t COPY_LEAVES_BYTES = (size_t)1 << 30;

/* A GPU that trains alone keeps all weights in the compute dtype only where they fit beside the
 * rest. */
static bool is_too_large(const nd_trainer *t)
{
    nd_cuda_info gpu;
    return t->rank->device->kind == ND_DEVICE_CUDA && t->model->layout->shards == 1 &&
           t->rank->config->parallel.reshard_after_forward && !t->rank->cast_units &&
           nd_cuda_info_of(t->rank->device, &gpu) == ND_OK &&
           t->plan.total + nd_beside_later(t->rank, &t->planned_graphs) + COPY_LEAVES_BYTES >
               gpu.free_bytes;
}

nd_status nd_trainer_create(nd_rank *rank, nd_trainer **out)
{
    nd_trainer *t = NULL;
    ND_TRY(create(rank, &t));
    if (is_too_large(t)) {
        nd_trainer_destroy(t);
        rank->cast_units = true;
        ND_TRY(create(rank, &t));
    }
    *out = t;
    return ND_OK;
}

nd_status nd_trainer_commit(nd_trainer *t)
{
    void *host = NULL;
    ND_TRY(nd_beside_commit(t->rank, &t->planned_graphs, &t->plan));
    ND_TRY(nd_host_alloc(t->rank->device, 2 * sizeof *t->sent, &host));
    t->sent = host;
    t->received = t->sent + 1;
    if (t->rank->config->kernels.cuda_graphs) {
        ND_TRY(nd_graphs_create(&t->rank->stream, &t->planned_graphs, &t->graphs));
    }
    nd_gradsync_bind(&t->sync, &t->plan);
    ND_TRY(nd_model_bind(t->model, &t->plan));
    nd_optimizer_bind(&t->optimizer);
    return nd_health_agree(&t->model->scales);
}

void nd_trainer_destroy(nd_trainer *t)
{
    if (t) {
        nd_optimizer_fini(&t->optimizer);
        nd_gradsync_fini(&t->sync);
        nd_model_destroy(t->model);
        nd_graphs_destroy(t->graphs);
        nd_host_free(t->rank->device, t->sent);
        nd_memplan_fini(&t->plan);
        free(t);
    }
}

/* The labels that count here, and on all ranks that hold different tokens: a sum on the device. */
static nd_status send_tokens(nd_trainer *t, int64_t count)
{
    nd_rank *r = t->rank;
    int64_t *tokens = &t->model->numbers->tokens;
    t->sent->tokens = count;
    ND_TRY(nd_copy(&r->stream, tokens, &t->sent->tokens, sizeof *tokens));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_DP_CP], &r->stream, tokens, 1,
                              ND_DTYPE_I64, ND_REDOP_SUM, NULL));
    return ND_OK;
}

/* The device's loss sum, over all ranks that hold different tokens. */
static nd_status sum_loss(nd_trainer *t)
{
    nd_rank *r = t->rank;
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_DP_CP], &r->stream,
                              &t->model->numbers->loss_sum, 1, ND_DTYPE_F64, ND_REDOP_SUM, NULL));
    return ND_OK;
}

/* A signal that reached one rank stops all of them at the same boundary. The device reads the word
 * when it comes here, not when the host does. */
static nd_status agree_to_stop(nd_trainer *t)
{
    nd_rank *r = t->rank;
    int64_t *stop = &t->model->numbers->stop;
    ND_TRY(nd_copy(&r->stream, stop, &t->sent->stop, sizeof *stop));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, stop, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL));
    return ND_OK;
}

/* The only wait of a step. */
static nd_status read_numbers(nd_trainer *t)
{
    nd_stream *stream = &t->rank->stream;
    ND_TRY(nd_copy(stream, t->received, t->model->numbers, sizeof *t->received));
    return nd_stream_sync(stream);
}

void nd_trainer_request_stop(nd_trainer *t, int reason)
{
    *(volatile int64_t *)&t->sent->stop = reason;
}

static nd_status micro_batch(nd_trainer *t, const nd_step_batch *batch, int64_t micro)
{
    nd_model *m = t->model;
    int64_t step = t->step + 1, offset = micro * m->dims.T;
    nd_fsdp_begin_micro(&m->fsdp, micro == 0);
    ND_TRY(
        nd_model_load_batch(m, batch->inputs + offset, batch->labels + offset, batch->positions));
    nd_progress_set_phase(t->rank->progress, ND_PHASE_FORWARD, step);
    nd_range_push(t->rank->device, "forward");
    ND_TRY(nd_model_forward(m, true));
    nd_range_pop(t->rank->device);
    nd_progress_set_phase(t->rank->progress, ND_PHASE_BACKWARD, step);
    nd_range_push(t->rank->device, "backward");
    ND_TRY(nd_model_backward(m));
    nd_range_pop(t->rank->device);
    return ND_OK;
}

nd_status nd_trainer_gradients(nd_trainer *t, const nd_step_batch *batch, nd_step_result *out)
{
    nd_rank *r = t->rank;
    nd_step_numbers *numbers = t->model->numbers;
    bool healthy = t->model->scales.healthy;
    /* The first step loads kernels, which a capture does not allow. */
    t->model->graphs = t->plain > 0 && !healthy ? t->graphs : NULL;
    nd_graphs_set_step(t->graphs, t->step + 1);
    int64_t micros = r->config->train.gradient_accumulation_steps;
    ND_TRY(send_tokens(t, batch->valid));
    ND_TRY(nd_zero(&r->stream, &numbers->loss_sum, sizeof numbers->loss_sum));
    for (int64_t micro = 0; micro < micros; micro++) {
        ND_TRY(micro_batch(t, batch, micro));
    }
    ND_TRY(nd_gradsync_reduce(&t->sync));
    ND_TRY(sum_loss(t));
    ND_TRY(nd_gradsync_squares(&t->sync, &numbers->squares));
    ND_TRY(agree_to_stop(t));
    ND_TRY(read_numbers(t));
    if (t->received->tokens == 0) {
        return nd_fail(
            ND_ERR_DATA,
            "step %lld has no label to learn from on any rank: all are -100; check the prompts "
            "and completions of data.path",
            (long long)t->step + 1);
    }
    t->plain += !healthy;
    out->loss = t->received->loss_sum / (double)t->received->tokens;
    out->grad_norm = sqrt(t->received->squares);
    out->tokens = t->received->tokens;
    out->stop = t->received->stop;
    return ND_OK;
}

/* Loss and norm are the same on every rank, and so is what becomes of the step. */
static nd_status not_finite(nd_trainer *t, nd_step_result *out)
{
    char where[ND_NONFINITE_NAME];
    long long step = (long long)t->step + 1;
    bool skip = t->rank->config->train.nonfinite == ND_NONFINITE_SKIP;
    ND_TRY(nd_nonfinite_find(t->model, where));
    const char *first = where[0] ? where : "none of weights, block inputs and gradients";
    if (!skip) {
        return nd_fail(
            ND_ERR_NUMERIC,
            "step %lld: the loss is %g and the gradient norm %g; the first tensor that is "
            "not finite is %s; the weights are those of step %lld; try a lower "
            "optimizer.lr, more warmup_steps, optimizer.max_grad_norm, or "
            "train.nonfinite: skip",
            step, nd_plain(out->loss), nd_plain(out->grad_norm), first, step - 1);
    }
    if (t->rank->rank == 0) {
        nd_log_warning("step %lld is skipped: the loss is %g and the gradient norm %g; the first "
                       "tensor that is not finite is %s",
                       step, nd_plain(out->loss), nd_plain(out->grad_norm), first);
    }
    ND_TRY(nd_scales_forget(&t->model->scales));
    out->lr = nd_schedule_lr(t->rank->config, t->step + 1);
    out->skipped = true;
    t->skipped++;
    t->step++;
    return ND_OK;
}

static nd_status step(nd_trainer *t, const nd_step_batch *batch, nd_step_result *out)
{
    nd_scales *scales = &t->model->scales;
    int64_t number = t->step + 1;
    *out = (nd_step_result){0};
    ND_TRY(nd_health_begin(scales, number));
    ND_TRY(nd_trainer_gradients(t, batch, out));
    ND_TRY(nd_health_end(scales, number));
    if (!isfinite(out->loss) || !isfinite(out->grad_norm)) {
        return not_finite(t, out);
    }
    nd_progress_set_phase(t->rank->progress, ND_PHASE_OPTIMIZER, number);
    ND_TRY(nd_scales_advance(scales));
    out->lr = nd_schedule_lr(t->rank->config, number);
    nd_range_push(t->rank->device, "optimizer");
    ND_TRY(nd_optimizer_step(&t->optimizer, number - t->skipped, out->lr, out->grad_norm));
    nd_range_pop(t->rank->device);
    t->step = number;
    return ND_OK;
}

nd_status nd_trainer_step(nd_trainer *t, const nd_step_batch *batch, nd_step_result *out)
{
    return nd_beside_explain(t->rank, &t->planned_graphs, &t->plan, step(t, batch, out));
}

nd_status nd_trainer_evaluate(nd_trainer *t, nd_loader *loader, int64_t batches,
                              const nd_trainer_pause *pause, double *loss, int64_t *tokens)
{
    nd_rank *r = t->rank;
    nd_model *m = t->model;
    int64_t counted = 0;
    nd_progress_set_phase(r->progress, ND_PHASE_EVAL, t->step);
    ND_TRY(nd_zero(&r->stream, &m->numbers->loss_sum, sizeof m->numbers->loss_sum));
    ND_TRY(nd_loader_rewind(loader));
    *tokens = 0;
    for (int64_t i = 0; i < batches; i++) {
        nd_step_batch batch;
        bool stop = false;
        ND_TRY(pause->asked(pause->context, &stop));
        if (stop) {
            return ND_OK;
        }
        ND_TRY(nd_loader_next(loader, &batch));
        counted += batch.valid;
        ND_TRY(nd_model_load_batch(m, batch.inputs, batch.labels, batch.positions));
        ND_TRY(nd_model_forward(m, false));
    }
    ND_TRY(send_tokens(t, counted));
    ND_TRY(sum_loss(t));
    ND_TRY(read_numbers(t));
    if (t->received->tokens == 0) {
        return nd_fail(ND_ERR_DATA, "the validation data has no label that counts: all are -100; "
                                    "check data.validation_path");
    }
    *tokens = t->received->tokens;
    *loss = t->received->loss_sum / (double)t->received->tokens;
    return ND_OK;
}
