// SPDX-License-Identifier: Apache-2.0
#include "trainer/dry/dry_ops.h"

#include <string.h>

enum { ALIGN_MAX = 256 };

static nd_call_matrix matrix(nd_tensor t)
{
    uintptr_t address = (uintptr_t)t.data, low = address & -address;
    if (!t.data) {
        return (nd_call_matrix){0};
    }
    return (nd_call_matrix){
        .rows = t.shape[0],
        .columns = t.axes == 1 ? 1 : t.shape[1],
        .stride = t.axes == 1 ? 1 : t.stride[0],
        .axes = t.axes,
        .dtype = (int32_t)t.dtype,
        .align = low == 0 || low > ALIGN_MAX ? ALIGN_MAX : (int32_t)low,
    };
}

static nd_call_matrix operand(const nd_fp8 *x, bool as_stored)
{
    nd_call_matrix m = matrix(as_stored && x->codes.data ? x->codes : x->transposed);
    m.along = (int32_t)x->granularity;
    return m;
}

static nd_status note(nd_stream *stream, const nd_call *call)
{
    return nd_calls_add(stream->native, call);
}

static nd_status matmul(nd_stream *s, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta)
{
    nd_call call = {.kind = ND_CALL_MATMUL,
                    .a_transposed = a_transposed,
                    .b_transposed = b_transposed,
                    .beta = beta != 0.0f,
                    .c = matrix(c),
                    .a = matrix(a),
                    .b = matrix(b)};
    return c.shape[0] == 0 || c.shape[1] == 0 ? ND_OK : note(s, &call);
}

static nd_status matmul_fp8(nd_stream *s, nd_tensor c, nd_fp8 a, bool a_transposed, nd_fp8 b,
                            bool b_transposed, float beta, bool fast_accumulation, void *scratch)
{
    nd_call call = {.kind = ND_CALL_MATMUL_FP8,
                    .a_transposed = a_transposed,
                    .b_transposed = b_transposed,
                    .beta = beta != 0.0f,
                    .fast = fast_accumulation,
                    .c = matrix(c),
                    .a = operand(&a, !a_transposed),
                    .b = operand(&b, b_transposed)};
    return c.shape[0] == 0 || c.shape[1] == 0 ? ND_OK : note(s, &call);
}

static nd_status amax(nd_stream *s, float *out, nd_tensor x, nd_granularity granularity, bool merge)
{
    nd_call call = {.kind = ND_CALL_AMAX, .merges = merge, .a = matrix(x)};
    call.a.along = (int32_t)granularity;
    return note(s, &call);
}

static nd_status fp8_scale(nd_stream *s, float *scale, float *inverse, const float *amax_,
                           int64_t count, nd_dtype format, bool power_of_two)
{
    nd_call call = {.kind = ND_CALL_FP8_SCALE,
                    .a = matrix(nd_tensor_1d(scale, ND_DTYPE_F32, count))};
    return note(s, &call);
}

static nd_status fp8_cast(nd_stream *s, nd_fp8 out, float *amax_, nd_tensor x)
{
    nd_call call = {.kind = ND_CALL_FP8_CAST,
                    .merges = amax_ != NULL,
                    .c = matrix(out.codes),
                    .a = matrix(x),
                    .b = matrix(out.transposed)};
    call.a.along = (int32_t)out.granularity;
    return note(s, &call);
}

static nd_status fp8_transpose(nd_stream *s, nd_tensor out, nd_tensor codes)
{
    nd_call call = {.kind = ND_CALL_FP8_TRANSPOSE, .c = matrix(out), .a = matrix(codes)};
    return note(s, &call);
}

/* Of matrices and vectors; others are the same in BF16 and FP8. */
static nd_status cast(nd_stream *s, nd_tensor out, nd_tensor x)
{
    nd_call call = {.kind = ND_CALL_CAST, .c = matrix(out), .a = matrix(x)};
    return note(s, &call);
}

/* The rest, which is the same whatever the linears' precision, or nearly so: a norm or SwiGLU that
 * measures or casts its result (nd_fuse) takes no longer for it. */
#define NOTHING(op, ...)                                                                           \
    static nd_status op(nd_stream *s, __VA_ARGS__)                                                 \
    {                                                                                              \
        return ND_OK;                                                                              \
    }

NOTHING(embedding_fwd, nd_tensor out, nd_tensor ids, nd_tensor table, int64_t first)
NOTHING(embedding_bwd, nd_tensor dtable, nd_tensor ids, nd_tensor dout, int64_t first)
NOTHING(rmsnorm_fwd, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x, nd_tensor delta,
        nd_tensor weight, float eps, const nd_fuse *fuse)
NOTHING(rmsnorm_bwd, nd_tensor dx, nd_tensor dweight, nd_tensor dy, nd_tensor dres, nd_tensor x,
        nd_tensor weight, nd_tensor rstd)
NOTHING(rope, nd_tensor out, nd_tensor x, nd_tensor positions, nd_rope_view table, bool inverse)
NOTHING(swiglu_fwd, nd_tensor out, nd_tensor gate, nd_tensor up, const nd_fuse *fuse)
NOTHING(swiglu_bwd, nd_tensor dgate, nd_tensor dup, nd_tensor dout, nd_tensor gate, nd_tensor up,
        const nd_fuse *fuse_gate, const nd_fuse *fuse_up)
NOTHING(attention_fwd, const nd_attention *a, nd_tensor out, nd_tensor lse, nd_tensor q,
        nd_tensor k, nd_tensor v, void *scratch)
NOTHING(attention_delta, const nd_attention *a, nd_tensor delta, nd_tensor out, nd_tensor dout)
NOTHING(attention_bwd, const nd_attention *a, nd_tensor dq, nd_tensor dk, nd_tensor dv, nd_tensor q,
        nd_tensor k, nd_tensor v, nd_tensor out, nd_tensor dout, nd_tensor lse, nd_tensor delta,
        bool add_q, bool add_kv, void *scratch)
NOTHING(lse_merge, const nd_attention *a, nd_tensor acc, nd_tensor acc_lse, nd_tensor out,
        nd_tensor lse)
NOTHING(ce_stats, nd_tensor row_max, nd_tensor row_sum, nd_tensor target, nd_tensor logits,
        nd_tensor labels, int64_t first, int64_t valid)
NOTHING(ce_rescale, nd_tensor row_sum, nd_tensor row_max, nd_tensor global_max)
NOTHING(ce_loss, double *loss_sum, nd_tensor max, nd_tensor sum, nd_tensor target, nd_tensor labels)
NOTHING(ce_bwd, nd_tensor logits, nd_tensor max, nd_tensor sum, nd_tensor labels, int64_t first,
        int64_t valid, const int64_t *count)
NOTHING(add, nd_tensor out, nd_tensor a, nd_tensor b)
NOTHING(accumulate, nd_tensor acc, nd_tensor x)
NOTHING(sum_squares, double *out, const float *x, int64_t count)
NOTHING(random_normal, float *out, int64_t count, float deviation, uint64_t seed,
        uint64_t random_stream, uint64_t first)
NOTHING(adamw, const nd_adamw *hyper, float *p, float *m, float *v, const float *grad,
        const nd_flat_range *ranges, int range_count)
NOTHING(sgd, const nd_adamw *hyper, float *p, const float *grad, const nd_flat_range *ranges,
        int range_count)
NOTHING(fp8_delayed, const nd_fp8_history *history, nd_amax_algorithm algorithm)
NOTHING(fp8_count, int64_t counts[2], nd_tensor x, nd_fp8 as)

nd_ops nd_dry_ops(const nd_ops *real)
{
    return (nd_ops){
        .name = real->name,
        .fp8_needs_transposed = real->fp8_needs_transposed,
        .matmul = matmul,
        .embedding_fwd = embedding_fwd,
        .embedding_bwd = embedding_bwd,
        .rmsnorm_fwd = rmsnorm_fwd,
        .rmsnorm_bwd = rmsnorm_bwd,
        .rope = rope,
        .swiglu_fwd = swiglu_fwd,
        .swiglu_bwd = swiglu_bwd,
        .attention_fwd = attention_fwd,
        .attention_delta = attention_delta,
        .attention_bwd = attention_bwd,
        .attention_scratch = real->attention_scratch,
        .attention_uses_delta = real->attention_uses_delta,
        .lse_merge = lse_merge,
        .ce_stats = ce_stats,
        .ce_rescale = ce_rescale,
        .ce_loss = ce_loss,
        .ce_bwd = ce_bwd,
        .add = add,
        .accumulate = accumulate,
        .cast = cast,
        .sum_squares = sum_squares,
        .random_normal = random_normal,
        .adamw = adamw,
        .sgd = sgd,
        .amax = amax,
        .fp8_scale = fp8_scale,
        .fp8_delayed = fp8_delayed,
        .fp8_cast = fp8_cast,
        .fp8_transpose = fp8_transpose,
        .fp8_count = fp8_count,
        .matmul_fp8 = matmul_fp8,
        .matmul_fp8_scratch = real->matmul_fp8_scratch,
    };
}
