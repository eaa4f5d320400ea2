// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels.h"

#include "kernels/cuda/common.cuh"

using namespace nd;

namespace {

enum { THREADS = 64 };

/* A (B, S, heads, D) view. */
template <class T> struct view {
    T *data;
    int64_t batch, token, head;

    __device__ T *row(int64_t b, int64_t i, int64_t h) const
    {
        return data + b * batch + i * token + h * head;
    }
};

struct shape {
    int64_t batch, sq, sk, diag, window;
    const int *first_key, *end_key; /* (B, Sq), or NULL */
    const int *owners;              /* (2, B, Sq), or NULL: kernels.h */
    int64_t stat_batch, stat_head;  /* strides of lse and delta */
    int heads, group, columns;      /* group: query heads per KV head */
    float scale;

    __device__ int64_t stat(int64_t b, int64_t h, int64_t i) const
    {
        return b * stat_batch + h * stat_head + i;
    }

    /* True where another kernel computes row i. */
    __device__ bool leaves(int64_t b, int64_t i) const
    {
        return owners && owners[b * sq + i] >= 0;
    }

    /* The first row whose keys end behind j, of rows in their order. */
    __device__ int64_t first_row(int64_t b, int64_t j) const
    {
        int64_t low = -1, high = sq;
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            (end_key[b * sq + middle] > j ? high : low) = middle;
        }
        return high;
    }
};

/* Row i of sample b sees keys [first, end). */
__device__ inline int64_t end_key(const shape &s, int64_t b, int64_t i)
{
    int64_t n = s.end_key ? s.end_key[b * s.sq + i] : i + s.diag + 1;
    return n < 0 ? 0 : n < s.sk ? n : s.sk;
}

__device__ inline int64_t first_key(const shape &s, int64_t b, int64_t i)
{
    int64_t end = s.end_key ? s.end_key[b * s.sq + i] : i + s.diag + 1;
    int64_t first = s.window > 0 ? end - s.window : 0;
    int64_t document = s.first_key ? s.first_key[b * s.sq + i] : 0;
    first = first > document ? first : document;
    return first > 0 ? first : 0;
}

template <class A, class B> __device__ inline float dot(const A *a, const B *b, int n)
{
    float sum = 0.0f;
    for (int d = 0; d < n; d++) {
        sum += widen(a[d]) * widen(b[d]);
    }
    return sum;
}

template <class O>
__device__ inline void put(O *to, const float *sums, float factor, int n, bool add)
{
    for (int d = 0; d < n; d++) {
        float value = sums[d] * factor;
        narrow(add ? widen(to[d]) + value : value, to[d]);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    forward(shape s, view<T> out, float *lse, view<const T> q, view<const T> k, view<const T> v)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= s.batch * s.heads * s.sq) {
        return;
    }
    int64_t i = at % s.sq, h = at / s.sq % s.heads, b = at / s.sq / s.heads;
    if (s.leaves(b, i)) {
        return;
    }
    int64_t first = first_key(s, b, i), end = end_key(s, b, i);
    float sums[ND_PLAIN_HEAD_DIM], most = -INFINITY, total = 0.0f;
    for (int d = 0; d < s.columns; d++) {
        sums[d] = 0.0f;
    }
    for (int64_t j = first; j < end; j++) {
        float score = s.scale * dot(q.row(b, i, h), k.row(b, j, h / s.group), s.columns);
        const T *value = v.row(b, j, h / s.group);
        float next = score > most ? score : most;
        float keep = expf(most - next), p = expf(score - next);
        for (int d = 0; d < s.columns; d++) {
            sums[d] = sums[d] * keep + p * widen(value[d]);
        }
        total = total * keep + p;
        most = next;
    }
    put(out.row(b, i, h), sums, first < end ? 1.0f / total : 0.0f, s.columns, false);
    lse[s.stat(b, h, i)] = first < end ? most + logf(total) : -INFINITY;
}

/* The backward reads this. */
template <class T> struct operands {
    view<const T> q, k, v, dout;
    const float *lse, *delta;
};

/* The backward of one pair of query and key needs this. */
template <class T> struct pair {
    float p, ds; /* probability, gradient of the score */

    __device__ pair(const shape &s, const T *q, const T *k, const T *v, const T *dout, float lse,
                    float delta)
    {
        p = expf(s.scale * dot(q, k, s.columns) - lse);
        ds = p * (dot(dout, v, s.columns) - delta);
    }
};

template <class T, class O>
__global__ void __launch_bounds__(THREADS) queries(shape s, view<O> dq, operands<T> in, bool add)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= s.batch * s.heads * s.sq) {
        return;
    }
    int64_t i = at % s.sq, h = at / s.sq % s.heads, b = at / s.sq / s.heads;
    if (s.leaves(b, i)) {
        return;
    }
    int64_t row = s.stat(b, h, i), end = in.lse[row] == -INFINITY ? 0 : end_key(s, b, i);
    float sums[ND_PLAIN_HEAD_DIM];
    for (int d = 0; d < s.columns; d++) {
        sums[d] = 0.0f;
    }
    for (int64_t j = first_key(s, b, i); j < end; j++) {
        const T *key = in.k.row(b, j, h / s.group);
        pair<T> x(s, in.q.row(b, i, h), key, in.v.row(b, j, h / s.group), in.dout.row(b, i, h),
                  in.lse[row], in.delta[row]);
        for (int d = 0; d < s.columns; d++) {
            sums[d] += x.ds * widen(key[d]);
        }
    }
    put(dq.row(b, i, h), sums, s.scale, s.columns, add);
}

template <class T, class O>
__global__ void __launch_bounds__(THREADS)
    keys(shape s, view<O> dk, view<O> dv, operands<T> in, bool add)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int kv_heads = s.heads / s.group;
    if (at >= s.batch * kv_heads * s.sk) {
        return;
    }
    int64_t j = at % s.sk, kv = at / s.sk % kv_heads, b = at / s.sk / kv_heads;
    if (!add && s.leaves(b, j)) { /* rows and keys are the same tokens */
        return;
    }
    /* Rows in their order see the key from row `begin` on; row `end` is the first that is too far
     * behind it for the window. */
    bool ordered = !s.end_key;
    int64_t begin = ordered && j > s.diag ? j - s.diag : 0, beyond = j - s.diag + s.window;
    int64_t end = ordered && s.window > 0 && beyond < s.sq ? beyond : s.sq;
    begin = s.owners ? s.first_row(b, j) : begin;
    float sums_k[ND_PLAIN_HEAD_DIM], sums_v[ND_PLAIN_HEAD_DIM];
    for (int d = 0; d < s.columns; d++) {
        sums_k[d] = sums_v[d] = 0.0f;
    }
    for (int64_t h = kv * s.group; h < (kv + 1) * s.group; h++) {
        for (int64_t i = begin; i < end; i++) {
            if (s.owners && s.first_key[b * s.sq + i] > j) {
                break; /* the next document */
            }
            if (s.leaves(b, i)) {
                i = s.owners[(s.batch + b) * s.sq + i] - 1;
                continue;
            }
            int64_t row = s.stat(b, h, i);
            if (in.lse[row] == -INFINITY || j < first_key(s, b, i) || j >= end_key(s, b, i)) {
                continue;
            }
            const T *query = in.q.row(b, i, h), *gradient = in.dout.row(b, i, h);
            pair<T> x(s, query, in.k.row(b, j, kv), in.v.row(b, j, kv), gradient, in.lse[row],
                      in.delta[row]);
            for (int d = 0; d < s.columns; d++) {
                sums_k[d] += x.ds * widen(query[d]);
                sums_v[d] += x.p * widen(gradient[d]);
            }
        }
    }
    put(dk.row(b, j, kv), sums_k, s.scale, s.columns, add);
    put(dv.row(b, j, kv), sums_v, 1.0f, s.columns, add);
}

shape shape_of(const nd_attention *a, nd_tensor first_key, nd_tensor end_key, const int *owners,
               nd_tensor stat)
{
    return {a->batch,
            a->sq,
            a->sk,
            a->diag,
            a->window,
            (const int *)first_key.data,
            (const int *)end_key.data,
            owners,
            stat.stride[0],
            stat.stride[1],
            (int)a->heads,
            (int)(a->heads / a->kv_heads),
            (int)a->head_dim,
            a->scale};
}

template <class T> view<T> view_of(nd_tensor t)
{
    return {(T *)t.data, t.stride[0], t.stride[1], t.stride[2]};
}

unsigned blocks_of(int64_t rows)
{
    return (unsigned)((rows + THREADS - 1) / THREADS);
}

template <class T>
int launch_forward(nd_cuda_queue queue, const nd_attention_fwd_args *args, const int *owners)
{
    const nd_attention *a = &args->attention;
    return ND_LAUNCH((forward<T>), blocks_of(a->batch * a->heads * a->sq), THREADS, queue,
                     shape_of(a, args->first_key, args->end_key, owners, args->lse),
                     view_of<T>(args->out), (float *)args->lse.data, view_of<const T>(args->q),
                     view_of<const T>(args->k), view_of<const T>(args->v));
}

template <class T> operands<T> operands_of(const nd_attention_bwd_args *args)
{
    return {view_of<const T>(args->q),     view_of<const T>(args->k),
            view_of<const T>(args->v),     view_of<const T>(args->dout),
            (const float *)args->lse.data, (const float *)args->delta.data};
}

template <class T, class O>
int launch_queries(nd_cuda_queue queue, const nd_attention_bwd_args *args, const int *owners)
{
    const nd_attention *a = &args->attention;
    return ND_LAUNCH((queries<T, O>), blocks_of(a->batch * a->heads * a->sq), THREADS, queue,
                     shape_of(a, args->first_key, args->end_key, owners, args->lse),
                     view_of<O>(args->dq), operands_of<T>(args), args->add_q);
}

template <class T, class O>
int launch_keys(nd_cuda_queue queue, const nd_attention_bwd_args *args, const int *owners)
{
    const nd_attention *a = &args->attention;
    return ND_LAUNCH((keys<T, O>), blocks_of(a->batch * a->kv_heads * a->sk), THREADS, queue,
                     shape_of(a, args->first_key, args->end_key, owners, args->lse),
                     view_of<O>(args->dk), view_of<O>(args->dv), operands_of<T>(args),
                     args->add_kv);
}

template <class T>
int launch_backward(nd_cuda_queue queue, const nd_attention_bwd_args *args, const int *owners)
{
    auto launch_q =
        args->dq.dtype == ND_DTYPE_F32 ? launch_queries<T, float> : launch_queries<T, T>;
    auto launch_k = args->dk.dtype == ND_DTYPE_F32 ? launch_keys<T, float> : launch_keys<T, T>;
    int launched = launch_q(queue, args, owners);
    return launched || !args->dk.data ? launched : launch_k(queue, args, owners);
}

} // namespace

int nd_cuda_attention_plain_fwd(nd_cuda_queue queue, const nd_attention_fwd_args *args,
                                const int32_t *owners)
{
    auto launch = args->q.dtype == ND_DTYPE_F32 ? launch_forward<float> : launch_forward<bf16>;
    return launch(queue, args, owners);
}

int nd_cuda_attention_plain_bwd(nd_cuda_queue queue, const nd_attention_bwd_args *args,
                                const int32_t *owners)
{
    auto launch = args->q.dtype == ND_DTYPE_F32 ? launch_backward<float> : launch_backward<bf16>;
    return launch(queue, args, owners);
}
