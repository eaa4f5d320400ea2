// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/fuse.cuh"
#include "kernels/cuda/map.cuh"
#include "kernels/cuda/rmsnorm.cuh"

using namespace nd;

namespace {

struct forward_args {
    void *y, *sum;
    float *rstd;
    const void *x, *delta, *weight;
    const float *squares; /* of whole rows of `width` columns, or NULL: rows are whole */
    int64_t y_stride, sum_stride, x_stride, delta_stride;
    int64_t rows;
    int columns, width;
    float plus, eps;
    fuse_view fuse;
};

template <class T, int N> struct input_packs {
    pack<T, N> x, delta;
};

template <class T, int N>
__device__ inline void read_input(const forward_args &a, int64_t row, int column,
                                  input_packs<T, N> &in)
{
    bool there = column < a.columns;
    in.x = load<N>((const T *)a.x + row * a.x_stride + column, there);
    in.delta = zeros<T, N>();
    if (a.delta) {
        in.delta = load<N>((const T *)a.delta + row * a.delta_stride + column, there);
    }
}

/* x, or x + delta rounded and stored: what is normalised. */
template <class T, int N>
__device__ inline void add_input(const forward_args &a, int64_t row, int column,
                                 input_packs<T, N> &in)
{
    if (a.delta && column < a.columns) {
        float sum[N];
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            sum[i] = get(in.x, i) + get(in.delta, i);
        }
        narrow_all(sum, in.x);
        store<N>((T *)a.sum + row * a.sum_stride + column, in.x);
    }
}

template <class T, int N> __device__ inline float squares_of(const pack<T, N> &in)
{
    float sum = 0.0f;
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        sum += get(in, i) * get(in, i);
    }
    return sum;
}

template <class T, int N, bool FUSED>
__device__ inline uint32_t write_output(const forward_args &a, float scale, int64_t row, int column,
                                        const pack<T, N> &in, const pack<T, N> &weight, float rstd)
{
    float y[N];
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        y[i] = (get(weight, i) + a.plus) * (get(in, i) * rstd);
    }
    T *to = a.y ? (T *)a.y + row * a.y_stride + column : NULL;
    if constexpr (FUSED) {
        return store_fused<N>(to, a.fuse, scale, row, column, y);
    }
    store_floats<N>(to, y);
    return 0;
}

template <class T, int N, int K, bool FUSED>
__global__ void __launch_bounds__(NORM_THREADS) forward_kernel(const forward_args a)
{
    ND_SHARED(float, slots, 64);
    const int step = (int)blockDim.x * N, mine = (int)threadIdx.x * N;
    const T *weights = (const T *)a.weight;
    const float scale = FUSED ? a.fuse.scale_value() : 1.0f;
    int parity = 0;
    uint32_t largest = 0;
    pack<T, N> weight[K > 0 ? K : 1];
    ND_UNROLL
    for (int k = 0; k < K; k++) {
        weight[k] = load<N>(weights + mine + k * step, mine + k * step < a.columns);
    }
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 32) {
        input_packs<T, N> in[K > 0 ? K : 1];
        float squares = 0.0f;
        if constexpr (K > 0) {
            ND_UNROLL
            for (int k = 0; k < K; k++) { /* all reads before the first store */
                read_input(a, row, mine + k * step, in[k]);
            }
            ND_UNROLL
            for (int k = 0; k < K; k++) {
                add_input(a, row, mine + k * step, in[k]);
                squares += squares_of<T, N>(in[k].x);
            }
        } else {
            for (int column = mine; column < a.columns; column += step) {
                read_input(a, row, column, in[0]);
                add_input(a, row, column, in[0]);
                squares += squares_of<T, N>(in[0].x);
            }
        }
        squares = a.squares ? a.squares[row] : block_sum(squares, slots + parity);
        float rstd = 1.0f / sqrtf(squares / (float)a.width + a.eps);
        if (threadIdx.x == 0) {
            a.rstd[row] = rstd;
        }
        if constexpr (K > 0) {
            ND_UNROLL
            for (int k = 0; k < K; k++) {
                int column = mine + k * step;
                if (column < a.columns) {
                    uint32_t size =
                        write_output<T, N, FUSED>(a, scale, row, column, in[k].x, weight[k], rstd);
                    largest = larger(largest, size);
                }
            }
        } else {
            const T *from = (const T *)(a.delta ? a.sum : a.x);
            from += row * (a.delta ? a.sum_stride : a.x_stride);
            for (int column = mine; column < a.columns; column += step) {
                pack<T, N> again = load<N>(from + column);
                weight[0] = load<N>(weights + column);
                uint32_t size =
                    write_output<T, N, FUSED>(a, scale, row, column, again, weight[0], rstd);
                largest = larger(largest, size);
            }
        }
    }
    if (FUSED && a.fuse.amax) {
        amax_merge(a.fuse.amax, largest);
    }
}

template <class T, int N, bool FUSED> int launch_forward(nd_cuda_queue queue, const forward_args &a)
{
    int K, threads = threads_for(nd_ceil_div(a.columns, N), &K);
    int64_t blocks = a.rows < 0x7fffffff ? a.rows : 0x7fffffff;
    switch (K) {
    case 2:
        return ND_LAUNCH_MEETING((forward_kernel<T, N, 2, FUSED>), blocks, threads, queue, a);
    case 4:
        return ND_LAUNCH_MEETING((forward_kernel<T, N, 4, FUSED>), blocks, threads, queue, a);
    default:
        return ND_LAUNCH_MEETING((forward_kernel<T, N, 0, FUSED>), blocks, threads, queue, a);
    }
}

template <class T> int forward(nd_cuda_queue queue, const forward_args &a, bool packs, bool fused)
{
    constexpr int PACK = type_of<T>::pack;
    if (fused) {
        return packs ? launch_forward<T, PACK, true>(queue, a)
                     : launch_forward<T, 1, true>(queue, a);
    }
    return packs ? launch_forward<T, PACK, false>(queue, a) : launch_forward<T, 1, false>(queue, a);
}

struct dots_args {
    float *out;
    const void *x, *y, *weight; /* weight may be NULL */
    int64_t x_stride, y_stride;
    int64_t rows;
    int columns;
};

template <class T, int N>
__global__ void __launch_bounds__(NORM_THREADS) row_dots_kernel(const dots_args a)
{
    ND_SHARED(float, slots, 64);
    const int step = (int)blockDim.x * N;
    int parity = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 32) {
        float dot = 0.0f;
        for (int column = (int)threadIdx.x * N; column < a.columns; column += step) {
            const pack<T, N> x = load<N>((const T *)a.x + row * a.x_stride + column);
            const pack<T, N> y = load<N>((const T *)a.y + row * a.y_stride + column);
            pack<T, N> weight;
            if (a.weight) {
                weight = load<N>((const T *)a.weight + column);
            }
            ND_UNROLL
            for (int i = 0; i < N; i++) {
                const float product = get(x, i) * get(y, i);
                dot += a.weight ? get(weight, i) * product : product;
            }
        }
        dot = block_sum(dot, slots + parity);
        if (threadIdx.x == 0) {
            a.out[row] = dot;
        }
    }
}

template <class T, int N> int launch_dots(nd_cuda_queue queue, const dots_args &a)
{
    int K, threads = threads_for(nd_ceil_div(a.columns, N), &K);
    int64_t blocks = a.rows < 0x7fffffff ? a.rows : 0x7fffffff;
    return ND_LAUNCH_MEETING((row_dots_kernel<T, N>), blocks, threads, queue, a);
}

template <class T> int dots(nd_cuda_queue queue, const dots_args &a, bool packs)
{
    return packs ? launch_dots<T, type_of<T>::pack>(queue, a) : launch_dots<T, 1>(queue, a);
}

} // namespace

int nd_cuda_row_dots(nd_cuda_queue queue, const nd_row_dots_args *args, void *scratch)
{
    const nd_tensor x = args->x, y = args->y, weight = args->weight;
    const dots_args a = {
        (float *)args->out.data, x.data, y.data, weight.data, x.stride[0], y.stride[0], x.shape[0],
        (int)x.shape[1]};
    const bool f32 = x.dtype == ND_DTYPE_F32;
    const nd_tensor t[2] = {x, y};
    int N;
    layout_of(t, f32 ? type_of<float>::pack : type_of<bf16>::pack, true, &N);
    if (a.rows == 0) {
        return 0;
    }
    const bool packs = N > 1 && aligned(weight.data);
    return f32 ? dots<float>(queue, a, packs) : dots<bf16>(queue, a, packs);
}

int nd_cuda_rmsnorm_fwd(nd_cuda_queue queue, const nd_rmsnorm_fwd_args *args, void *scratch)
{
    const nd_tensor y = args->y, sum = args->sum, x = args->x, delta = args->delta,
                    weight = args->weight;
    fuse_view f = fuse_view_of(args->fuse);
    forward_args a = {y.data,
                      sum.data,
                      (float *)args->rstd.data,
                      x.data,
                      delta.data,
                      weight.data,
                      (const float *)args->squares.data,
                      y.stride[0],
                      sum.stride[0],
                      x.stride[0],
                      delta.stride[0],
                      x.shape[0],
                      (int)x.shape[1],
                      (int)(args->squares.data ? args->width : x.shape[1]),
                      args->plus,
                      args->eps,
                      f};
    bool f32 = x.dtype == ND_DTYPE_F32;
    int N, pack = f32 ? type_of<float>::pack : type_of<bf16>::pack;
    nd_tensor added = delta.data ? sum : delta;
    const nd_tensor t[5] = {x, y, added, delta, args->fuse.codes};
    layout_of(t, pack, true, &N);
    if (a.rows == 0 || a.columns == 0) {
        return 0;
    }
    bool packs = N > 1 && aligned(weight.data);
    return f32 ? forward<float>(queue, a, packs, fuse_is_on(args->fuse))
               : forward<bf16>(queue, a, packs, fuse_is_on(args->fuse));
}
