// SPDX-License-Identifier: Apache-2.0
/*
 * Attention through the cache of keys and values. LANES threads of a warp share one key: each has
 * N CHUNKS columns of it, of its value, and of the QUERIES queries of the block, which are rows and
 * heads of one segment that read the same KV head. The groups of lanes of a block take keys in
 * turn, and merge what they have in their order.
 *
 * Which group takes a key depends on nothing but the key's number, so a row has the same bits
 * beside any other rows.
 */
#include "kernels/cuda/common.cuh"

using namespace nd;

namespace {

enum {
    THREADS = 256,
    QUERIES = 4,   /* of a block */
    KEYS = 2,      /* that a group of lanes reads at once */
    SEGMENTS = 64, /* of a launch: they are arguments, and so need no copy to the device */
};

struct segment {
    int row, rows; /* of the call */
    int length;
    int slot;
    int tile; /* the first one of the segment */
};

struct segments {
    segment list[SEGMENTS];
    int count;
};

struct shape {
    int columns;         /* D */
    int heads, kv_heads; /* H, K */
    int group;           /* H / K */
    int64_t capacity;    /* rows of a slot, of 2 K D elements each */
    int64_t qkv_stride, out_stride;
    float scale;
    int window; /* 0: none */
};

__device__ inline int64_t width_of(const shape &s)
{
    return (int64_t)2 * s.kv_heads * s.columns;
}

/* Row `at` of the launch: one block copies its keys and values into the slot. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    append_kernel(T *cache, const T *qkv, shape s, segments all)
{
    int row = all.list[0].row + (int)blockIdx.x, i = 0;
    while (i + 1 < all.count && all.list[i + 1].row <= row) {
        i++;
    }
    int64_t token = all.list[i].length + (row - all.list[i].row), width = width_of(s);
    const T *from = qkv + row * s.qkv_stride + (int64_t)s.heads * s.columns;
    T *to = cache + (all.list[i].slot * s.capacity + token) * width;
    for (int64_t at = (int64_t)threadIdx.x * N; at < width; at += THREADS * N) {
        store<N>(to + at, load<N>(from + at));
    }
}

/* A query and its online softmax; E elements of a lane. */
template <int E> struct query {
    float q[E], sums[E];
    float most, total;

    __device__ void add(float score, const float (&value)[E], float keep, float p)
    {
        ND_UNROLL
        for (int i = 0; i < E; i++) {
            sums[i] = sums[i] * keep + p * value[i];
        }
        total = total * keep + p;
        most = fmaxf(most, score);
    }
};

/* The lane's elements of a row of `columns`, widened; 0 behind the last one. */
template <int N, int CHUNKS, int LANES, class T>
__device__ inline void load_lane(const T *row, int lane, int columns, bool here,
                                 pack<T, N> (&out)[CHUNKS])
{
    ND_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        int column = (c * LANES + lane) * N;
        out[c] = load<N>(row + column, here && column < columns);
    }
}

template <class T, int N, int CHUNKS>
__device__ inline void widen_all(const pack<T, N> (&x)[CHUNKS], float (&out)[N * CHUNKS])
{
    ND_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            out[c * N + i] = get(x[c], i);
        }
    }
}

template <int LANES, int E> __device__ inline float dot(const float (&a)[E], const float (&b)[E])
{
    float sum = 0.0f;
    ND_UNROLL
    for (int i = 0; i < E; i++) {
        sum += a[i] * b[i];
    }
    ND_UNROLL
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    return sum;
}

template <class T, int N, int CHUNKS, int LANES>
__global__ void __launch_bounds__(THREADS, LANES < 32 ? 2 : 1)
    attend_kernel(T *out, const T *qkv, const T *cache, shape s, segments all)
{
    constexpr int E = N * CHUNKS, COLUMNS = E * LANES, GROUPS = THREADS / LANES;
    ND_SHARED(float, sums, GROUPS *QUERIES *COLUMNS);
    ND_SHARED(float, mosts, GROUPS *QUERIES);
    ND_SHARED(float, totals, GROUPS *QUERIES);
    int lane = (int)threadIdx.x % LANES, group = (int)threadIdx.x / LANES, i = 0;
    int tile = (int)(blockIdx.x / (unsigned)s.kv_heads), kv = (int)blockIdx.x % s.kv_heads;
    while (i + 1 < all.count && all.list[i + 1].tile <= tile) {
        i++;
    }
    const segment me = all.list[i];
    /* Queries of the segment and KV head: those of a row are adjacent. */
    int first = (tile - me.tile) * QUERIES, end = me.rows * s.group;
    int last = first + QUERIES < end ? first + QUERIES - 1 : end - 1;
    int keys = me.length + last / s.group + 1;
    query<E> queries[QUERIES];
    int visible[QUERIES];
    ND_UNROLL
    for (int n = 0; n < QUERIES; n++) {
        int index = first + n <= last ? first + n : last;
        int64_t row = me.row + index / s.group, head = kv * s.group + index % s.group;
        pack<T, N> read[CHUNKS];
        load_lane<N, CHUNKS, LANES>(qkv + row * s.qkv_stride + head * s.columns, lane, s.columns,
                                    true, read);
        widen_all(read, queries[n].q);
        visible[n] = me.length + index / s.group + 1;
        queries[n].most = -INFINITY;
        queries[n].total = 0.0f;
        ND_UNROLL
        for (int e = 0; e < E; e++) {
            queries[n].sums[e] = 0.0f;
        }
    }
    int64_t width = width_of(s);
    const T *slot = cache + me.slot * s.capacity * width + (int64_t)kv * s.columns;
    /* Keys before the window of the first query are seen by none of them. */
    const int before = s.window > 0 ? me.length + first / s.group + 1 - s.window : 0;
    const int skipped = before > 0 ? before / (GROUPS * KEYS) : 0;
    for (int begin = skipped * (GROUPS * KEYS); begin < keys; begin += GROUPS * KEYS) {
        pack<T, N> key[KEYS][CHUNKS], value[KEYS][CHUNKS];
        ND_UNROLL
        for (int u = 0; u < KEYS; u++) {
            int j = begin + u * GROUPS + group;
            const T *row = slot + j * width;
            load_lane<N, CHUNKS, LANES>(row, lane, s.columns, j < keys, key[u]);
            load_lane<N, CHUNKS, LANES>(row + width / 2, lane, s.columns, j < keys, value[u]);
        }
        ND_UNROLL
        for (int u = 0; u < KEYS; u++) {
            int j = begin + u * GROUPS + group;
            float k[E], v[E];
            widen_all(key[u], k);
            widen_all(value[u], v);
            ND_UNROLL
            for (int n = 0; n < QUERIES; n++) {
                float score = s.scale * dot<LANES>(queries[n].q, k);
                if (j < visible[n] && (s.window == 0 || j >= visible[n] - s.window)) {
                    float most = fmaxf(queries[n].most, score);
                    queries[n].add(score, v, exp_for<T>(queries[n].most - most),
                                   exp_for<T>(score - most));
                }
            }
        }
    }
    ND_UNROLL
    for (int n = 0; n < QUERIES; n++) {
        float *to = sums + (group * QUERIES + n) * COLUMNS;
        ND_UNROLL
        for (int e = 0; e < E; e++) {
            to[(e / N * LANES + lane) * N + e % N] = queries[n].sums[e];
        }
        if (lane == 0) {
            mosts[group * QUERIES + n] = queries[n].most;
            totals[group * QUERIES + n] = queries[n].total;
        }
    }
    __syncthreads();
    for (int at = (int)threadIdx.x; at < (last - first + 1) * s.columns; at += THREADS) {
        int n = at / s.columns, column = at % s.columns, index = first + n;
        float most = -INFINITY, total = 0.0f, sum = 0.0f;
        for (int g = 0; g < GROUPS; g++) {
            most = fmaxf(most, mosts[g * QUERIES + n]);
        }
        for (int g = 0; g < GROUPS; g++) {
            float weight = exp_for<T>(mosts[g * QUERIES + n] - most); /* 0 where no key was seen */
            total += weight * totals[g * QUERIES + n];
            sum += weight * sums[(g * QUERIES + n) * COLUMNS + column];
        }
        int64_t row = me.row + index / s.group, head = kv * s.group + index % s.group;
        narrow(divide_for<T>(sum, total), out[row * s.out_stride + head * s.columns + column]);
    }
}

/* Segments of one launch. */
struct launch_of {
    segments all;
    int rows, tiles;
};

launch_of next_launch(const nd_attention_cached_args *x, int group, int64_t from, int row)
{
    launch_of l = {};
    for (; from < x->count && l.all.count < SEGMENTS; from++) {
        const nd_kv_segment *s = &x->segments[from];
        int rows = (int)s->rows;
        l.all.list[l.all.count++] = {row, rows, (int)s->length, (int)s->slot, l.tiles};
        row += rows;
        l.rows += rows;
        l.tiles += (int)nd_ceil_div((int64_t)rows * group, QUERIES);
    }
    return l;
}

template <class T, int N, int CHUNKS, int LANES>
int launch_all(nd_cuda_queue queue, const nd_attention_cached_args *x)
{
    const nd_attention *a = &x->attention;
    const shape s = {
        (int)a->head_dim,  (int)a->heads,    (int)a->kv_heads, (int)(a->heads / a->kv_heads),
        x->cache.shape[1], x->qkv.stride[0], x->out.stride[0], a->scale,
        (int)a->window};
    T *out = (T *)x->out.data, *cache = (T *)x->cache.data;
    const T *qkv = (const T *)x->qkv.data;
    int error = 0, row = 0;
    for (int64_t at = 0; at < x->count && error == 0; at += SEGMENTS) {
        launch_of l = next_launch(x, s.group, at, row);
        row += l.rows;
        error = ND_LAUNCH((append_kernel<T, N>), l.rows, THREADS, queue, cache, qkv, s, l.all);
        if (error == 0) {
            error = ND_LAUNCH_MEETING((attend_kernel<T, N, CHUNKS, LANES>),
                                      (int64_t)l.tiles * s.kv_heads, THREADS, queue, out, qkv,
                                      (const T *)cache, s, l.all);
        }
    }
    return error;
}

template <class T> bool packs_fit(const nd_attention_cached_args *x)
{
    const int64_t size = (int64_t)sizeof(T);
    return x->attention.head_dim % type_of<T>::pack == 0 &&
           aligned(x->qkv.data, x->qkv.stride[0] * size) && aligned(x->cache.data);
}

template <class T> int launch_typed(nd_cuda_queue queue, const nd_attention_cached_args *x)
{
    constexpr int N = type_of<T>::pack;
    const int64_t packs = x->attention.head_dim / N;
    if (!packs_fit<T>(x)) {
        return launch_all<T, 1, ND_PLAIN_HEAD_DIM / 32, 32>(queue, x);
    }
    return packs <= 8    ? launch_all<T, N, 1, 8>(queue, x)
           : packs <= 16 ? launch_all<T, N, 1, 16>(queue, x)
           : packs <= 32 ? launch_all<T, N, 1, 32>(queue, x)
                         : launch_all<T, N, ND_PLAIN_HEAD_DIM / 32 / N, 32>(queue, x);
}

} // namespace

int nd_cuda_attention_cached(nd_cuda_queue queue, const nd_attention_cached_args *args,
                             void *scratch)
{
    return args->qkv.dtype == ND_DTYPE_F32 ? launch_typed<float>(queue, args)
                                           : launch_typed<bf16>(queue, args);
}
