// SPDX-License-Identifier: Apache-2.0
/* NCCL on one GPU (launch.nccl_alone), or on its double: the start, a communicator for each group,
 * every operation, the end in good order, and the abort after a fault. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/comm/comm.h"
#include "runtime/device/cuda.h"
#include "runtime/device/memplan.h"

enum { N = 1000, BYTES = 4 * N * (int)sizeof(float) };

static const nd_mesh one = {{1, 1, 1, 1, 1}};

typedef struct alone {
    nd_progress_slot slot;
    nd_device *device;
    nd_transport *transport;
    nd_groups groups;
    nd_stream stream;
    float *memory; /* (4, N), on the device */
    float *host;   /* (4, N), pinned */
} alone;

static nd_status exchange_with_itself(void *context, const void *send, void *recv, size_t bytes)
{
    memcpy(recv, send, bytes);
    return ND_OK;
}

static void expect_ok(nd_status status, const char *what)
{
    cr_assert_eq(status, ND_OK, "%s: %s", what, nd_error_last()->message);
}

static void open_alone(alone *a)
{
    nd_cuda_options options = {.local_workers = 1};
    memset(a, 0, sizeof *a);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0); /* as a worker does */
    expect_ok(nd_device_open_cuda(&options, &a->device), "the GPU");
    const nd_transport_options nccl = {
        .size = 1,
        .timeout_seconds = 60,
        .progress = &a->slot,
        .exchange = exchange_with_itself,
        .device = a->device,
        .alone = true,
    };
    expect_ok(nd_transport_open_nccl(&nccl, &a->transport), "the start of NCCL");
    expect_ok(nd_groups_create(a->transport, &one, &a->groups), "the communicators");
    expect_ok(a->device->table->stream_init(a->device, &a->stream), "a stream");
    expect_ok(nd_device_alloc(a->device, BYTES, (void **)&a->memory), "memory");
    expect_ok(nd_host_alloc(a->device, BYTES, (void **)&a->host), "pinned memory");
}

static void close_alone(alone *a)
{
    nd_groups_destroy(&a->groups);
    nd_transport_close(a->transport);
    nd_device_free(a->device, a->memory, BYTES);
    nd_host_free(a->device, a->host);
    a->device->table->stream_fini(&a->stream);
    nd_device_close(a->device);
}

static float value(int i, int salt)
{
    return (float)((i * 7 + salt * 13) % 1001);
}

/* Writes the first row of the memory, and zeros the second. */
static void fill(alone *a, int salt)
{
    for (int i = 0; i < N; i++) {
        a->host[i] = value(i, salt);
    }
    expect_ok(nd_copy(&a->stream, a->memory, a->host, N * sizeof(float)), "a copy");
    expect_ok(nd_zero(&a->stream, a->memory + N, N * sizeof(float)), "zeros");
}

static void expect_row(alone *a, int row, int salt, const char *what)
{
    const float *from = a->memory + (size_t)row * N;
    expect_ok(nd_copy(&a->stream, a->host, from, N * sizeof(float)), what);
    expect_ok(nd_stream_sync(&a->stream), what);
    for (int i = 0; i < N; i++) {
        cr_assert_eq(a->host[i], value(i, salt), "%s: element %d is %g, not %g", what, i,
                     (double)a->host[i], (double)value(i, salt));
    }
}

/* From the first row to the second, or with `in_place` within the first; with its own stream and
 * event, or on the caller's. */
static void run_one(alone *a, nd_comm *comm, nd_comm_call *call, int salt, bool in_place,
                    bool with_event)
{
    nd_event done = {0};
    const nd_comm_args args = {.send = a->memory,
                               .recv = in_place ? a->memory : a->memory + N,
                               .count = N,
                               .dtype = ND_DTYPE_F32,
                               .redop = ND_REDOP_SUM};
    fill(a, salt);
    expect_ok(call(comm, &a->stream, &args, with_event ? &done : NULL), nd_group_name(comm->kind));
    if (with_event) {
        expect_ok(nd_stream_wait(&a->stream, &done), nd_group_name(comm->kind));
    }
    expect_row(a, in_place ? 0 : 1, salt, nd_group_name(comm->kind));
}

static void run_all(alone *a, nd_comm *comm)
{
    nd_comm_call *const calls[] = {nd_comm_all_gather, nd_comm_reduce_scatter, nd_comm_exchange,
                                   nd_comm_all_to_all};
    int64_t tokens = 5;
    int salt = (int)comm->kind + 1;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        run_one(a, comm, calls[i], salt++, false, false);
        run_one(a, comm, calls[i], salt++, false, true);
    }
    run_one(a, comm, nd_comm_all_gather, salt++, true, true);
    run_one(a, comm, nd_comm_reduce_scatter, salt++, true, true);
    fill(a, salt);
    expect_ok(nd_comm_all_reduce(comm, &a->stream, a->memory, N, ND_DTYPE_F32, ND_REDOP_MAX, NULL),
              "all_reduce");
    expect_ok(nd_comm_broadcast(comm, &a->stream, a->memory, N, ND_DTYPE_F32, 0, NULL),
              "broadcast");
    expect_row(a, 0, salt, "all_reduce and broadcast");
    expect_ok(nd_comm_all_reduce(comm, &a->stream, &tokens, 1, ND_DTYPE_I64, ND_REDOP_SUM, NULL),
              "all_reduce of host memory");
    cr_expect_eq(tokens, 5);
    expect_ok(nd_comm_barrier(comm), "barrier");
}

/* Both all-gathers of a unit in one launch. */
static void run_group(alone *a, nd_comm *comm)
{
    nd_event done[2] = {{0}, {0}};
    fill(a, 3);
    expect_ok(nd_comm_group_begin(comm), "a group of calls");
    for (int half = 0; half < 2; half++) {
        const nd_comm_args args = {.send = a->memory + half * N / 2,
                                   .recv = a->memory + N + half * N / 2,
                                   .count = N / 2,
                                   .dtype = ND_DTYPE_F32};
        expect_ok(nd_comm_all_gather(comm, &a->stream, &args, &done[half]), "a group of calls");
    }
    expect_ok(nd_comm_group_end(comm), "a group of calls");
    expect_ok(nd_stream_wait(&a->stream, &done[0]), "a group of calls");
    expect_ok(nd_stream_wait(&a->stream, &done[1]), "a group of calls");
    expect_row(a, 1, 3, "a group of calls");
}

Test(nccl_alone, every_operation_of_every_group)
{
    alone a;
    int communicators = 0;
    open_alone(&a);
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        nd_comm *const comms[] = {a.groups.by_kind[kind], a.groups.second[kind]};
        for (int i = 0; i < nd_group_rows[kind].communicators; i++) {
            cr_assert_str_eq(comms[i]->backend->name, "nccl", "%s", nd_group_name(kind));
            run_all(&a, comms[i]);
            run_group(&a, comms[i]);
            communicators++;
        }
    }
    cr_expect_gt(communicators, ND_GROUP_COUNT / 2);
    close_alone(&a);
}

/* After a fault all communicators are aborted, and the end waits for nothing. */
Test(nccl_alone, a_fault_aborts_what_is_pending)
{
    alone a;
    nd_event done = {0};
    open_alone(&a);
    nd_comm *comm = a.groups.by_kind[ND_GROUP_DP_SHARD_CP];
    const nd_comm_args args = {
        .send = a.memory, .recv = a.memory + N, .count = N, .dtype = ND_DTYPE_F32};
    fill(&a, 1);
    expect_ok(nd_comm_all_gather(comm, &a.stream, &args, &done), "all_gather");
    cr_assert_eq(nd_fail(ND_ERR_DATA, "the loader has its own reason"), ND_ERR_DATA);
    nd_transport_abandon(a.transport);
    cr_expect_str_eq(nd_error_last()->message, "the loader has its own reason");
    cr_expect_eq(nd_comm_all_gather(comm, &a.stream, &args, &done), ND_ERR_DATA);
    nd_groups_destroy(&a.groups);
    nd_transport_close(a.transport);
}
