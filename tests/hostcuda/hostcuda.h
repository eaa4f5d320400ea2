// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_H
#define ND_TESTS_HOSTCUDA_H
/*
 * CUDA for kernels compiled for the host: included on the command line before a .cu file. It
 * defines what kernels/cuda/platform.cuh lists, and the built-in variables and functions that our
 * kernels use. Nothing of the CUDA Toolkit is needed.
 *
 * Blocks run one after another in the calling thread, before the launch returns. Threads of a
 * kernel that was launched with ND_LAUNCH run one after another; those of ND_LAUNCH_MEETING are
 * fibers that stop at barriers and shuffles (fibers.h, where the mistakes that are caught are
 * listed).
 *
 * With HOSTCUDA_AS_NVCC approximate functions err as far as those of a GPU may, subnormal results
 * of ex2 are 0, and there are as many processors as on an H200; the compiler is then told to fuse
 * multiplications and additions, as nvcc does.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tests/hostcuda/fibers.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

#define threadIdx hostcuda::here.thread
#define blockIdx  hostcuda::here.block
#define blockDim  hostcuda::here.block_size
#define gridDim   hostcuda::here.grid_size

/* platform.cuh */

#define ND_UNROLL
#define ND_NO_UNROLL
#define ND_SHARED(type, name, count)                                                               \
    static const char name##_key = 0;                                                              \
    type *name = (type *)hostcuda::shared(&name##_key, sizeof(type) * (count))
#define ND_EXPECT_ALIGNED(p, bytes)                                                                \
    hostcuda::expect_aligned((p), (size_t)(bytes), __FILE__, __LINE__)
#define ND_LAUNCH(kernel, grid, block, queue, ...)                                                 \
    nd::launch(false, #kernel, (kernel), (int64_t)(grid), (int64_t)(block), (queue), __VA_ARGS__)
#define ND_LAUNCH_MEETING(kernel, grid, block, queue, ...)                                         \
    nd::launch(true, #kernel, (kernel), (int64_t)(grid), (int64_t)(block), (queue), __VA_ARGS__)

namespace nd {

template <class T> struct as_is {
    using type = T;
};

template <class... P>
int launch(bool meets, const char *name, void (*kernel)(P...), int64_t grid, int64_t block,
           CUstream_st *queue, typename as_is<P>::type... arguments)
{
    auto thread = [=]() { kernel(arguments...); };
    int loaded = nd_double_load ? nd_double_load(queue, &kernel, sizeof kernel) : 0;
    if (loaded) {
        return loaded;
    }
    return hostcuda::launch(name, grid, block, meets, queue, thread);
}

inline int zero_async(CUstream_st *queue, void *p, size_t bytes)
{
    return hostcuda::submit(queue, [=]() { memset(p, 0, bytes); });
}

/* Few and odd, so that the tests' small grids go round more than once and unevenly. */
inline int processors()
{
#ifdef HOSTCUDA_AS_NVCC
    return 132;
#else
    return 3;
#endif
}

} // namespace nd

/* built-in functions */

inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#ifdef HOSTCUDA_AS_NVCC

namespace hostcuda {

/* Up to 2 units of the last place away, up or down by the bits of `from`; 0 and infinity stay. */
inline float astray(float x, float from)
{
    if (x == 0.0f || isinf(x)) {
        return x;
    }
    uint32_t draw = __float_as_uint(from) * 2654435761u;
    for (uint32_t i = 0; i < (draw >> 30) % 3; i++) {
        x = nextafterf(x, draw & 0x20000000u ? INFINITY : -INFINITY);
    }
    return x;
}

inline float exp2_approximate(float x)
{
    float y = astray(exp2f(x), x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

} // namespace hostcuda

inline float __fdividef(float a, float b)
{
    return fabsf(b) > 8.507059e37f ? 0.0f : hostcuda::astray(a / b, b);
}

inline float hostcuda_expf(float x)
{
    return hostcuda::astray(expf(x), x);
}

inline float hostcuda_logf(float x)
{
    return hostcuda::astray(logf(x), x);
}

inline float hostcuda_log1pf(float x)
{
    return hostcuda::astray(log1pf(x), x);
}

#define exp2f  hostcuda::exp2_approximate
#define expf   hostcuda_expf
#define logf   hostcuda_logf
#define log1pf hostcuda_log1pf

#else

inline float __fdividef(float a, float b)
{
    return a / b;
}

#endif

inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        out |= (uint32_t)(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    }
    return out;
}

inline unsigned atomicMax(unsigned *p, unsigned x)
{
    unsigned old = *p;
    *p = old > x ? old : x;
    return old;
}

inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long x)
{
    unsigned long long old = *p;
    *p = old + x;
    return old;
}

inline void __syncthreads()
{
    hostcuda::wait_block();
}

inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    hostcuda::exchange(mask, 0, hostcuda::SYNC);
}

template <class T> T __shfl_xor_sync(unsigned mask, T x, int lanes)
{
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    const uint64_t *all = hostcuda::exchange(mask, bits, hostcuda::SHUFFLE);
    memcpy(&x, &all[(hostcuda::here.thread.x ^ (unsigned)lanes) % 32], sizeof x);
    return x;
}

inline uint32_t __reduce_max_sync(unsigned mask, uint32_t x)
{
    const uint64_t *all = hostcuda::exchange(mask, x, hostcuda::REDUCE);
    uint64_t max = 0;
    for (int lane = 0; lane < 32; lane++) {
        max = all[lane] > max ? all[lane] : max;
    }
    return (uint32_t)max;
}

inline uint32_t __reduce_add_sync(unsigned mask, uint32_t x)
{
    const uint64_t *all = hostcuda::exchange(mask, x, hostcuda::REDUCE);
    uint64_t sum = 0;
    for (int lane = 0; lane < 32; lane++) {
        sum += all[lane];
    }
    return (uint32_t)sum;
}

#endif
