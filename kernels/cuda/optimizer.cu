// SPDX-License-Identifier: Apache-2.0
/*
 * Optimizers over flat shards, and sums of squares. Ranges begin anywhere: a thread owns N elements
 * at multiples of N of the shard and touches those inside the range.
 */
#include "kernels/cuda/common.cuh"

using namespace nd;

namespace {

enum { THREADS = 256, TOGETHER = 2, MOST_RANGES = 64 };

/* Some ranges of a shard; block b belongs to the last range whose first_block is at most b. */
struct range_list {
    int64_t begin[MOST_RANGES], end[MOST_RANGES];
    bf16 *copy[MOST_RANGES]; /* NULL, or of element begin + i */
    uint32_t first_block[MOST_RANGES];
    uint64_t decay; /* a bit per range */
    int count;
};

__device__ inline int range_of(const range_list &ranges, uint32_t block)
{
    int low = 0, high = ranges.count; /* first_block[low] <= block < first_block[high] */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (ranges.first_block[middle] <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* p -= lr wd p; m, v; p -= lr (m / bias1) / (sqrt(v / bias2) + eps). */
template <int N> struct adamw_step {
    float lr, beta1, beta2, eps, weight_decay, grad_scale, by_bias1, by_bias2; /* by: 1 / bias */
    float *p, *m, *v;
    const float *grad;

    struct state {
        pack<float, N> p, m, v, grad;
    };

    __device__ void load(int64_t at, state &s) const
    {
        s.p = nd::load<N>(p + at);
        s.m = nd::load<N>(m + at);
        s.v = nd::load<N>(v + at);
        s.grad = nd::load<N>(grad + at);
    }

    __device__ void update(state &s, float decay) const
    {
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            float g = s.grad.e[i] * grad_scale, x = s.p.e[i] - decay * s.p.e[i];
            s.m.e[i] = beta1 * s.m.e[i] + (1.0f - beta1) * g;
            s.v.e[i] = beta2 * s.v.e[i] + (1.0f - beta2) * g * g;
            s.p.e[i] = x - lr * (s.m.e[i] * by_bias1) / (sqrtf(s.v.e[i] * by_bias2) + eps);
        }
    }

    __device__ void finish(int64_t at, state &s, bool decays, bf16 *copy) const
    {
        update(s, decays ? lr * weight_decay : 0.0f);
        store<N>(p + at, s.p);
        store<N>(m + at, s.m);
        store<N>(v + at, s.v);
        if (copy) {
            store_floats<N>(copy, s.p.e);
        }
    }
};

template <int N> struct sgd_step {
    float lr, weight_decay, grad_scale;
    float *p;
    const float *grad;

    struct state {
        pack<float, N> p, grad;
    };

    __device__ void load(int64_t at, state &s) const
    {
        s.p = nd::load<N>(p + at);
        s.grad = nd::load<N>(grad + at);
    }

    __device__ void finish(int64_t at, state &s, bool decays, bf16 *copy) const
    {
        float decay = decays ? weight_decay : 0.0f;
        ND_UNROLL
        for (int i = 0; i < N; i++) {
            s.p.e[i] -= lr * (s.grad.e[i] * grad_scale + decay * s.p.e[i]);
        }
        store<N>(p + at, s.p);
        if (copy) {
            store_floats<N>(copy, s.p.e);
        }
    }
};

/* S: the step in packs of N; S1: the same for one element, at the ends of a range. */
template <int N, class S, class S1>
__global__ void __launch_bounds__(THREADS)
    update_kernel(const S step, const S1 single, const range_list ranges)
{
    int r = range_of(ranges, blockIdx.x);
    int64_t begin = ranges.begin[r], end = ranges.end[r];
    bool decays = ranges.decay >> r & 1;
    bf16 *copy = ranges.copy[r];
    int64_t at =
        begin / N * N +
        ((blockIdx.x - ranges.first_block[r]) * (int64_t)(THREADS * TOGETHER) + threadIdx.x) * N;
    typename S::state states[TOGETHER];
    ND_UNROLL
    for (int u = 0; u < TOGETHER; u++) {
        int64_t mine = at + (int64_t)u * THREADS * N;
        if (mine >= begin && mine + N <= end) {
            step.load(mine, states[u]);
        }
    }
    ND_UNROLL
    for (int u = 0; u < TOGETHER; u++) {
        int64_t mine = at + (int64_t)u * THREADS * N;
        if (mine >= begin && mine + N <= end) {
            step.finish(mine, states[u], decays, copy ? copy + (mine - begin) : NULL);
        } else if (N > 1 && mine < end && mine + N > begin) {
            ND_NO_UNROLL
            for (int64_t one = mine > begin ? mine : begin; one < end && one < mine + N; one++) {
                typename S1::state state;
                single.load(one, state);
                single.finish(one, state, decays, copy ? copy + (one - begin) : NULL);
            }
        }
    }
}

/* Collects the next ranges, at most MOST_RANGES; returns the blocks that they need. */
template <int N> int64_t take_ranges(const nd_flat_range *ranges, int count, range_list &list)
{
    int64_t blocks = 0;
    list = {};
    for (int r = 0; r < count; r++) {
        int64_t elements = ranges[r].end - ranges[r].begin / N * N;
        list.begin[r] = ranges[r].begin;
        list.end[r] = ranges[r].end;
        list.copy[r] = (bf16 *)ranges[r].copy;
        list.first_block[r] = (uint32_t)blocks;
        list.decay |= (uint64_t)(ranges[r].decay ? 1 : 0) << r;
        blocks += ranges[r].end > ranges[r].begin
                      ? nd_ceil_div(elements, (int64_t)N * THREADS * TOGETHER)
                      : 0;
    }
    list.count = count;
    return blocks;
}

template <int N, class S, class S1>
int update(nd_cuda_queue queue, const S &step, const S1 &single, const nd_flat_range *ranges,
           int count)
{
    for (int done = 0; done < count; done += MOST_RANGES) {
        int now = count - done < MOST_RANGES ? count - done : (int)MOST_RANGES;
        range_list list;
        int64_t blocks = take_ranges<N>(ranges + done, now, list);
        if (blocks == 0) {
            continue;
        }
        int error =
            ND_LAUNCH((update_kernel<N, S, S1>), blocks, THREADS, queue, step, single, list);
        if (error) {
            return error;
        }
    }
    return 0;
}

template <int N>
adamw_step<N> adamw_of(const nd_adamw *o, float *p, float *m, float *v, const float *grad)
{
    return {o->lr,
            o->beta1,
            o->beta2,
            o->eps,
            o->weight_decay,
            o->grad_scale,
            1.0f / o->bias1,
            1.0f / o->bias2,
            p,
            m,
            v,
            grad};
}

template <int N> sgd_step<N> sgd_of(const nd_adamw *o, float *p, const float *grad)
{
    return {o->lr, o->weight_decay, o->grad_scale, p, grad};
}

/* Do packs of 4 of the copies lie on their boundaries where those of the shard do? */
bool copies_align(const nd_flat_range *ranges, int count)
{
    bool fine = true;
    for (int r = 0; r < count; r++) {
        uintptr_t first = (uintptr_t)ranges[r].copy - (uintptr_t)ranges[r].begin * sizeof(bf16);
        fine = fine && (!ranges[r].copy || first % (4 * sizeof(bf16)) == 0);
    }
    return fine;
}

/* sum of squares: F64 per thread, a tree per block, then the blocks in one more tree */

enum { SUM_BLOCKS = 1024, SUM_TOGETHER = 4 };

__device__ inline double squares_of(const pack<float, 4> &x)
{
    double sum = 0.0;
    ND_UNROLL
    for (int i = 0; i < 4; i++) {
        sum += (double)x.e[i] * (double)x.e[i];
    }
    return sum;
}

/* x is aligned to 16 bytes; `before` elements that precede it and the ones behind the last pack go
 * to the first threads. */
__global__ void __launch_bounds__(THREADS)
    squares_kernel(double *partials, const float *x, int before, int64_t count)
{
    ND_SHARED(double, slots, 32);
    const int64_t packs = count / 4, stride = (int64_t)gridDim.x * THREADS;
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, v = thread;
    double sum = 0.0;
    for (; v + (SUM_TOGETHER - 1) * stride < packs; v += SUM_TOGETHER * stride) {
        pack<float, 4> four[SUM_TOGETHER];
        ND_UNROLL
        for (int u = 0; u < SUM_TOGETHER; u++) {
            four[u] = load<4>(x + (v + u * stride) * 4);
        }
        ND_UNROLL
        for (int u = 0; u < SUM_TOGETHER; u++) {
            sum += squares_of(four[u]);
        }
    }
    for (; v < packs; v += stride) {
        sum += squares_of(load<4>(x + v * 4));
    }
    if (thread < before) {
        sum += (double)x[thread - before] * (double)x[thread - before];
    }
    if (thread < count % 4) {
        sum += (double)x[packs * 4 + thread] * (double)x[packs * 4 + thread];
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(SUM_BLOCKS)
    sum_partials_kernel(double *out, const double *partials, int count)
{
    ND_SHARED(double, slots, 32);
    double sum = (int)threadIdx.x < count ? partials[threadIdx.x] : 0.0;
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) {
        *out += sum;
    }
}

/* Sums of integers, so the order of the additions does not matter. */
enum { DIGEST_BLOCKS = 264 };

__global__ void __launch_bounds__(THREADS)
    digest_kernel(unsigned long long *out, const uint32_t *x, int64_t count)
{
    unsigned long long sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * THREADS) {
        sum += (2 * (unsigned long long)i + 1) * x[i];
    }
    atomicAdd(out, sum);
}

} // namespace

int nd_cuda_adamw(nd_cuda_queue queue, const nd_adamw_args *args, void *scratch)
{
    const nd_adamw *o = &args->hyper;
    float *p = args->p, *m = args->m, *v = args->v;
    const float *grad = args->grad;
    const nd_flat_range *ranges = args->ranges;
    int range_count = args->range_count;
    bool packs = aligned(p) && aligned(m) && aligned(v) && aligned(grad) &&
                 copies_align(ranges, range_count);
    adamw_step<1> single = adamw_of<1>(o, p, m, v, grad);
    if (!packs) {
        return update<1>(queue, single, single, ranges, range_count);
    }
    return update<4>(queue, adamw_of<4>(o, p, m, v, grad), single, ranges, range_count);
}

int nd_cuda_sgd(nd_cuda_queue queue, const nd_sgd_args *args, void *scratch)
{
    const nd_adamw *o = &args->hyper;
    float *p = args->p;
    const float *grad = args->grad;
    const nd_flat_range *ranges = args->ranges;
    int range_count = args->range_count;
    bool packs = aligned(p) && aligned(grad) && copies_align(ranges, range_count);
    sgd_step<1> single = sgd_of<1>(o, p, grad);
    if (!packs) {
        return update<1>(queue, single, single, ranges, range_count);
    }
    return update<4>(queue, sgd_of<4>(o, p, grad), single, ranges, range_count);
}

int nd_cuda_digest(nd_cuda_queue queue, const nd_digest_args *args, void *scratch)
{
    int64_t blocks = nd_ceil_div(args->count, (int64_t)THREADS);
    return args->count == 0
               ? 0
               : ND_LAUNCH(digest_kernel, blocks < DIGEST_BLOCKS ? blocks : (int64_t)DIGEST_BLOCKS,
                           THREADS, queue, (unsigned long long *)args->out,
                           (const uint32_t *)args->x, args->count);
}

int nd_cuda_sum_squares(nd_cuda_queue queue, const nd_sum_squares_args *args, void *scratch)
{
    int64_t count = args->count;
    int64_t before = (int64_t)(-(uintptr_t)args->x / sizeof(float) % 4);
    before = before < count ? before : count;
    count -= before;
    int64_t wanted = nd_ceil_div(count, (int64_t)THREADS * 4 * SUM_TOGETHER);
    int blocks = (int)(wanted < 1 ? 1 : wanted < SUM_BLOCKS ? wanted : (int64_t)SUM_BLOCKS);
    int error = ND_LAUNCH_MEETING(squares_kernel, blocks, THREADS, queue, (double *)scratch,
                                  args->x + before, (int)before, count);
    if (error) {
        return error;
    }
    return ND_LAUNCH_MEETING(sum_partials_kernel, 1, SUM_BLOCKS, queue, args->out,
                             (const double *)scratch, blocks);
}
