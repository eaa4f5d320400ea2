// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/documents.h"

#include "kernels/cuda/common.cuh"

using namespace nd;

namespace {

/* TOKENS: the most of a block that takes results. */
enum { THREADS = 256, PACK = 8, TOKENS = 8 };

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
    const int64_t S = f.of.rows;
    return {f.first_key + b * S, f.end_key + b * S, S, f.form != ND_SEGMENTS_FLAT};
}

/* Returns which of the calls computes a segment; -1: the plain kernels do. */
__device__ inline int tier_of(const nd_documents_find_args &f, const segment &s)
{
    const int64_t rows = s.end - s.begin, keys = s.last - s.first;
    int tier = 0;
    while (tier < f.of.count && rows + keys < f.of.tiers[tier].least) {
        tier++;
    }
    return tier < f.of.count && rows > 1 && keys > 0 && s.ordinal < f.rounds ? tier : -1;
}

/* A slot begins at its segment, or, where it has none, between those of the round. */
__device__ inline void put_slot(const nd_documents_find_args &f, const sample &x, int tier,
                                int64_t b, int64_t of_sample)
{
    const nd_document_tier &t = f.of.tiers[tier];
    const int64_t number = of_sample * t.least, slot = b * (t.slots / f.of.batch) + of_sample;
    const int64_t i =
        sample::first_of(0, x.rows, [&](int64_t row) { return x.end_key[row] + row + 1 > number; });
    int32_t *lengths = (int32_t *)(f.scratch + t.lengths);
    segment s = {x.rows, x.rows, f.of.keys, f.of.keys, 0};
    bool has = false, behind = true;
    if (i < x.rows) {
        for (s = x.segment_of(i);
             s.ordinal < f.round && s.end < x.rows && x.first_key[s.end] == s.first;) {
            s = x.segment_of(s.end);
        }
        const bool ours = s.ordinal == f.round && tier_of(f, s) == tier;
        behind = s.ordinal != f.round || (ours && s.begin + s.first <= number - t.least);
        has = ours && !behind && s.begin + s.first <= number;
    }
    lengths[slot] = has ? (int32_t)(s.end - s.begin) : 0;
    lengths[t.slots + slot] = has ? (int32_t)(s.last - s.first) : 0;
    for (int k = 0; k < ND_RAGGED_KINDS; k++) {
        const bool keys = k == ND_RAGGED_KV || k == ND_RAGGED_DKV;
        const int64_t at = keys ? b * f.of.keys + (behind ? s.last : s.first)
                                : b * f.of.rows + (behind ? s.end : s.begin);
        int64_t *starts = (int64_t *)(f.scratch + t.starts) + k * (t.slots + 1);
        starts[slot] = at * f.widths[k];
        if (slot == 0) {
            starts[t.slots] = f.of.batch * (keys ? f.of.keys : f.of.rows) * f.widths[k];
        }
    }
}

__global__ void __launch_bounds__(THREADS) find_kernel(const nd_documents_find_args f)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t B = f.of.batch, rows = B * f.of.rows;
    int32_t *owners = (int32_t *)(f.scratch + f.of.owners);
    if (at < rows) {
        const int64_t b = at / f.of.rows;
        const segment s = sample_of(f, b).segment_of(at - b * f.of.rows);
        owners[at] = tier_of(f, s);
        owners[rows + at] = (int32_t)s.end;
    }
    for (int t = 0; t < f.of.count; t++) {
        const int64_t each = f.of.tiers[t].slots / B;
        if (at < f.of.tiers[t].slots) {
            put_slot(f, sample_of(f, at / each), t, at / each, at % each);
        }
    }
}

/* A block takes every parts-th token of a slot. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    take_kernel(const nd_documents_take_args t, int64_t parts)
{
    const int64_t S = t.out.shape[1], heads = t.out.shape[2], D = t.out.shape[3];
    const int64_t slot = blockIdx.x / parts, width = heads * D, first = t.starts[slot] / width;
    for (int64_t r = blockIdx.x % parts; r < t.lengths[slot]; r += parts) {
        const int64_t token = first + r, b = token / S, i = token % S;
        T *row = (T *)t.out.data + b * t.out.stride[0] + i * t.out.stride[1];
        const bf16 *x = (const bf16 *)t.x + token * width;
        for (int64_t c = threadIdx.x * PACK; c < width; c += THREADS * PACK) {
            T *to = row + c / D * t.out.stride[2] + c % D;
            const pack<bf16, PACK> values = load<PACK>(x + c);
            const pack<T, PACK> before = load<PACK>(to, t.add);
            float sums[PACK];
            ND_UNROLL
            for (int e = 0; e < PACK; e++) {
                sums[e] = t.add ? get(values, e) + get(before, e) : get(values, e);
            }
            store_floats<PACK>(to, sums);
        }
        for (int64_t h = threadIdx.x; t.lse.data && h < heads; h += THREADS) {
            ((float *)t.lse.data)[b * t.lse.stride[0] + h * S + i] = t.stats[token * heads + h];
        }
    }
}

} // namespace

int nd_cuda_documents_find(nd_cuda_queue queue, const nd_documents_find_args *args)
{
    const nd_documents *d = &args->of;
    const int64_t most = nd_max(d->batch * d->rows, d->tiers[d->count - 1].slots);
    return ND_LAUNCH(find_kernel, nd_ceil_div(most, (int64_t)THREADS), THREADS, queue, *args);
}

int nd_cuda_documents_take(nd_cuda_queue queue, const nd_documents_take_args *args)
{
    const int64_t parts = nd_ceil_div(args->most, (int64_t)TOKENS);
    return args->out.dtype == ND_DTYPE_F32
               ? ND_LAUNCH((take_kernel<float>), args->slots * parts, THREADS, queue, *args, parts)
               : ND_LAUNCH((take_kernel<bf16>), args->slots * parts, THREADS, queue, *args, parts);
}
