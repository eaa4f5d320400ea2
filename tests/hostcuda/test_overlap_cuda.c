// SPDX-License-Identifier: Apache-2.0
/*
 * The order in which a step enqueues its collectives between its products and blocks. It changes no
 * number, only what overlaps: each block's weights are gathered while the block before it computes,
 * forward and backward, and gradients go over a communicator of their own. In the backward what tp,
 * cp and replicas exchange is on its way while weight gradients and other blocks are computed.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/ops.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/step/step.h"

enum { RANKS = 2, LAYERS = 5, BATCH = 4, LOG = 4096, AT_STEP = 1 };

/* A rank's log, as its thread writes it: 'g' a unit's gathers begin, 'r' its reduce-scatters,
 * 'F' and 'B' attention of a block, 'X' a collective on the other's communicator, 'x' and 'd'
 * products of input and weight gradients, 'w' a wait of its stream. Over tp 'a' all-gathers, 't'
 * reduce-scatters; over cp 'c' reduce-scatters, 'e' exchanges; over replicas 's' sums: as capitals
 * where later work of the stream waits for them at once. */
typedef struct rank_log {
    char text[LOG];
    size_t used;
    bool on;
    const nd_comm *weights, *gradients;
    const nd_comm_backend *backend;
    const nd_ops *ops;
    nd_comm_backend noting_backend;
    nd_ops noting_ops;
    const nd_device_table *table;
    nd_device_table noting_table;
} rank_log;

static rank_log logs[RANKS];

static void note(int rank, char what)
{
    rank_log *log = &logs[rank];
    if (log->on && log->used + 1 < LOG) {
        log->text[log->used++] = what;
    }
}

/* A collective that is begun, or that later work waits for. */
static void note_begun(const nd_comm *comm, char begun, const nd_event *done)
{
    note(comm->transport->rank, done ? begun : (char)(begun - 'a' + 'A'));
}

static bool is_of_fsdp(const nd_comm *comm)
{
    return comm->kind == ND_GROUP_DP_SHARD_CP;
}

static nd_status note_group(nd_comm *comm)
{
    const rank_log *log = &logs[comm->transport->rank];
    note(comm->transport->rank, comm == log->weights ? 'g' : 'r');
    return log->backend->group_begin(comm);
}

static nd_status note_call(nd_comm *comm, nd_stream *stream, nd_comm_op op,
                           const nd_comm_args *args, nd_event *done)
{
    const int rank = comm->transport->rank;
    const rank_log *log = &logs[rank];
    const bool gathers = op == ND_COMM_ALL_GATHER, scatters = op == ND_COMM_REDUCE_SCATTER;
    if (is_of_fsdp(comm)) {
        if ((gathers && comm != log->weights) || (scatters && comm != log->gradients)) {
            note(rank, 'X');
        }
    } else if (gathers && comm->kind == ND_GROUP_TP) {
        note_begun(comm, 'a', done);
    } else if (scatters) {
        note_begun(comm, comm->kind == ND_GROUP_TP ? 't' : 'c', done);
    } else if (op == ND_COMM_EXCHANGE) {
        note_begun(comm, 'e', done);
    } else if (op == ND_COMM_ALL_REDUCE && comm->kind == ND_GROUP_DP_REPLICATE) {
        note_begun(comm, 's', done);
    }
    return log->backend->run(comm, stream, op, args, done);
}

static nd_status note_wait(nd_stream *stream, nd_event *event)
{
    int rank = stream->device->ordinal;
    if (event->native) {
        note(rank, 'w');
    }
    return logs[rank].table->stream_wait(stream, event);
}

static nd_status note_product(nd_stream *stream, const nd_product_args *args)
{
    int rank = stream->device->ordinal;
    if (args->a_transposed || !args->b_transposed) {
        note(rank, args->a_transposed ? 'd' : 'x');
    }
    return logs[rank].ops->product(stream, args);
}

static nd_status note_forward(nd_stream *stream, const nd_attention_fwd_args *args)
{
    int rank = stream->device->ordinal;
    note(rank, 'F');
    return logs[rank].ops->attention_fwd(stream, args);
}

static nd_status note_backward(nd_stream *stream, const nd_attention_bwd_args *args)
{
    int rank = stream->device->ordinal;
    note(rank, 'B');
    return logs[rank].ops->attention_bwd(stream, args);
}

/* Returns the backend of the groups of several ranks. */
static const nd_comm_backend *backend_of(const nd_rank *r)
{
    return r->groups.by_kind[ND_GROUP_WORLD]->backend;
}

static nd_status begin_log(void *context, nd_trainer *t, int64_t step)
{
    nd_rank *r = t->rank;
    rank_log *log = &logs[r->rank];
    nd_comm *weights = r->groups.by_kind[ND_GROUP_DP_SHARD_CP],
            *gradients = r->groups.second[ND_GROUP_DP_SHARD_CP];
    log->on = step == AT_STEP;
    if (step > 0) {
        return ND_OK;
    }
    *log = (rank_log){.weights = weights, .gradients = gradients, .backend = backend_of(r)};
    log->noting_backend = *log->backend;
    log->noting_backend.group_begin = note_group;
    log->noting_backend.run = note_call;
    nd_comm *const noted[] = {weights, gradients, r->groups.by_kind[ND_GROUP_TP],
                              r->groups.by_kind[ND_GROUP_CP],
                              r->groups.by_kind[ND_GROUP_DP_REPLICATE]};
    for (size_t i = 0; i < sizeof noted / sizeof *noted; i++) {
        noted[i]->backend = noted[i]->size > 1 ? &log->noting_backend : noted[i]->backend;
    }
    log->table = r->device->table;
    log->noting_table = *r->device->table;
    log->noting_table.stream_wait = note_wait;
    r->device->table = &log->noting_table;
    log->ops = r->ops;
    log->noting_ops = *r->ops;
    log->noting_ops.attention_fwd = note_forward;
    log->noting_ops.attention_bwd = note_backward;
    log->noting_ops.product = note_product;
    r->ops = &log->noting_ops;
    return ND_OK;
}

static int count_before(const char *text, const char *end, char what)
{
    int count = 0;
    for (const char *c = text; c < end; c++) {
        count += *c == what;
    }
    return count;
}

static const char *nth(const char *text, char what, int number)
{
    const char *at = strchr(text, what);
    for (int i = 0; at && i < number; i++) {
        at = strchr(at + 1, what);
    }
    return at;
}

/* Checks the step's first micro-batch. */
static void expect_ahead(const char *text)
{
    const char *last_forward = nth(text, 'F', LAYERS - 1);
    cr_assert_not_null(last_forward, "%s", text);
    for (int block = 0; block < LAYERS; block++) {
        const char *at = nth(text, 'F', block);
        /* The embedding, the blocks up to this one, and the block or the tail behind it. */
        cr_expect_eq(count_before(text, at, 'g'), block + 3, "forward of block %d: %s", block,
                     text);
        at = nth(last_forward, 'B', LAYERS - 1 - block);
        cr_assert_not_null(at, "%s", text);
        /* The last two blocks are still there; the others come one before they are needed. */
        int wanted = block >= LAYERS - 1 ? 0 : block > 0 ? LAYERS - 1 - block : LAYERS - 2;
        cr_expect_eq(count_before(last_forward, at, 'g'), wanted, "backward of block %d: %s", block,
                     text);
        /* A block's gradients leave when it has computed, behind the next one's compute. */
        cr_expect_geq(count_before(last_forward, at, 'r'), LAYERS - 1 - block,
                      "backward of block %d: %s", block, text);
    }
}

static void run(const mesh_case *mesh)
{
    tempdir dir;
    tempdir_make(&dir);
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_BF16);
    job.shape.layers = LAYERS;
    job.global_batch = BATCH;
    job.before_step = begin_log;
    mesh_use_gpus(true, false);
    mesh_trained(&job, mesh);
    tempdir_remove(&dir);
}

Test(overlap_cuda, gathers_go_one_block_ahead_and_gradients_apart, .timeout = 600)
{
    static const mesh_case fsdp = {"fsdp 2", 1, 2, 1, 1, 1};
    run(&fsdp);
    for (int rank = 0; rank < RANKS; rank++) {
        const rank_log *log = &logs[rank];
        cr_expect_null(strchr(log->text, 'X'), "%s", log->text);
        cr_expect_neq(log->weights, log->gradients);
        expect_ahead(log->text);
    }
}

/* Each block's backward of each micro-batch has these events, one after the other. */
static void expect_in_each_block(const mesh_case *mesh, const char *events)
{
    run(mesh);
    for (int rank = 0; rank < RANKS; rank++) {
        int found = 0;
        for (const char *at = logs[rank].text; (at = strstr(at, events)) != NULL; at++) {
            found++;
        }
        cr_expect_eq(found, LAYERS * BATCH, "%s, rank %d: %s is there %d times: %s", mesh->name,
                     rank, events, found, logs[rank].text);
    }
}

/* down; gate and up, whose input is gathered beside dx, and whose dx is summed beside dw; o, whose
 * dw is made after the attention; q, k and v. */
Test(overlap_cuda, tp_exchanges_beside_input_and_weight_gradients, .timeout = 600)
{
    static const mesh_case tp = {"tp 2", 1, 1, 1, 2, 1};
    expect_in_each_block(&tp, "Axdaxwtdw"
                              "AxBdaxwtdw");
}

/* The weight gradient of o is made while dk and dv arrive. */
Test(overlap_cuda, cp_sums_keys_and_values_beside_a_weight_gradient, .timeout = 600)
{
    static const mesh_case gather = {"cp 2", 1, 1, 2, 1, 1};
    static mesh_case ring;
    ring = gather;
    ring.ring = true;
    expect_in_each_block(&gather, "Bcdw");
    expect_in_each_block(&ring, "Bedw");
}

Test(overlap_cuda, replicas_sum_each_block_behind_its_backward, .timeout = 600)
{
    static const mesh_case ddp = {"ddp 2", 2, 1, 1, 1, 1};
    run(&ddp);
    for (int rank = 0; rank < RANKS; rank++) {
        const char *text = logs[rank].text, *last = strrchr(text, 'F');
        cr_assert_not_null(last, "%s", text);
        cr_expect_eq(count_before(text, last, 's'), 0, "before the last micro-batch: %s", text);
        for (int block = 0; block < LAYERS; block++) {
            const char *at = nth(last, 'B', LAYERS - 1 - block);
            cr_assert_not_null(at, "%s", text);
            /* The head, and the blocks behind this one. */
            cr_expect_eq(count_before(last, at, 's'), LAYERS - block, "block %d: %s", block, text);
        }
        cr_expect_null(strchr(text, 'S'), "%s", text);
    }
}
