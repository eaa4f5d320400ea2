// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_COMMON_CUH
#define ND_CUDA_COMMON_CUH
/*
 * Elements, packs of them, and reductions: what every kernel is made of.
 *
 * A thread moves N elements at a time, a pack: 16 bytes of the widest type of the kernel (8 BF16, 4
 * F32), or N = 1 where a pointer, a stride or a row is not a multiple of that. All arithmetic is in
 * F32.
 */
#include "kernels/cuda/platform.cuh"
#include "runtime/base/math.h"

namespace nd {

struct bf16 {
    uint16_t bits;
};

template <class T> struct type_of;
template <> struct type_of<float> {
    static constexpr nd_dtype dtype = ND_DTYPE_F32;
    static constexpr int pack = 4; /* elements in 16 bytes */
};
template <> struct type_of<bf16> {
    static constexpr nd_dtype dtype = ND_DTYPE_BF16;
    static constexpr int pack = 8;
};

constexpr int smaller(int a, int b)
{
    return a < b ? a : b;
}

/* conversions: to nearest, ties to even */

__device__ inline float widen(float x)
{
    return x;
}

__device__ inline float widen(bf16 x)
{
    return __uint_as_float((uint32_t)x.bits << 16);
}

/* Two BF16, the first in the lower half. NaN gives 0x7fff, as the hardware does. */
__device__ inline uint32_t narrow_pair(float first, float second)
{
#ifdef __CUDA_ARCH__
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    const float values[2] = {first, second};
    uint32_t both = 0;
    for (int i = 0; i < 2; i++) {
        uint32_t bits = __float_as_uint(values[i]);
        bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        uint32_t half = nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        both |= half << (16 * i);
    }
    return both;
#endif
}

__device__ inline void narrow(float x, float &out)
{
    out = x;
}

__device__ inline void narrow(float x, bf16 &out)
{
    out.bits = (uint16_t)narrow_pair(x, 0.0f);
}

/* The value as it is stored. */
template <class T> __device__ inline float rounded(float x)
{
    T stored;
    narrow(x, stored);
    return widen(stored);
}

/* packs */

/* Elements of less than 32 bits are kept in words, so that two or four of them share a register. */
template <class T, int N, bool WORDS = (sizeof(T) < 4 && N > 1)> struct pack;

template <class T, int N> struct alignas(smaller(16, (int)sizeof(T) * N)) pack<T, N, false> {
    T e[N];
};

template <class T, int N> struct alignas(smaller(16, (int)sizeof(T) * N)) pack<T, N, true> {
    uint32_t w[(int)sizeof(T) * N / 4];
};

/* Element i, widened; i is known when the loop around it is unrolled. */
template <int N> __device__ inline float get(const pack<float, N> &x, int i)
{
    return x.e[i];
}

template <int N> __device__ inline float get(const pack<bf16, N> &x, int i)
{
    if constexpr (N == 1) {
        return widen(x.e[0]);
    } else {
        uint32_t both = x.w[i / 2];
        return __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
    }
}

template <class T, int N> __device__ inline pack<T, N> zeros()
{
    pack<T, N> out;
    if constexpr (sizeof(T) < 4 && N > 1) {
        ND_UNROLL
        for (int i = 0; i < (int)sizeof(T) * N / 4; i++) {
            out.w[i] = 0;
        }
    } else {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            out.e[i] = T{};
        }
    }
    return out;
}

/* Zeros where `there` is false; nothing is read then. */
template <int N, class T> __device__ inline pack<T, N> load(const T *p, bool there = true)
{
    ND_EXPECT_ALIGNED(p, there ? alignof(pack<T, N>) : 1);
    return there ? *(const pack<T, N> *)p : zeros<T, N>();
}

template <int N, class T> __device__ inline void store(T *p, const pack<T, N> &x)
{
    ND_EXPECT_ALIGNED(p, alignof(pack<T, N>));
    *(pack<T, N> *)p = x;
}

template <int N> __device__ inline void narrow_all(const float (&x)[N], pack<float, N> &out)
{
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        out.e[i] = x[i];
    }
}

template <int N> __device__ inline void narrow_all(const float (&x)[N], pack<bf16, N> &out)
{
    if constexpr (N == 1) {
        narrow(x[0], out.e[0]);
    } else {
        ND_UNROLL
        for (int i = 0; i < N / 2; i++) {
            out.w[i] = narrow_pair(x[2 * i], x[2 * i + 1]);
        }
    }
}

template <int N, class T> __device__ inline void store_floats(T *p, const float (&x)[N])
{
    pack<T, N> out;
    narrow_all(x, out);
    store<N>(p, out);
}

/* functions */

/* 2^x within 2 units of the last place; subnormal results are 0. */
__device__ inline float exp2_fast(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

/* e^x for results that are stored as T: with BF16 results an error of |x| 2^-24 is far below their
 * rounding. */
template <class T> __device__ inline float exp_for(float x)
{
    if constexpr (sizeof(T) == 2) {
        return exp2_fast(x * 1.4426950408889634f);
    } else {
        return expf(x);
    }
}

template <class T> __device__ inline float divide_for(float a, float b)
{
    if constexpr (sizeof(T) == 2) {
        return __fdividef(a, b); /* 0 for b above 2^126 */
    } else {
        return a / b;
    }
}

/* reductions: every thread gets the result */

template <class T> __device__ inline T warp_sum(T x)
{
    ND_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    }
    return x;
}

__device__ inline float warp_max(float x)
{
    ND_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    }
    return x;
}

/*
 * Over a block of whole warps, at most 32. slots: 32 of shared memory, not in use by a reduction
 * that another warp may still be reading: alternate between two, or put a barrier between.
 */
template <class T> __device__ inline T block_sum(T x, T *slots)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) {
        slots[warp] = x;
    }
    __syncthreads();
    return warp_sum(lane < warps ? slots[lane] : (T)0);
}

__device__ inline float block_max(float x, float *slots)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) {
        slots[warp] = x;
    }
    __syncthreads();
    return warp_max(slots[lane < warps ? lane : 0]);
}

/* amax: |x| as bits, which are ordered like the numbers, NaN above all */

__device__ inline uint32_t size_bits(float x)
{
    return __float_as_uint(x) & 0x7fffffffu;
}

__device__ inline uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Every thread of the warp must call this. The order does not affect the result, and once a large
 * value is stored, few threads still have a larger one to send. */
__device__ inline void amax_merge(float *amax, uint32_t bits)
{
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % 32 == 0 && bits > *(volatile const uint32_t *)amax) {
        atomicMax((unsigned *)amax, bits);
    }
}

/* sizes */

inline bool aligned(const void *p, int64_t stride_bytes = 0, int64_t to = 16)
{
    return ((uintptr_t)p | (uintptr_t)stride_bytes) % (uintptr_t)to == 0;
}

/* Quotients of numbers below 2^31 by a fixed one. Source: Granlund and Montgomery (1994), for
 * 31-bit numerators. */
struct divider {
    uint32_t divisor, multiplier, shift;

    static divider by(int64_t d)
    {
        divider out = {(uint32_t)d, 0, 0};
        while (((int64_t)1 << out.shift) < d) {
            out.shift++;
        }
        uint64_t power = (uint64_t)1 << out.shift;
        out.multiplier = (uint32_t)((((power - (uint64_t)d) << 32) / (uint64_t)d) + 1);
        return out;
    }

    __device__ uint32_t quotient(uint32_t n) const
    {
        return (__umulhi(n, multiplier) + n) >> shift;
    }
};

} // namespace nd
#endif
