// SPDX-License-Identifier: Apache-2.0
/* The NCCL transport over the double of NCCL: results, order between streams, faults. */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda_check.h"
#include "tests/hostcuda/cuda_ranks.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/nccl_expect.h"
#include "tests/hostcuda/nccl_job.h"

static void expect_all_fine(job_body *body, nd_mesh mesh)
{
    for (int order = ND_DOUBLE_LAZY; order <= ND_DOUBLE_OTHERS; order++) {
        nd_ranks ranks = nccl_job_ranks(body, mesh, 60.0);
        nd_double_machine_get()->order = order;
        nd_status status = nd_ranks_run_threads(&ranks);
        cr_assert_eq(status, ND_OK, "order %d: %s", order, nd_error_last()->message);
    }
}

/* Element i of what rank r contributes. */
static float part(int r, int i)
{
    return (float)(r * 100 + i);
}

static nd_status fill(job *j, int64_t count)
{
    for (int i = 0; i < count; i++) {
        j->host[i] = part(j->transport->rank, i);
    }
    return nd_copy(&j->stream, j->memory, j->host, (size_t)count * 4);
}

static nd_status fetch(job *j, const float *from, int64_t count)
{
    ND_TRY(nd_copy(&j->stream, j->host, from, (size_t)count * 4));
    return nd_stream_sync(&j->stream);
}

/* Member m sends m + r, modulo 3, elements to member r. */
static nd_status check_uneven(job *j, nd_comm *comm, float *out)
{
    enum { MEMBERS_MAX = 8 };
    int64_t sends[MEMBERS_MAX], receives[MEMBERS_MAX], at = 0;
    const int n = comm->size;
    ND_CHECK(n <= MEMBERS_MAX, "%d members", n);
    for (int r = 0; r < n; r++) {
        sends[r] = receives[r] = (comm->index + r) % 3;
    }
    const nd_comm_args args = {.send = j->memory,
                               .recv = out,
                               .count = N,
                               .dtype = ND_DTYPE_F32,
                               .sends = sends,
                               .receives = receives};
    ND_TRY(n > 1 ? nd_comm_all_to_all(comm, &j->stream, &args, NULL) : ND_OK);
    ND_TRY(fetch(j, out, n > 1 ? 2 * n : 0));
    for (int m = 0; m < n && n > 1; m++) {
        int first = 0;
        for (int r = 0; r < comm->index; r++) {
            first += (m + r) % 3;
        }
        for (int i = 0; i < receives[m]; i++, at++) {
            ND_CHECK(j->host[at] == part(comm->ranks[m], first + i), "uneven all_to_all");
        }
    }
    return ND_OK;
}

static nd_status every_operation(job *j)
{
    for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
        nd_comm *comm = j->groups.by_kind[kind];
        if (!comm) {
            continue; /* nothing is sent within the group */
        }
        float *out = j->memory + 32 * N, sum = 0.0f, most = 0.0f;
        int n = comm->size, next = (comm->index + 1) % n, before = (comm->index + n - 1) % n;
        ND_TRY(fill(j, 16 * N));
        ND_TRY(nd_comm_all_gather(comm, &j->stream, FLOATS(j->memory, out), NULL));
        ND_TRY(fetch(j, out, n * N));
        for (int m = 0; m < n; m++) {
            ND_CHECK(j->host[m * N + 3] == part(comm->ranks[m], 3), "all_gather of %s: %g",
                     nd_group_name(comm->kind), (double)j->host[m * N + 3]);
            sum += part(comm->ranks[m], comm->index * N + 5);
            most = part(comm->ranks[m], 2) > most ? part(comm->ranks[m], 2) : most;
        }
        ND_TRY(nd_comm_reduce_scatter(comm, &j->stream, FLOATS(j->memory, out), NULL));
        ND_TRY(fetch(j, out, N));
        ND_CHECK(j->host[5] == sum, "reduce_scatter: %g, not %g", (double)j->host[5], (double)sum);
        ND_TRY(nd_comm_all_to_all(comm, &j->stream, FLOATS(j->memory, out), NULL));
        ND_TRY(fetch(j, out, n * N));
        for (int m = 0; m < n; m++) {
            ND_CHECK(j->host[m * N] == part(comm->ranks[m], comm->index * N), "all_to_all");
        }
        ND_TRY(check_uneven(j, comm, out));
        ND_TRY(nd_comm_exchange(comm, &j->stream,
                                &(nd_comm_args){.send = j->memory,
                                                .recv = out,
                                                .count = N,
                                                .dtype = ND_DTYPE_F32,
                                                .to = next,
                                                .from = before},
                                NULL));
        ND_TRY(fetch(j, out, N));
        ND_CHECK(j->host[7] == part(comm->ranks[before], 7), "exchange");
        ND_TRY(
            nd_comm_all_reduce(comm, &j->stream, j->memory, N, ND_DTYPE_F32, ND_REDOP_MAX, NULL));
        ND_TRY(fetch(j, j->memory, N));
        ND_CHECK(j->host[2] == most, "all_reduce: %g, not %g", (double)j->host[2], (double)most);
        ND_TRY(fill(j, N));
        ND_TRY(nd_comm_broadcast(comm, &j->stream, j->memory, N, ND_DTYPE_F32, n - 1, NULL));
        ND_TRY(fetch(j, j->memory, N));
        ND_CHECK(j->host[1] == part(comm->ranks[n - 1], 1), "broadcast");
        int64_t tokens = comm->index + 1;
        ND_TRY(nd_comm_all_reduce(comm, &j->stream, &tokens, 1, ND_DTYPE_I64, ND_REDOP_SUM, NULL));
        ND_CHECK(tokens == n * (n + 1) / 2, "host memory: %lld", (long long)tokens);
        ND_TRY(nd_comm_barrier(comm));
    }
    return ND_OK;
}

Test(nccl, every_operation_of_every_group)
{
    expect_all_fine(every_operation, (nd_mesh){{1, 2, 2, 1, 2}});
    expect_all_fine(every_operation, (nd_mesh){{1, 1, 1, 3, 1}});
}

/* A unit's two gathers, which are waited for late, and its two reduce-scatters on another
 * communicator of the same group; each pair in one group, or one by one. Buffers are written again
 * in the next round. */
static nd_status gather_and_reduce(job *j, bool grouped)
{
    nd_comm *weights = j->groups.by_kind[ND_GROUP_DP_SHARD_CP],
            *gradients = j->groups.second[ND_GROUP_DP_SHARD_CP];
    float *out = j->memory + 16 * N, *sums = j->memory + 40 * N;
    nd_event gathered[2] = {{0}}, reduced[2] = {{0}};
    int n = weights->size;
    for (int round = 0; round < 5; round++) {
        float sum = 0.0f;
        for (int i = 0; i < 2 * n * N; i++) {
            j->host[i] = part(weights->index, i) + (float)round;
        }
        for (int m = 0; m < n; m++) {
            sum += part(m, weights->index * N) + (float)round;
        }
        ND_TRY(nd_copy(&j->stream, j->memory, j->host, (size_t)(2 * n * N) * 4));
        ND_TRY(grouped ? nd_comm_group_begin(weights) : ND_OK);
        for (int k = 0; k < 2; k++) { /* bytes, as codes are, and F32 */
            ND_TRY(nd_comm_all_gather(weights, &j->stream,
                                      &(nd_comm_args){.send = j->memory + k * N,
                                                      .recv = out + k * n * N,
                                                      .count = k ? N : 4 * N,
                                                      .dtype = k ? ND_DTYPE_F32 : ND_DTYPE_U8},
                                      &gathered[k]));
        }
        ND_TRY(grouped ? nd_comm_group_end(weights) : ND_OK);
        ND_TRY(grouped ? nd_comm_group_begin(gradients) : ND_OK);
        for (int k = 0; k < 2; k++) {
            ND_TRY(nd_comm_reduce_scatter(
                gradients, &j->stream, FLOATS(j->memory + k * n * N, sums + k * N), &reduced[k]));
        }
        ND_TRY(grouped ? nd_comm_group_end(gradients) : ND_OK);
        for (int k = 0; k < 2; k++) {
            ND_TRY(nd_stream_wait(&j->stream, &gathered[k]));
            ND_TRY(nd_stream_wait(&j->stream, &reduced[k]));
        }
        ND_TRY(fetch(j, out, 26 * N));
        for (int k = 0; k < 2; k++) {
            float last = part(n - 1, k * N) + (float)round;
            float scattered = sum + (float)(n * n * N * k);
            float got = j->host[(k * n + n - 1) * N], reduction = j->host[(24 + k) * N];
            ND_CHECK(got == last, "gathered %g, not %g, of %d in round %d", (double)got,
                     (double)last, k, round);
            ND_CHECK(reduction == scattered, "reduced %g, not %g, of %d in round %d",
                     (double)reduction, (double)scattered, k, round);
        }
    }
    return ND_OK;
}

static nd_status overlapped(job *j)
{
    return gather_and_reduce(j, false);
}

Test(nccl, operations_with_events_overlap)
{
    expect_all_fine(overlapped, (nd_mesh){{1, 1, 4, 1, 1}});
}

static nd_status in_groups(job *j)
{
    return gather_and_reduce(j, true);
}

Test(nccl, groups_are_one_launch)
{
    int64_t before = nd_double_nccl_groups();
    expect_all_fine(in_groups, (nd_mesh){{1, 1, 4, 1, 1}});
    int64_t orders = ND_DOUBLE_OTHERS - ND_DOUBLE_LAZY + 1, per_rank = 2 * 5;
    cr_expect_eq(nd_double_nccl_groups() - before, orders * 4 * per_rank, "%ld groups",
                 (long)(nd_double_nccl_groups() - before));
}

static nd_status one_does_not_enter(job *j)
{
    nd_comm *comm = j->groups.by_kind[ND_GROUP_TP];
    if (j->transport->rank != 0) { /* in a communicator that is not that of tp */
        nd_status status = nd_comm_barrier(j->groups.by_kind[ND_GROUP_WORLD]);
        ND_CHECK(status != ND_OK, "the barrier ended without rank 0");
        return ND_OK;
    }
    ND_TRY(nd_comm_all_reduce(comm, &j->stream, j->memory, N, ND_DTYPE_F32, ND_REDOP_SUM, NULL));
    return nd_stream_sync(&j->stream);
}

Test(nccl, a_missing_peer_is_named)
{
    nd_ranks ranks = nccl_job_run(one_does_not_enter, (nd_mesh){{1, 1, 2, 1, 2}}, 2.0);
    expect_message(&ranks, 0, ND_ERR_HANG,
                   "all_reduce of tp, operation 1 (24 x f32), for rank 1; ");
    expect_message(&ranks, 0, ND_ERR_HANG, "launch.comm_timeout_seconds");
}

static ncclResult_t fault_of_nccl = ncclRemoteError;

static atomic_int in_it;

/* When the others wait in an operation. */
static nd_status network_breaks(job *j)
{
    nd_comm *comm = j->groups.by_kind[ND_GROUP_TP];
    while (j->transport->rank == 0 && atomic_load(&in_it) < comm->size - 1) {
        usleep(1000);
    }
    if (j->transport->rank == 0) {
        nd_double_nccl_break(((nccl_comm *)comm->native)->native, fault_of_nccl);
    }
    ND_TRY(nd_comm_all_reduce(comm, &j->stream, j->memory, N, ND_DTYPE_F32, ND_REDOP_SUM, NULL));
    atomic_fetch_add(&in_it, 1);
    return nd_stream_sync(&j->stream);
}

Test(nccl, an_asynchronous_error_ends_every_rank)
{
    nd_ranks ranks = nccl_job_run(network_breaks, (nd_mesh){{1, 1, 1, 1, 3}}, 60.0);
    for (int r = 0; r < 3; r++) {
        char rank[32];
        snprintf(rank, sizeof rank, "rank %d: NCCL error", r);
        expect_message(&ranks, r, ND_ERR_IO, rank, "remote",
                       "all_reduce of tp, operation 1 (24 x f32)");
    }
}

static atomic_bool enqueued;

/* Rank 1 comes when rank 0 frees, or is about to. */
static nd_status frees_what_is_gathered(job *j)
{
    float *out = NULL;
    ND_TRY(nd_device_alloc(j->device, 2 * N * 4, (void **)&out));
    while (j->transport->rank == 1 && !atomic_load(&enqueued)) {
        usleep(1000);
    }
    usleep(j->transport->rank == 1 ? 100000 : 0);
    ND_TRY(nd_comm_all_gather(j->groups.by_kind[ND_GROUP_TP], &j->stream, FLOATS(j->memory, out),
                              NULL));
    atomic_store(&enqueued, j->transport->rank == 0); /* not at the next start */
    nd_device_free(j->device, out, 2 * N * 4);
    ND_CUDA(j->device, cudaStreamQuery(nd_cuda_stream(&j->stream)));
    return ND_OK;
}

Test(nccl, memory_is_freed_when_the_last_operation_is_done)
{
    expect_all_fine(frees_what_is_gathered, (nd_mesh){{1, 1, 1, 1, 2}});
}

static nd_status streams_go_first(job *j)
{
    const nccl_comm *nc = j->groups.by_kind[ND_GROUP_TP]->native;
    int of_compute = 0, of_group = 0;
    ND_CUDA(j->device, cudaStreamGetPriority(nd_cuda_stream(&j->stream), &of_compute));
    ND_CUDA(j->device, cudaStreamGetPriority(nd_cuda_stream(&nc->stream), &of_group));
    ND_CHECK(of_group < of_compute, "priorities %d and %d", of_group, of_compute);
    return ND_OK;
}

Test(nccl, streams_of_groups_go_before_compute)
{
    expect_all_fine(streams_go_first, (nd_mesh){{1, 1, 1, 1, 2}});
}

/* Groups of small operations, and whose communicator serves each of them: their own, or that of an
 * earlier group. */
static nd_status expect_shared(job *j, const nd_group_kind with[3])
{
    static const nd_group_kind small[3] = {ND_GROUP_DP_CP, ND_GROUP_MODEL, ND_GROUP_WORLD};
    nd_comm **by_kind = j->groups.by_kind;
    for (int i = 0; i < 3; i++) {
        for (int kind = 0; kind < (int)small[i]; kind++) {
            bool shared = by_kind[kind] && by_kind[kind]->native == by_kind[small[i]]->native;
            bool want = with[i] != small[i] &&
                        (kind == (int)with[i] ||
                         (by_kind[kind] && by_kind[with[i]]->native == by_kind[kind]->native));
            ND_CHECK(by_kind[kind] == NULL || by_kind[kind]->size == 1 || shared == want,
                     "%s and %s", nd_group_name(small[i]), nd_group_name((nd_group_kind)kind));
        }
    }
    ND_CHECK(j->groups.second[ND_GROUP_DP_SHARD_CP]->native !=
                     by_kind[ND_GROUP_DP_SHARD_CP]->native ||
                 by_kind[ND_GROUP_DP_SHARD_CP]->size == 1,
             "gradients wait for weights");
    return ND_OK;
}

/* The one that was made first ends first; the others go on. */
static nd_status others_go_on(job *j, nd_group_kind first)
{
    nd_comm_destroy(j->groups.by_kind[first]);
    j->groups.by_kind[first] = NULL;
    return every_operation(j);
}

static nd_status all_of_one_axis(job *j)
{
    static const nd_group_kind with[] = {ND_GROUP_DP_SHARD_CP, ND_GROUP_DP_SHARD_CP,
                                         ND_GROUP_DP_SHARD_CP};
    ND_TRY(expect_shared(j, with));
    ND_TRY(every_operation(j));
    ND_TRY(overlapped(j));
    return others_go_on(j, ND_GROUP_DP_SHARD_CP);
}

/* Keys and values do not wait for weights, which the same ranks gather. */
static nd_status two_axes(job *j)
{
    static const nd_group_kind with[] = {ND_GROUP_CP, ND_GROUP_MODEL, ND_GROUP_MODEL};
    nd_comm **by_kind = j->groups.by_kind;
    ND_TRY(expect_shared(j, with));
    ND_CHECK(by_kind[ND_GROUP_CP]->native != by_kind[ND_GROUP_DP_SHARD_CP]->native, "keys wait");
    ND_TRY(every_operation(j));
    return others_go_on(j, ND_GROUP_CP);
}

static nd_status three_axes(job *j)
{
    static const nd_group_kind with[] = {ND_GROUP_DP_CP, ND_GROUP_MODEL, ND_GROUP_WORLD};
    ND_TRY(expect_shared(j, with));
    return every_operation(j);
}

Test(nccl, groups_of_small_operations_share_communicators)
{
    expect_all_fine(all_of_one_axis, (nd_mesh){{1, 1, 4, 1, 1}});
    expect_all_fine(two_axes, (nd_mesh){{1, 1, 1, 2, 2}});
    expect_all_fine(three_axes, (nd_mesh){{1, 2, 2, 1, 2}});
}

/* The plan counts what is made: of 8 GPUs with FSDP, the gathers' and the gradients'. */
Test(nccl, shared_communicators_are_planned_once)
{
    const size_t each = (size_t)288 << 20;
    cr_expect_eq(nd_comm_nccl_bytes(&(nd_mesh){{1, 1, 8, 1, 1}}), 2 * each);
    cr_expect_eq(nd_comm_nccl_bytes(&(nd_mesh){{1, 1, 1, 1, 8}}), each);
    cr_expect_eq(nd_comm_nccl_bytes(&(nd_mesh){{1, 1, 1, 2, 2}}), 5 * each);
    cr_expect_eq(nd_comm_nccl_bytes(&(nd_mesh){{1, 2, 2, 1, 2}}), 7 * each);
    cr_expect_eq(nd_comm_nccl_bytes(&(nd_mesh){{1, 1, 1, 1, 1}}), 0);
}

static int blocks_of(const nd_comm *comm)
{
    return nd_double_nccl_blocks(((const nccl_comm *)comm->native)->native);
}

/* Groups that gather weights and reduce gradients beside products have few blocks, and so have
 * groups that share their communicator; those that compute waits for have as many as NCCL takes. */
static nd_status blocks_are_bounded(job *j)
{
    for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
        const nd_comm *comm = j->groups.by_kind[kind], *second = j->groups.second[kind];
        bool beside = nd_comm_shared_group(&j->mesh, (nd_group_kind)kind) == ND_GROUP_DP_SHARD_CP;
        int want = beside ? 6 : 0;
        ND_CHECK(!comm || comm->size == 1 || blocks_of(comm) == want, "%s has %d blocks, not %d",
                 nd_group_name((nd_group_kind)kind), blocks_of(comm), want);
        ND_CHECK(!second || blocks_of(second) == want, "the second of %s has %d blocks, not %d",
                 nd_group_name((nd_group_kind)kind), blocks_of(second), want);
    }
    return overlapped(j);
}

Test(nccl, gathers_and_reductions_beside_products_have_bounded_blocks)
{
    cuda_rank_blocks(6);
    expect_all_fine(blocks_are_bounded, (nd_mesh){{1, 2, 2, 1, 2}});
}

/* As the library: a bound of no blocks, and one below the other. */
Test(nccl, the_double_refuses_bounds_that_nccl_refuses)
{
    ncclComm_t comm = NULL;
    ncclUniqueId id = {{0}};
    const int bounds[][2] = {{NCCL_CONFIG_UNDEF_INT, 0}, {0, 4}, {8, 4}};
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        config.minCTAs = bounds[i][0];
        config.maxCTAs = bounds[i][1];
        cr_expect_eq(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument,
                     "from %d to %d", bounds[i][0], bounds[i][1]);
    }
    ncclConfig_t blank = {0};
    cr_expect_eq(ncclCommInitRankConfig(&comm, 1, id, 0, &blank), ncclInvalidArgument);
}

/* NCCL allocates at the first use of a group, after the plan. */
Test(nccl, memory_that_it_does_not_find_is_said)
{
    fault_of_nccl = ncclUnhandledCudaError;
    nd_ranks ranks = nccl_job_run(network_breaks, (nd_mesh){{1, 1, 1, 1, 2}}, 60.0);
    for (int r = 0; r < 2; r++) {
        expect_message(&ranks, r, ND_ERR_RESOURCE, "all_reduce of tp", "'out of memory'",
                       "outside the plan");
    }
}

static nd_status nothing(job *j)
{
    return ND_OK;
}

/* NCCL's own issue 1605 happened with 2.25.1. */
Test(nccl, an_old_library_is_refused_with_both_versions)
{
    static const char *const old[][2] = {{"21403", "2.14.3"}, {"22501", "2.25.1"}};
    for (int i = 0; i < 2; i++) {
        setenv("ND_DOUBLE_NCCL", old[i][0], 1);
        nd_ranks ranks = nccl_job_run(nothing, (nd_mesh){{1, 1, 1, 1, 2}}, 60.0);
        expect_message(&ranks, 0, ND_ERR_CONFIG, old[i][1], "2.26.2");
    }
}

Test(nccl, the_oldest_library_is_taken)
{
    setenv("ND_DOUBLE_NCCL", "22602", 1);
    nd_ranks ranks = nccl_job_ranks(nothing, (nd_mesh){{1, 1, 1, 1, 2}}, 60.0);
    cr_expect_eq(nd_ranks_run_threads(&ranks), ND_OK, "%s", nd_error_last()->message);
}
