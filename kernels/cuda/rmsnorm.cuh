// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_RMSNORM_CUH
#define ND_CUDA_RMSNORM_CUH
/*
 * RMSNorm, forward and backward: one block holds one row in registers, K packs of N elements a
 * thread. Rows too long for that (K = 0) are read twice, the second time from the cache.
 */
#include "kernels/cuda/common.cuh"

namespace nd {

enum { NORM_THREADS = 512 }; /* most of a block */

/* Threads for a row of `packs`, with about two packs a thread; *K: packs a thread holds, 0 when
 * they are too many. */
inline int threads_for(int64_t packs, int *K)
{
    int64_t threads = nd_ceil_div(nd_ceil_div(packs, 2), 32) * 32;
    threads = threads < 32 ? 32 : threads > NORM_THREADS ? (int64_t)NORM_THREADS : threads;
    int64_t each = nd_ceil_div(packs, threads);
    *K = each <= 2 ? 2 : each <= 4 ? 4 : 0;
    return (int)threads;
}

} // namespace nd
#endif
