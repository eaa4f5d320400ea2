// SPDX-License-Identifier: Apache-2.0
/* The backward adds the tokens of a table row in ascending order: it sorts tokens by row
 * (token_sort.cuh), and the thread at the first token of a row walks over the others. */
#include "kernels/cuda/map.cuh"
#include "kernels/cuda/token_sort.cuh"

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

enum {
    ADD_THREADS = 128,
    AHEAD = 8 /* tokens whose gradients are loaded before the first is added */
};

/* Block (i, strip of columns): when sorted token i is the first of its row, adds the gradients of
 * all of them to it. */
template <class T, int N>
__global__ void __launch_bounds__(ADD_THREADS)
    add_kernel(float *dtable, int64_t dtable_stride, const T *dout, int64_t dout_stride,
               const sorted_token *tokens, int n, int64_t vocabulary, int64_t columns, int strips)
{
    int i = (int)(blockIdx.x / (unsigned)strips), strip = (int)(blockIdx.x % (unsigned)strips);
    int64_t row = (int64_t)(tokens[i] >> 32);
    int64_t column = ((int64_t)strip * ADD_THREADS + threadIdx.x) * N;
    bool first = i == 0 || (int64_t)(tokens[i - 1] >> 32) != row;
    if (!first || row >= vocabulary || column >= columns) {
        return;
    }
    float *to = dtable + row * dtable_stride + column;
    pack<float, N> sums = load<N>(to);
    for (bool more = true; more; i += AHEAD) {
        pack<T, N> x[AHEAD];
        ND_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            sorted_token token = i + a < n ? tokens[i + a] : ~(sorted_token)0;
            more = (int64_t)(token >> 32) ==
                   row; /* after the first token of another row all are of other rows */
            x[a] =
                load<N>(dout + (more ? (int64_t)(uint32_t)token : 0) * dout_stride + column, more);
        }
        ND_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            ND_UNROLL
            for (int k = 0; k < N; k++) {
                sums.e[k] += get(x[a], k); /* adding +0 changes only -0, and a sum is never -0 */
            }
        }
    }
    store<N>(to, sums);
}

template <class T, int N>
int add_rows(nd_cuda_queue queue, nd_tensor dtable, nd_tensor dout, const sorted_token *tokens)
{
    int64_t n = dout.shape[0], columns = dout.shape[1];
    int strips = (int)nd_ceil_div(columns, ADD_THREADS * N);
    return ND_LAUNCH((add_kernel<T, N>), n * strips, ADD_THREADS, queue, (float *)dtable.data,
                     dtable.stride[0], (const T *)dout.data, dout.stride[0], tokens, (int)n,
                     dtable.shape[0], columns, strips);
}

template <class T>
int backward(nd_cuda_queue queue, nd_tensor dtable, nd_tensor dout, const sorted_token *tokens)
{
    const nd_tensor t[1] = {dout};
    int N, F;
    layout_of(t, 4, true, &N);
    const nd_tensor f[1] = {dtable};
    layout_of(f, 4, true, &F);
    return N == 4 && F == 4 ? add_rows<T, 4>(queue, dtable, dout, tokens)
                            : add_rows<T, 1>(queue, dtable, dout, tokens);
}

} // namespace

int nd_cuda_embedding_fwd(nd_cuda_queue queue, const nd_embedding_fwd_args *args, void *scratch)
{
    const nd_tensor out = args->out, ids = args->ids, table = args->table;
    return out.dtype == ND_DTYPE_F32 ? forward<float>(queue, out, ids, table, args->first)
                                     : forward<bf16>(queue, out, ids, table, args->first);
}

int nd_cuda_embedding_bwd(nd_cuda_queue queue, const nd_embedding_bwd_args *args, void *scratch)
{
    const nd_tensor dtable = args->dtable, dout = args->dout;
    int64_t n = dout.shape[0];
    const sorted_token *tokens = nullptr;
    if (n == 0 || dout.shape[1] == 0) {
        return 0;
    }
    int error = sort_tokens(queue, (const int32_t *)args->ids.data, (int)n, args->first,
                            dtable.shape[0], scratch, &tokens);
    if (error) {
        return error;
    }
    return dout.dtype == ND_DTYPE_F32 ? backward<float>(queue, dtable, dout, tokens)
                                      : backward<bf16>(queue, dtable, dout, tokens);
}
