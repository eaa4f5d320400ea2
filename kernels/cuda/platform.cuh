// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_PLATFORM_CUH
#define ND_CUDA_PLATFORM_CUH
/*
 * The kernels take what follows from CUDA. Under nvcc this is the CUDA runtime; when the same files
 * are compiled for the host, a header given on the command line (tests/hostcuda/hostcuda.h) has
 * defined the same names before.
 *
 *   ND_LAUNCH(kernel, grid, block, queue, arguments...)   a kernel whose threads do not meet
 *   ND_LAUNCH_MEETING(...)                                the same for kernels with barriers,
 *                                                         shuffles or shared memory
 *   ND_SHARED(type, name, count)                          static shared memory, aligned to 16 bytes
 *   ND_UNROLL, ND_NO_UNROLL                               for the loop that follows
 *   zero_async, processors                                below
 *
 * Both launches are expressions of type int, a cudaError_t. A template's kernel is put in
 * parentheses.
 */
#include "kernels/cuda/kernels.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>

#define ND_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define ND_UNROLL                    _Pragma("unroll")
#define ND_NO_UNROLL                 _Pragma("unroll 1")
#define ND_EXPECT_ALIGNED(p, bytes)  ((void)0)

#define ND_LAUNCH(kernel, grid, block, queue, ...)                                                 \
    nd::launch((kernel), (unsigned)(grid), (unsigned)(block), (queue), __VA_ARGS__)
#define ND_LAUNCH_MEETING ND_LAUNCH

namespace nd {

template <class T> struct as_is {
    using type = T;
};

/* The error of this launch; cudaGetLastError may return an older one. */
template <class... P>
int launch(void (*kernel)(P...), unsigned grid, unsigned block, cudaStream_t queue,
           typename as_is<P>::type... arguments)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(block);
    config.stream = queue;
    return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline int zero_async(cudaStream_t queue, void *p, size_t bytes)
{
    return (int)cudaMemsetAsync(p, 0, bytes, queue);
}

/* Streaming multiprocessors of the current device: an estimate that only sizes grids. */
inline int processors()
{
    int device = 0, count = 0;
    bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return known && count > 0 ? count : 1;
}

} // namespace nd
#endif
#endif
