// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TRAINER_RANK_H
#define ND_TRAINER_RANK_H
/*
 * One rank of the job: everything a step needs hangs off it, nothing is global, so N ranks can live
 * in one process as threads (tests) or one each in N processes. The code that sets a rank up owns
 * all members; the rank borrows them.
 */
#include <string.h>

#include "kernels/ops.h"
#include "runtime/comm/comm.h"
#include "runtime/config/config.h"
#include "runtime/device/trace.h"
#include "trainer/layout/layout.h"

typedef struct nd_rank {
    int rank, world_size;
    int host_ranks; /* of the job on this host; 0 counts as 1 */
    nd_mesh mesh;
    nd_coord coord;
    const nd_config *config;
    nd_shape shape;
    nd_device *device;
    nd_stream stream;
    const nd_ops *ops;
    nd_transport *transport;
    nd_groups groups;
    nd_progress_slot *progress;
    nd_trace trace;
} nd_rank;

/* True also for the plan of a GPU that is not here. */
static inline bool nd_rank_is_gpu(const nd_rank *rank)
{
    return strcmp(rank->ops->name, "cuda") == 0;
}

/* Runs a call, charges its time to `kind`, and returns from the calling function when it fails. */
#define ND_RUN(rank_, kind_, call_) ND_RUN_NAMED(rank_, kind_, #call_, call_)
/* Like ND_RUN, with a name of its own in a profile. */
#define ND_RUN_NAMED(rank_, kind_, name_, call_)                                                   \
    do {                                                                                           \
        int64_t nd_begin_ = nd_clock_ns();                                                         \
        nd_status nd_run_status_ = (call_);                                                        \
        nd_trace_add(&(rank_)->trace, (kind_), (name_), nd_begin_);                                \
        if (nd_run_status_ != ND_OK) {                                                             \
            return nd_run_status_;                                                                 \
        }                                                                                          \
    } while (0)

/*
 * Calls an operation of a communicator with the arguments that are named. done_: the event of its
 * end; NULL: at once.
 *
 * ND_COMM(rank, comm, all_gather, NULL, .send = x, .recv = y, .count = n, .dtype = ND_DTYPE_F32);
 */
#define ND_COMM(rank_, comm_, op_, done_, ...)                                                     \
    ND_RUN_NAMED(rank_, ND_TRACE_COMMUNICATION, "nd_comm_" #op_,                                   \
                 nd_comm_##op_(comm_, &(rank_)->stream, &(nd_comm_args){__VA_ARGS__}, done_))

/* Communication that was begun and lends its buffers until it is finished. */
typedef struct nd_exchange {
    nd_event done;
} nd_exchange;

/* Later work of the rank's stream sees what arrived. Does nothing where nothing was begun. */
static inline nd_status nd_exchange_finish(nd_rank *rank, nd_exchange *exchange)
{
    ND_RUN_NAMED(rank, ND_TRACE_COMMUNICATION, "nd_exchange_finish",
                 nd_stream_wait(&rank->stream, &exchange->done));
    exchange->done = (nd_event){0};
    return ND_OK;
}

/* The sum or the maximum over the ranks of a group replaces `count` numbers, on the rank's stream.
 * Nothing is done where there are none. */
static inline nd_status nd_all_reduce(nd_rank *rank, nd_group_kind group, void *numbers,
                                      int64_t count, nd_dtype dtype, nd_redop op)
{
    if (count > 0) {
        ND_RUN(rank, ND_TRACE_COMMUNICATION,
               nd_comm_all_reduce(rank->groups.by_kind[group], &rank->stream, numbers, count, dtype,
                                  op, NULL));
    }
    return ND_OK;
}

/*
 * Calls an op of the backend with the arguments that are named; absent operands are not. Does
 * nothing when a replayed CUDA graph already contains the call.
 *
 * ND_OP(rank, ND_TRACE_GEMM, product, .c = y, .a = nd_rows(x), .b = nd_rows(weight), .b_transposed
 * = true);
 */
#define ND_OP(rank_, kind_, op_, ...)                                                              \
    do {                                                                                           \
        bool nd_enqueue_;                                                                          \
        ND_TRY(nd_stream_inside(&(rank_)->stream, &(nd_graph_op){.name = #op_}, &nd_enqueue_));    \
        if (nd_enqueue_) {                                                                         \
            ND_RUN_NAMED(rank_, kind_, #op_,                                                       \
                         ND_CALL((rank_)->ops, &(rank_)->stream, op_, __VA_ARGS__));               \
        }                                                                                          \
    } while (0)

#endif
