// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/view.h"

typedef struct rotation {
    const nd_row_ops *rows;
    nd_tensor out, x; /* (n, heads, D) */
    const int32_t *positions;
    nd_rope_view table;
    float sign;
} rotation;

static void rotate_tokens(void *arg, int64_t begin, int64_t end)
{
    const rotation *w = arg;
    int64_t half = w->x.shape[2] / 2;
    for (int64_t i = begin; i < end; i++) {
        int64_t position = w->positions[i];
        ND_ASSERT(position >= 0 && position < w->table.positions);
        for (int64_t h = 0; h < w->x.shape[1]; h++) {
            w->rows->rope(nd_address(w->out, i * w->out.stride[0] + h * w->out.stride[1]),
                          nd_address(w->x, i * w->x.stride[0] + h * w->x.stride[1]),
                          w->table.cos + position * half, w->table.sin + position * half, half,
                          w->sign, w->x.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_rope(nd_stream *stream, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse)
{
    int64_t n = x.shape[0];
    ND_ASSERT(nd_is_act(x) && x.axes == 3 && x.shape[2] % 2 == 0 && x.stride[2] == 1);
    ND_ASSERT(out.axes == 3 && out.dtype == x.dtype && out.shape[0] == n && out.stride[2] == 1);
    ND_ASSERT(out.shape[1] == x.shape[1] && out.shape[2] == x.shape[2]);
    ND_ASSERT(nd_is_vector(positions, ND_DTYPE_I32, n));
    rotation w = {.rows = nd_cpu_context_of(stream)->rows,
                  .out = out,
                  .x = x,
                  .positions = positions.data,
                  .table = table,
                  .sign = inverse ? -1.0f : 1.0f};
    nd_cpu_parallel(stream, n, x.shape[1] * x.shape[2], rotate_tokens, &w);
    return ND_OK;
}
