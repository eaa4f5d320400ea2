// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

/* One pack of the low half of a head and its partner in the high half. */
template <class T, int N> struct rotation {
    static constexpr int together = N == 1 ? 1 : 2;
    T *out;
    const T *x;
    const int32_t *positions;
    const float *cosines, *sines; /* (P, half) */
    int64_t half;
    int64_t out_token, out_head, x_token, x_head; /* strides */
    divider packs, heads;                         /* of half a head; of a token */
    float direction;                              /* -1: inverse */

    struct state {
        T *to;
        pack<T, N> low, high;
        pack<float, N> cosine, sine;
    };

    __device__ void load(int64_t v, state &s) const
    {
        uint32_t head_of_all = packs.quotient((uint32_t)v), token = heads.quotient(head_of_all);
        int64_t d = ((uint32_t)v - head_of_all * packs.divisor) * N;
        int64_t head = head_of_all - token * heads.divisor;
        const T *from = x + token * x_token + head * x_head + d;
        int64_t row = positions[token] * half + d;
        s.to = out + token * out_token + head * out_head + d;
        s.low = nd::load<N>(from);
        s.high = nd::load<N>(from + half);
        s.cosine = nd::load<N>(cosines + row);
        s.sine = nd::load<N>(sines + row);
    }

    __device__ void finish(state &s) const
    {
        float low[N], high[N];
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float a = get(s.low, i), b = get(s.high, i);
            float cosine = s.cosine.e[i], sine = direction * s.sine.e[i];
            low[i] = a * cosine - b * sine;
            high[i] = b * cosine + a * sine;
        }
        store_floats<N>(s.to, low);
        store_floats<N>(s.to + half, high);
    }
};

template <class T, int N>
int rotate(nd_cuda_queue queue, nd_tensor out, nd_tensor x, nd_tensor positions, nd_rope_view table,
           bool inverse)
{
    int64_t tokens = x.shape[0], heads = x.shape[1], half = x.shape[2] / 2, packs = half / N;
    if (tokens * heads * packs == 0) {
        return 0;
    }
    int64_t at_once = ((int64_t)1 << 30) / (heads * packs); /* tokens of one launch */
    for (int64_t begin = 0; begin < tokens; begin += at_once) {
        int64_t count = tokens - begin < at_once ? tokens - begin : at_once;
        rotation<T, N> f = {(T *)out.data + begin * out.stride[0],
                            (const T *)x.data + begin * x.stride[0],
                            (const int32_t *)positions.data + begin,
                            table.cos,
                            table.sin,
                            half,
                            out.stride[0],
                            out.stride[1],
                            x.stride[0],
                            x.stride[1],
                            divider::by(packs),
                            divider::by(heads),
                            inverse ? -1.0f : 1.0f};
        int error = map(queue, f, count * heads * packs);
        if (error) {
            return error;
        }
    }
    return 0;
}

template <class T>
int rotate_typed(nd_cuda_queue queue, nd_tensor out, nd_tensor x, nd_tensor positions,
                 nd_rope_view table, bool inverse)
{
    constexpr int PACK = type_of<T>::pack;
    int64_t half = x.shape[2] / 2, size = sizeof(T);
    bool packs = half % PACK == 0 && aligned(x.data, (x.stride[0] | x.stride[1]) * size) &&
                 aligned(out.data, (out.stride[0] | out.stride[1]) * size) && aligned(table.cos) &&
                 aligned(table.sin);
    return packs ? rotate<T, PACK>(queue, out, x, positions, table, inverse)
                 : rotate<T, 1>(queue, out, x, positions, table, inverse);
}

} // namespace

int nd_cuda_rope(nd_cuda_queue queue, const nd_rope_args *args, void *scratch)
{
    const nd_tensor out = args->out, x = args->x, positions = args->positions;
    const nd_rope_view table = args->table;
    return x.dtype == ND_DTYPE_F32
               ? rotate_typed<float>(queue, out, x, positions, table, args->inverse)
               : rotate_typed<bf16>(queue, out, x, positions, table, args->inverse);
}
