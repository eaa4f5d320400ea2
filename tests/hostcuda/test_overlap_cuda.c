// SPDX-License-Identifier: Apache-2.0
/*
 * The order in which a sharded step enqueues its collectives between its blocks. It changes no
 * number, only what overlaps: each block's weights are gathered while the block before it computes,
 * forward and backward, and gradients go over a communicator of their own.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/ops.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/step/step.h"

enum { RANKS = 2, LAYERS = 5, LOG = 256, AT_STEP = 1 };

/* What one rank did, as its thread writes it: 'g' a unit's gathers begin, 'r' its reduce-scatters,
 * 'F' and 'B' attention of a block, 'X' a collective on the other's communicator. */
typedef struct rank_log {
    char text[LOG];
    size_t used;
    bool on;
    const nd_comm *weights, *gradients;
    const nd_comm_backend *backend;
    const nd_ops *ops;
    nd_comm_backend noting_backend;
    nd_ops noting_ops;
} rank_log;

static rank_log logs[RANKS];

static void note(int rank, char what)
{
    rank_log *log = &logs[rank];
    if (log->on && log->used + 1 < LOG) {
        log->text[log->used++] = what;
    }
}

static nd_status note_group(nd_comm *comm)
{
    const rank_log *log = &logs[comm->transport->rank];
    note(comm->transport->rank, comm == log->weights ? 'g' : 'r');
    return log->backend->group_begin(comm);
}

static nd_status note_gather(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                             nd_event *done)
{
    const rank_log *log = &logs[comm->transport->rank];
    if (comm != log->weights) {
        note(comm->transport->rank, 'X');
    }
    return log->backend->all_gather(comm, stream, args, done);
}

static nd_status note_scatter(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                              nd_event *done)
{
    const rank_log *log = &logs[comm->transport->rank];
    if (comm != log->gradients) {
        note(comm->transport->rank, 'X');
    }
    return log->backend->reduce_scatter(comm, stream, args, done);
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
    *log = (rank_log){.weights = weights, .gradients = gradients, .backend = weights->backend};
    log->noting_backend = *weights->backend;
    log->noting_backend.group_begin = note_group;
    log->noting_backend.all_gather = note_gather;
    log->noting_backend.reduce_scatter = note_scatter;
    weights->backend = gradients->backend = &log->noting_backend;
    log->ops = r->ops;
    log->noting_ops = *r->ops;
    log->noting_ops.attention_fwd = note_forward;
    log->noting_ops.attention_bwd = note_backward;
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

Test(overlap_cuda, gathers_go_one_block_ahead_and_gradients_apart, .timeout = 600)
{
    static const mesh_case fsdp = {"fsdp 2", 1, 2, 1, 1, 1};
    tempdir dir;
    mesh_result got;
    tempdir_make(&dir);
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_BF16);
    job.shape.layers = LAYERS;
    job.before_step = begin_log;
    mesh_use_gpus(true, false);
    cr_assert_eq(mesh_run(&job, &fsdp, &got), ND_OK, "%s", nd_error_last()->message);
    for (int rank = 0; rank < RANKS; rank++) {
        const rank_log *log = &logs[rank];
        cr_expect_null(strchr(log->text, 'X'), "%s", log->text);
        cr_expect_neq(log->weights, log->gradients);
        expect_ahead(log->text);
    }
    mesh_result_free(&got);
    tempdir_remove(&dir);
}
