// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/mesh_run.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "tests/parity/rank_device.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"
#include "trainer/tune/tune.h"
#include "trainer/weights/weights.h"

typedef struct shared_run {
    const mesh_job *job;
    const mesh_case *mesh;
    nd_config config;
    nd_dataset *data;
    mesh_result *out;
    char **written[2]; /* [gradients, weights][tensor][element] */
    pthread_mutex_t lock;
} shared_run;

static void fill_config(nd_config *c, const mesh_job *job, const mesh_case *m)
{
    int64_t dp = (int64_t)m->dp_replicate * m->dp_shard;
    c->launch.workers = dp * m->cp * m->tp;
    c->launch.comm_timeout_seconds = 60;
    c->resolved_mesh = (nd_mesh){{1, m->dp_replicate, m->dp_shard, m->cp, m->tp}, m->ulysses};
    c->data.documents = job->separate ? ND_DOCUMENTS_SEPARATE : ND_DOCUMENTS_JOIN;
    c->train.steps = job->steps;
    c->train.sequence_length = job->sequence;
    c->train.micro_batch_size = m->micro_batch;
    c->train.gradient_accumulation_steps = job->global_batch / (dp * m->micro_batch);
    c->train.precision = job->precision;
    c->train.seed = 7;
    c->fp8.recipe = job->recipe;
    c->fp8.all_gather = job->all_gather;
    c->fp8.filter = (char *)job->filter;
    c->fp8.amax_compute = job->amax_compute;
    c->fp8.amax_history_length = job->history_length;
    c->fp8.health_interval = job->health_interval;
    c->log.level = ND_LOG_DEBUG;
    c->train.nonfinite = job->nonfinite;
    c->kernels.autotune = job->autotune;
    c->kernels.autotune_from = (char *)job->autotune_from;
    c->kernels.cuda_graphs = job->cuda_graphs;
    c->launch.nccl_alone = job->nccl_alone;
    c->optimizer.name = job->optimizer;
    c->optimizer.lr = job->lr;
    c->optimizer.betas[0] = 0.9;
    c->optimizer.betas[1] = 0.95;
    c->optimizer.eps = 1e-8;
    c->optimizer.weight_decay = job->weight_decay;
    c->optimizer.max_grad_norm = job->max_grad_norm;
    c->optimizer.schedule = ND_SCHEDULE_CONSTANT;
    c->parallel.reshard_after_forward = !m->zero2;
    c->parallel.cp_comm = m->ring ? ND_CP_RING : ND_CP_ALLGATHER;
    c->parallel.recompute = m->recompute;
    c->parallel.tiled_mlp = m->mlp_pieces;
    c->limits = job->limits;
}

static int tensor_index(const mesh_result *out, const char *name)
{
    for (int i = 0; i < out->tensors; i++) {
        if (strcmp(out->names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

typedef struct collect_context {
    shared_run *run;
    const float *state;
    float **into;
    char **written;
    int rank;
} collect_context;

/* First holder of an element writes it, every other one must hold the same bits. */
static nd_status collect_span(void *context, const nd_span *span)
{
    collect_context *c = context;
    int t = tensor_index(c->run->out, span->param->name);
    ND_CHECK(t >= 0, "tensor %s is not in the table", span->param->name);
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t e = nd_span_global(span, i);
        float value = c->state[span->begin + i];
        if (!c->written[t][e]) {
            c->written[t][e] = 1;
            c->into[t][e] = value;
        }
        ND_CHECK(memcmp(&c->into[t][e], &value, sizeof value) == 0,
                 "%s: element %lld of %s is %.9g on rank %d and %.9g on another holder",
                 c->run->mesh->name, (long long)e, span->param->name, (double)value, c->rank,
                 (double)c->into[t][e]);
    }
    return ND_OK;
}

static nd_status collect_host(shared_run *run, const nd_trainer *t, bool gradients,
                              const float *state)
{
    const nd_layout *layout = t->model->layout;
    collect_context context = {
        .run = run,
        .state = state,
        .into = gradients ? run->out->gradients : run->out->weights,
        .written = run->written[gradients ? 0 : 1],
        .rank = t->rank->rank,
    };
    nd_status status = ND_OK;
    pthread_mutex_lock(&run->lock);
    for (int u = 0; u < layout->unit_count && status == ND_OK; u++) {
        status = nd_layout_each_span(layout, &layout->units[u], layout->shard_index, collect_span,
                                     &context);
    }
    pthread_mutex_unlock(&run->lock);
    return status;
}

static nd_status collect(shared_run *run, nd_trainer *t, bool gradients)
{
    const float *state = gradients ? t->model->fsdp.grad : t->model->fsdp.master;
    int64_t count = t->model->layout->shard_total;
    nd_stream *stream = &t->rank->stream;
    float *host = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(count, &host));
    ND_TRY_OUT(nd_copy(stream, host, state, (size_t)count * sizeof *host));
    ND_TRY_OUT(nd_stream_sync(stream));
    status = collect_host(run, t, gradients, host);
out:
    free(host);
    return status;
}

/* A step that was done before must give the same bits. */
static nd_status keep_result(shared_run *run, int64_t step, const nd_step_result *result,
                             bool again)
{
    mesh_result *out = run->out;
    ND_CHECK(!again || memcmp(&out->loss[step], &result->loss, sizeof result->loss) == 0,
             "%s: after a restore the loss of step %lld is %.17g, and was %.17g", run->mesh->name,
             (long long)step + 1, result->loss, out->loss[step]);
    ND_CHECK(!again || memcmp(&out->norm[step], &result->grad_norm, sizeof result->grad_norm) == 0,
             "%s: after a restore the norm of step %lld is %.17g, and was %.17g", run->mesh->name,
             (long long)step + 1, result->grad_norm, out->norm[step]);
    out->loss[step] = result->loss;
    out->norm[step] = result->grad_norm;
    out->work[step] = result->work;
    if (result->source_sums) {
        memcpy(out->source_sums[step], result->source_sums, sizeof out->source_sums[step]);
    }
    return ND_OK;
}

/* The job's function of this name, if it has one. */
#define HOOK(run, name, ...)                                                                       \
    ((run)->job->name ? (run)->job->name((run)->job->context, __VA_ARGS__) : ND_OK)

static nd_status train_step(shared_run *run, nd_trainer *t, nd_loader *loader, int64_t step)
{
    const mesh_job *job = run->job;
    nd_step_batch batch;
    nd_step_result result;
    ND_TRY(nd_loader_next(loader, &batch));
    if (job->batch) {
        job->batch(job->context, t->rank, step, &batch);
    }
    batch.wait_seconds += t->rank->rank == job->late_rank ? job->late_seconds : 0;
    if (step == 0 && job->observe) {
        ND_TRY(nd_trainer_gradients(t, &batch, &result));
        ND_TRY(job->observe(job->context, t));
    }
    ND_TRY(HOOK(run, before_step, t, step));
    ND_TRY(nd_trainer_step(t, &batch, &result));
    ND_TRY(HOOK(run, after_step, t, step));
    if (step == 0) {
        ND_TRY(collect(run, t, true));
    }
    return t->rank->rank == 0 ? keep_result(run, step, &result, false) : ND_OK;
}

static nd_status train_steps(shared_run *run, nd_trainer *t, nd_loader *loader)
{
    for (int64_t step = 0; step < run->job->steps; step++) {
        ND_TRY(train_step(run, t, loader, step));
    }
    return collect(run, t, false);
}

static nd_status open_loader(shared_run *run, const nd_rank *rank, int64_t accumulation,
                             int64_t first_step, nd_loader **out)
{
    nd_loader_options options = {
        .deal = {run->job->sequence, rank->mesh.size[ND_AXIS_CP],
                 nd_mesh_group_size(&rank->mesh, ND_GROUP_ULYSSES)},
        .micro_batch = run->mesh->micro_batch,
        .accumulation = accumulation,
        .dp_size = nd_mesh_group_size(&rank->mesh, ND_GROUP_DP),
        .dp_index = nd_mesh_group_index(&rank->mesh, ND_GROUP_DP, rank->rank),
        .cp_index = rank->coord.at[ND_AXIS_CP],
        .separate = run->job->separate,
        .running = run->job->running,
        .first_step = first_step,
        .seed = 11,
    };
    return nd_loader_open(run->data, &options, out);
}

/* Restores, and goes the same way again; collect compares the weights with those of before. */
static nd_status train_again(shared_run *run, nd_trainer *t)
{
    nd_loader *loader = NULL;
    nd_status status = ND_OK;
    ND_TRY(run->job->rewind(run->job->context, t));
    ND_TRY(open_loader(run, t->rank, run->config.train.gradient_accumulation_steps,
                       t->position.step, &loader));
    for (int64_t s = t->position.step - run->job->first_step; s < run->job->steps; s++) {
        nd_step_batch batch;
        nd_step_result result;
        ND_TRY_OUT(nd_loader_next(loader, &batch));
        ND_TRY_OUT(nd_trainer_step(t, &batch, &result));
        ND_TRY_OUT(t->rank->rank == 0 ? keep_result(run, s, &result, true) : ND_OK);
    }
    status = collect(run, t, false);
out:
    nd_loader_close(loader);
    return status;
}

static nd_status never_stop(void *context, bool *stop)
{
    return ND_OK;
}

static nd_status validate(shared_run *run, nd_trainer *t)
{
    const nd_stop_check check = {.ask = never_stop};
    nd_loader *loader = NULL;
    int64_t tokens;
    double loss;
    ND_TRY(open_loader(run, t->rank, 1, 0, &loader));
    nd_status status = nd_trainer_evaluate(t, loader, run->config.train.gradient_accumulation_steps,
                                           &check, &loss, &tokens);
    nd_loader_close(loader);
    if (t->rank->rank == 0) {
        run->out->validation = loss;
    }
    return status;
}

static void keep_counts(mesh_result *out, const nd_trainer *t)
{
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        const nd_comm *comm = t->rank->groups.by_kind[kind];
        if (comm) {
            memcpy(out->calls[kind], comm->stats.calls, sizeof out->calls[kind]);
        }
    }
    out->activation_bytes = nd_memplan_class_bytes(&t->plan, ND_MEM_ACTIVATIONS);
}

static void round_weights(nd_trainer *t)
{
    for (int64_t i = 0; i < t->model->layout->shard_total; i++) {
        float *w = &t->model->fsdp.master[i];
        *w = nd_bf16_to_f32(nd_bf16_from_f32(*w));
    }
    nd_fsdp_weights_changed(&t->model->fsdp);
}

static nd_status train_rank(shared_run *run, nd_rank *rank)
{
    nd_trainer *trainer = NULL;
    nd_loader *loader = NULL;
    nd_tuning *tuning = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_tuning_make(rank, &tuning));
    if (run->job->schedule) {
        nd_schedule schedule;
        const int micros = (int)run->config.train.gradient_accumulation_steps;
        ND_TRY_OUT(run->job->schedule(micros, &schedule));
        ND_TRY_OUT(nd_trainer_create_scheduled(rank, tuning, schedule, &trainer));
    } else {
        ND_TRY_OUT(nd_trainer_create(rank, tuning, &trainer));
    }
    ND_TRY_OUT(nd_trainer_commit(trainer));
    ND_TRY_OUT(nd_weights_init(&trainer->model->fsdp, rank->shape.init_std, 3));
    if (run->job->bf16_weights) {
        round_weights(trainer);
    }
    ND_TRY_OUT(HOOK(run, start, trainer));
    ND_TRY_OUT(open_loader(run, rank, run->config.train.gradient_accumulation_steps,
                           run->job->first_step, &loader));
    ND_TRY_OUT(train_steps(run, trainer, loader));
    ND_TRY_OUT(run->job->validates ? validate(run, trainer) : ND_OK);
    ND_TRY_OUT(HOOK(run, end, trainer));
    ND_TRY_OUT(run->job->rewind ? train_again(run, trainer) : ND_OK);
    if (rank->rank == 0) {
        keep_counts(run->out, trainer);
        ND_TRY_OUT(nd_fs_format(&run->out->autotune, "%s", tuning ? tuning->json : ""));
    }
out:
    nd_loader_close(loader);
    nd_trainer_destroy(trainer);
    nd_tuning_destroy(tuning);
    return status;
}

static nd_status rank_body(nd_transport *transport, void *context)
{
    shared_run *run = context;
    nd_rank rank = {
        .rank = transport->rank,
        .world_size = transport->size,
        .host_ranks = run->job->host_ranks,
        .mesh = run->config.resolved_mesh,
        .config = &run->config,
        .shape = run->job->shape,
        .transport = transport,
        .progress = transport->progress,
    };
    nd_status status = ND_OK;
    rank.mesh.kv_copies = (int)nd_shape_kv_copies(&rank.shape, rank.mesh.size[ND_AXIS_TP]);
    rank.coord = nd_mesh_coord_of(&rank.mesh, rank.rank);
    transport->staging_bytes = run->job->staging_bytes;
    ND_TRY(rank_device_open(&rank, run->job->threads > 0 ? run->job->threads : 1));
    ND_TRY_OUT(run->job->reference ? nd_ops_ref(&rank.ops) : ND_OK);
    ND_TRY_OUT(rank.device->table->stream_init(rank.device, &rank.stream));
    ND_TRY_OUT(nd_groups_create(rank.transport, &rank.mesh, &rank.groups));
    status = train_rank(run, &rank);
    nd_groups_destroy(&rank.groups);
    rank.device->table->stream_fini(&rank.stream);
out:
    rank_device_close(&rank, transport);
    return status;
}

/* Whole tensors by name, from the layout of a mesh of one. */
static nd_status make_tables(shared_run *run)
{
    mesh_result *out = run->out;
    nd_layout *layout = NULL;
    nd_mesh one = {{1, 1, 1, 1, 1}};
    ND_TRY(
        nd_layout_create(&(nd_layout_options){.shape = &run->job->shape, .mesh = &one}, &layout));
    out->tensors = layout->param_count;
    ND_TRY(ND_ALLOC(out->tensors, &out->names));
    ND_TRY(ND_ALLOC(out->tensors, &out->sizes));
    ND_TRY(ND_ALLOC(out->tensors, &out->gradients));
    ND_TRY(ND_ALLOC(out->tensors, &out->weights));
    ND_TRY(ND_ALLOC(out->tensors, &run->written[0]));
    ND_TRY(ND_ALLOC(out->tensors, &run->written[1]));
    for (int i = 0; i < out->tensors; i++) {
        const nd_param *p = &layout->params[i];
        memcpy(out->names[i], p->name, sizeof out->names[i]);
        out->sizes[i] = p->rows * p->cols;
        ND_TRY(ND_ALLOC(out->sizes[i], &out->gradients[i]));
        ND_TRY(ND_ALLOC(out->sizes[i], &out->weights[i]));
        ND_TRY(ND_ALLOC(out->sizes[i], &run->written[0][i]));
        ND_TRY(ND_ALLOC(out->sizes[i], &run->written[1][i]));
    }
    nd_layout_destroy(layout);
    return ND_OK;
}

/* Every element of every tensor had a holder. */
static nd_status check_complete(const shared_run *run)
{
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < run->out->tensors; i++) {
            for (int64_t e = 0; e < run->out->sizes[i]; e++) {
                ND_CHECK(run->written[k][i][e], "%s: nobody holds element %lld of %s",
                         run->mesh->name, (long long)e, run->out->names[i]);
            }
        }
    }
    return ND_OK;
}

static nd_status open_one(const mesh_job *job, const char *path, nd_dataset **out)
{
    const nd_corpus_rules rules = {.json_key = "text", .pairs = true};
    nd_token_cache_request request = {.job = {.rules = &rules, .threads = 1},
                                      .vocab = job->shape.vocab};
    char *folder = NULL;
    if (job->format != ND_DATA_JSONL) {
        return nd_dataset_open(path, job->format, job->tokenizer, job->shape.vocab, job->sequence,
                               out);
    }
    ND_TRY(nd_fs_parent(path, &folder));
    request.folder = folder;
    nd_status status = nd_dataset_open_text(path, job->format, request, job->sequence, out);
    free(folder);
    return status;
}

nd_status mesh_open_data(const mesh_job *job, const char *path, nd_dataset **out)
{
    const nd_document_rules rules = {
        .rule = job->separate ? ND_DOCUMENTS_SEPARATE : ND_DOCUMENTS_JOIN,
        .end_of_text = job->end_of_text > 0 ? job->end_of_text : -1,
        .model_end = -1,
    };
    ND_TRY(open_one(job, path, out));
    return nd_dataset_set_documents(*out, &rules);
}

static nd_status open_data(shared_run *run)
{
    const mesh_job *job = run->job;
    nd_dataset_part parts[] = {{.name = "first", .weight = 0.6}, {.name = "second", .weight = 0.4}};
    ND_TRY(mesh_open_data(job, job->data_path, &run->data));
    if (!job->second_path) {
        return ND_OK;
    }
    parts[0].data = run->data;
    run->data = NULL;
    run->config.data_sources = job->one_loss ? 1 : 2;
    nd_status status = mesh_open_data(job, job->second_path, &parts[1].data);
    if (status != ND_OK) {
        nd_dataset_close(parts[0].data);
        return status;
    }
    return nd_dataset_blend(parts, 2, &run->data);
}

/* Keeps a result's memory within reach until the process of the test ends. */
static void keep_memory(const mesh_result *result)
{
    static struct kept {
        mesh_result result;
        struct kept *next;
    } * all;
    struct kept *one = malloc(sizeof *one);
    ND_ASSERT(one);
    *one = (struct kept){*result, all};
    all = one;
}

nd_status mesh_run(const mesh_job *job, const mesh_case *mesh, mesh_result *out)
{
    shared_run run = {.job = job, .mesh = mesh, .out = out};
    nd_status status = ND_OK;
    memset(out, 0, sizeof *out);
    out->steps = job->steps;
    fill_config(&run.config, job, mesh);
    pthread_mutex_init(&run.lock, NULL);
    ND_TRY_OUT(make_tables(&run));
    ND_TRY_OUT(open_data(&run));
    nd_ranks ranks = {.size = (int)run.config.launch.workers,
                      .timeout_seconds = 60,
                      .body = rank_body,
                      .context = &run};
    ND_TRY_OUT(nd_ranks_run_threads(&ranks));
    ND_TRY_OUT(check_complete(&run));
out:
    for (int k = 0; k < 2 && run.written[k]; k++) {
        for (int i = 0; i < out->tensors; i++) {
            free(run.written[k][i]);
        }
        free(run.written[k]);
    }
    keep_memory(out);
    nd_dataset_close(run.data);
    pthread_mutex_destroy(&run.lock);
    return status == ND_OK ? ND_OK : nd_fail_context(status, "training on mesh %s", mesh->name);
}

double mesh_relative_l2(const float *a, const float *b, int64_t count)
{
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double d = (double)a[i] - (double)b[i];
        difference += d * d;
        norm += (double)b[i] * (double)b[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}
