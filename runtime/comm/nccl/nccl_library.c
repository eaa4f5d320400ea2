// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/nccl/nccl_state.h"
#include "runtime/device/cuda_library.h"

enum { OLDEST = 21800 }; /* ncclCommSplit of non-blocking communicators */

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
        return nd_fail(ND_ERR_CONFIG,
                       "NCCL here is version %d and several GPUs need %d (2.18) or newer; install "
                       "a newer NCCL",
                       version, (int)OLDEST);
    }
    *out = library;
    return ND_OK;
}
