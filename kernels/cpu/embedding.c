// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"

enum { STRIP = 32 }; /* columns of the table that one item of the backward owns */

/* Row of the table (V, C) that holds token i, or -1 when it is not here. */
static int64_t row_of(nd_tensor table, nd_tensor ids, int64_t first, int64_t i)
{
    const int64_t row = ((const int32_t *)ids.data)[i] - first;
    return row >= 0 && row < table.shape[0] ? row : -1;
}

static void look_up(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_embedding_fwd_args *w = args;
    const size_t bytes = (size_t)w->out.shape[1] * nd_dtype_size(w->out.dtype);
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = row_of(w->table, w->ids, w->first, i);
        if (row >= 0) {
            memcpy(nd_row(w->out, i), nd_row(w->table, row), bytes);
        } else {
            memset(nd_row(w->out, i), 0, bytes);
        }
    }
}

nd_status nd_cpu_embedding_fwd(nd_stream *stream, const nd_embedding_fwd_args *args)
{
    const nd_tensor out = args->out, table = args->table;
    int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C));
    ND_ASSERT(nd_is_2d_of(table, out.dtype, table.shape[0], C));
    ND_ASSERT(nd_is_vector(args->ids, ND_DTYPE_I32, n));
    nd_cpu_each(stream, n, C, look_up, args);
    return ND_OK;
}

/* Threads own columns, so that each element receives its tokens in ascending order. */
static void add_strips(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_embedding_bwd_args *w = args;
    const int64_t from = begin * STRIP, columns = nd_min(end * STRIP, w->dout.shape[1]) - from;
    for (int64_t i = 0; i < w->dout.shape[0]; i++) {
        const int64_t row = row_of(w->dtable, w->ids, w->first, i);
        if (row >= 0) {
            rows->accumulate(nd_at(w->dtable, row, from), nd_at(w->dout, i, from), columns,
                             w->dout.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_embedding_bwd(nd_stream *stream, const nd_embedding_bwd_args *args)
{
    const nd_tensor dtable = args->dtable, dout = args->dout;
    int64_t n = dout.shape[0], C = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C));
    ND_ASSERT(nd_is_2d_of(dtable, ND_DTYPE_F32, dtable.shape[0], C));
    ND_ASSERT(nd_is_vector(args->ids, ND_DTYPE_I32, n));
    nd_cpu_each(stream, nd_ceil_div(C, STRIP), n * STRIP, add_strips, args);
    return ND_OK;
}
