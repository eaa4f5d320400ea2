// SPDX-License-Identifier: Apache-2.0
#include "trainer/dry/dry.h"

/* Memory is an address that is never read. */

static nd_status dry_alloc(nd_device *device, size_t bytes, void **out)
{
    *out = (void *)((uintptr_t)1 << 40);
    return ND_OK;
}

static void dry_free(nd_device *device, void *p, size_t bytes)
{
}

static void dry_host_free(nd_device *device, void *p)
{
}

static nd_status dry_copy(nd_stream *stream, void *dst, const void *src, size_t bytes)
{
    return ND_OK;
}

static nd_status dry_zero(nd_stream *stream, void *dst, size_t bytes)
{
    return ND_OK;
}

static nd_status dry_wait(nd_stream *stream, nd_event *event)
{
    return ND_OK;
}

/* A device whose streams and events are those of the CPU, where nothing is pending. */
static nd_status open_dry_device(nd_device_table *table, nd_device **out)
{
    ND_TRY(nd_device_open_cpu(1, out));
    *table = *(*out)->table;
    table->name = "dry";
    table->alloc = table->host_alloc = dry_alloc;
    table->free = dry_free;
    table->host_free = dry_host_free;
    table->copy = dry_copy;
    table->zero = dry_zero;
    table->stream_wait = dry_wait;
    (*out)->table = table;
    return ND_OK;
}

/* Communicators that send nothing. */

static nd_status dry_create(nd_transport *transport, nd_comm *comm)
{
    return ND_OK;
}

static void dry_destroy(nd_comm *comm)
{
}

static nd_status nothing(void *operation)
{
    return ND_OK;
}

/* Where the transport has an nd_step_work, what a ring sends: an all-reduce is a reduce-scatter and
 * an all-gather. In a group of several ranks the caller waits for an event, which is complete. */
static nd_status dry_call(nd_comm *comm, nd_stream *stream, nd_comm_op op, const nd_comm_args *args,
                          nd_event *done)
{
    nd_step_work *work = comm->transport->native;
    double elements = (double)args->count;
    if (op == ND_COMM_ALL_REDUCE) {
        elements = 2.0 * elements * (comm->size - 1) / comm->size;
    } else if (op != ND_COMM_BROADCAST && op != ND_COMM_EXCHANGE) { /* to each of the others */
        elements *= comm->size - 1;
    }
    if (work) {
        const int first = comm->ranks[0], last = comm->ranks[comm->size - 1];
        const bool host = first / work->host_ranks == last / work->host_ranks;
        const double bytes =
            elements * (double)nd_dtype_size(args->dtype) * (double)work->calls.weight;
        *(host ? &work->host_bytes : &work->wire_bytes) += bytes;
        work->exposed_bytes += done ? 0.0 : bytes;
    }
    if (done) {
        *done = (nd_event){.finish = nothing};
    }
    return ND_OK;
}

static const nd_comm_backend dry_backend = {
    .name = "dry", .create = dry_create, .destroy = dry_destroy, .run = dry_call};

static nd_status run_step(nd_model *m, nd_calls *calls)
{
    const int64_t micros = m->rank->config->train.gradient_accumulation_steps;
    for (int s = 0; s < m->set_count && !m->forward_only; s++) { /* each has graphs of its own */
        /* No op reads tokens and first keys, but some are other calls where there are any. */
        m->sets[s].batch.first_keys = m->batches.first_keys > 0 ? m->batches.memory : NULL;
        nd_fsdp_begin_step(&m->fsdp, 0);
        for (int i = 0; i < (micros > 1 ? 2 : 1); i++) { /* all but the first are alike */
            calls->weight = s > 0 ? 0 : i == 0 ? 1 : micros - 1;
            ND_TRY(nd_model_forward(m, &m->sets[s], ND_PASS_TRAIN));
            ND_TRY(nd_model_backward(m, &m->sets[s]));
        }
    }
    calls->weight = 0;
    return nd_model_forward(m, m->sets, ND_PASS_EVAL);
}

typedef struct dry_step {
    nd_model_options options;
    nd_calls *calls;
    nd_graph_counts *graphs; /* NULL: not wanted */
    nd_ops ops;
    void *native;       /* stream.native that these ops get */
    nd_step_work *work; /* what communication adds to; NULL: nothing */
} dry_step;

static nd_status run_rank(const nd_rank *rank, const dry_step *step)
{
    nd_rank r = *rank;
    nd_device_table table;
    nd_device *device = NULL;
    nd_progress_slot slot = {0};
    nd_transport transport = {
        .backend = &dry_backend,
        .rank = rank->rank,
        .size = rank->world_size,
        .alone = rank->config->launch.nccl_alone,
        .progress = &slot,
        .native = step->work,
    };
    nd_memplan plan;
    nd_model *model = NULL;
    nd_graphs *graphs = NULL;
    nd_status status = ND_OK;
    nd_memplan_init(&plan);
    ND_TRY(nd_ops_check(&step->ops));
    ND_TRY(open_dry_device(&table, &device));
    /* The queries of the ops read what they keep for the real device. */
    device->native = rank->device ? rank->device->native : NULL;
    r.device = device;
    r.stream = (nd_stream){.device = device, .native = step->native};
    r.ops = &step->ops;
    r.transport = &transport;
    r.progress = &slot;
    r.groups = (nd_groups){0};
    ND_TRY_OUT(nd_groups_create(&transport, &r.mesh, &r.groups));
    ND_TRY_OUT(nd_model_create(&r, &step->options, &plan, &model));
    ND_TRY_OUT(nd_model_plan_weights(model, false, &plan));
    ND_TRY_OUT(nd_memplan_commit(&plan, device));
    ND_TRY_OUT(nd_model_start(model));
    if (step->graphs) {
        ND_TRY_OUT(nd_graphs_create(&r.stream, NULL, &graphs));
        model->graphs = graphs;
    }
    ND_TRY_OUT(run_step(model, step->calls));
    if (step->graphs) {
        *step->graphs = nd_graphs_count(graphs);
    }
out:
    nd_graphs_destroy(graphs);
    nd_model_destroy(model);
    nd_memplan_fini(&plan);
    nd_groups_destroy(&r.groups);
    nd_device_close(device);
    return status;
}

nd_status nd_dry_run(const nd_rank *rank, const nd_linear_choice *linears, nd_calls *calls)
{
    const dry_step step = {.options = {.linears = linears},
                           .calls = calls,
                           .ops = nd_dry_ops(rank->ops),
                           .native = calls};
    return run_rank(rank, &step);
}

/* What stream->native points to where the calls of ops are prepared. */
typedef struct prepare_target {
    const nd_prepare_ops *prepare;
    nd_device *device;
} prepare_target;

/* The op of the backend that prepares the call, on the device itself. */
#define PREPARE(op, prefix)                                                                        \
    static nd_status prefix##op(nd_stream *s, const nd_##op##_args *x)                             \
    {                                                                                              \
        const prepare_target *target = s->native;                                                  \
        nd_stream stream = {.device = target->device};                                             \
        return target->prepare->op(&stream, x);                                                    \
    }
ND_EACH_PREPARED_OP(PREPARE, prepare_)

/* Ops that make what the backend keeps for the forms they meet (nd_ops.prepare). */
static nd_ops prepare_ops(const nd_ops *real)
{
    nd_ops ops = nd_dry_idle_ops(real);
#define PREPARED(op, prefix) ops.op = prefix##op;
    ND_EACH_PREPARED_OP(PREPARED, prepare_)
#undef PREPARED
    return ops;
}

nd_status nd_dry_run_prepare(const nd_rank *rank, const nd_model_options *options)
{
    nd_calls calls = {0};
    prepare_target target = {rank->ops->prepare, rank->device};
    const dry_step step = {
        .options = *options, .calls = &calls, .ops = prepare_ops(rank->ops), .native = &target};
    const bool needed = rank->ops->prepare && rank->device->kind == ND_DEVICE_CUDA;
    return needed ? run_rank(rank, &step) : ND_OK;
}

nd_status nd_dry_run_graphs(const nd_rank *rank, const nd_model_options *options,
                            nd_graph_counts *out)
{
    nd_calls calls = {0};
    const dry_step step = {
        .options = *options, .calls = &calls, .graphs = out, .ops = nd_dry_idle_ops(rank->ops)};
    return run_rank(rank, &step);
}

nd_status nd_dry_run_work(const nd_rank *rank, int host_ranks, nd_step_work *out)
{
    nd_step_work work = {.host_ranks = host_ranks};
    const dry_step step = {
        .calls = &work.calls, .ops = nd_dry_work_ops(rank->ops), .native = &work, .work = &work};
    ND_TRY(run_rank(rank, &step));
    *out = work;
    return ND_OK;
}
