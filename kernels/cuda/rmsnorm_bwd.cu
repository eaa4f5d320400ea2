// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/map.cuh"
#include "kernels/cuda/rmsnorm.cuh"

using namespace nd;

namespace {

struct backward_args {
    void *dx;
    float *partials; /* (blocks, columns): each block's sum of dy x rstd */
    const void *dy, *dres, *x, *weight;
    const float *rstd;
    const float *dots; /* of whole rows of `width` columns, or NULL: rows are whole */
    float *amax;       /* or NULL */
    int64_t dx_stride, dy_stride, dres_stride, x_stride;
    int64_t rows;
    int columns, width;
    float plus;
};

template <class T, int N> struct row_packs {
    pack<T, N> dy, x, dres;
};

template <class T, int N>
__device__ inline void read_row(const backward_args &a, int64_t row, int column, row_packs<T, N> &r)
{
    bool there = row < a.rows && column < a.columns;
    r.dy = load<N>((const T *)a.dy + row * a.dy_stride + column, there);
    r.x = load<N>((const T *)a.x + row * a.x_stride + column, there);
    r.dres = zeros<T, N>();
    if (a.dres) {
        r.dres = load<N>((const T *)a.dres + row * a.dres_stride + column, there);
    }
}

/* sum of w dy x, and dy x rstd added to dweight. */
template <class T, int N>
__device__ inline float row_dot(const row_packs<T, N> &r, const pack<T, N> &weight, float plus,
                                float rstd, float *dweight)
{
    float dot = 0.0f;
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        float product = get(r.dy, i) * get(r.x, i);
        dot += (get(weight, i) + plus) * product;
        dweight[i] += product * rstd;
    }
    return dot;
}

/* dx = dres + rstd (w dy - x rstd^2 mean(w dy x)). Returns the largest size (bits), for amax. */
template <class T, int N>
__device__ inline uint32_t write_dx(const backward_args &a, int64_t row, int column,
                                    const row_packs<T, N> &r, const pack<T, N> &weight, float rstd,
                                    float factor)
{
    float dx[N];
    pack<T, N> stored;
    uint32_t size = 0;
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        float g = (get(weight, i) + a.plus) * get(r.dy, i);
        dx[i] = rstd * (g - get(r.x, i) * factor) + (a.dres ? get(r.dres, i) : 0.0f);
    }
    narrow_all(dx, stored);
    store<N>((T *)a.dx + row * a.dx_stride + column, stored);
    if (a.amax) {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            size = larger(size, size_bits(get(stored, i)));
        }
    }
    return size;
}

template <class T, int N> __device__ inline pack<T, N> weight_of(const backward_args &a, int column)
{
    return load<N>((const T *)a.weight + column, column < a.columns);
}

/*
 * Rows b, b + blocks, ... AHEAD: the next row is read before this one is reduced, so that memory is
 * never idle; K = 4 has no registers left for that, nor for the weights, which stay in the cache.
 */
template <class T, int N, int K, bool AHEAD>
__global__ void __launch_bounds__(NORM_THREADS) backward_kernel(const backward_args a)
{
    ND_SHARED(float, slots, 64);
    const int step = (int)blockDim.x * N, mine = (int)threadIdx.x * N;
    float dweight[K][N] = {};
    pack<T, N> weight[K];
    row_packs<T, N> next[K];
    float next_rstd = blockIdx.x < a.rows ? a.rstd[blockIdx.x] : 0.0f;
    uint32_t largest = 0;
    int parity = 0;
    ND_UNROLL
    for (int k = 0; k < K; k++) {
        int column = mine + k * step;
        if (AHEAD) {
            weight[k] = weight_of<T, N>(a, column);
            read_row(a, blockIdx.x, column, next[k]);
        }
    }
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 32) {
        row_packs<T, N> now[K];
        float rstd = next_rstd, dot = 0.0f;
        next_rstd = row + gridDim.x < a.rows ? a.rstd[row + gridDim.x] : 0.0f;
        ND_UNROLL
        for (int k = 0; k < K; k++) {
            if (AHEAD) {
                now[k] = next[k];
                read_row(a, row + gridDim.x, mine + k * step, next[k]);
            } else {
                read_row(a, row, mine + k * step, now[k]);
            }
        }
        ND_UNROLL
        for (int k = 0; k < K; k++) {
            dot += row_dot<T, N>(now[k], AHEAD ? weight[k] : weight_of<T, N>(a, mine + k * step),
                                 a.plus, rstd, dweight[k]);
        }
        dot = a.dots ? a.dots[row] : block_sum(dot, slots + parity);
        float factor = dot / (float)a.width * rstd * rstd;
        ND_UNROLL
        for (int k = 0; k < K; k++) {
            if (mine + k * step < a.columns) {
                uint32_t size =
                    write_dx(a, row, mine + k * step, now[k],
                             AHEAD ? weight[k] : weight_of<T, N>(a, mine + k * step), rstd, factor);
                largest = larger(largest, size);
            }
        }
    }
    if (a.amax) {
        amax_merge(a.amax, largest);
    }
    ND_UNROLL
    for (int k = 0; k < K; k++) {
        int column = mine + k * step;
        if (column < a.columns) {
            float *to = a.partials + (int64_t)blockIdx.x * a.columns + column;
            ND_UNROLL
            for (int i = 0; i < N; i++) {
                to[i] = dweight[k][i];
            }
        }
    }
}

/* Rows of any length; the sums of dweight stay in the partials. */
template <class T>
__global__ void __launch_bounds__(NORM_THREADS) backward_long_kernel(const backward_args a)
{
    ND_SHARED(float, slots, 64);
    const int step = (int)blockDim.x;
    float *sums = a.partials + (int64_t)blockIdx.x * a.columns;
    uint32_t largest = 0;
    int parity = 0;
    for (int column = (int)threadIdx.x; column < a.columns; column += step) {
        sums[column] = 0.0f;
    }
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 32) {
        row_packs<T, 1> r;
        float rstd = a.rstd[row], dot = 0.0f;
        for (int column = (int)threadIdx.x; column < a.columns; column += step) {
            read_row(a, row, column, r);
            dot += row_dot<T, 1>(r, load<1>((const T *)a.weight + column), a.plus, rstd,
                                 sums + column);
        }
        dot = a.dots ? a.dots[row] : block_sum(dot, slots + parity);
        float factor = dot / (float)a.width * rstd * rstd;
        for (int column = (int)threadIdx.x; column < a.columns; column += step) {
            read_row(a, row, column, r);
            uint32_t size =
                write_dx(a, row, column, r, load<1>((const T *)a.weight + column), rstd, factor);
            largest = larger(largest, size);
        }
    }
    if (a.amax) {
        amax_merge(a.amax, largest);
    }
}

enum {
    SUM_COLUMNS = 32,
    SUM_LANES = 16, /* a warp reads 32 columns; 16 warps share the blocks' partials */
    SUM_TOGETHER = 8
};

__global__ void __launch_bounds__(SUM_COLUMNS *SUM_LANES)
    dweight_kernel(float *dweight, const float *partials, int blocks, int columns)
{
    ND_SHARED(float, sums, SUM_COLUMNS *SUM_LANES);
    int lane = (int)threadIdx.x / SUM_COLUMNS;
    int column = (int)(blockIdx.x * SUM_COLUMNS + threadIdx.x % SUM_COLUMNS);
    float sum = 0.0f;
    for (int b = lane; b < blocks && column < columns; b += SUM_LANES * SUM_TOGETHER) {
        float part[SUM_TOGETHER]; /* all loads before the first addition; then in their order */
        ND_UNROLL
        for (int u = 0; u < SUM_TOGETHER; u++) {
            int from = b + u * SUM_LANES;
            part[u] = from < blocks ? partials[(int64_t)from * columns + column] : 0.0f;
        }
        ND_UNROLL
        for (int u = 0; u < SUM_TOGETHER; u++) {
            sum += part[u];
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && column < columns) {
        for (int l = 1; l < SUM_LANES; l++) {
            sum += sums[l * SUM_COLUMNS + threadIdx.x];
        }
        dweight[column] += sum;
    }
}

template <class T, int N>
int launch_backward(nd_cuda_queue queue, const backward_args &a, int *blocks)
{
    int K, threads = threads_for(nd_ceil_div(a.columns, N), &K);
    /* There are as many blocks as fit at once: 512 threads of 128 registers a processor. */
    int64_t most = (int64_t)ND_CUDA_SCRATCH / 4 / a.columns;
    int64_t wanted = (int64_t)processors() * (NORM_THREADS / threads);
    int64_t count = wanted < most ? wanted : most;
    *blocks = (int)(count < a.rows ? (count < 1 ? 1 : count) : a.rows);
    switch (K) {
    case 2:
        return ND_LAUNCH_MEETING((backward_kernel<T, N, 2, true>), *blocks, threads, queue, a);
    case 4:
        return ND_LAUNCH_MEETING((backward_kernel<T, N, 4, false>), *blocks, threads, queue, a);
    default:
        return ND_LAUNCH_MEETING((backward_long_kernel<T>), *blocks, NORM_THREADS, queue, a);
    }
}

template <class T>
int backward(nd_cuda_queue queue, const backward_args &a, bool packs, int *blocks)
{
    return packs ? launch_backward<T, type_of<T>::pack>(queue, a, blocks)
                 : launch_backward<T, 1>(queue, a, blocks);
}

} // namespace

int nd_cuda_rmsnorm_bwd(nd_cuda_queue queue, const nd_rmsnorm_bwd_args *args, void *scratch)
{
    const nd_tensor dx = args->dx, dy = args->dy, dres = args->dres, x = args->x,
                    weight = args->weight;
    backward_args a = {dx.data,
                       (float *)scratch,
                       dy.data,
                       dres.data,
                       x.data,
                       weight.data,
                       (float *)args->rstd.data,
                       (const float *)args->dots.data,
                       args->amax,
                       dx.stride[0],
                       dy.stride[0],
                       dres.stride[0],
                       x.stride[0],
                       dy.shape[0],
                       (int)dy.shape[1],
                       (int)(args->dots.data ? args->width : dy.shape[1]),
                       args->plus};
    bool f32 = x.dtype == ND_DTYPE_F32;
    const nd_tensor t[4] = {dx, dy, dres, x};
    int N, blocks = 0;
    layout_of(t, f32 ? type_of<float>::pack : type_of<bf16>::pack, true, &N);
    if (a.rows == 0 || a.columns == 0) {
        return 0;
    }
    bool packs = N > 1 && aligned(weight.data);
    int error =
        f32 ? backward<float>(queue, a, packs, &blocks) : backward<bf16>(queue, a, packs, &blocks);
    if (error) {
        return error;
    }
    return ND_LAUNCH_MEETING(dweight_kernel, nd_ceil_div(a.columns, SUM_COLUMNS),
                             SUM_COLUMNS * SUM_LANES, queue, (float *)args->dweight.data,
                             (const float *)scratch, blocks, a.columns);
}
