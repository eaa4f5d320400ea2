// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/nccl/nccl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/backend.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_library.h"

/*
 * Version 2.26.2 in the encoding of version(). In older versions, a thread that uses another
 * communicator after a non-blocking call on one has ended finds the state of that call and crashes
 * (NVIDIA/nccl, issue 1605), and an abort may not return.
 */
enum { OLDEST = 22602 };

/* 21403 becomes "2.14.3"; before version 2.8 the minor version had one digit. */
static void format_version(int version, char *text, size_t size)
{
    int major = version < 10000 ? 1000 : 10000;
    snprintf(text, size, "%d.%d.%d", version / major, version % major / 100, version % 100);
}

static nd_status open_library(nccl_library *out)
{
    static const char *const names[] = {"libnccl.so.2", NULL};
    nccl_library library;
    const nd_cuda_symbol symbols[] = {
        {"ncclGetVersion", (void **)&library.version},
        {"ncclGetUniqueId", (void **)&library.unique_id},
        {"ncclCommInitRankConfig", (void **)&library.init},
        {"ncclCommSplit", (void **)&library.split},
        {"ncclCommGetAsyncError", (void **)&library.async_error},
        {"ncclCommFinalize", (void **)&library.finalize},
        {"ncclCommDestroy", (void **)&library.destroy},
        {"ncclCommAbort", (void **)&library.abort},
        {"ncclAllReduce", (void **)&library.all_reduce},
        {"ncclAllGather", (void **)&library.all_gather},
        {"ncclReduceScatter", (void **)&library.reduce_scatter},
        {"ncclBroadcast", (void **)&library.broadcast},
        {"ncclSend", (void **)&library.send},
        {"ncclRecv", (void **)&library.recv},
        {"ncclGroupStart", (void **)&library.group_start},
        {"ncclGroupEnd", (void **)&library.group_end},
        {"ncclGetErrorString", (void **)&library.error_string},
        {"ncclGetLastError", (void **)&library.last_error},
    };
    int version = 0;
    ND_TRY(nd_cuda_library_open("NCCL", names, symbols, sizeof symbols / sizeof *symbols));
    library.version(&version);
    if (version < OLDEST) {
        char here[32], oldest[32];
        format_version(version, here, sizeof here);
        format_version(OLDEST, oldest, sizeof oldest);
        return nd_fail(ND_ERR_CONFIG,
                       "NCCL here is version %s and several GPUs need %s or newer; install a newer "
                       "NCCL",
                       here, oldest);
    }
    *out = library;
    return ND_OK;
}

/* What each rank sends to all others before NCCL is initialised. */
typedef struct card {
    ncclUniqueId id; /* rank 0's counts */
    uint64_t host;
    int32_t pid;
} card;

static nd_status exchange_cards(nccl_state *state, const nd_nccl_options *options, card **out)
{
    card mine, *all = NULL;
    memset(&mine, 0, sizeof mine);
    mine.pid = (int32_t)getpid();
    ND_TRY(nd_report_host((const char *const[]){"pid", NULL}, &mine.host));
    if (options->rank == 0) {
        ncclResult_t result = state->library.unique_id(&mine.id);
        if (result != ncclSuccess) {
            return nd_fail(ND_ERR_INTERNAL, "NCCL error %d (%s) from ncclGetUniqueId", (int)result,
                           state->library.error_string(result));
        }
    }
    ND_TRY(ND_ALLOC(options->size, &all));
    nd_status status = options->exchange(options->exchange_context, &mine, all, sizeof mine);
    if (status != ND_OK) {
        free(all);
        return status;
    }
    for (int r = 0; r < options->size; r++) {
        if (all[r].host == mine.host && all[r].pid != mine.pid) {
            state->peers[r].pid = all[r].pid;
            state->peers[r].pidfd = (int)syscall(SYS_pidfd_open, all[r].pid, 0);
            bool gone = state->peers[r].pidfd < 0 && errno == ESRCH; /* otherwise an older kernel */
            state->peers[r].gone_ns = gone ? nd_clock_ns() : 0;
        }
    }
    *out = all;
    return ND_OK;
}

static nd_status open_world(nd_transport *transport, const nd_nccl_options *options)
{
    nccl_state *state = nccl_state_of(transport);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    card *cards = NULL;
    config.blocking = 0;
    ND_TRY(exchange_cards(state, options, &cards));
    int call = nccl_call_begin(transport, "ncclCommInitRankConfig");
    ncclResult_t result =
        state->library.init(&state->world, options->size, cards[0].id, options->rank, &config);
    nccl_call_end(state, call);
    free(cards);
    return nccl_settle(transport, NULL, state->world, result, "the start of NCCL");
}

static nd_status fill(nd_transport *transport, const nd_nccl_options *options)
{
    nccl_state *state = nccl_state_of(transport);
    nd_device *device = options->device;
    state->device = device;
    state->max_blocks = options->max_blocks;
    state->on_fault = options->on_fault;
    state->fault_context = options->fault_context;
    state->progress_ns = nd_clock_ns();
    pthread_mutex_init(&state->calls, NULL);
    pthread_mutex_init(&state->ring, NULL);
    state->watching = (nd_monitor)ND_MONITOR_INIT;
    ND_TRY(ND_ALLOC(options->size, &state->peers));
    for (int r = 0; r < options->size; r++) {
        state->peers[r].pidfd = -1;
    }
    ND_TRY(nd_call_limit_create(&state->limit));
    ND_TRY(open_library(&state->library));
    ND_TRY(device->table->stream_init(device, &state->stream));
    ND_TRY(nd_device_alloc(device, NCCL_STAGING_BYTES, &state->staging));
    ND_TRY(nd_cuda_pinned_alloc(device, NCCL_STAGING_BYTES, &state->pinned));
    ND_TRY(nccl_thread_start(transport)); /* before there is a communicator that peers wait for */
    ND_TRY(open_world(transport, options));
    device->while_waiting = nccl_watch;
    device->waiting_context = transport;
    return ND_OK;
}

nd_status nd_transport_open_nccl(const nd_nccl_options *options, nd_transport **out)
{
    ND_ASSERT(options->progress && options->exchange && options->timeout_seconds > 0);
    nd_transport *transport = NULL;
    nccl_state *state = NULL;
    ND_TRY(ND_ALLOC(1, &transport));
    nd_status status = ND_ALLOC(1, &state);
    if (status != ND_OK) {
        free(transport);
        return status;
    }
    *transport = (nd_transport){
        .backend = &nd_nccl_backend,
        .rank = options->rank,
        .size = options->size,
        .alone = options->alone,
        .timeout_seconds = options->timeout_seconds,
        .progress = options->progress,
        .page = options->page,
        .slot_of_rank = options->slot_of_rank,
        .slot_context = options->slot_context,
        .native = state,
    };
    status = fill(transport, options);
    if (status != ND_OK) {
        nd_transport_close(transport);
        return status;
    }
    *out = transport;
    return ND_OK;
}
