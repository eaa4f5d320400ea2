// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/documents.h"

#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

enum { THREADS = 256 };

/* Rows [begin, end) of a sample, which see keys up to `last`; number `ordinal` of those of its
 * document that see keys. */
struct segment {
    int64_t begin, end, first, last;
    int ordinal;
};

/* The bounds of a sample's rows, which ascend. */
struct sample {
    const int32_t *first_key, *end_key;
    int64_t rows;
    int step; /* keys that a row of a segment sees more than the row before */

    __device__ bool together(int64_t i, int64_t j) const
    {
        return first_key[i] == first_key[j] && end_key[j] - end_key[i] == (j - i) * step;
    }

    /* The first row of [low, high) that `is` holds for, as for all behind it; else high. */
    template <class Is> __device__ static int64_t first_of(int64_t low, int64_t high, const Is &is)
    {
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (is(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return high;
    }

    __device__ int64_t begin_of(int64_t i) const
    {
        return first_of(0, i, [&](int64_t row) { return together(row, i); });
    }

    __device__ segment segment_of(int64_t i) const
    {
        segment s = {begin_of(i), 0, first_key[i], 0, 0};
        s.end = first_of(i, rows, [&](int64_t row) { return !together(i, row); });
        s.last = end_key[s.end - 1];
        for (int64_t r = s.begin; r > 0 && first_key[r - 1] == s.first && end_key[r - 1] > s.first;
             r = begin_of(r - 1)) {
            s.ordinal++;
        }
        return s;
    }
};

__device__ inline sample sample_of(const nd_documents_find_args &f, int64_t b)
{
    const int64_t S = f.tiers.rows;
    return {f.first_key + b * S, f.end_key + b * S, S, f.form != ND_SEGMENTS_FLAT};
}

/* -1: the plain kernels. */
__device__ inline int owner_of(const nd_documents_find_args &f, const segment &s)
{
    const int64_t rows = s.end - s.begin, keys = s.last - s.first;
    int tier = 0;
    while (tier < f.tiers.count && rows + keys < f.tiers.of[tier].least) {
        tier++;
    }
    return tier < f.tiers.count && rows > 1 && keys > 0 && s.ordinal < f.rounds
               ? s.ordinal * ND_DOCUMENT_TIERS + tier
               : -1;
}

/* Who computes what the key gets in this round. */
__device__ inline int owner_of_key(const nd_documents_find_args &f, const sample &x, int64_t j)
{
    int64_t i = sample::first_of(0, x.rows, [&](int64_t row) { return x.end_key[row] > j; });
    while (i < x.rows && x.first_key[i] <= j) {
        const segment s = x.segment_of(i);
        if (s.ordinal == f.round) {
            return owner_of(f, s);
        }
        i = s.end;
    }
    return -1;
}

/* A slot begins at its segment, or, where it has none, between those of the round. */
__device__ inline void put_slot(const nd_documents_find_args &f, const sample &x, int tier,
                                int64_t b, int64_t of_sample)
{
    const nd_document_tier &t = f.tiers.of[tier];
    const int64_t number = of_sample * t.least, slot = b * (t.slots / f.tiers.batch) + of_sample;
    const int64_t i =
        sample::first_of(0, x.rows, [&](int64_t row) { return x.end_key[row] + row + 1 > number; });
    segment s = {x.rows, x.rows, f.tiers.keys, f.tiers.keys, 0};
    bool has = false, behind = true;
    if (i < x.rows) {
        for (s = x.segment_of(i);
             s.ordinal < f.round && s.end < x.rows && x.first_key[s.end] == s.first;) {
            s = x.segment_of(s.end);
        }
        const bool ours = owner_of(f, s) == f.round * ND_DOCUMENT_TIERS + tier;
        behind = s.ordinal != f.round || (ours && s.begin + s.first <= number - t.least);
        has = ours && !behind && s.begin + s.first <= number;
    }
    f.lengths[tier][slot] = has ? (int32_t)(s.end - s.begin) : 0;
    f.lengths[tier][t.slots + slot] = has ? (int32_t)(s.last - s.first) : 0;
    for (int k = 0; k < ND_RAGGED_KINDS; k++) {
        const bool keys = k == ND_RAGGED_KV || k == ND_RAGGED_DKV;
        const int64_t at = keys ? b * f.tiers.keys + (behind ? s.last : s.first)
                                : b * f.tiers.rows + (behind ? s.end : s.begin);
        int64_t *starts = f.starts[tier] + k * (t.slots + 1);
        starts[slot] = at * f.widths[k];
        if (slot == 0) {
            starts[t.slots] = f.tiers.batch * (keys ? f.tiers.keys : f.tiers.rows) * f.widths[k];
        }
    }
}

__global__ void __launch_bounds__(THREADS) find_kernel(const nd_documents_find_args f)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, B = f.tiers.batch;
    const int64_t rows = B * f.tiers.rows, keys = B * f.tiers.keys;
    if (at < rows) {
        const int64_t b = at / f.tiers.rows;
        const segment s = sample_of(f, b).segment_of(at - b * f.tiers.rows);
        f.owners[at] = owner_of(f, s);
        f.owners[rows + at] = (int32_t)s.end;
    }
    if (at < keys) {
        const int64_t b = at / f.tiers.keys;
        f.key_owners[at] = owner_of_key(f, sample_of(f, b), at - b * f.tiers.keys);
    }
    for (int t = 0; t < f.tiers.count; t++) {
        const int64_t each = f.tiers.of[t].slots / B;
        if (at < f.tiers.of[t].slots) {
            put_slot(f, sample_of(f, at / each), t, at / each, at % each);
        }
    }
}

/* One pack of a row, or key, of the owner. */
template <class T, int N, bool ADD> struct taken {
    static constexpr int together = 4;
    T *out;
    const bf16 *x;
    const int32_t *owners;
    int64_t out_token, out_head; /* strides */
    divider packs, heads;        /* of a head; of a token */
    int32_t owner;

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
        const bool ours = owners[token] == owner;
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
                                  a->owner};
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
    stats_of_documents(float *lse, float *stats, const int32_t *owners, int32_t owner,
                       int64_t batch, int64_t heads, int64_t rows, int64_t stride, bool to_lse)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= batch * heads * rows) {
        return;
    }
    const int64_t i = at % rows, h = at / rows % heads, b = at / rows / heads, token = b * rows + i;
    float *of_row = lse + b * stride + h * rows + i;
    if (!to_lse) {
        stats[token * heads + h] = *of_row;
    } else if (owners[token] == owner) {
        *of_row = stats[token * heads + h];
    }
}

} // namespace

int nd_cuda_documents_find(nd_cuda_queue queue, const nd_documents_find_args *args)
{
    const nd_document_tiers *t = &args->tiers;
    const int64_t tokens = t->batch * nd_max(t->rows, t->keys);
    const int64_t most = nd_max(tokens, t->of[t->count - 1].slots);
    return ND_LAUNCH(find_kernel, nd_ceil_div(most, (int64_t)THREADS), THREADS, queue, *args);
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
                     (float *)args->lse.data, args->stats, args->owners, args->owner, shape[0],
                     shape[1], shape[2], args->lse.stride[0], args->to_lse);
}
