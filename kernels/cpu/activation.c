// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"

#include "kernels/cpu/fuse.h"
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
            w->rows->rope(nd_element_address(w->out, i * w->out.stride[0] + h * w->out.stride[1]),
                          nd_element_address(w->x, i * w->x.stride[0] + h * w->x.stride[1]),
                          w->table.cos + position * half, w->table.sin + position * half, half,
                          w->sign, w->x.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_rope(nd_stream *stream, const nd_rope_args *args)
{
    const nd_tensor out = args->out, x = args->x, positions = args->positions;
    int64_t n = x.shape[0];
    ND_ASSERT(nd_is_act(x) && x.axes == 3 && x.shape[2] % 2 == 0 && x.stride[2] == 1);
    ND_ASSERT(out.axes == 3 && out.dtype == x.dtype && out.shape[0] == n && out.stride[2] == 1);
    ND_ASSERT(out.shape[1] == x.shape[1] && out.shape[2] == x.shape[2]);
    ND_ASSERT(nd_is_vector(positions, ND_DTYPE_I32, n));
    rotation w = {.rows = nd_cpu_context_of(stream)->rows,
                  .out = out,
                  .x = x,
                  .positions = positions.data,
                  .table = args->table,
                  .sign = args->inverse ? -1.0f : 1.0f};
    nd_cpu_parallel(stream, n, x.shape[1] * x.shape[2], rotate_tokens, &w);
    return ND_OK;
}

enum { WORK = 4 }; /* an element of SwiGLU costs about four of a plain sum */

typedef struct swiglu {
    const nd_row_ops *rows;
    nd_tensor gate, up;
    nd_tensor dout;           /* backward */
    nd_cpu_result results[2]; /* forward: out; backward: dgate, dup */
    int64_t F;
} swiglu;

static void *at(nd_tensor t, int64_t row, int64_t column)
{
    return nd_element_address(t, row * t.stride[0] + column);
}

static void forward_rows(void *arg, int64_t begin, int64_t end)
{
    swiglu *w = arg;
    nd_cpu_result *r = &w->results[0];
    int64_t piece = nd_cpu_piece_of(r, w->F);
    float buffer[ND_CPU_PIECE];
    uint32_t most = 0;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t f = 0; f < w->F; f += piece) {
            int64_t n = w->F - f < piece ? w->F - f : piece;
            void *out = nd_cpu_piece_at(r, i, f, buffer);
            w->rows->swiglu_fwd(out, at(w->gate, i, f), at(w->up, i, f), n, r->bf16);
            most = nd_cpu_piece_done(r, w->rows, out, i, f, n, most);
        }
    }
    nd_raise_largest(&r->most, most);
}

nd_status nd_cpu_swiglu_fwd(nd_stream *stream, const nd_swiglu_fwd_args *args)
{
    const nd_tensor out = args->out, gate = args->gate, up = args->up;
    int64_t n = out.shape[0], F = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, F));
    ND_ASSERT(nd_is_2d_of(gate, out.dtype, n, F) && nd_is_2d_of(up, out.dtype, n, F));
    swiglu w = {.rows = nd_cpu_context_of(stream)->rows, .gate = gate, .up = up, .F = F};
    ND_ASSERT(nd_is_fuse_of(&args->fuse, out, n, F));
    nd_cpu_result_begin(&w.results[0], out, &args->fuse);
    nd_cpu_parallel(stream, n, WORK * F, forward_rows, &w);
    nd_cpu_result_end(&w.results[0]);
    return ND_OK;
}

static void backward_rows(void *arg, int64_t begin, int64_t end)
{
    swiglu *w = arg;
    nd_cpu_result *r = w->results;
    int64_t piece[2] = {nd_cpu_piece_of(&r[0], w->F), nd_cpu_piece_of(&r[1], w->F)};
    int64_t step = piece[0] < piece[1] ? piece[0] : piece[1];
    float buffers[2][ND_CPU_PIECE];
    uint32_t most[2] = {0, 0};
    for (int64_t i = begin; i < end; i++) {
        for (int64_t f = 0; f < w->F; f += step) {
            int64_t n = w->F - f < step ? w->F - f : step;
            void *d[2] = {nd_cpu_piece_at(&r[0], i, f, buffers[0]),
                          nd_cpu_piece_at(&r[1], i, f, buffers[1])};
            w->rows->swiglu_bwd(d[0], d[1], at(w->dout, i, f), at(w->gate, i, f), at(w->up, i, f),
                                n, r[0].bf16);
            for (int k = 0; k < 2; k++) {
                most[k] = nd_cpu_piece_done(&r[k], w->rows, d[k], i, f, n, most[k]);
            }
        }
    }
    nd_raise_largest(&r[0].most, most[0]);
    nd_raise_largest(&r[1].most, most[1]);
}

nd_status nd_cpu_swiglu_bwd(nd_stream *stream, const nd_swiglu_bwd_args *args)
{
    const nd_tensor dgate = args->dgate, dup = args->dup, dout = args->dout, gate = args->gate,
                    up = args->up;
    int64_t n = dout.shape[0], F = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, F));
    ND_ASSERT(nd_is_2d_of(gate, dout.dtype, n, F) && nd_is_2d_of(up, dout.dtype, n, F));
    ND_ASSERT(nd_is_2d_of(dgate, dout.dtype, n, F) && nd_is_2d_of(dup, dout.dtype, n, F));
    ND_ASSERT(nd_is_fuse_of(&args->fuse_gate, dgate, n, F) &&
              nd_is_fuse_of(&args->fuse_up, dup, n, F));
    swiglu w = {
        .rows = nd_cpu_context_of(stream)->rows, .gate = gate, .up = up, .dout = dout, .F = F};
    nd_cpu_result_begin(&w.results[0], dgate, &args->fuse_gate);
    nd_cpu_result_begin(&w.results[1], dup, &args->fuse_up);
    nd_cpu_parallel(stream, n, WORK * F, backward_rows, &w);
    nd_cpu_result_end(&w.results[0]);
    nd_cpu_result_end(&w.results[1]);
    return ND_OK;
}
