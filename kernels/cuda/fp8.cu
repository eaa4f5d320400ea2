// SPDX-License-Identifier: Apache-2.0
/* Largest sizes, scales, and counts for the health log. */
#include "kernels/cuda/fuse.cuh"
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

enum { THREADS = 256 };

template <class T, int N> __device__ inline uint32_t size_of_pack(const pack<T, N> &x)
{
    uint32_t size = 0;
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        size = larger(size, size_bits(get(x, i)));
    }
    return size;
}

/* amax */

template <class T, int N> struct amax_of {
    static constexpr int together = N == 1 ? 1 : 4, amaxes = 1;
    const T *x;
    layout<1> l;
    float *amax[1];

    struct state {
        pack<T, N> x;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        s.x = nd::load<N>(x + l.offset(0, p));
    }

    __device__ void finish(state &s, uint32_t (&sizes)[1]) const
    {
        sizes[0] = larger(sizes[0], size_of_pack<T, N>(s.x));
    }
};

/* A warp per row. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    row_amax_kernel(float *amax, const T *x, int64_t stride, int64_t rows, int64_t columns,
                    bool merge)
{
    int64_t row = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const T *from = x + (row < rows ? row : 0) * stride;
    uint32_t size = 0;
    for (int64_t at = (int64_t)(threadIdx.x % 32) * N; at < columns; at += 32 * N) {
        size = larger(size, size_of_pack<T, N>(load<N>(from + at)));
    }
    size = __reduce_max_sync(0xffffffffu, size);
    if (row < rows && threadIdx.x % 32 == 0) {
        uint32_t *to = (uint32_t *)amax + row;
        *to = merge ? larger(*to, size) : size;
    }
}

enum {
    COLUMN_LANES = 32,
    COLUMN_ROWS = 8,
    SEGMENT = 256
}; /* threads across and down; rows of a block */

/* Block (segment of rows, strip of COLUMN_LANES packs). */
template <class T, int N>
__global__ void __launch_bounds__(COLUMN_LANES *COLUMN_ROWS)
    column_amax_kernel(float *amax, const T *x, int64_t stride, int64_t rows, int64_t columns,
                       int strips)
{
    int64_t segment = blockIdx.x / (unsigned)strips, strip = blockIdx.x % (unsigned)strips;
    int64_t column = (strip * COLUMN_LANES + threadIdx.x % COLUMN_LANES) * N;
    int64_t end = (segment + 1) * SEGMENT < rows ? (segment + 1) * SEGMENT : rows;
    uint32_t sizes[N] = {};
    for (int64_t row = segment * SEGMENT + threadIdx.x / COLUMN_LANES;
         row < end && column < columns; row += COLUMN_ROWS) {
        pack<T, N> in = load<N>(x + row * stride + column);
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            sizes[i] = larger(sizes[i], size_bits(get(in, i)));
        }
    }
    ND_UNROLL
    for (int i = 0; i < N; i++) {
        if (sizes[i] > 0) {
            atomicMax((unsigned *)amax + column + i, sizes[i]);
        }
    }
}

template <class T, int N>
int amax_packs(nd_cuda_queue queue, float *amax, nd_tensor x, nd_granularity granularity,
               bool merge, const layout<1> &l)
{
    const T *from = (const T *)x.data;
    int64_t rows = x.axes == 1 ? 1 : x.shape[0], columns = x.shape[x.axes - 1];
    int64_t stride = x.axes == 1 ? 0 : x.stride[0];
    if (granularity == ND_PER_TENSOR) {
        return map_amax(queue, amax_of<T, N>{from, l, {amax}}, l.count());
    }
    if (granularity == ND_PER_ROW) {
        return ND_LAUNCH_MEETING((row_amax_kernel<T, N>), nd_ceil_div(rows, THREADS / 32), THREADS,
                                 queue, amax, from, stride, rows, columns, merge);
    }
    int strips = (int)nd_ceil_div(columns, COLUMN_LANES * N);
    return ND_LAUNCH((column_amax_kernel<T, N>), nd_ceil_div(rows, SEGMENT) * strips,
                     COLUMN_LANES * COLUMN_ROWS, queue, amax, from, stride, rows, columns, strips);
}

template <class T>
int amax_typed(nd_cuda_queue queue, float *amax, nd_tensor x, nd_granularity granularity,
               bool merge)
{
    constexpr int PACK = type_of<T>::pack;
    const nd_tensor t[1] = {x};
    int N;
    layout<1> l = layout_of(t, PACK, granularity != ND_PER_TENSOR, &N);
    return N == PACK ? amax_packs<T, PACK>(queue, amax, x, granularity, merge, l)
                     : amax_packs<T, 1>(queue, amax, x, granularity, merge, l);
}

/* scales */

struct copy_of_scales {
    float *to;
    int stride;
    const float *a, *b;

    __device__ void operator()(int64_t at) const
    {
        to[at * stride] = at ? *b : *a;
    }
};

struct scale_of {
    float *scale, *inverse;
    const float *amax;
    double limit;
    bool power_of_two;

    __device__ void operator()(int64_t at) const
    {
        double size = (double)amax[at];
        float x = (float)(limit / (size < 1e-12 ? 1e-12 : size)); /* NaN stays */
        if (power_of_two && x > 0.0f && x < INFINITY) {
            x = ldexpf(1.0f, (int)floorf((float)log2((double)x)));
        }
        scale[at] = x;
        inverse[at] = 1.0f / x;
    }
};

/* One thread per tensor: adjacent threads read adjacent columns of the history. */
struct delayed_of {
    nd_fp8_history h;
    bool most_recent;

    /* The amax that the scale follows; shifts the history by one step. */
    __device__ float roll(int64_t i) const
    {
        float newest = h.amax[i], largest;
        if (newest == 0.0f) {
            return 0.0f;
        }
        largest = fmaxf(0.0f, newest); /* NaN is ignored */
        for (int64_t row = 1; row < h.length; row++) {
            float past = h.amax[row * h.count + i];
            largest = fmaxf(largest, past);
            if (row > 1) {
                h.amax[(row - 1) * h.count + i] = past;
            }
        }
        h.amax[(h.length - 1) * h.count + i] = newest;
        h.amax[i] = 0.0f;
        return most_recent ? newest : largest;
    }

    __device__ void operator()(int64_t at) const
    {
        float amax = roll(at), scale = h.scale[at];
        if (amax > 0.0f && amax < INFINITY) {
            scale = h.limit[at] / amax;
            scale = scale == INFINITY ? 3.402823466e+38f : scale;
            h.scale[at] = scale;
        }
        h.inverse[at] = 1.0f / scale;
    }
};

/* counts */

enum { COUNT_BLOCKS = 2048 };

template <class T>
__global__ void __launch_bounds__(THREADS)
    count_kernel(unsigned long long *counts, const T *x, layout<1> l, const float *scale,
                 nd_granularity granularity, bool e4m3)
{
    const float limit = e4m3 ? 448.0f : 57344.0f;
    uint32_t lost = 0, cut = 0;
    for (int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x; v < l.rows * l.packs;
         v += (int64_t)gridDim.x * THREADS) {
        place p = l.template find<1>(v);
        int64_t group = granularity == ND_PER_TENSOR ? 0
                        : granularity == ND_PER_ROW  ? p.row
                                                     : p.column;
        float value[1] = {widen(x[l.offset(0, p)])}, scaled = value[0] * scale[group];
        uint32_t code = encode_scaled<1>(value, scale[group], e4m3).e[0];
        lost += value[0] != 0.0f && (code & 0x7f) == 0;
        cut += fabsf(scaled) > limit;
    }
    lost = __reduce_add_sync(0xffffffffu, lost);
    cut = __reduce_add_sync(0xffffffffu, cut);
    if (threadIdx.x % 32 == 0 && (lost | cut) != 0) {
        atomicAdd(counts, (unsigned long long)lost);
        atomicAdd(counts + 1, (unsigned long long)cut);
    }
}

template <class T>
int count_typed(nd_cuda_queue queue, int64_t *counts, nd_tensor x, const layout<1> &l,
                const nd_matrix &as, bool e4m3)
{
    int64_t blocks = nd_ceil_div(l.count(), THREADS);
    return ND_LAUNCH_MEETING((count_kernel<T>),
                             blocks < COUNT_BLOCKS ? blocks : (int64_t)COUNT_BLOCKS, THREADS, queue,
                             (unsigned long long *)counts, (const T *)x.data, l,
                             (const float *)as.scale, as.granularity, e4m3);
}

/* c = product a[i] b[j] + beta c */

template <class T, int N> struct rescale_of {
    static constexpr int together = N == 1 ? 1 : 2;
    T *c;
    const float *product, *a, *b;
    bool a_rows, b_columns, add;
    layout<2> l;

    struct state {
        T *to;
        int64_t row, column;
        pack<float, N> product;
        pack<T, N> c;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        s.to = c + l.offset(0, p);
        s.row = p.row;
        s.column = p.column;
        s.product = nd::load<N>(product + l.offset(1, p));
        s.c = nd::load<N>(s.to, add);
    }

    __device__ void finish(state &s) const
    {
        float x[N], row_scale = a[a_rows ? s.row : 0];
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float column_scale = b[b_columns ? s.column + i : 0];
            x[i] = s.product.e[i] * row_scale * column_scale + get(s.c, i);
        }
        store_floats<N>(s.to, x);
    }
};

template <class T> int rescale(nd_cuda_queue queue, const nd_fp8_rescale_args *x)
{
    const nd_tensor t[2] = {x->c, x->product};
    int N;
    layout<2> l = layout_of(t, 4, true, &N);
    T *c = (T *)x->c.data;
    const float *product = (const float *)x->product.data;
    bool add = x->beta != 0.0f;
    if (N == 1) {
        rescale_of<T, 1> one = {c, product, x->a, x->b, x->a_rows, x->b_columns, add, l};
        return map(queue, one, l.count());
    }
    rescale_of<T, 4> four = {c, product, x->a, x->b, x->a_rows, x->b_columns, add, l};
    return map(queue, four, l.count());
}

} // namespace

int nd_cuda_amax(nd_cuda_queue queue, const nd_amax_args *args, void *scratch)
{
    float *amax = args->amax;
    const nd_tensor x = args->x;
    nd_granularity granularity = args->granularity;
    bool merge = args->merge;
    int64_t groups = granularity == ND_PER_TENSOR ? 1
                     : granularity == ND_PER_ROW  ? x.shape[0]
                                                  : x.shape[1];
    /* One warp writes the amax of a row; the other granularities use atomic maxima. */
    bool by_rows = granularity == ND_PER_ROW && x.shape[1] > 0;
    if (!merge && !by_rows && groups > 0) {
        int error = zero_async(queue, amax, (size_t)groups * sizeof(float));
        if (error) {
            return error;
        }
    }
    if (count_of(x) == 0) {
        return 0;
    }
    return x.dtype == ND_DTYPE_F32 ? amax_typed<float>(queue, amax, x, granularity, merge)
                                   : amax_typed<bf16>(queue, amax, x, granularity, merge);
}

int nd_cuda_fp8_scale(nd_cuda_queue queue, const nd_fp8_scale_args *args, void *scratch)
{
    double limit = args->format == ND_DTYPE_F8_E4M3 ? 448.0 : 57344.0;
    return each(queue, scale_of{args->scale, args->inverse, args->amax, limit, args->power_of_two},
                args->count);
}

int nd_cuda_fp8_delayed(nd_cuda_queue queue, const nd_fp8_delayed_args *args, void *scratch)
{
    const nd_fp8_history *history = &args->history;
    return each(queue, delayed_of{*history, args->algorithm == ND_AMAX_MOST_RECENT},
                history->count);
}

int nd_cuda_fp8_count(nd_cuda_queue queue, const nd_fp8_count_args *args, void *scratch)
{
    const nd_tensor x = args->x;
    const nd_matrix as = args->as;
    const nd_tensor t[1] = {x};
    int N;
    layout<1> l = layout_of(t, 1, as.granularity != ND_PER_TENSOR, &N);
    bool e4m3 = as.format == ND_DTYPE_F8_E4M3;
    if (l.count() == 0) {
        return 0;
    }
    return x.dtype == ND_DTYPE_F32 ? count_typed<float>(queue, args->counts, x, l, as, e4m3)
                                   : count_typed<bf16>(queue, args->counts, x, l, as, e4m3);
}

int nd_cuda_fp8_rescale(nd_cuda_queue queue, const nd_fp8_rescale_args *args)
{
    return args->c.dtype == ND_DTYPE_F32 ? rescale<float>(queue, args) : rescale<bf16>(queue, args);
}

int nd_cuda_copy_scales(nd_cuda_queue queue, float *to, int stride, const float *a, const float *b)
{
    return each(queue, copy_of_scales{to, stride, a, b}, 2);
}
