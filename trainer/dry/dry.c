// SPDX-License-Identifier: Apache-2.0
/* Lists of calls, ops that make them or count what a step computes and moves, and the model's own
 * forward and backward over those ops. */
#include "trainer/dry/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops_check.h"
#include "runtime/base/math.h"

enum { ALIGN_MAX = 256 };

nd_call_entry *nd_calls_find(const nd_calls *calls, const nd_call *call)
{
    for (int i = 0; i < calls->count; i++) {
        if (memcmp(&calls->entries[i].call, call, sizeof *call) == 0) {
            return &calls->entries[i];
        }
    }
    return NULL;
}

nd_status nd_calls_add(nd_calls *calls, const nd_call *call)
{
    nd_call_entry *entry = nd_calls_find(calls, call);
    if (entry) {
        entry->times += calls->weight;
        return ND_OK;
    }
    entry = realloc(calls->entries, (size_t)(calls->count + 1) * sizeof *entry);
    if (!entry) {
        return nd_fail_memory("the calls of a step");
    }
    calls->entries = entry;
    calls->entries[calls->count++] = (nd_call_entry){.call = *call, .times = calls->weight};
    return ND_OK;
}

nd_status nd_calls_add_all(nd_calls *calls, const nd_calls *from)
{
    for (int i = 0; i < from->count; i++) {
        calls->weight = from->entries[i].times;
        ND_TRY(nd_calls_add(calls, &from->entries[i].call));
    }
    return ND_OK;
}

static int64_t times_in(const nd_calls *step, const nd_call *call)
{
    const nd_call_entry *entry = nd_calls_find(step, call);
    return entry ? entry->times : 0;
}

double nd_calls_difference(const nd_calls *timed, const nd_calls *step, const nd_calls *other,
                           bool only_more)
{
    double seconds = 0.0;
    for (int i = 0; i < timed->count; i++) {
        const nd_call_entry *entry = &timed->entries[i];
        int64_t more = times_in(step, &entry->call) - times_in(other, &entry->call);
        if (more != 0 && entry->seconds < 0.0) {
            return NAN;
        }
        seconds += more > 0 || !only_more ? (double)more * entry->seconds : 0.0;
    }
    return seconds;
}

void nd_calls_free(nd_calls *calls)
{
    free(calls->entries);
    *calls = (nd_calls){0};
}

static nd_call_matrix matrix(nd_tensor t)
{
    uintptr_t address = (uintptr_t)t.data, low = address & -address;
    if (!t.data) {
        return (nd_call_matrix){0};
    }
    return (nd_call_matrix){
        .rows = t.shape[0],
        .columns = t.axes == 1 ? 1 : t.shape[1],
        .stride = t.axes == 1 ? 1 : t.stride[0],
        .axes = t.axes,
        .dtype = (int32_t)t.dtype,
        .align = low == 0 || low > ALIGN_MAX ? ALIGN_MAX : (int32_t)low,
    };
}

static nd_call_matrix operand(const nd_matrix *x)
{
    nd_call_matrix m = matrix(x->stored);
    m.along = (int32_t)x->granularity;
    return m;
}

static nd_status note_product(nd_stream *s, const nd_product_args *x)
{
    const bool fp8 = nd_matrix_is_fp8(&x->a);
    nd_call call = {.kind = fp8 ? ND_CALL_PRODUCT_FP8 : ND_CALL_PRODUCT,
                    .a_transposed = x->a_transposed,
                    .b_transposed = x->b_transposed,
                    .beta = x->beta != 0.0f,
                    .fast = x->fast_accumulation,
                    .c = matrix(x->c),
                    .a = operand(&x->a),
                    .b = operand(&x->b)};
    return nd_tensor_count(x->c) == 0 ? ND_OK : nd_calls_add(s->native, &call);
}

static nd_status note_amax(nd_stream *s, const nd_amax_args *x)
{
    nd_call call = {.kind = ND_CALL_AMAX, .merges = x->merge, .a = matrix(x->x)};
    call.a.along = (int32_t)x->granularity;
    return nd_calls_add(s->native, &call);
}

static nd_status note_fp8_scale(nd_stream *s, const nd_fp8_scale_args *x)
{
    nd_call call = {.kind = ND_CALL_FP8_SCALE,
                    .a = matrix(nd_tensor_1d(x->scale, ND_DTYPE_F32, x->count))};
    return nd_calls_add(s->native, &call);
}

static nd_status note_make_form(nd_stream *s, const nd_make_form_args *x)
{
    const bool codes = nd_dtype_is_fp8(x->x.dtype);
    nd_call call = {.kind = codes ? ND_CALL_FP8_TRANSPOSE : ND_CALL_FP8_CAST,
                    .merges = x->amax != NULL,
                    .c = matrix(codes ? x->transposed : x->out.stored),
                    .a = matrix(x->x),
                    .b = matrix(codes ? (nd_tensor){0} : x->transposed)};
    call.a.along = (int32_t)x->out.granularity;
    return nd_calls_add(s->native, &call);
}

/* Casts of matrices and vectors; casts of other views are the same in BF16 and FP8. */
static nd_status note_cast(nd_stream *s, const nd_cast_args *x)
{
    nd_call call = {.kind = ND_CALL_CAST, .c = matrix(x->out), .a = matrix(x->x)};
    return x->x.axes > 2 || x->out.axes > 2 ? ND_OK : nd_calls_add(s->native, &call);
}

#define SKIP(op, prefix)                                                                           \
    static nd_status prefix##op(nd_stream *s, const nd_##op##_args *x)                             \
    {                                                                                              \
        return ND_OK;                                                                              \
    }
ND_EACH_OP(SKIP, skip_)

/* Ops that compute nothing and touch no memory; with the properties and the queries of `real`. */
static nd_ops idle_ops(const nd_ops *real)
{
#define QUERY_OF_REAL(query, type, parameters, prefix) .query = real->query,
    return (nd_ops){.name = real->name,
                    .limits = real->limits,
                    .fp8_rows = real->fp8_rows,
                    ND_EACH_OP(ND_OP_ENTRY, skip_) ND_EACH_QUERY(QUERY_OF_REAL, )};
#undef QUERY_OF_REAL
}

/* The amounts that the ops of a step compute and move. */

static nd_step_work *work_of(const nd_stream *stream)
{
    return stream->native;
}

static void add_weighted(const nd_stream *stream, double *sum, double amount)
{
    *sum += amount * (double)work_of(stream)->calls.weight;
}

/* Bytes of the elements, not of the gaps; 0 for an absent tensor. */
static double bytes_of(nd_tensor t)
{
    return t.data ? (double)nd_tensor_count(t) * (double)nd_dtype_size(t.dtype) : 0.0;
}

/* Bytes of a result that is stored, as codes, or both. */
static double bytes_of_result(nd_tensor t, const nd_fuse *fuse)
{
    return bytes_of(t) + bytes_of(fuse->codes);
}

static nd_status work_product(nd_stream *s, const nd_product_args *x)
{
    nd_step_work *w = work_of(s);
    const nd_matrix *a = &x->a;
    const int64_t k = a->stored.shape[a->transposed == x->a_transposed ? 1 : 0];
    add_weighted(s,
                 nd_matrix_is_fp8(a)               ? &w->flops_fp8
                 : a->stored.dtype == ND_DTYPE_F32 ? &w->flops_f32
                                                   : &w->flops_bf16,
                 2.0 * (double)nd_tensor_count(x->c) * (double)k);
    return ND_OK;
}

/* Pairs of a query and a key that it sees. */
static double visible_pairs(const nd_attention *a)
{
    double pairs = 0.0;
    for (int64_t i = 0; i < a->sq; i++) {
        const nd_key_range keys = nd_visible_keys(a, (nd_tensor){0}, (nd_tensor){0}, 0, i);
        pairs += (double)nd_max(0, keys.end - keys.begin);
    }
    return pairs * (double)(a->batch * a->heads);
}

#define WORK_OF_ATTENTION(op, factor)                                                              \
    static nd_status work_##op(nd_stream *s, const nd_##op##_args *x)                              \
    {                                                                                              \
        const double n = visible_pairs(&x->attention) * (double)x->attention.head_dim * (factor);  \
        add_weighted(s, &work_of(s)->flops_attention, n);                                          \
        return ND_OK;                                                                              \
    }
/* Scores, and their product with the values. */
WORK_OF_ATTENTION(attention_fwd, 4.0)
/* Scores again, and the gradients of probabilities, values, queries and keys. */
WORK_OF_ATTENTION(attention_bwd, 10.0)

/* X(op, bytes): the ops of our kernels, and what each reads and writes. */
#define EACH_MOVE(X)                                                                               \
    X(embedding_fwd, 2.0 * bytes_of(x->out))                                                       \
    X(embedding_bwd, bytes_of(x->dout) + 8.0 * (double)nd_tensor_count(x->dout))                   \
    X(rmsnorm_fwd,                                                                                 \
      bytes_of_result(x->y, &x->fuse) + bytes_of(x->sum) + bytes_of(x->x) + bytes_of(x->delta))    \
    X(rmsnorm_bwd, bytes_of(x->dx) + bytes_of(x->dy) + bytes_of(x->dres) + bytes_of(x->x))         \
    X(row_dots, bytes_of(x->x) + bytes_of(x->y))                                                   \
    X(rope, bytes_of(x->out) + bytes_of(x->x))                                                     \
    X(swiglu_fwd, bytes_of_result(x->out, &x->fuse) + bytes_of(x->gate) + bytes_of(x->up))         \
    X(swiglu_bwd, bytes_of_result(x->dgate, &x->fuse[0]) + bytes_of_result(x->dup, &x->fuse[1]) +  \
                      bytes_of(x->dout) + bytes_of(x->gate) + bytes_of(x->up))                     \
    X(bias_fwd, bytes_of(x->out))                                                                  \
    X(bias_bwd, bytes_of(x->dout))                                                                 \
    X(attention_delta, bytes_of(x->delta) + bytes_of(x->out) + bytes_of(x->dout))                  \
    X(lse_merge, 2.0 * bytes_of(x->acc) + bytes_of(x->out))                                        \
    X(ce_stats, bytes_of(x->logits))                                                               \
    X(ce_bwd, 2.0 * bytes_of(x->logits))                                                           \
    X(accumulate, 2.0 * bytes_of(x->acc) + bytes_of(x->x))                                         \
    X(cast, bytes_of(x->out) + bytes_of(x->x))                                                     \
    X(amax, bytes_of(x->x))                                                                        \
    X(make_form, bytes_of(x->out.stored) + bytes_of(x->transposed) + bytes_of(x->x))

#define MOVE(op, bytes)                                                                            \
    static nd_status work_##op(nd_stream *s, const nd_##op##_args *x)                              \
    {                                                                                              \
        add_weighted(s, &work_of(s)->moved_bytes, bytes);                                          \
        return ND_OK;                                                                              \
    }
EACH_MOVE(MOVE)

#define NOTHING(function, ...)                                                                     \
    static nd_status function(__VA_ARGS__)                                                         \
    {                                                                                              \
        return ND_OK;                                                                              \
    }

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

NOTHING(dry_copy, nd_stream *stream, void *dst, const void *src, size_t bytes)
NOTHING(dry_zero, nd_stream *stream, void *dst, size_t bytes)
NOTHING(dry_wait, nd_stream *stream, nd_event *event)

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

static void dry_destroy(nd_comm *comm)
{
}

NOTHING(dry_create, nd_transport *transport, nd_comm *comm)
NOTHING(nothing, void *operation)

/* Adds what a ring sends (an all-reduce is a reduce-scatter and an all-gather) to the transport's
 * nd_step_work, if it has one. In a group of several the caller waits for a complete event. */
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
        m->sets[s].batch.first_keys = m->batches.keys.numbers > 0 ? m->batches.memory : NULL;
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
    dry_step step = {.options = {.linears = linears},
                     .calls = calls,
                     .ops = idle_ops(rank->ops),
                     .native = calls};
    /* Calls whose time is measured are noted. The ops that are skipped take the same time whatever
     * the linears' precision, or nearly so: a norm or SwiGLU that measures or casts its results
     * takes no longer for it. */
    step.ops.product = note_product;
    step.ops.amax = note_amax;
    step.ops.fp8_scale = note_fp8_scale;
    step.ops.make_form = note_make_form;
    step.ops.cast = note_cast;
    return run_rank(rank, &step);
}

/* The target of stream->native where the calls of ops are prepared. */
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

nd_status nd_dry_run_prepare(const nd_rank *rank, const nd_model_options *options)
{
    nd_calls calls = {0};
    prepare_target target = {rank->ops->prepare, rank->device};
    dry_step step = {
        .options = *options, .calls = &calls, .ops = idle_ops(rank->ops), .native = &target};
    const bool needed = rank->ops->prepare && rank->device->kind == ND_DEVICE_CUDA;
#define PREPARED(op, prefix) step.ops.op = prefix##op;
    ND_EACH_PREPARED_OP(PREPARED, prepare_)
#undef PREPARED
    return needed ? run_rank(rank, &step) : ND_OK;
}

nd_status nd_dry_run_graphs(const nd_rank *rank, const nd_model_options *options,
                            nd_graph_counts *out)
{
    nd_calls calls = {0};
    const dry_step step = {
        .options = *options, .calls = &calls, .graphs = out, .ops = idle_ops(rank->ops)};
    return run_rank(rank, &step);
}

nd_status nd_dry_run_work(const nd_rank *rank, int host_ranks, nd_step_work *out)
{
    nd_step_work work = {.host_ranks = host_ranks};
    dry_step step = {
        .calls = &work.calls, .ops = idle_ops(rank->ops), .native = &work, .work = &work};
#define COUNTED(op, bytes) step.ops.op = work_##op;
    EACH_MOVE(COUNTED)
#undef COUNTED
    step.ops.product = work_product;
    step.ops.attention_fwd = work_attention_fwd;
    step.ops.attention_bwd = work_attention_bwd;
    ND_TRY(run_rank(rank, &step));
    *out = work;
    return ND_OK;
}
