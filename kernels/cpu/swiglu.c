// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/view.h"

enum { WORK = 4 }; /* an element of SwiGLU costs about four of a plain sum */

typedef struct swiglu {
    const nd_row_ops *rows;
    nd_tensor out, gate, up;    /* forward */
    nd_tensor dgate, dup, dout; /* backward, with gate and up */
    int64_t F;
    bool bf16;
} swiglu;

static void forward_rows(void *arg, int64_t begin, int64_t end)
{
    const swiglu *w = arg;
    for (int64_t i = begin; i < end; i++) {
        w->rows->swiglu_fwd(nd_row(w->out, i), nd_row(w->gate, i), nd_row(w->up, i), w->F, w->bf16);
    }
}

nd_status nd_cpu_swiglu_fwd(nd_stream *stream, nd_tensor out, nd_tensor gate, nd_tensor up)
{
    int64_t n = out.shape[0], F = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, F));
    ND_ASSERT(nd_is_2d_of(gate, out.dtype, n, F) && nd_is_2d_of(up, out.dtype, n, F));
    swiglu w = {.rows = nd_cpu_context_of(stream)->rows,
                .out = out,
                .gate = gate,
                .up = up,
                .F = F,
                .bf16 = out.dtype == ND_DTYPE_BF16};
    nd_cpu_parallel(stream, n, WORK * F, forward_rows, &w);
    return ND_OK;
}

static void backward_rows(void *arg, int64_t begin, int64_t end)
{
    const swiglu *w = arg;
    for (int64_t i = begin; i < end; i++) {
        w->rows->swiglu_bwd(nd_row(w->dgate, i), nd_row(w->dup, i), nd_row(w->dout, i),
                            nd_row(w->gate, i), nd_row(w->up, i), w->F, w->bf16);
    }
}

nd_status nd_cpu_swiglu_bwd(nd_stream *stream, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up)
{
    int64_t n = dout.shape[0], F = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, F));
    ND_ASSERT(nd_is_2d_of(gate, dout.dtype, n, F) && nd_is_2d_of(up, dout.dtype, n, F));
    ND_ASSERT(nd_is_2d_of(dgate, dout.dtype, n, F) && nd_is_2d_of(dup, dout.dtype, n, F));
    swiglu w = {.rows = nd_cpu_context_of(stream)->rows,
                .gate = gate,
                .up = up,
                .dgate = dgate,
                .dup = dup,
                .dout = dout,
                .F = F,
                .bf16 = dout.dtype == ND_DTYPE_BF16};
    nd_cpu_parallel(stream, n, WORK * F, backward_rows, &w);
    return ND_OK;
}
