// SPDX-License-Identifier: Apache-2.0
/*
 * The backward adds the tokens of a table row in ascending order without a sort: a first kernel
 * links each token to the next one with the same id, a second starts at the first token of each id
 * and walks. The links cost n^2 comparisons of numbers in shared memory, which is nothing beside
 * the model up to a hundred thousand tokens.
 */
#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

template <class T, int N> struct look_up {
    static constexpr int together = N == 1 ? 1 : 4;
    T *out;
    const T *table;
    const int32_t *ids;
    int64_t first, vocabulary;
    layout<2> l; /* out; table, whose rows are not the layout's */

    struct state {
        T *to;
        pack<T, N> x;
    };

    __device__ void load(int64_t v, state &s) const
    {
        place p = l.template find<N>(v);
        int64_t row = ids[p.row] - first;
        s.to = out + l.offset(0, p);
        bool here = row >= 0 && row < vocabulary;
        s.x = nd::load<N>(table + (here ? row * l.stride[1][2] + p.column : 0), here);
    }

    __device__ void finish(state &s) const
    {
        store<N>(s.to, s.x);
    }
};

template <class T>
int forward(nd_cuda_queue queue, nd_tensor out, nd_tensor ids, nd_tensor table, int64_t first)
{
    constexpr int PACK = type_of<T>::pack;
    int64_t vocabulary = table.shape[0];
    nd_tensor row = table; /* as many rows as out has; only its stride is used */
    row.shape[0] = out.shape[0];
    const nd_tensor t[2] = {out, row};
    int N;
    layout<2> l = layout_of(t, PACK, true, &N);
    T *to = (T *)out.data;
    const T *from = (const T *)table.data;
    const int32_t *id = (const int32_t *)ids.data;
    if (N == 1) {
        return map(queue, look_up<T, 1>{to, from, id, first, vocabulary, l}, l.count());
    }
    return map(queue, look_up<T, PACK>{to, from, id, first, vocabulary, l}, l.count());
}

enum { LINK_THREADS = 128, LINK_TILE = 1024, HEAD_FLAG = 1 << 30, LINK_MASK = HEAD_FLAG - 1 };

/* links[i] = the next token with i's id, or LINK_MASK; HEAD_FLAG is set where no earlier token has
 * it. */
__global__ void __launch_bounds__(LINK_THREADS)
    link_kernel(uint32_t *links, const int32_t *ids, int n)
{
    ND_SHARED(int32_t, tile, LINK_TILE);
    int i = (int)(blockIdx.x * LINK_THREADS + threadIdx.x);
    int32_t own = i < n ? ids[i] : 0;
    bool head = true;
    int next = LINK_MASK;
    for (int begin = 0; begin < n; begin += LINK_TILE) {
        int count = n - begin < LINK_TILE ? n - begin : LINK_TILE;
        for (int j = (int)threadIdx.x; j < LINK_TILE; j += LINK_THREADS) {
            tile[j] = j < count ? ids[begin + j] : 0;
        }
        __syncthreads();
        for (int j = 0; j < count; j += 4) {
            pack<int32_t, 4> four = *(const pack<int32_t, 4> *)(tile + j);
            ND_UNROLL
            for (int k = 0; k < 4; k++) {
                int other = begin + j + k;
                bool same = four.e[k] == own && j + k < count;
                head = head && !(same && other < i);
                next = same && other > i && other < next ? other : next;
            }
        }
        __syncthreads();
    }
    if (i < n) {
        links[i] = (uint32_t)next | (head ? (uint32_t)HEAD_FLAG : 0u);
    }
}

enum { ADD_THREADS = 128, AHEAD = 4 /* tokens whose gradients are read at once */ };

/* Block (i, strip of columns): when token i is the first of its id, adds the gradients of all of
 * them to their row. */
template <class T, int N>
__global__ void __launch_bounds__(ADD_THREADS)
    add_kernel(float *dtable, int64_t dtable_stride, const T *dout, int64_t dout_stride,
               const int32_t *ids, const uint32_t *links, int64_t first, int64_t vocabulary,
               int64_t columns, int strips)
{
    int i = (int)(blockIdx.x / (unsigned)strips), strip = (int)(blockIdx.x % (unsigned)strips);
    int64_t row = ids[i] - first, column = ((int64_t)strip * ADD_THREADS + threadIdx.x) * N;
    if (!(links[i] & HEAD_FLAG) || row < 0 || row >= vocabulary || column >= columns) {
        return;
    }
    float *to = dtable + row * dtable_stride + column;
    pack<float, N> sums = load<N>(to);
    for (int at = i; at != LINK_MASK;) {
        pack<T, N> x[AHEAD];
        ND_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            bool there = at != LINK_MASK;
            x[a] = load<N>(dout + (there ? at : 0) * dout_stride + column, there);
            at = there ? (int)(links[at] & LINK_MASK) : at;
        }
        ND_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            ND_UNROLL
            for (int k = 0; k < N; k++) {
                sums.e[k] +=
                    get(x[a], k); /* adding +0 changes nothing but -0, which a sum is not */
            }
        }
    }
    store<N>(to, sums);
}

template <class T, int N>
int add_rows(nd_cuda_queue queue, nd_tensor dtable, nd_tensor ids, nd_tensor dout, int64_t first,
             const uint32_t *links)
{
    int64_t n = dout.shape[0], columns = dout.shape[1];
    int strips = (int)ceil_div(columns, ADD_THREADS * N);
    return ND_LAUNCH((add_kernel<T, N>), n * strips, ADD_THREADS, queue, (float *)dtable.data,
                     dtable.stride[0], (const T *)dout.data, dout.stride[0],
                     (const int32_t *)ids.data, links, first, dtable.shape[0], columns, strips);
}

template <class T>
int backward(nd_cuda_queue queue, nd_tensor dtable, nd_tensor ids, nd_tensor dout, int64_t first,
             const uint32_t *links)
{
    const nd_tensor t[1] = {dout};
    int N, F;
    layout_of(t, 4, true, &N);
    const nd_tensor f[1] = {dtable};
    layout_of(f, 4, true, &F);
    return N == 4 && F == 4 ? add_rows<T, 4>(queue, dtable, ids, dout, first, links)
                            : add_rows<T, 1>(queue, dtable, ids, dout, first, links);
}

} // namespace

int nd_cuda_embedding_fwd(nd_cuda_queue queue, nd_tensor out, nd_tensor ids, nd_tensor table,
                          int64_t first)
{
    return out.dtype == ND_DTYPE_F32 ? forward<float>(queue, out, ids, table, first)
                                     : forward<bf16>(queue, out, ids, table, first);
}

int nd_cuda_embedding_bwd(nd_cuda_queue queue, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                          int64_t first, void *scratch)
{
    int64_t n = dout.shape[0];
    uint32_t *links = (uint32_t *)scratch;
    if (n == 0 || dout.shape[1] == 0) {
        return 0;
    }
    int error = ND_LAUNCH_MEETING(link_kernel, ceil_div(n, LINK_THREADS), LINK_THREADS, queue,
                                  links, (const int32_t *)ids.data, (int)n);
    if (error) {
        return error;
    }
    return dout.dtype == ND_DTYPE_F32 ? backward<float>(queue, dtable, ids, dout, first, links)
                                      : backward<bf16>(queue, dtable, ids, dout, first, links);
}
