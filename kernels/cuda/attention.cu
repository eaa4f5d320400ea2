// SPDX-License-Identifier: Apache-2.0
/* Attention needs two things besides its library: delta, and the merge of partial results. LANES
 * threads of a warp share one head of one token. */
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

enum { THREADS = 256 };

/* A (B, Sq, H, D) view, and the heads of it that a group of lanes handles. */
struct heads_view {
    int64_t batch_stride, token_stride, head_stride;
};

struct row_args {
    int64_t rows; /* B Sq H, heads fastest */
    divider heads, queries;
    int columns; /* D */
};

struct row_place {
    bool here;
    int64_t batch, token, head;
    int64_t statistic; /* index in (B, H, Sq) */
    int lane;
};

template <int LANES> __device__ inline row_place find_row(const row_args &a)
{
    row_place p;
    int64_t row = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    p.here = row < a.rows;
    uint32_t index = p.here ? (uint32_t)row : 0u;
    uint32_t token = a.heads.quotient(index), batch = a.queries.quotient(token);
    p.head = index - token * a.heads.divisor;
    p.token = token - batch * a.queries.divisor;
    p.batch = batch;
    p.statistic = (p.batch * a.heads.divisor + p.head) * a.queries.divisor + p.token;
    p.lane = (int)threadIdx.x % LANES;
    return p;
}

__device__ inline int64_t offset_of(const heads_view &v, const row_place &p)
{
    return p.batch * v.batch_stride + p.token * v.token_stride + p.head * v.head_stride;
}

template <class T, int N, int LANES>
__global__ void __launch_bounds__(THREADS)
    delta_kernel(float *delta, const T *out, heads_view out_view, const T *dout,
                 heads_view dout_view, row_args a)
{
    row_place p = find_row<LANES>(a);
    const T *x = out + offset_of(out_view, p), *y = dout + offset_of(dout_view, p);
    float sum = 0.0f;
    for (int column = p.lane * N; column < a.columns && p.here; column += LANES * N) {
        pack<T, N> left = load<N>(x + column);
        pack<T, N> right = load<N>(y + column);
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            sum += get(left, i) * get(right, i);
        }
    }
    ND_UNROLL
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (p.here && p.lane == 0) {
        delta[p.statistic] = sum;
    }
}

/*
 * With e = exp(-|old - new|): lse' = max(old, new) + log(1 + e), and the sides weigh 1 / (1 + e)
 * and e / (1 + e), the larger one the former. A side of weight 0 is not read: acc may be
 * uninitialised at first.
 */
template <class T, int N, int LANES>
__global__ void __launch_bounds__(THREADS)
    merge_kernel(float *acc, heads_view acc_view, float *acc_lse, const T *out, heads_view out_view,
                 const float *lse, row_args a)
{
    row_place p = find_row<LANES>(a);
    float before = p.here ? acc_lse[p.statistic] : 0.0f;
    float added = p.here ? lse[p.statistic] : -INFINITY;
    __syncwarp(); /* all lanes have read acc_lse before one of them writes it */
    if (added == -INFINITY) {
        return;
    }
    float e = expf(-fabsf(before - added)), large = 1.0f / (1.0f + e), small = e / (1.0f + e);
    bool keep_more = before > added;
    float keep = keep_more ? large : small, take = keep_more ? small : large;
    float *to = acc + offset_of(acc_view, p);
    const T *from = out + offset_of(out_view, p);
    if (p.lane == 0) {
        acc_lse[p.statistic] = (keep_more ? before : added) + log1pf(e);
    }
    if (take == 0.0f) {
        return;
    }
    for (int column = p.lane * N; column < a.columns; column += LANES * N) {
        pack<T, N> x = load<N>(from + column);
        pack<float, N> sums = load<N>(to + column, keep != 0.0f);
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float kept = keep != 0.0f ? sums.e[i] * keep : 0.0f;
            sums.e[i] = kept + get(x, i) * take;
        }
        store<N>(to + column, sums);
    }
}

heads_view view_of(nd_tensor t)
{
    return {t.stride[0], t.stride[1], t.stride[2]};
}

bool packs_fit(nd_tensor t, int N)
{
    int64_t size = size_of(t.dtype), to = smaller(16, N * (int)size);
    return t.shape[3] % N == 0 &&
           aligned(t.data, (t.stride[0] | t.stride[1] | t.stride[2]) * size, to);
}

row_args args_of(const nd_attention *a)
{
    return {a->batch * a->sq * a->heads, divider::by(a->heads), divider::by(a->sq),
            (int)a->head_dim};
}

template <class T, int N, int LANES>
int delta_lanes(nd_cuda_queue queue, const nd_attention *a, nd_tensor delta, nd_tensor out,
                nd_tensor dout)
{
    row_args rows = args_of(a);
    return ND_LAUNCH_MEETING((delta_kernel<T, N, LANES>), nd_ceil_div(rows.rows, THREADS / LANES),
                             THREADS, queue, (float *)delta.data, (const T *)out.data, view_of(out),
                             (const T *)dout.data, view_of(dout), rows);
}

template <class T>
int delta_typed(nd_cuda_queue queue, const nd_attention *a, nd_tensor delta, nd_tensor out,
                nd_tensor dout)
{
    constexpr int PACK = type_of<T>::pack;
    if (!packs_fit(out, PACK) || !packs_fit(dout, PACK)) {
        return delta_lanes<T, 1, 32>(queue, a, delta, out, dout);
    }
    return a->head_dim > 16 * PACK  ? delta_lanes<T, PACK, 32>(queue, a, delta, out, dout)
           : a->head_dim > 8 * PACK ? delta_lanes<T, PACK, 16>(queue, a, delta, out, dout)
                                    : delta_lanes<T, PACK, 8>(queue, a, delta, out, dout);
}

template <class T, int N, int LANES>
int merge_lanes(nd_cuda_queue queue, const nd_attention *a, nd_tensor acc, nd_tensor acc_lse,
                nd_tensor out, nd_tensor lse)
{
    row_args rows = args_of(a);
    return ND_LAUNCH_MEETING((merge_kernel<T, N, LANES>), nd_ceil_div(rows.rows, THREADS / LANES),
                             THREADS, queue, (float *)acc.data, view_of(acc), (float *)acc_lse.data,
                             (const T *)out.data, view_of(out), (const float *)lse.data, rows);
}

template <class T>
int merge_typed(nd_cuda_queue queue, const nd_attention *a, nd_tensor acc, nd_tensor acc_lse,
                nd_tensor out, nd_tensor lse)
{
    if (!packs_fit(acc, 4) || !packs_fit(out, 4)) {
        return merge_lanes<T, 1, 32>(queue, a, acc, acc_lse, out, lse);
    }
    return a->head_dim > 64 ? merge_lanes<T, 4, 32>(queue, a, acc, acc_lse, out, lse)
                            : merge_lanes<T, 4, 16>(queue, a, acc, acc_lse, out, lse);
}

} // namespace

int nd_cuda_attention_delta(nd_cuda_queue queue, const nd_attention_delta_args *args, void *scratch)
{
    const nd_attention *a = &args->attention;
    const nd_tensor delta = args->delta, out = args->out, dout = args->dout;
    if (a->batch * a->sq * a->heads == 0) {
        return 0;
    }
    return out.dtype == ND_DTYPE_F32 ? delta_typed<float>(queue, a, delta, out, dout)
                                     : delta_typed<bf16>(queue, a, delta, out, dout);
}

int nd_cuda_lse_merge(nd_cuda_queue queue, const nd_lse_merge_args *args, void *scratch)
{
    const nd_attention *a = &args->attention;
    const nd_tensor acc = args->acc, acc_lse = args->acc_lse, out = args->out, lse = args->lse;
    if (a->batch * a->sq * a->heads == 0) {
        return 0;
    }
    return out.dtype == ND_DTYPE_F32 ? merge_typed<float>(queue, a, acc, acc_lse, out, lse)
                                     : merge_typed<bf16>(queue, a, acc, acc_lse, out, lse);
}
