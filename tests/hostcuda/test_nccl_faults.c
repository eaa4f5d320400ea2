// SPDX-License-Identifier: Apache-2.0
/*
 * Tests when the NCCL transport finds a fault, and whom it names, over the double of NCCL. Times: a
 * healthy run has a second or more to spare, and a fault is waited for as long as it takes.
 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda_check.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/nccl_expect.h"
#include "tests/hostcuda/nccl_job.h"

/* Two ranks over tp run `body`; a fault is one of the test. */
static void expect_good_end(nd_status (*body)(job *), double deadline)
{
    nd_ranks ranks = nccl_job_ranks(body, (nd_mesh){{1, 1, 1, 1, 2}}, deadline);
    cr_assert_eq(nd_ranks_run_threads(&ranks), ND_OK, "%s", nd_error_last()->message);
}

/* A kernel that takes that long from when it comes to its turn. */
typedef struct long_kernel {
    double seconds;
    int64_t begun_ns;
} long_kernel;

static nd_double_state run_long(void *closure)
{
    long_kernel *k = closure;
    k->begun_ns = k->begun_ns ? k->begun_ns : nd_clock_ns();
    return (double)(nd_clock_ns() - k->begun_ns) * 1e-9 < k->seconds ? ND_DOUBLE_BLOCKED
                                                                     : ND_DOUBLE_DONE;
}

static nd_status compute(job *j, double seconds)
{
    long_kernel kernel = {seconds, 0};
    ND_CUDA(j->device,
            nd_double_submit(nd_cuda_stream(&j->stream), run_long, &kernel, sizeof kernel));
    return ND_OK;
}

/* Longer than the deadline, in one wait: kernels before collectives, and a rank that comes late to
 * each. */
static nd_status long_step(job *j)
{
    for (int i = 0; i < 4; i++) {
        ND_TRY(compute(j, j->transport->rank == 1 ? 1.5 : 0.5));
        ND_TRY(sum_over(j, ND_GROUP_TP));
    }
    return nd_stream_sync(&j->stream);
}

Test(nccl_faults, the_deadline_is_of_one_collective, .timeout = 100)
{
    expect_good_end(long_step, 4);
}

/* One kernel that is longer than the deadline, with the collective behind it. */
static nd_status long_kernels(job *j)
{
    ND_TRY(compute(j, 4));
    ND_TRY(sum_over(j, ND_GROUP_TP));
    return nd_stream_sync(&j->stream);
}

Test(nccl_faults, compute_before_a_collective_does_not_count, .timeout = 100)
{
    expect_good_end(long_kernels, 3);
}

/* Ranks that have their sentence; those of one process. */
static atomic_int given_up;

static void wait_until_given_up(int ranks)
{
    for (int i = 0; i < 50000 && atomic_load(&given_up) < ranks; i++) {
        usleep(1000);
    }
}

static nd_status sums(job *j)
{
    ND_TRY(sum_over(j, ND_GROUP_DP_SHARD_CP));
    ND_TRY(sum_over(j, ND_GROUP_TP));
    ND_TRY(sum_over(j, ND_GROUP_DP_SHARD_CP));
    return nd_stream_sync(&j->stream);
}

/* Ranks 0 1 are a tp group, 2 3 too; 0 2 and 1 3 shard. Rank 3 enqueues nothing. Nobody leaves
 * before all have said what they see. */
static nd_status without_rank_3(job *j)
{
    if (j->transport->rank == 3) {
        wait_until_given_up(3);
        return nd_fail(ND_ERR_INTERNAL, "rank 3 has its own reasons");
    }
    nd_status status = sums(j);
    atomic_fetch_add(&given_up, 1);
    wait_until_given_up(3);
    return status;
}

Test(nccl_faults, the_running_collective_is_named_and_who_is_missing, .timeout = 100)
{
    nd_ranks ranks = nccl_job_run(without_rank_3, (nd_mesh){{1, 1, 2, 1, 2}}, 2.0);
    expect_message(&ranks, 1, ND_ERR_HANG,
                   "in all_reduce of dp_shard_cp, operation 1 (24 x f32), for rank 3;");
    expect_message(&ranks, 0, ND_ERR_HANG,
                   "in all_reduce of tp, operation 1 (24 x f32), for rank 1; rank 1 is in "
                   "all_reduce of dp_shard_cp, operation 1, since");
    expect_message(&ranks, 2, ND_ERR_HANG,
                   "in all_reduce of tp, operation 1 (24 x f32), for rank 3");
    expect_message(&ranks, 3, ND_ERR_INTERNAL, "its own reasons");
}

static bool shows(const job *j, nd_group_kind kind, int64_t sequence, bool runs)
{
    const nd_progress_slot *slot = j->transport->progress;
    return atomic_load(&slot->group) == (int)kind && atomic_load(&slot->sequence) == sequence &&
           (atomic_load(&slot->since_ns) != 0) == runs;
}

static nd_status look_until_shown(job *j, nd_group_kind kind, int64_t sequence, bool runs)
{
    int64_t from = nd_clock_ns();
    while (!shows(j, kind, sequence, runs)) {
        ND_CHECK(nd_clock_ns() - from < 20000000000, "operation %d of %s is not shown",
                 (int)sequence, nd_group_name(kind));
        ND_TRY(j->device->while_waiting(j->transport, 0));
        (void)cudaStreamQuery(nd_cuda_stream(&j->stream));
        usleep(1000);
    }
    return ND_OK;
}

static atomic_bool seen, released;

static nd_double_state run_until_released(void *closure)
{
    return atomic_load(&released) ? ND_DOUBLE_DONE : ND_DOUBLE_BLOCKED;
}

/* An operation that waits for a kernel is shown only while NCCL is polled to take it. */
static nd_status looks(job *j)
{
    char nothing = 0;
    ND_TRY(look_until_shown(j, ND_GROUP_TP, 1, false));
    ND_CUDA(j->device,
            nd_double_submit(nd_cuda_stream(&j->stream), run_until_released, &nothing, 1));
    ND_TRY(sum_over(j, ND_GROUP_WORLD));
    atomic_store(&j->transport->progress->sequence, -1); /* what a look from now on shows */
    ND_TRY(look_until_shown(j, ND_GROUP_TP, 1, false));
    atomic_store(&released, true);
    ND_TRY(look_until_shown(j, ND_GROUP_WORLD, 1, true));
    ND_TRY(sum_over(j, ND_GROUP_TP));
    ND_CHECK(shows(j, ND_GROUP_WORLD, 1, true), "another one is shown than what runs");
    return ND_OK;
}

/* Rank 1 comes to the second operation when rank 0 has looked. */
static nd_status is_shown(job *j)
{
    nd_status status = sum_over(j, ND_GROUP_TP);
    status = status == ND_OK ? nd_stream_sync(&j->stream) : status;
    if (j->transport->rank == 0) {
        status = status == ND_OK ? looks(j) : status;
        atomic_store(&seen, true);
        return status == ND_OK ? nd_stream_sync(&j->stream) : status;
    }
    while (!atomic_load(&seen)) {
        usleep(1000);
    }
    ND_TRY(sum_over(j, ND_GROUP_WORLD));
    ND_TRY(sum_over(j, ND_GROUP_TP));
    return nd_stream_sync(&j->stream);
}

Test(nccl_faults, the_progress_page_shows_what_runs, .timeout = 100)
{
    expect_good_end(is_shown, 20);
}

/* Text that callers add to a fault's sentence stays there when the rank abandons its transport. */
static nd_status adds_context(job *j)
{
    if (j->transport->rank == 1) {
        wait_until_given_up(1);
        return nd_fail_context(nd_fail(ND_ERR_DATA, "rank 1 has its own reasons"), "it waits");
    }
    ND_TRY(sum_over(j, ND_GROUP_TP));
    nd_status status = nd_fail_context(nd_stream_sync(&j->stream), "the caller adds to it");
    atomic_fetch_add(&given_up, 1);
    return status;
}

Test(nccl_faults, the_sentence_keeps_its_context, .timeout = 100)
{
    nd_ranks ranks = nccl_job_run(adds_context, (nd_mesh){{1, 1, 1, 1, 2}}, 2.0);
    expect_message(&ranks, 0, ND_ERR_HANG, "in all_reduce of tp, operation 1 (24 x f32)",
                   " (while the caller adds to it)");
    expect_message(&ranks, 1, ND_ERR_DATA, "rank 1 has its own reasons (while it waits)");
}

/* The watch has seen an error of NCCL; then the driving thread goes into NCCL and does not come
 * back, so that nobody can ask again. Rank 1 may then still be about its communicators. */
static nd_status enters_broken_nccl(job *j)
{
    nccl_state *state = nccl_state_of(j->transport);
    if (j->transport->rank == 1) {
        return nd_fail(ND_ERR_DATA, "rank 1 has its own reasons");
    }
    nd_double_nccl_break(state->world, ncclRemoteError);
    usleep(1500000); /* many looks, and less than the driving thread may be absent */
    pthread_mutex_lock(&state->calls);
    sleep(30);
    pthread_mutex_unlock(&state->calls);
    return nd_fail(ND_ERR_DATA, "the process goes on");
}

Test(nccl_faults, an_error_seen_once_ends_a_host_inside_of_nccl, .timeout = 100)
{
    nd_ranks ranks = nccl_job_ranks(enters_broken_nccl, (nd_mesh){{1, 1, 1, 1, 2}}, 90);
    nd_ranks_run_processes(&ranks);
    cr_expect(!ranks.results[0].finished, "%s", ranks.results[0].message);
}

/* Freeing would wait for what the GPU still runs. */
static nd_status frees_nothing(job *j)
{
    void *p = NULL;
    ND_TRY(nd_device_alloc(j->device, 4096, &p));
    nd_status status = nd_fail(ND_ERR_DATA, "it gives up");
    long before = nd_double_counts_get().frees;
    nd_transport_abandon(j->transport);
    nd_device_free(j->device, p, 4096);
    long frees = nd_double_counts_get().frees - before;
    ND_CHECK(frees == 0, "%ld frees on a GPU that is given up", frees);
    return status;
}

Test(nccl_faults, nothing_is_freed_after_a_fault, .timeout = 100)
{
    nd_ranks ranks = nccl_job_run(frees_nothing, (nd_mesh){{1, 1, 1, 1, 2}}, 5);
    expect_message(&ranks, 0, ND_ERR_DATA, "it gives up");
    expect_message(&ranks, 1, ND_ERR_DATA, "it gives up");
}

/* A gather on the communicator's stream and then a sum in place of what it gathers, which waits for
 * no event: the communicator's order is enough. */
static nd_status mixed_order(job *j)
{
    nd_comm *tp = j->groups.by_kind[ND_GROUP_TP];
    nd_event gathered = {0};
    for (int i = 0; i < N; i++) {
        j->host[i] = (float)(1 + tp->index);
    }
    ND_TRY(nd_copy(&j->stream, j->memory, j->host, N * 4));
    ND_TRY(nd_comm_all_gather(tp, &j->stream, FLOATS(j->memory, j->memory + 16 * N), &gathered));
    ND_TRY(nd_comm_all_reduce(tp, &j->stream, j->memory + 16 * N, 2 * N, ND_DTYPE_F32, ND_REDOP_SUM,
                              NULL));
    ND_TRY(nd_copy(&j->stream, j->host, j->memory + 16 * N, 2 * N * 4));
    ND_TRY(nd_comm_barrier(tp)); /* on a stream of its own, behind the sum */
    ND_TRY(nd_stream_sync(&j->stream));
    ND_TRY(nd_stream_wait(&j->stream, &gathered));
    ND_CHECK(j->host[0] == 2.0f && j->host[N] == 4.0f, "%g and %g", (double)j->host[0],
             (double)j->host[N]);
    return ND_OK;
}

Test(nccl_faults, operations_with_and_without_events_keep_their_order, .timeout = 100)
{
    nd_ranks ranks = nccl_job_ranks(mixed_order, (nd_mesh){{1, 1, 1, 1, 2}}, 5);
    nd_double_machine_get()->order = ND_DOUBLE_LAZY;
    cr_assert_eq(nd_ranks_run_threads(&ranks), ND_OK, "%s", nd_error_last()->message);
}

/* More than a ring holds, before anything is waited for. */
static nd_status many(job *j)
{
    for (int i = 0; i < NCCL_RING + 100; i++) {
        ND_TRY(sum_over(j, ND_GROUP_TP));
    }
    return nd_stream_sync(&j->stream);
}

Test(nccl_faults, a_full_ring_waits, .timeout = 100)
{
    expect_good_end(many, 60);
}

/* An operation that cannot be enqueued leaves no group open: another communicator's works. */
static nd_status broken_group(job *j)
{
    nd_comm *tp = j->groups.by_kind[ND_GROUP_TP];
    nd_event done = {0};
    ND_TRY(nd_comm_group_begin(tp));
    nd_double_break(cudaErrorIllegalAddress);
    nd_status status =
        nd_comm_all_gather(tp, &j->stream, FLOATS(j->memory, j->memory + 16 * N), &done);
    ND_CHECK(status != ND_OK, "a broken device took an operation");
    const nccl_state *state = nccl_state_of(j->transport);
    ND_CHECK(!state->grouping, "the group is still open");
    nd_double_break(cudaSuccess);
    return nd_fail(ND_ERR_DATA, "as it should");
}

Test(nccl_faults, a_group_that_fails_is_closed, .timeout = 100)
{
    nd_ranks ranks = nccl_job_run(broken_group, (nd_mesh){{1, 1, 1, 1, 2}}, 5);
    expect_message(&ranks, 0, ND_ERR_DATA, "as it should");
    expect_message(&ranks, 1, ND_ERR_DATA, "as it should");
}
