// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_TOKEN_SORT_CUH
#define ND_CUDA_TOKEN_SORT_CUH
/*
 * Tokens in the order of their ids, equal ids in the order of the tokens: a radix sort of 9 bits a
 * pass, the lowest first, each pass stable. Work grows with the number of tokens, there are no
 * atomics, and the result is a function of the ids alone.
 *
 * A pass: each tile of 512 tokens counts its digits; the counts of all tiles, digit by digit, are
 * added up to the places where each tile's tokens of each digit begin; each token goes to its
 * place, which is that beginning and the number of earlier tokens of its tile with its digit.
 * Counting is by comparison within a tile, where the 512 digits lie in shared memory.
 */
#include "kernels/cuda/common.cuh"

namespace nd {

enum { SORT_BITS = 9, SORT_TILE = 1 << SORT_BITS, SCAN_THREADS = 512 };

/* Table row in the upper half (the number of rows for an id outside), token below. */
typedef uint64_t sorted_token;

struct token_source {
    const sorted_token *tokens; /* NULL: the ids */
    const int32_t *ids;
    int64_t first, vocabulary;
    int n, shift;

    __device__ sorted_token at(int i) const
    {
        if (tokens) {
            return tokens[i];
        }
        int64_t row = ids[i] - first;
        uint64_t key = row >= 0 && row < vocabulary ? (uint64_t)row : (uint64_t)vocabulary;
        return key << 32 | (uint32_t)i;
    }

    __device__ uint32_t digit(sorted_token token) const
    {
        return (uint32_t)(token >> (32 + shift)) & (SORT_TILE - 1);
    }
};

/* Counts how many of the digits [0, count) of a tile are this one; count is a multiple of 4. */
__device__ inline uint32_t count_equal(const uint32_t *digits, int count, uint32_t digit)
{
    uint32_t same = 0;
    for (int j = 0; j < count; j += 4) {
        pack<uint32_t, 4> four = *(const pack<uint32_t, 4> *)(digits + j);
        ND_UNROLL
        for (int k = 0; k < 4; k++) {
            same += four.e[k] == digit;
        }
    }
    return same;
}

/* counts: [digit][tile]. */
static __global__ void __launch_bounds__(SORT_TILE)
    sort_count_kernel(uint32_t *counts, token_source from)
{
    ND_SHARED(uint32_t, digits, SORT_TILE);
    uint32_t own = threadIdx.x;
    int i = (int)(blockIdx.x * SORT_TILE + own);
    digits[own] = i < from.n ? from.digit(from.at(i)) : (uint32_t)SORT_TILE;
    __syncthreads();
    counts[(int64_t)own * gridDim.x + blockIdx.x] = count_equal(digits, SORT_TILE, own);
}

/* counts: each becomes the sum of those before it. One block; a thread has `each` of them. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    sort_scan_kernel(uint32_t *counts, int count, int each)
{
    ND_SHARED(uint32_t, sums, SCAN_THREADS);
    int own = (int)threadIdx.x, begin = own * each;
    int end = begin + each < count ? begin + each : count;
    uint32_t sum = 0;
    for (int i = begin; i < end; i++) {
        sum += counts[i];
    }
    sums[own] = sum;
    __syncthreads();
    for (int distance = 1; distance < SCAN_THREADS; distance *= 2) {
        uint32_t before = own >= distance ? sums[own - distance] : 0u;
        __syncthreads();
        sums[own] += before;
        __syncthreads();
    }
    uint32_t at = sums[own] - sum;
    for (int i = begin; i < end; i++) {
        uint32_t here = counts[i];
        counts[i] = at;
        at += here;
    }
}

static __global__ void __launch_bounds__(SORT_TILE)
    sort_place_kernel(sorted_token *to, token_source from, const uint32_t *counts)
{
    ND_SHARED(uint32_t, digits, SORT_TILE);
    int own = (int)threadIdx.x, i = (int)blockIdx.x * SORT_TILE + own;
    sorted_token token = i < from.n ? from.at(i) : 0;
    uint32_t digit = i < from.n ? from.digit(token) : (uint32_t)SORT_TILE;
    digits[own] = digit;
    __syncthreads();
    if (i < from.n) {
        uint32_t earlier = count_equal(digits, own / 4 * 4, digit);
        for (int j = own / 4 * 4; j < own; j++) {
            earlier += digits[j] == digit;
        }
        to[counts[(int64_t)digit * gridDim.x + blockIdx.x] + earlier] = token;
    }
}

/* scratch: ND_CUDA_SCRATCH bytes, enough for ND_CUDA_EMBEDDING_TOKENS; *out points into it. */
inline int sort_tokens(nd_cuda_queue queue, const int32_t *ids, int n, int64_t first,
                       int64_t vocabulary, void *scratch, const sorted_token **out)
{
    int tiles = (int)nd_ceil_div(n, SORT_TILE), count = tiles * SORT_TILE;
    sorted_token *buffers[2] = {(sorted_token *)scratch, (sorted_token *)scratch + n};
    uint32_t *counts = (uint32_t *)(buffers[1] + n);
    token_source from = {nullptr, ids, first, vocabulary, n, 0};
    for (int pass = 0; pass == 0 || vocabulary >> from.shift > 0; pass++) {
        int error = ND_LAUNCH_MEETING(sort_count_kernel, tiles, SORT_TILE, queue, counts, from);
        error = error ? error
                      : ND_LAUNCH_MEETING(sort_scan_kernel, 1, SCAN_THREADS, queue, counts, count,
                                          (int)nd_ceil_div(count, SCAN_THREADS));
        error = error ? error
                      : ND_LAUNCH_MEETING(sort_place_kernel, tiles, SORT_TILE, queue,
                                          buffers[pass % 2], from, counts);
        if (error) {
            return error;
        }
        from.tokens = *out = buffers[pass % 2];
        from.shift += SORT_BITS;
    }
    return 0;
}

} // namespace nd
#endif
