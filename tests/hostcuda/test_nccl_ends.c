// SPDX-License-Identifier: Apache-2.0
/* Processes that end, over the double of NCCL: which of them the others name, and when an end is
 * none of their concern. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda_check.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/nccl_expect.h"
#include "tests/hostcuda/nccl_job.h"

/* `count` processes over tp, which may end, run `body`; what rank 0 says. */
static void expect_of_rank_0(nd_status (*body)(job *), int count, nd_status status,
                             const char *words)
{
    nd_ranks ranks = nccl_job_ranks(body, (nd_mesh){{1, 1, 1, 1, count}}, 90);
    nd_ranks_run_processes(&ranks);
    expect_message(&ranks, 0, status, words);
}

static nd_status dies(job *j)
{
    ND_TRY(sum_over(j, ND_GROUP_TP));
    ND_TRY(nd_stream_sync(&j->stream));
    if (j->transport->rank == 1) {
        raise(SIGKILL);
    }
    ND_TRY(sum_over(j, ND_GROUP_TP));
    return nd_stream_sync(&j->stream);
}

/* No launcher is there to see it; the deadline is far. */
Test(nccl_ends, a_process_that_ends_is_named, .timeout = 100)
{
    expect_of_rank_0(dies, 2, ND_ERR_IO,
                     "rank 1 has ended while rank 0 waited for it in all_reduce of tp, operation 2 "
                     "(24 x f32)");
}

static nd_status look_until_gone(job *j, int rank)
{
    nccl_state *state = nccl_state_of(j->transport);
    bool gone = false;
    for (int i = 0; i < 20000 && !gone; i++) {
        usleep(1000);
        ND_TRY(j->device->while_waiting(j->transport, 0));
        pthread_mutex_lock(&state->ring);
        gone = state->peers[rank].gone_ns != 0;
        pthread_mutex_unlock(&state->ring);
    }
    ND_CHECK(gone, "the end of rank %d is not seen", rank);
    return ND_OK;
}

/* Rank 1 lives until rank 0 has seen the end of rank 2; nothing is pending meanwhile. What rank 0
 * then begins still has its 0.3 s. */
static nd_status end_in_turn(job *j)
{
    ND_TRY(sum_over(j, ND_GROUP_TP));
    ND_TRY(nd_stream_sync(&j->stream));
    if (j->transport->rank == 2) {
        raise(SIGKILL);
    }
    if (j->transport->rank == 1) {
        sleep(50);
        return nd_fail(ND_ERR_DATA, "rank 0 did not see the end of rank 2");
    }
    ND_TRY(look_until_gone(j, 2));
    int pid = nccl_state_of(j->transport)->peers[1].pid;
    ND_CHECK(pid > 0 && kill(pid, SIGKILL) == 0, "rank 1 cannot be ended");
    ND_TRY(look_until_gone(j, 1));
    usleep(400000);
    int64_t from = nd_clock_ns();
    nd_status status = sum_over(j, ND_GROUP_TP);
    status = status == ND_OK ? nd_stream_sync(&j->stream) : status;
    ND_CHECK(nd_clock_ns() - from > 300000000, "an end seen before is a fault at once");
    return status;
}

Test(nccl_ends, of_two_processes_the_one_that_ended_first_is_named, .timeout = 100)
{
    expect_of_rank_0(end_in_turn, 3, ND_ERR_IO, "rank 2 has ended while rank 0 waited for it in ");
}

/* Rank 0 does its part and looks again when rank 1, which came later, has ended: all is there. */
static nd_status ends_well(job *j)
{
    if (j->transport->rank == 1) {
        usleep(400000);
    }
    ND_TRY(sum_over(j, ND_GROUP_TP));
    if (j->transport->rank == 1) {
        ND_TRY(nd_stream_sync(&j->stream));
        raise(SIGKILL);
    }
    (void)cudaStreamQuery(nd_cuda_stream(&j->stream));
    usleep(1600000);
    return nd_stream_sync(&j->stream);
}

static nd_status ends_well_and_leaves(job *j)
{
    ND_TRY(ends_well(j));
    return nd_fail(ND_ERR_DATA, "it was all there");
}

Test(nccl_ends, a_peer_that_did_its_part_may_end, .timeout = 100)
{
    expect_of_rank_0(ends_well_and_leaves, 2, ND_ERR_DATA, "it was all there");
}

/* Rank 1 has ended its communicator and itself while rank 0 still ends its own: looks are at least
 * a millisecond apart. */
static nd_status ends_late(job *j)
{
    const nccl_state *state = nccl_state_of(j->transport);
    nd_mesh mesh = {{1, 1, 1, 1, 2}};
    nd_comm *comm = NULL;
    ND_TRY(nd_comm_create(j->transport, &mesh, ND_GROUP_TP, 3, &comm));
    nd_double_nccl_finalize_late(j->transport->rank == 0 ? 1500 : 0);
    nd_comm_destroy(comm);
    if (j->transport->rank == 1) {
        raise(SIGKILL);
    }
    ND_CHECK(!state->failed, "%s", state->message);
    return nd_fail(ND_ERR_DATA, "it was all there");
}

Test(nccl_ends, a_peer_that_ended_its_communicators_may_end, .timeout = 100)
{
    expect_of_rank_0(ends_late, 2, ND_ERR_DATA, "it was all there");
}
