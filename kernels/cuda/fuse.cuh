// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_FUSE_CUH
#define ND_CUDA_FUSE_CUH
/* FP8 codes, and what kernels do with a result while they store it (nd_fuse). */
#include "kernels/cuda/common.cuh"

namespace nd {

/* Two codes, the first in the lower byte: limited to +-FMAX, to nearest even; NaN gives a NaN. */
template <nd_dtype FORMAT> __device__ inline uint32_t encode_pair(float first, float second)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t both;
    if constexpr (FORMAT == ND_DTYPE_F8_E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    }
    return both;
#else
    constexpr bool E4M3 = FORMAT == ND_DTYPE_F8_E4M3;
    constexpr uint32_t FMAX = E4M3 ? 0x43e00000u : 0x47600000u; /* 448, 57344 */
    constexpr uint32_t NORMAL =
        E4M3 ? 0x3c800000u : 0x38800000u; /* 2^-6, 2^-14: the least normal */
    constexpr int SHIFT = E4M3 ? 20 : 21;
    const float values[2] = {first, second};
    uint32_t both = 0;
    for (int i = 0; i < 2; i++) {
        uint32_t bits = __float_as_uint(values[i]), sign = bits >> 24 & 0x80u, code;
        bits &= 0x7fffffffu;
        if (bits > 0x7f800000u) {
            code = 0x7f;
        } else if (bits < NORMAL) {
            /* Added to 2^23 units of the last place, a subnormal is rounded to whole units in the
             * low bits. */
            code = __float_as_uint(__uint_as_float(bits) + (E4M3 ? 16384.0f : 128.0f)) & 0xfu;
        } else {
            bits = bits < FMAX ? bits : FMAX;
            code = (bits + (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1u)) >> SHIFT;
            code -= E4M3 ? (127u - 7u) << 3 : (127u - 15u) << 2;
        }
        both |= (sign | code) << (8 * i);
    }
    return both;
#endif
}

template <nd_dtype FORMAT, int N> __device__ inline pack<uint8_t, N> encode_all(const float (&x)[N])
{
    pack<uint8_t, N> out;
    if constexpr (N == 1) {
        out.e[0] = (uint8_t)encode_pair<FORMAT>(x[0], 0.0f);
    } else {
        ND_UNROLL
        for (int i = 0; i < N; i += 4) {
            out.w[i / 4] =
                encode_pair<FORMAT>(x[i], x[i + 1]) | encode_pair<FORMAT>(x[i + 2], x[i + 3]) << 16;
        }
    }
    return out;
}

/* x scale as codes of a format known at run time. */
template <int N>
__device__ inline pack<uint8_t, N> encode_scaled(const float (&x)[N], float scale, bool e4m3)
{
    float scaled[N];
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        scaled[i] = x[i] * scale;
    }
    return e4m3 ? encode_all<ND_DTYPE_F8_E4M3>(scaled) : encode_all<ND_DTYPE_F8_E5M2>(scaled);
}

/* nd_fuse for a kernel: 2-d, or off (no codes, no amax). */
struct fuse_view {
    float *amax;
    uint8_t *codes;
    const float *scale;
    int64_t stride;
    bool e4m3;

    /* Read this before the first store: the compiler must assume that a store may change it. */
    __device__ float scale_value() const
    {
        return codes ? *scale : 1.0f;
    }
};

inline fuse_view fuse_view_of(const nd_fuse &fuse)
{
    fuse_view v = {};
    v.amax = fuse.amax;
    v.codes = (uint8_t *)fuse.codes.data;
    v.scale = fuse.scale;
    v.stride = fuse.codes.stride[0];
    v.e4m3 = fuse.codes.dtype == ND_DTYPE_F8_E4M3;
    return v;
}

inline bool fuse_is_on(const nd_fuse &fuse)
{
    return fuse.amax || fuse.codes.data;
}

/*
 * Stores a pack of results as T at `to` (unless NULL) and its codes, and returns the largest size
 * among them (bits) for amax_merge.
 */
template <int N, class T>
__device__ inline uint32_t store_fused(T *to, const fuse_view &f, float scale, int64_t row,
                                       int64_t column, const float (&x)[N])
{
    pack<T, N> stored;
    float values[N];
    uint32_t size = 0;
    narrow_all(x, stored);
    if (to) {
        store<N>(to, stored);
    }
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        values[i] = get(stored, i);
        size = larger(size, size_bits(values[i]));
    }
    if (f.codes) {
        store<N>(f.codes + row * f.stride + column, encode_scaled<N>(values, scale, f.e4m3));
    }
    return size;
}

} // namespace nd
#endif
