// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"

enum { STRIP = 32 }; /* columns of the table that one item of the backward owns */

typedef struct embedding {
    const nd_row_ops *rows;
    nd_tensor table; /* (V, C): the table, or its gradient */
    nd_tensor act;   /* (n, C): the output, or its gradient */
    const int32_t *ids;
    int64_t first;
} embedding;

/* Row of the table that holds token i, or -1 when it is not here. */
static int64_t row_of(const embedding *w, int64_t i)
{
    int64_t row = w->ids[i] - w->first;
    return row >= 0 && row < w->table.shape[0] ? row : -1;
}

static void look_up(void *arg, int64_t begin, int64_t end)
{
    const embedding *w = arg;
    size_t bytes = (size_t)w->act.shape[1] * (w->act.dtype == ND_DTYPE_BF16 ? 2 : 4);
    for (int64_t i = begin; i < end; i++) {
        int64_t row = row_of(w, i);
        if (row >= 0) {
            memcpy(nd_row(w->act, i), nd_row(w->table, row), bytes);
        } else {
            memset(nd_row(w->act, i), 0, bytes);
        }
    }
}

nd_status nd_cpu_embedding_fwd(nd_stream *stream, const nd_embedding_fwd_args *args)
{
    const nd_tensor out = args->out, ids = args->ids, table = args->table;
    int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C));
    ND_ASSERT(nd_is_2d_of(table, out.dtype, table.shape[0], C));
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, n));
    embedding w = {.table = table, .act = out, .ids = ids.data, .first = args->first};
    nd_cpu_parallel(stream, n, C, look_up, &w);
    return ND_OK;
}

/* Threads own columns, so that each element receives its tokens in ascending order. */
static void add_strips(void *arg, int64_t begin, int64_t end)
{
    const embedding *w = arg;
    int64_t C = w->act.shape[1], from = begin * STRIP;
    int64_t columns = (end * STRIP < C ? end * STRIP : C) - from;
    for (int64_t i = 0; i < w->act.shape[0]; i++) {
        int64_t row = row_of(w, i);
        if (row >= 0) {
            float *sum = (float *)nd_row(w->table, row) + from;
            w->rows->accumulate(sum, nd_element_address(w->act, i * w->act.stride[0] + from),
                                columns, w->act.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_embedding_bwd(nd_stream *stream, const nd_embedding_bwd_args *args)
{
    const nd_tensor dtable = args->dtable, ids = args->ids, dout = args->dout;
    int64_t n = dout.shape[0], C = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C));
    ND_ASSERT(nd_is_2d_of(dtable, ND_DTYPE_F32, dtable.shape[0], C));
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, n));
    embedding w = {.rows = nd_cpu_context_of(stream)->rows,
                   .table = dtable,
                   .act = dout,
                   .ids = ids.data,
                   .first = args->first};
    nd_cpu_parallel(stream, nd_ceil_div(C, STRIP), n * STRIP, add_strips, &w);
    return ND_OK;
}
