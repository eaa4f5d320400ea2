// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

enum { NOT_COUNTED = -100, STATS_THREADS = 512, LOSS_THREADS = 1024 };

/* statistics: one pass over the row, a maximum and a sum on its scale per thread, then both
 * over the block */

struct running {
    float max, sum;
};

/* No finite logit is below it. Its differences with -inf are -inf, so that a slice of -inf so far
 * gives no NaN. */
#define ND_NO_MAX (-3.402823466e+38f)

template <class T, int N, int TOGETHER>
__device__ inline void absorb(running &r, const pack<T, N> (&x)[TOGETHER], int64_t n)
{
    float max = r.max, sum = 0.0f;
    ND_UNROLL
    for (int u = 0; u < TOGETHER; u++) {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            if (u * N + i < n) {
                max = fmaxf(max, get(x[u], i));
            }
        }
    }
    ND_UNROLL
    for (int u = 0; u < TOGETHER; u++) {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            if (u * N + i < n) {
                sum += exp_for<T>(get(x[u], i) - max);
            }
        }
    }
    r.sum = r.sum * exp_for<T>(r.max - max) + sum;
    r.max = max;
}

/* The statistics of a row become those of earlier columns too. The sum of the maximum -inf is 0 or
 * NaN. */
__device__ inline void merge_before(float &max, float &sum, float before, float sum_before)
{
    float both = fmaxf(max, before);
    sum = (max == both ? sum : sum * expf(max - both)) +
          (before == both ? sum_before : sum_before * expf(before - both));
    max = both;
}

template <class T, int N>
__global__ void __launch_bounds__(STATS_THREADS)
    stats_kernel(float *row_max, float *row_sum, float *target, const T *logits, int64_t stride,
                 const int32_t *labels, int64_t first, int64_t valid, bool merge)
{
    constexpr int TOGETHER = N == 1 ? 1 : 4;
    ND_SHARED(float, slots, 64);
    const T *x = logits + (int64_t)blockIdx.x * stride;
    running r = {ND_NO_MAX, 0.0f};
    int64_t whole = valid / N * N, at = (int64_t)threadIdx.x * N;
    const int64_t step = STATS_THREADS * N;
    for (; at + (TOGETHER - 1) * step < whole; at += TOGETHER * step) {
        pack<T, N> packs[TOGETHER];
        ND_UNROLL
        for (int u = 0; u < TOGETHER; u++) {
            packs[u] = load<N>(x + at + u * step);
        }
        absorb<T, N, TOGETHER>(r, packs, TOGETHER * N);
    }
    for (; at < valid; at += step) {
        pack<T, N> packs[1] = {
            load<N>(x + at)}; /* a row has whole packs, so reading past `valid` is safe */
        absorb<T, N, 1>(r, packs, valid - at);
    }
    float max = block_max(r.max, slots);
    float sum = block_sum(r.sum * exp_for<T>(r.max - max), slots + 32);
    if (threadIdx.x == 0) {
        bool none = max == ND_NO_MAX && !(sum > 0.0f); /* no logit is above -inf */
        int64_t column = labels[blockIdx.x] - first;
        float logit = column >= 0 && column < valid ? widen(x[column]) : 0.0f;
        max = none ? -INFINITY : max;
        if (merge) {
            merge_before(max, sum, row_max[blockIdx.x], row_sum[blockIdx.x]);
            logit += target[blockIdx.x];
        }
        row_max[blockIdx.x] = max;
        row_sum[blockIdx.x] = sum;
        target[blockIdx.x] = logit;
    }
}

template <class T, int N> int launch_stats(nd_cuda_queue queue, const nd_ce_stats_args *x)
{
    return ND_LAUNCH_MEETING(
        (stats_kernel<T, N>), x->logits.shape[0], STATS_THREADS, queue, (float *)x->row_max.data,
        (float *)x->row_sum.data, (float *)x->target.data, (const T *)x->logits.data,
        x->logits.stride[0], (const int32_t *)x->labels.data, x->first, x->valid, x->merge);
}

template <class T> bool rows_are_packs(nd_tensor logits)
{
    return logits.shape[1] % type_of<T>::pack == 0 &&
           aligned(logits.data, logits.stride[0] * (int64_t)sizeof(T));
}

template <class T> int stats(nd_cuda_queue queue, const nd_ce_stats_args *x)
{
    return rows_are_packs<T>(x->logits) ? launch_stats<T, type_of<T>::pack>(queue, x)
                                        : launch_stats<T, 1>(queue, x);
}

/* small vectors */

struct rescale_of {
    float *sum;
    const float *max, *global;

    __device__ void operator()(int64_t at) const
    {
        float own = max[at]; /* -inf: the sum is 0 or NaN */
        sum[at] = own == -INFINITY ? sum[at] : sum[at] * expf(own - global[at]);
    }
};

/* Thread t adds rows t, t + 1024, ... in F64; then a fixed tree. */
__global__ void __launch_bounds__(LOSS_THREADS)
    loss_kernel(double *loss_sum, const float *max, const float *sum, const float *target,
                const int32_t *labels, int64_t n)
{
    ND_SHARED(double, slots, 32);
    double loss = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += LOSS_THREADS) {
        if (labels[i] != NOT_COUNTED) {
            loss += log((double)sum[i]) + (double)max[i] - (double)target[i];
        }
    }
    loss = block_sum(loss, slots);
    if (threadIdx.x == 0) {
        *loss_sum += loss;
    }
}

/* gradient, in place: a block has TOGETHER packs a thread of one row */

enum { GRADIENT_THREADS = 256 };

template <class T> struct gradient_args {
    T *logits;
    int64_t stride;
    const float *max, *sum;
    const int32_t *labels;
    int64_t first, valid, columns;
    const int64_t *count;
    unsigned tiles; /* of one row */
};

/* Values that are the same for all elements of a row. */
struct gradient_row {
    float max, factor, scale;
};

/* Elements from `valid` on are 0, and element `hot` is the label's. */
template <class T, int N>
__device__ inline void gradient_pack(T *at, const pack<T, N> &x, const gradient_row &row,
                                     int64_t valid, int64_t hot)
{
    float out[N];
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        out[i] = exp_for<T>(get(x, i) - row.max) * row.factor * row.scale;
    }
    if (hot >= 0 && hot < N) {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float p = exp_for<T>(get(x, i) - row.max) * row.factor;
            out[i] = i == (int)hot ? (p - 1.0f) * row.scale : out[i];
        }
    }
    if (valid < N) {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            out[i] = i < valid ? out[i] : 0.0f;
        }
    }
    store_floats<N>(at, out);
}

template <class T, int N>
__global__ void __launch_bounds__(GRADIENT_THREADS) gradient_kernel(const gradient_args<T> a)
{
    constexpr int TOGETHER = 4;
    int64_t row = blockIdx.x / a.tiles;
    int64_t begin =
        ((int64_t)(blockIdx.x % a.tiles) * GRADIENT_THREADS * TOGETHER + threadIdx.x) * N;
    T *logits = a.logits + row * a.stride;
    pack<T, N> x[TOGETHER];
    ND_UNROLL
    for (int u = 0; u < TOGETHER; u++) {
        int64_t column = begin + u * GRADIENT_THREADS * N;
        x[u] = load<N>(logits + column, column < a.columns);
    }
    int32_t label = a.labels[row];
    gradient_row shared = {a.max[row], 1.0f / a.sum[row], (float)(1.0 / (double)*a.count)};
    int64_t valid = label == NOT_COUNTED ? 0 : a.valid;
    ND_UNROLL
    for (int u = 0; u < TOGETHER; u++) {
        int64_t column = begin + u * GRADIENT_THREADS * N;
        if (column < a.columns) {
            gradient_pack<T, N>(logits + column, x[u], shared, valid - column,
                                label - a.first - column);
        }
    }
}

template <class T, int N> int launch_gradient(nd_cuda_queue queue, int64_t rows, gradient_args<T> a)
{
    a.tiles = (unsigned)nd_ceil_div(a.columns, (int64_t)GRADIENT_THREADS * 4 * N);
    return ND_LAUNCH((gradient_kernel<T, N>), rows * a.tiles, GRADIENT_THREADS, queue, a);
}

template <class T> int gradient(nd_cuda_queue queue, const nd_ce_bwd_args *x)
{
    gradient_args<T> a = {(T *)x->logits.data,
                          x->logits.stride[0],
                          (const float *)x->max.data,
                          (const float *)x->sum.data,
                          (const int32_t *)x->labels.data,
                          x->first,
                          x->valid,
                          x->logits.shape[1],
                          x->count,
                          0};
    return rows_are_packs<T>(x->logits)
               ? launch_gradient<T, type_of<T>::pack>(queue, x->logits.shape[0], a)
               : launch_gradient<T, 1>(queue, x->logits.shape[0], a);
}

} // namespace

int nd_cuda_ce_stats(nd_cuda_queue queue, const nd_ce_stats_args *args, void *scratch)
{
    if (args->logits.shape[0] == 0) {
        return 0;
    }
    return args->logits.dtype == ND_DTYPE_F32 ? stats<float>(queue, args)
                                              : stats<bf16>(queue, args);
}

int nd_cuda_ce_rescale(nd_cuda_queue queue, const nd_ce_rescale_args *args, void *scratch)
{
    const nd_tensor row_sum = args->row_sum;
    rescale_of f = {(float *)row_sum.data, (const float *)args->row_max.data,
                    (const float *)args->global_max.data};
    return each(queue, f, count_of(row_sum));
}

int nd_cuda_ce_loss(nd_cuda_queue queue, const nd_ce_loss_args *args, void *scratch)
{
    const nd_tensor labels = args->labels;
    return ND_LAUNCH_MEETING(loss_kernel, 1, LOSS_THREADS, queue, args->loss_sum,
                             (const float *)args->max.data, (const float *)args->sum.data,
                             (const float *)args->target.data, (const int32_t *)labels.data,
                             count_of(labels));
}

int nd_cuda_ce_bwd(nd_cuda_queue queue, const nd_ce_bwd_args *args, void *scratch)
{
    if (args->logits.shape[0] == 0 || args->logits.shape[1] == 0) {
        return 0;
    }
    return args->logits.dtype == ND_DTYPE_F32 ? gradient<float>(queue, args)
                                              : gradient<bf16>(queue, args);
}
