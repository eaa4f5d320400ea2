// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "runtime/comm/nccl/nccl_state.h"
#include "runtime/device/cuda_library.h"

/*
 * 2.26.2, as version() counts. Before it, who goes on with another communicator once a non-blocking
 * call of one has ended finds the state of that call, and crashes (NVIDIA/nccl, issue 1605), and an
 * abort may not return.
 */
enum { OLDEST = 22602 };

/* "2.14.3" of 21403; until 2.8 the minor version had one digit. */
static void format_version(int version, char *text, size_t size)
{
    int major = version < 10000 ? 1000 : 10000;
    snprintf(text, size, "%d.%d.%d", version / major, version % major / 100, version % 100);
}

nd_status nccl_library_open(nccl_library *out)
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
