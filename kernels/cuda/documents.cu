// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/documents.h"

#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

enum { THREADS = 256 };

/* The end of row i's document: first keys ascend, and those of its rows are at most i. */
__device__ inline int64_t end_of_document(const int32_t *first_key, int64_t i, int64_t rows)
{
    int64_t low = i, high = rows; /* row `low` is in the document, row `high` is not */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (first_key[middle] <= i) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return high;
}

__device__ inline int tier_of(const nd_document_tiers &tiers, int64_t length)
{
    int tier = 0;
    while (tier < tiers.count && length < tiers.of[tier].least) {
        tier++;
    }
    return tier < tiers.count ? tier : -1;
}

/* A slot begins at its document, or, where it has none, behind what lies before it. */
__device__ inline void put_slot(const nd_documents_find_args &f, int tier, int64_t slot,
                                int64_t token, int64_t length)
{
    f.lengths[tier][slot] = (int32_t)length;
    for (int k = 0; k < ND_RAGGED_KINDS; k++) {
        f.starts[tier][k * (f.tiers.of[tier].slots + 1) + slot] = token * f.widths[k];
    }
}

__global__ void __launch_bounds__(THREADS) find_kernel(const nd_documents_find_args f)
{
    const int64_t S = f.tiers.rows, at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= f.tiers.batch * S) {
        return;
    }
    const int64_t b = at / S, i = at - b * S;
    const int32_t *first_key = f.first_key + b * S;
    const int64_t first = first_key[i], end = end_of_document(first_key, i, S);
    const int own = tier_of(f.tiers, end - first);
    f.owners[at] = own >= 0 ? own : -(int32_t)end;
    for (int t = 0; t < f.tiers.count; t++) {
        const nd_document_tier &tier = f.tiers.of[t];
        if (i % tier.least == 0) {
            const int64_t slot = b * (tier.slots / f.tiers.batch) + i / tier.least;
            const bool has = own == t && first > i - tier.least;
            put_slot(f, t, slot, b * S + (has ? first : own == t ? end : i), has ? end - first : 0);
        }
        if (at == 0) {
            for (int k = 0; k < ND_RAGGED_KINDS; k++) {
                f.starts[t][k * (tier.slots + 1) + tier.slots] = f.tiers.batch * S * f.widths[k];
            }
        }
    }
}

/* One pack of a row of the tier. */
template <class T, int N, bool ADD> struct taken {
    static constexpr int together = 4;
    T *out;
    const bf16 *x;
    const int32_t *owners;
    int64_t out_token, out_head; /* strides */
    divider packs, heads;        /* of a head; of a token */
    int32_t tier;

    struct state {
        T *to; /* NULL: a row of others */
        pack<bf16, N> value;
        pack<T, N> before;
    };

    __device__ void load(int64_t v, state &s) const
    {
        uint32_t head_of_all = packs.quotient((uint32_t)v), token = heads.quotient(head_of_all);
        int64_t d = ((uint32_t)v - head_of_all * packs.divisor) * N;
        int64_t head = head_of_all - token * heads.divisor;
        const bool ours = owners[token] == tier;
        s.to = ours ? out + token * out_token + head * out_head + d : nullptr;
        s.value = nd::load<N>(x + v * N, ours);
        if constexpr (ADD) {
            s.before = nd::load<N>(s.to, ours);
        }
    }

    __device__ void finish(state &s) const
    {
        float sums[N];
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            sums[i] = get(s.value, i);
            if constexpr (ADD) {
                sums[i] += get(s.before, i);
            }
        }
        if (s.to) {
            store_floats<N>(s.to, sums);
        }
    }
};

template <class T, int N, bool ADD> int take(nd_cuda_queue queue, const nd_documents_take_args *a)
{
    const nd_tensor &out = a->out;
    const int64_t S = out.shape[1], heads = out.shape[2], D = out.shape[3], packs = D / N;
    const int64_t row = heads * packs, size = (int64_t)sizeof(T);
    const int64_t at_once = ((int64_t)1 << 30) / row; /* tokens of one launch */
    int error = 0;
    for (int64_t b = 0; b < out.shape[0] && !error; b++) {
        for (int64_t i = 0; i < S && !error; i += at_once) {
            const int64_t count = S - i < at_once ? S - i : at_once, token = b * S + i;
            const int64_t begin = b * out.stride[0] + i * out.stride[1];
            taken<T, N, ADD> f = {(T *)((char *)out.data + begin * size),
                                  (const bf16 *)a->x.data + token * heads * D,
                                  a->owners + token,
                                  out.stride[1],
                                  out.stride[2],
                                  divider::by(packs),
                                  divider::by(heads),
                                  a->tier};
            error = map(queue, f, count * row);
        }
    }
    return error;
}

/* cuDNN takes heads of multiples of 8 elements, so x has whole packs. */
template <class T, bool ADD> int take_packs(nd_cuda_queue queue, const nd_documents_take_args *a)
{
    const nd_tensor &out = a->out;
    bool packs = true;
    for (int axis = 0; axis < 3; axis++) {
        packs = packs && aligned(out.data, out.stride[axis] * (int64_t)sizeof(T));
    }
    return packs ? take<T, 8, ADD>(queue, a) : take<T, 1, ADD>(queue, a);
}

__global__ void __launch_bounds__(THREADS)
    stats_of_documents(float *lse, float *stats, const int32_t *owners, int32_t tier, int64_t batch,
                       int64_t heads, int64_t rows, bool to_lse)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= batch * heads * rows) {
        return;
    }
    const int64_t i = at % rows, h = at / rows % heads, token = at / rows / heads * rows + i;
    if (!to_lse) {
        stats[token * heads + h] = lse[at];
    } else if (owners[token] == tier) {
        lse[at] = stats[token * heads + h];
    }
}

} // namespace

int nd_cuda_documents_find(nd_cuda_queue queue, const nd_documents_find_args *args)
{
    const int64_t tokens = args->tiers.batch * args->tiers.rows;
    return ND_LAUNCH(find_kernel, nd_ceil_div(tokens, (int64_t)THREADS), THREADS, queue, *args);
}

int nd_cuda_documents_take(nd_cuda_queue queue, const nd_documents_take_args *args)
{
    if (args->out.dtype == ND_DTYPE_F32) {
        return args->add ? take_packs<float, true>(queue, args)
                         : take_packs<float, false>(queue, args);
    }
    return take_packs<bf16, false>(queue, args);
}

int nd_cuda_documents_stats(nd_cuda_queue queue, const nd_documents_stats_args *args)
{
    const int64_t *shape = args->lse.shape, count = shape[0] * shape[1] * shape[2];
    return ND_LAUNCH(stats_of_documents, nd_ceil_div(count, (int64_t)THREADS), THREADS, queue,
                     (float *)args->lse.data, args->stats, args->owners, args->tier, shape[0],
                     shape[1], shape[2], args->to_lse);
}
