// SPDX-License-Identifier: Apache-2.0
/* The trainer of one rank: its memory, within what there is, and its optimizer. */
#include "trainer/step/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda.h"
#include "trainer/dry/dry.h"
#include "trainer/precision/precision.h"

/* Numbers of a model and a configuration that readers accept, but that ops cannot compute. */

/* Checks one number of config.json against one limit of the ops. */
static nd_status check_shape(const char *key, int64_t value, int64_t most, const char *op,
                             const nd_ops *ops)
{
    if (most == 0 || value <= most) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_DATA,
                   "the model's %s is %lld, but %s of the backend \"%s\" supports at most %lld; "
                   "use a model with a smaller %s",
                   key, (long long)value, op, ops->name, (long long)most, key);
}

/* F64, since the question is whether integers would overflow. */
static double activation_bytes(const nd_shape *s, const nd_mesh *mesh, double tokens)
{
    double tp = mesh->size[ND_AXIS_TP], C = (double)s->hidden, F = (double)s->ffn;
    double kv_heads = tp * (double)nd_shape_local_kv_heads(s, mesh->size[ND_AXIS_TP]);
    double heads = ((double)s->heads + kv_heads) * (double)s->head_dim;
    double token = 6.0 * C + (2.0 * heads + 4.0 * F) / tp;
    return (double)s->layers * tokens * token * 4.0;
}

nd_status nd_trainer_check_shape(const nd_ops *ops, const nd_shape *shape)
{
    ND_TRY(check_shape("hidden_size", shape->hidden, ops->limits.hidden, "rmsnorm", ops));
    return check_shape("head_dim", shape->head_dim, ops->limits.head_dim, "attention", ops);
}

nd_status nd_trainer_check_limits(const nd_ops *ops, const nd_config *config, const nd_mesh *mesh,
                                  const nd_shape *shape)
{
    const nd_op_limits *most = &ops->limits;
    int64_t batch = config->train.micro_batch_size, sequence = config->train.sequence_length;
    int cp = mesh->size[ND_AXIS_CP];
    int64_t tokens = batch * (sequence / cp);
    ND_TRY(nd_trainer_check_shape(ops, shape));
    if (most->tokens > 0 && tokens > most->tokens) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.micro_batch_size %lld x train.sequence_length %lld / mesh.cp %d = "
                       "%lld tokens of a worker, but the backend \"%s\" supports at most %lld; use "
                       "a smaller micro-batch and more gradient_accumulation_steps, or a shorter "
                       "sequence",
                       (long long)batch, (long long)sequence, cp, (long long)tokens, ops->name,
                       (long long)most->tokens);
    }
    double bytes = activation_bytes(shape, mesh, (double)tokens);
    if (bytes > ND_PLAN_BYTES_MAX) {
        return nd_fail(ND_ERR_RESOURCE,
                       "%lld layers of %lld tokens (train.micro_batch_size %lld x "
                       "train.sequence_length %lld / mesh.cp %d) have activations of %.3g GiB a "
                       "worker, but no host can address more than %.3g; use a smaller model, a "
                       "shorter sequence or a smaller micro-batch",
                       (long long)shape->layers, (long long)tokens, (long long)batch,
                       (long long)sequence, cp, bytes * 0x1p-30, ND_PLAN_BYTES_MAX * 0x1p-30);
    }
    return ND_OK;
}

nd_status nd_trainer_check_precision(const nd_config *config, const nd_shape *shape)
{
    nd_filter filter;
    ND_TRY(nd_filter_init(&filter, config, shape));
    nd_status status = nd_filter_check(&filter, config, shape, &config->resolved_mesh);
    nd_filter_fini(&filter);
    return status;
}

/* The budget (parts.h). */

/* Kernels' code, of this program and of libraries, which the driver loads when it is first used. */
static const size_t KERNEL_BYTES = (size_t)256 << 20;

/* The most that plans may take of a host's memory, or of a limit, while they hold packed weights,
 * which only save time. The rest is for libraries, stacks, files and other programs. */
static const double FULL_SHARE = 0.75;

/* The most that the transport may hold for this rank's groups. It is an upper bound: a group that
 * never reduces leaves its pages untouched, and one without a communicator is counted as one. */
static size_t staging_bytes(const nd_mesh *mesh)
{
    size_t bytes = 0;
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        int communicators = nd_group_rows[kind].communicators;
        bytes += nd_comm_staging_bytes(nd_mesh_group_size(mesh, kind)) *
                 (size_t)(communicators > 0 ? communicators : 1);
    }
    return bytes;
}

/* Returns what the driver and the libraries already hold: CUDA's context, kernels, cuBLASLt and
 * cuDNN. For a plan without a GPU it is what they hold on one of 80 GB. */
static size_t context_bytes(const nd_rank *rank)
{
    nd_cuda_info gpu;
    size_t used = (size_t)1 << 30;
    if (rank->device->kind == ND_DEVICE_CUDA && nd_cuda_info_of(rank->device, &gpu) == ND_OK) {
        used = gpu.total_bytes - gpu.free_bytes;
        const size_t ours = rank->ops->workspace(rank->device);
        used -= used < ours ? used : ours;
    }
    return used;
}

/* Returns what kernels, NCCL and CUDA graphs take of a GPU after the plan; 0 on a CPU. */
static size_t bytes_later(const nd_rank *rank, const nd_graph_counts *graphs)
{
    return nd_rank_is_gpu(rank) ? KERNEL_BYTES + nd_comm_nccl_bytes(&rank->mesh) +
                                      (graphs ? nd_graphs_bytes(graphs) : 0)
                                : 0;
}

bool nd_budget_exceeds(size_t bytes, int workers, const nd_host_memory *host,
                       const nd_memory_limit *limit)
{
    const double all = (double)bytes * (double)nd_max(1, workers);
    const double share = FULL_SHARE * (double)host->physical;
    const double most = share < (double)host->available ? share : (double)host->available;
    return (host->physical > 0 && all > most) ||
           (limit->option && (double)bytes > FULL_SHARE * (double)limit->left);
}

/* True if the workers of this host have memory for the plan and `more` bytes, which only save time,
 * with what is free before this worker allocates its plan. Answers of workers may differ, since
 * some may have allocated their plans already; no result depends on the answer. */
static bool has_room(const nd_trainer *t, size_t more)
{
    const nd_host_memory host = nd_host_memory_read("");
    const nd_memory_limit limit = nd_limits_read_memory();
    return more == 0 || !nd_budget_exceeds(t->plan.total + t->plan.external + more,
                                           t->rank->host_ranks, &host, &limit);
}

void nd_budget_plan(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan)
{
    if (nd_rank_is_gpu(rank)) {
        nd_memplan_add_external(plan, ND_MEM_SCRATCH, "workspaces of cuBLASLt and kernels",
                                rank->ops->workspace(rank->device));
        nd_memplan_add_external(plan, ND_MEM_SCRATCH, "driver and libraries", context_bytes(rank));
        if (rank->config->kernels.cuda_graphs) {
            nd_memplan_add_external(plan, ND_MEM_SCRATCH, "CUDA graphs, estimated",
                                    graphs ? nd_graphs_bytes(graphs) : 0);
        }
        nd_memplan_add_external(plan, ND_MEM_COMMUNICATION, "NCCL, estimated",
                                nd_comm_nccl_bytes(&rank->mesh));
        return;
    }
    nd_memplan_add_external(plan, ND_MEM_SCRATCH, "packed operands, partial sums",
                            rank->ops->workspace(rank->device));
    if (graphs) {
        const char *path = rank->config->data.validation_path;
        const nd_loader_options train = nd_loader_options_of(rank, false),
                                validation = nd_loader_options_of(rank, true);
        nd_memplan_add_external(plan, ND_MEM_COMMUNICATION, "staging of reductions",
                                staging_bytes(&rank->mesh));
        nd_memplan_add_external(plan, ND_MEM_DATA, "prefetched batches",
                                nd_loader_bytes(&train) +
                                    (path && path[0] ? nd_loader_bytes(&validation) : 0));
    }
}

/* This is only a warning: what comes after the plan is estimated, so the run may still fit. */
static void warn_of_later(const nd_rank *rank, size_t later, const nd_memplan *plan)
{
    nd_cuda_info gpu;
    if (rank->device->kind == ND_DEVICE_CUDA && nd_cuda_info_of(rank->device, &gpu) == ND_OK &&
        plan->total <= gpu.free_bytes && plan->total + later > gpu.free_bytes) {
        nd_log_warning(
            "the plan takes %.2f GiB of the %.2f that are free on %s, and kernels, NCCL "
            "and CUDA graphs will take about %.2f, so the first steps may run "
            "out of memory; recompute, a smaller micro-batch, a shorter sequence or more "
            "shards need less",
            (double)plan->total / nd_gib, (double)gpu.free_bytes / nd_gib, rank->device->name,
            (double)later / nd_gib);
    }
}

nd_status nd_budget_commit(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan)
{
    size_t later = bytes_later(rank, graphs);
    warn_of_later(rank, later, plan);
    nd_status status = nd_memplan_commit(plan, rank->device);
    return status == ND_ERR_RESOURCE && later > 0
               ? nd_fail_context(status,
                                 "kernels, NCCL and CUDA graphs still need about %.2f GiB more",
                                 (double)later / nd_gib)
               : status;
}

nd_status nd_budget_explain(const nd_trainer *t, nd_status status)
{
    if (status != ND_ERR_RESOURCE || t->rank->device->kind != ND_DEVICE_CUDA) {
        return status;
    }
    return nd_fail_context(status,
                           "the plan holds %.2f GiB, and kernels, NCCL and CUDA graphs were "
                           "estimated at %.2f GiB more",
                           (double)t->plan.total / nd_gib,
                           (double)bytes_later(t->rank, &t->planned_graphs) / nd_gib);
}

/* The optimizer. */

nd_status nd_optimizer_init(nd_optimizer *optimizer, nd_fsdp *fsdp)
{
    const nd_layout *layout = fsdp->layout;
    *optimizer = (nd_optimizer){.fsdp = fsdp};
    ND_TRY(ND_ALLOC(layout->param_count, &optimizer->ranges));
    for (int i = 0; i < layout->param_count; i++) {
        nd_flat_range range = nd_layout_shard_range(layout, &layout->params[i]);
        if (range.begin < range.end) {
            range.copy = nd_fsdp_resident(fsdp, range.begin);
            range.amax = nd_scales_updated_amax(fsdp->scales, range.begin);
            optimizer->ranges[optimizer->range_count++] = range;
        }
    }
    return ND_OK;
}

void nd_optimizer_fini(nd_optimizer *optimizer)
{
    free(optimizer->ranges);
    optimizer->ranges = NULL;
}

/* Ranges [first, last). */
static nd_status update_ranges(nd_optimizer *optimizer, nd_adamw hyper, int first, int last)
{
    nd_fsdp *fsdp = optimizer->fsdp;
    nd_rank *r = fsdp->rank;
    if (first == last) {
        return ND_OK;
    }
    if (r->config->optimizer.name == ND_OPTIMIZER_SGD) {
        ND_OP(r, ND_TRACE_OPTIMIZER, sgd, .hyper = hyper, .p = fsdp->master, .grad = fsdp->grad,
              .ranges = optimizer->ranges + first, .range_count = last - first);
    } else {
        ND_OP(r, ND_TRACE_OPTIMIZER, adamw, .hyper = hyper, .p = fsdp->master, .m = fsdp->moment1,
              .v = fsdp->moment2, .grad = fsdp->grad, .ranges = optimizer->ranges + first,
              .range_count = last - first);
    }
    return ND_OK;
}

nd_status nd_optimizer_step(nd_optimizer *optimizer, const nd_update_gate *gate, int64_t step,
                            double lr, double grad_norm)
{
    nd_fsdp *fsdp = optimizer->fsdp;
    const nd_config *config = fsdp->rank->config;
    const double max_norm = config->optimizer.max_grad_norm;
    nd_adamw hyper = {
        .lr = (float)lr,
        .beta1 = (float)config->optimizer.betas[0],
        .beta2 = (float)config->optimizer.betas[1],
        .eps = (float)config->optimizer.eps,
        .weight_decay = (float)config->optimizer.weight_decay,
        .grad_scale = max_norm > 0 ? (float)fmin(1, max_norm / (grad_norm + 1e-6)) : 1,
        .bias1 = (float)(1.0 - pow(config->optimizer.betas[0], (double)step)),
        .bias2 = (float)(1.0 - pow(config->optimizer.betas[1], (double)step)),
    };
    bool gated = gate && gate->wait;
    ND_TRY(nd_scales_begin_update(fsdp->scales, fsdp->version + 1));
    if (!gated) {
        ND_TRY(update_ranges(optimizer, hyper, 0, optimizer->range_count));
    }
    int first = 0;
    for (int u = 0, last = 0; gated && u < fsdp->layout->unit_count; u++, first = last) {
        const nd_unit *unit = &fsdp->layout->units[u];
        const int64_t end = unit->shard_offset + unit->shard_count;
        while (last < optimizer->range_count && optimizer->ranges[last].begin < end) {
            last++;
        }
        ND_TRY(gate->wait(gate->context, u));
        ND_TRY(update_ranges(optimizer, hyper, first, last));
    }
    ND_ASSERT(!gated || first == optimizer->range_count);
    nd_fsdp_weights_updated(fsdp);
    return ND_OK;
}

/* The trainer. */

/* A copy of all weights must leave so much memory free. The copy saves one cast per unit; that is
 * not worth running out of memory because a library or the driver took more than estimated. */
static const size_t COPY_LEAVES_BYTES = (size_t)1 << 30;

/* A single GPU keeps all weights also in the compute dtype, but only if they fit next to everything
 * else. */
static bool copy_is_too_large(const nd_trainer *t)
{
    nd_cuda_info gpu;
    const size_t others = t->plan.total + bytes_later(t->rank, &t->planned_graphs);
    return !t->model->forward_only && t->rank->device->kind == ND_DEVICE_CUDA &&
           nd_cuda_info_of(t->rank->device, &gpu) == ND_OK &&
           others + nd_fsdp_own_bytes(&t->model->fsdp) + COPY_LEAVES_BYTES > gpu.free_bytes;
}

/* least: as in the smallest plan, the libraries make no plans, whose workspaces would count, and
 * there is no copy of all weights. */
static nd_status create(nd_rank *rank, const nd_model_options *options, bool least,
                        nd_trainer **out)
{
    nd_trainer *t = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_trainer_check_limits(rank->ops, rank->config, &rank->mesh, &rank->shape));
    if (rank->config->kernels.cuda_graphs && !nd_rank_is_gpu(rank)) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.cuda_graphs is true, but this run is on the CPU, as no GPU is "
                       "visible; set kernels.cuda_graphs: false (--cuda-graphs false)");
    }
    ND_TRY(ND_ALLOC(1, &t));
    t->rank = rank;
    nd_memplan_init(&t->plan);
    if (!least) {
        ND_TRY_OUT(nd_dry_run_prepare(rank, options));
    }
    ND_TRY_OUT(nd_model_create(rank, options, &t->plan, &t->model));
    if (rank->config->kernels.cuda_graphs && !options->forward_only) {
        ND_TRY_OUT(nd_dry_run_graphs(rank, options, &t->planned_graphs));
    }
    ND_TRY_OUT(nd_model_plan_weights(t->model, least || copy_is_too_large(t), &t->plan));
    nd_budget_plan(rank, &t->planned_graphs, &t->plan);
    *out = t;
out:
    if (status != ND_OK) {
        nd_trainer_destroy(t);
    }
    return status;
}

/* Keeps the packed weights that there is memory for: all, those of the head, or none. */
static void plan_packed(nd_trainer *t)
{
    nd_packed_weights *p = &t->model->packed;
    const size_t blocks = nd_packed_plan(p, false, NULL), head = nd_packed_plan(p, true, NULL);
    const bool all = has_room(t, blocks + head);
    if (all) {
        nd_packed_plan(p, false, &t->plan);
    }
    t->unkept_blocks = all ? 0 : blocks;
    if (all || has_room(t, head)) {
        nd_packed_plan(p, true, &t->plan);
    } else {
        t->unkept_head = head;
    }
}

bool nd_trainer_describe_unkept(const nd_trainer *t, char *out, size_t capacity)
{
    const size_t blocks = t->unkept_blocks, head = t->unkept_head;
    snprintf(out, capacity,
             "packed weights of %s%s%s would need %.1f MiB of each worker, for which this host has "
             "too little memory, so each product packs its weight again: steps have the same bits "
             "and take longer; free memory, raise a limit (ulimit -v, -d), or use fewer workers on "
             "this host",
             blocks > 0 ? "the blocks" : "", blocks > 0 && head > 0 ? " and " : "",
             head > 0 ? "the head" : "", (double)(blocks + head) / 1048576.0);
    return blocks + head > 0;
}

/* These are the options of the model of a step. documents auto: the data are not open, as for a
 * plan, which takes them for joined. */
static nd_model_options options_of(const nd_rank *rank, const nd_linear_choice *linears)
{
    return (nd_model_options){.linears = linears,
                              .sources = rank->config->data_sources,
                              .separate = rank->config->data.documents == ND_DOCUMENTS_SEPARATE};
}

nd_status nd_trainer_create_scheduled(nd_rank *rank, const nd_tuning *tuning, nd_schedule schedule,
                                      nd_trainer **out)
{
    nd_trainer *t = NULL;
    nd_schedule_needs needs;
    nd_status status = ND_OK;
    nd_model_options options = options_of(rank, tuning ? &tuning->linear_choice : NULL);
    ND_TRY_OUT(nd_schedule_check(&schedule, &needs));
    options.sets = needs.sets;
    options.delays = needs.delays;
    ND_TRY_OUT(create(rank, &options, false, &t));
    plan_packed(t);
    t->tuning = tuning;
    t->schedule = schedule;
    schedule = (nd_schedule){0};
    *out = t;
out:
    nd_schedule_fini(&schedule);
    return status;
}

nd_status nd_trainer_create(nd_rank *rank, const nd_tuning *tuning, nd_trainer **out)
{
    nd_schedule schedule;
    ND_TRY(nd_schedule_sequential((int)rank->config->train.gradient_accumulation_steps, &schedule));
    return nd_trainer_create_scheduled(rank, tuning, schedule, out);
}

/* Bytes of the plan with these linears, without a copy of all weights. */
static nd_status least_bytes(nd_rank *rank, const nd_linear_choice *linears, size_t *out)
{
    const nd_model_options options = options_of(rank, linears);
    nd_trainer *t = NULL;
    ND_TRY(create(rank, &options, true, &t));
    *out = t->plan.total;
    nd_trainer_destroy(t);
    return ND_OK;
}

nd_status nd_trainer_check_memory(nd_rank *rank)
{
    const nd_linear_choice all_bf16 = {0};
    nd_cuda_info gpu;
    size_t asked = 0, bf16 = 0;
    if (rank->device->kind != ND_DEVICE_CUDA) {
        return ND_OK;
    }
    ND_TRY(nd_cuda_info_of(rank->device, &gpu));
    ND_TRY(least_bytes(rank, NULL, &asked));
    bf16 = asked;
    if (rank->config->train.precision == ND_PRECISION_FP8) {
        ND_TRY(least_bytes(rank, &all_bf16, &bf16));
    }
    size_t least = asked < bf16 ? asked : bf16;
    if (least > gpu.free_bytes) {
        return nd_fail(
            ND_ERR_RESOURCE,
            "the plan needs %.2f GiB whatever autotune chooses, and %.2f of %.2f GiB are "
            "free on %s, so it times nothing; use recompute, a smaller micro-batch, a "
            "shorter sequence or more shards",
            (double)least / nd_gib, (double)gpu.free_bytes / nd_gib,
            (double)gpu.total_bytes / nd_gib, rank->device->name);
    }
    return ND_OK;
}

nd_status nd_trainer_create_evaluator(nd_rank *rank, nd_trainer **out)
{
    const nd_model_options options = {
        .forward_only = true, .separate = rank->config->data.documents != ND_DOCUMENTS_JOIN};
    return create(rank, &options, false, out);
}

nd_status nd_trainer_commit(nd_trainer *t)
{
    void *host = NULL;
    ND_TRY(nd_budget_commit(t->rank, &t->planned_graphs, &t->plan));
    const int sources = t->model->sources;
    ND_TRY(nd_host_alloc(t->rank->device,
                         2 * sizeof *t->sent + (size_t)(3 * sources) * sizeof *t->sent_sources,
                         &host));
    t->sent = host;
    t->sent_sources = (double *)(t->sent + 1);
    t->received_sources = t->sent_sources + sources;
    t->received = (nd_step_numbers *)(t->received_sources + 2 * sources);
    if (t->rank->config->kernels.cuda_graphs && !t->model->forward_only) {
        ND_TRY(nd_graphs_create(&t->rank->stream, &t->planned_graphs, &t->graphs));
    }
    ND_TRY(nd_model_start(t->model));
    if (!t->model->forward_only) {
        ND_TRY(nd_optimizer_init(&t->optimizer, &t->model->fsdp));
    }
    return ND_OK;
}

void nd_trainer_destroy(nd_trainer *t)
{
    if (t) {
        nd_dump_destroy(t->dump);
        nd_optimizer_fini(&t->optimizer);
        nd_schedule_fini(&t->schedule);
        nd_model_destroy(t->model);
        nd_graphs_destroy(t->graphs);
        nd_host_free(t->rank->device, t->sent);
        nd_memplan_fini(&t->plan);
        free(t);
    }
}

nd_trainer_state nd_trainer_state_of(const nd_trainer *t)
{
    const nd_fsdp *fsdp = &t->model->fsdp;
    nd_trainer_state state = {.shards = {fsdp->master, fsdp->moment1, fsdp->moment2},
                              .shard_count = fsdp->moment1 ? 3 : 1};
    state.scale_count = nd_scales_state(&t->model->scales, state.scales);
    return state;
}

void nd_trainer_resume_at(nd_trainer *t, nd_run_position position)
{
    t->position = position;
    if (t->rank->config->train.spike_factor == 0) { /* they would only grow old */
        t->position.recent = (nd_recent_losses){0};
    }
    nd_fsdp_weights_changed(&t->model->fsdp);
}
