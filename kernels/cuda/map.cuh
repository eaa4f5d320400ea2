// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_MAP_CUH
#define ND_CUDA_MAP_CUH
/*
 * Elementwise work over strided views: a layout (which element of each operand a pack is) and a
 * kernel that walks it.
 *
 * map_kernel gives each thread F::together packs at a time and issues the loads of all of them
 * before the first is used, so that enough bytes are in flight to cover the latency of memory. F
 * has
 *   struct state                        what load leaves for finish
 *   void load(int64_t v, state &) const
 *   void finish(state &) const          after load, by the same thread; may store where load of the
 *                                       same v has read
 * With F::amaxes it also merges the largest sizes of so many results into f.amax[k] (NULL: not
 * wanted); there
 *   void finish(state &, uint32_t (&sizes)[F::amaxes]) const    raises sizes, bits of |x|
 */
#include "kernels/cuda/common.cuh"

namespace nd {

enum { MAP_THREADS = 256 };

/* A pack of a row: its columns are [column, column + N). */
struct place {
    int64_t row, column;
    int64_t at[3]; /* the row's index on each outer axis; 2-d views use the last */
};

template <int OPERANDS> struct layout {
    int64_t rows, packs; /* packs of one row */
    int64_t stride[OPERANDS][3];
    int axes;  /* outer axes: 1, or up to 3 */
    bool wide; /* more packs than a divider can handle */
    divider by_packs, by_last, by_middle;

    int64_t count() const
    {
        return rows * packs;
    }

    template <int N> __device__ place find(int64_t v) const
    {
        place p;
        if (rows == 1) {
            p.row = 0;
            p.column = v * N;
        } else {
            p.row = wide ? v / packs : (int64_t)by_packs.quotient((uint32_t)v);
            p.column = (v - p.row * packs) * N;
        }
        p.at[0] = p.at[1] = 0;
        p.at[2] = p.row;
        if (axes > 1) {
            uint32_t outer = by_last.quotient((uint32_t)p.row);
            uint32_t first = by_middle.quotient(outer);
            p.at[2] = (uint32_t)p.row - outer * by_last.divisor;
            p.at[1] = outer - first * by_middle.divisor;
            p.at[0] = first;
        }
        return p;
    }

    __device__ int64_t offset(int operand, const place &p) const
    {
        const int64_t *s = stride[operand];
        int64_t row = p.at[2] * s[2];
        return p.column + (axes > 1 ? p.at[0] * s[0] + p.at[1] * s[1] + row : row);
    }
};

/* Strides of t seen as `shape`: its own, or those of contiguous memory when it has another
 * shape. */
inline void strides_as(const nd_tensor &t, int axes, const int64_t *shape, int64_t *stride)
{
    bool same = t.axes == axes;
    for (int a = 0; a < axes && same; a++) {
        same = t.shape[a] == shape[a];
    }
    int64_t step = 1;
    for (int a = axes - 1; a >= 0; a--) {
        stride[a] = same ? t.stride[a] : step;
        step *= shape[a];
    }
}

inline bool contiguous(const nd_tensor &t)
{
    int64_t step = 1;
    for (int a = t.axes - 1; a >= 0; a--) {
        if (t.shape[a] != 1 && t.stride[a] != step) {
            return false;
        }
        step *= t.shape[a];
    }
    return true;
}

inline int64_t count_of(const nd_tensor &t)
{
    int64_t count = 1;
    for (int a = 0; a < t.axes; a++) {
        count *= t.shape[a];
    }
    return count;
}

inline int size_of(nd_dtype dtype)
{
    return dtype == ND_DTYPE_F32 ? 4 : dtype == ND_DTYPE_BF16 ? 2 : 1;
}

/* Do packs of N elements of every operand lie on their own boundaries (of at most 16 bytes)? */
template <int OPERANDS> bool packs_align(const nd_tensor *t, const layout<OPERANDS> &l, int N)
{
    bool fine = true;
    for (int k = 0; k < OPERANDS; k++) {
        int64_t size = size_of(t[k].dtype), to = smaller(16, N * (int)size);
        for (int a = 0; a < 3 && t[k].data; a++) {
            fine = fine && aligned(t[k].data, l.stride[k][a] * size, to);
        }
    }
    return fine;
}

/*
 * The layout of operands of one count, in packs of `pack` elements where rows are made of aligned
 * ones; *N is pack or 1. Operands without data take part in nothing. keep_rows: the operands are
 * 2-d and place.row is their row; else adjacent axes are merged where every operand allows it,
 * and the flat case is one row.
 */
template <int OPERANDS>
layout<OPERANDS> layout_of(const nd_tensor (&t)[OPERANDS], int pack, bool keep_rows, int *N)
{
    layout<OPERANDS> l = {};
    int shaped = 0; /* the operand whose shape counts: the first that is not contiguous */
    for (int k = OPERANDS - 1; k >= 0; k--) {
        shaped = t[k].data && (keep_rows || !contiguous(t[k])) ? k : shaped;
    }
    int axes = t[shaped].axes, kept = 0;
    int64_t shape[ND_TENSOR_MAX_AXES], stride[OPERANDS][ND_TENSOR_MAX_AXES];
    for (int k = 0; k < OPERANDS; k++) {
        strides_as(t[k], axes, t[shaped].shape, stride[k]);
    }
    for (int a = 0; a < axes; a++) {
        int64_t extent = t[shaped].shape[a];
        if (extent == 1 && !keep_rows && a + 1 < axes) {
            continue;
        }
        bool merge = kept > 0 && !keep_rows;
        for (int k = 0; k < OPERANDS; k++) {
            merge = merge && (!t[k].data || stride[k][kept - 1] == extent * stride[k][a]);
        }
        shape[kept] = extent;
        for (int k = 0; k < OPERANDS; k++) {
            stride[k][kept] = stride[k][a];
        }
        if (merge) {
            shape[kept - 1] *= extent;
            for (int k = 0; k < OPERANDS; k++) {
                stride[k][kept - 1] = stride[k][kept];
            }
        } else {
            kept++;
        }
    }
    int64_t outer[3] = {1, 1, 1};
    for (int a = 0; a + 1 < kept; a++) {
        int to = 3 - (kept - 1) + a;
        outer[to] = shape[a];
        for (int k = 0; k < OPERANDS; k++) {
            l.stride[k][to] = stride[k][a];
        }
    }
    l.rows = outer[0] * outer[1] * outer[2];
    l.axes = outer[0] * outer[1] > 1 ? 3 : 1;
    *N = shape[kept - 1] % pack == 0 && packs_align<OPERANDS>(t, l, pack) ? pack : 1;
    l.packs = shape[kept - 1] / *N;
    l.wide = l.rows * l.packs >= (int64_t)1 << 31;
    l.by_packs = divider::by(l.packs > 0 ? l.packs : 1);
    l.by_last = divider::by(outer[2] > 0 ? outer[2] : 1);
    l.by_middle = divider::by(outer[1] > 0 ? outer[1] : 1);
    return l;
}

/* AMAXES: F::amaxes, or 0 for a kernel without maxima. */
template <class F, int AMAXES>
__global__ void __launch_bounds__(MAP_THREADS) map_kernel(const F f, int64_t count)
{
    const int64_t tile = MAP_THREADS * F::together;
    uint32_t sizes[AMAXES > 0 ? AMAXES : 1] = {};
    for (int64_t begin = blockIdx.x * tile; begin < count; begin += gridDim.x * tile) {
        typename F::state states[F::together];
        ND_UNROLL
        for (int u = 0; u < F::together; u++) {
            int64_t v = begin + u * MAP_THREADS + threadIdx.x;
            if (v < count) {
                f.load(v, states[u]);
            }
        }
        ND_UNROLL
        for (int u = 0; u < F::together; u++) {
            if (begin + u * MAP_THREADS + threadIdx.x < count) {
                if constexpr (AMAXES > 0) {
                    f.finish(states[u], sizes);
                } else {
                    f.finish(states[u]);
                }
            }
        }
    }
    if constexpr (AMAXES > 0) {
        ND_UNROLL
        for (int k = 0; k < AMAXES; k++) {
            if (f.amax[k]) {
                amax_merge(f.amax[k], sizes[k]);
            }
        }
    }
}

/* Few blocks, each of which walks over many packs: every block sends its maxima once. */
template <class F> int map_amax(nd_cuda_queue queue, const F &f, int64_t count)
{
    if (count == 0) {
        return 0;
    }
    int64_t blocks = nd_ceil_div(count, (int64_t)MAP_THREADS * F::together);
    int64_t most = (int64_t)processors() * 16;
    return ND_LAUNCH_MEETING((map_kernel<F, F::amaxes>), blocks < most ? blocks : most, MAP_THREADS,
                             queue, f, count);
}

template <class F> int map(nd_cuda_queue queue, const F &f, int64_t count)
{
    if (count == 0) {
        return 0;
    }
    int64_t blocks = nd_ceil_div(count, (int64_t)MAP_THREADS * F::together);
    const int64_t most = 0x7fffffff;
    return ND_LAUNCH((map_kernel<F, 0>), blocks < most ? blocks : most, MAP_THREADS, queue, f,
                     count);
}

/* f(i) of each i below count. */
template <class F> struct each_of {
    static constexpr int together = 1;
    F f;

    struct state {
        int64_t i;
    };

    __device__ void load(int64_t i, state &s) const
    {
        s.i = i;
    }

    __device__ void finish(state &s) const
    {
        f(s.i);
    }
};

template <class F> int each(nd_cuda_queue queue, const F &f, int64_t count)
{
    return map(queue, each_of<F>{f}, count);
}

} // namespace nd
#endif
