// SPDX-License-Identifier: Apache-2.0
/* accumulate, cast, biases and initial values. */
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

/* out = scale a + b, or scale a alone; the scale is 1 unless SCALED. */
template <class O, class A, class B, bool SUM, bool SCALED, int N> struct sum_of {
    static constexpr int together = N == 1 ? 1 : 4;
    O *out;
    const A *a;
    const B *b;
    layout<3> l;
    float scale;

    struct state {
        O *to;
        pack<A, N> a;
        pack<B, N> b;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        s.to = out + l.offset(0, p);
        s.a = nd::load<N>(a + l.offset(1, p));
        if (SUM) {
            s.b = nd::load<N>(b + l.offset(2, p));
        }
    }

    __device__ void finish(state &s) const
    {
        float x[N];
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            const float a = SCALED ? scale * get(s.a, i) : get(s.a, i);
            x[i] = SUM ? a + get(s.b, i) : a;
        }
        store_floats<N>(s.to, x);
    }
};

template <class O, class A, class B, bool SUM, bool SCALED = false>
int sum_typed(nd_cuda_queue queue, const nd_tensor (&t)[3], float scale = 1.0f)
{
    constexpr int PACK = sizeof(O) + sizeof(A) + sizeof(B) == 6 ? 8 : 4;
    int N;
    layout<3> l = layout_of(t, PACK, false, &N);
    O *out = (O *)t[0].data;
    const A *a = (const A *)t[1].data;
    const B *b = (const B *)t[2].data;
    if (N == 1) {
        return map(queue, sum_of<O, A, B, SUM, SCALED, 1>{out, a, b, l, scale}, l.count());
    }
    return map(queue, sum_of<O, A, B, SUM, SCALED, PACK>{out, a, b, l, scale}, l.count());
}

template <class O> int cast_to(nd_cuda_queue queue, const nd_tensor (&t)[3])
{
    return t[1].dtype == ND_DTYPE_F32 ? sum_typed<O, float, float, false>(queue, t)
                                      : sum_typed<O, bf16, bf16, false>(queue, t);
}

/* Element v of out is that of its column in the bias. */
template <class T> struct bias_of {
    static constexpr int together = 4;
    T *out;
    const T *bias;
    int64_t columns, stride;

    struct state {
        T *to;
        T value;
    };

    __device__ void load(int64_t v, state &s) const
    {
        const int64_t row = v / columns, column = v - row * columns;
        s.to = out + row * stride + column;
        s.value = bias[column];
    }

    __device__ void finish(state &s) const
    {
        *s.to = s.value;
    }
};

template <class T> int bias_typed(nd_cuda_queue queue, nd_tensor out, nd_tensor bias)
{
    const bias_of<T> f = {(T *)out.data, (const T *)bias.data, out.shape[1], out.stride[0]};
    return map(queue, f, out.shape[0] * out.shape[1]);
}

enum { BIAS_COLUMNS = 32, BIAS_LANES = 16 };

/* A block sums 32 columns: each lane every 16th row in order, then the lanes in order. */
template <class T>
__global__ void __launch_bounds__(BIAS_COLUMNS *BIAS_LANES)
    bias_bwd_kernel(float *dbias, const T *dout, int64_t rows, int64_t columns, int64_t stride)
{
    ND_SHARED(float, sums, BIAS_COLUMNS *BIAS_LANES);
    const int lane = (int)threadIdx.x / BIAS_COLUMNS;
    const int64_t column = (int64_t)blockIdx.x * BIAS_COLUMNS + threadIdx.x % BIAS_COLUMNS;
    float sum = 0.0f;
    for (int64_t row = lane; row < rows && column < columns; row += BIAS_LANES) {
        const pack<T, 1> x = nd::load<1>(dout + row * stride + column);
        sum += get(x, 0);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && column < columns) {
        for (int l = 1; l < BIAS_LANES; l++) {
            sum += sums[l * BIAS_COLUMNS + threadIdx.x];
        }
        dbias[column] += sum;
    }
}

template <class T> int bias_bwd_typed(nd_cuda_queue queue, nd_tensor dbias, nd_tensor dout)
{
    const int64_t columns = dout.shape[1], blocks = nd_ceil_div(columns, BIAS_COLUMNS);
    return blocks == 0 ? 0
                       : ND_LAUNCH_MEETING(bias_bwd_kernel<T>, blocks, BIAS_COLUMNS * BIAS_LANES,
                                           queue, (float *)dbias.data, (const T *)dout.data,
                                           dout.shape[0], columns, dout.stride[0]);
}

/* nd_rng_normal (runtime/base/rng.c), bit for bit: Philox4x32-10, the sum of eight 16-bit
 * uniforms. */
__device__ float random_normal(uint64_t seed, uint64_t random_stream, uint64_t index)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32);
    uint32_t c2 = (uint32_t)random_stream, c3 = (uint32_t)(random_stream >> 32);
    ND_UNROLL
    for (int round = 0; round < 10; round++) {
        uint32_t n0 = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0;
        uint32_t n2 = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint32_t words[4] = {c0, c1, c2, c3};
    int32_t sum = 0;
    ND_UNROLL
    for (int i = 0; i < 4; i++) {
        sum += (int32_t)(words[i] & 0xffff) + (int32_t)(words[i] >> 16);
    }
    const float scale = 1.0f / 53509.92f;
    return (float)(2 * sum - 8 * 65535) * 0.5f * scale;
}

struct normal_of {
    float *out;
    float deviation;
    uint64_t seed, random_stream, first;

    __device__ void operator()(int64_t at) const
    {
        out[at] = deviation * random_normal(seed, random_stream, first + (uint64_t)at);
    }
};

template <class T> int scaled_typed(nd_cuda_queue queue, const nd_axpy_args *x)
{
    const nd_tensor t[3] = {x->out, x->x, x->plus};
    return x->plus.data ? sum_typed<T, T, T, true, true>(queue, t, x->scale)
                        : sum_typed<T, T, T, false, true>(queue, t, x->scale);
}

} // namespace

int nd_cuda_accumulate(nd_cuda_queue queue, const nd_accumulate_args *args, void *scratch)
{
    const nd_tensor t[3] = {args->acc, args->acc, args->x};
    return args->x.dtype == ND_DTYPE_F32 ? sum_typed<float, float, float, true>(queue, t)
                                         : sum_typed<float, float, bf16, true>(queue, t);
}

int nd_cuda_cast(nd_cuda_queue queue, const nd_cast_args *args, void *scratch)
{
    const nd_tensor t[3] = {args->out, args->x, {}};
    return args->out.dtype == ND_DTYPE_F32 ? cast_to<float>(queue, t) : cast_to<bf16>(queue, t);
}

int nd_cuda_axpy(nd_cuda_queue queue, const nd_axpy_args *args, void *scratch)
{
    return args->out.dtype == ND_DTYPE_F32 ? scaled_typed<float>(queue, args)
                                           : scaled_typed<bf16>(queue, args);
}

int nd_cuda_bias_fwd(nd_cuda_queue queue, const nd_bias_fwd_args *args, void *scratch)
{
    return args->out.dtype == ND_DTYPE_F32 ? bias_typed<float>(queue, args->out, args->bias)
                                           : bias_typed<bf16>(queue, args->out, args->bias);
}

int nd_cuda_bias_bwd(nd_cuda_queue queue, const nd_bias_bwd_args *args, void *scratch)
{
    return args->dout.dtype == ND_DTYPE_F32 ? bias_bwd_typed<float>(queue, args->dbias, args->dout)
                                            : bias_bwd_typed<bf16>(queue, args->dbias, args->dout);
}

int nd_cuda_random_normal(nd_cuda_queue queue, const nd_random_normal_args *args, void *scratch)
{
    return each(queue,
                normal_of{args->out, args->deviation, args->seed, args->random_stream, args->first},
                args->count);
}
