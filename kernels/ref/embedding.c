// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

nd_status nd_ref_embedding_fwd(nd_stream *stream, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first)
{
    int64_t n = out.shape[0], C = out.shape[1], V = table.shape[0];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_2d_of(table, out.dtype, V, C));
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = ((const int32_t *)ids.data)[i] - first;
        bool here = row >= 0 && row < V;
        for (int64_t c = 0; c < C; c++) {
            nd_ref_put(out, i * out.stride[0] + c,
                       here ? nd_ref_get(table, row * table.stride[0] + c) : 0.0);
        }
    }
    return ND_OK;
}

nd_status nd_ref_embedding_bwd(nd_stream *stream, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first)
{
    int64_t n = dout.shape[0], C = dout.shape[1], V = dtable.shape[0];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C));
    ND_ASSERT(nd_is_2d_of(dtable, ND_DTYPE_F32, V, C) && nd_is_vector(ids, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = ((const int32_t *)ids.data)[i] - first;
        if (row < 0 || row >= V) {
            continue;
        }
        float *sum = (float *)dtable.data + row * dtable.stride[0];
        for (int64_t c = 0; c < C; c++) {
            sum[c] += nd_ref_get(dout, i * dout.stride[0] + c);
        }
    }
    return ND_OK;
}
