// SPDX-License-Identifier: Apache-2.0
#include "trainer/dry/dry.h"

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

static nd_call_matrix operand(const nd_matrix *x)
{
    nd_call_matrix m = matrix(x->stored);
    m.along = (int32_t)x->granularity;
    return m;
}

static nd_status note(nd_stream *stream, const nd_call *call)
{
    return nd_calls_add(stream->native, call);
}

static bool is_empty(nd_tensor c)
{
    return c.shape[0] == 0 || c.shape[1] == 0;
}

static nd_status note_product(nd_stream *s, const nd_product_args *x)
{
    const bool fp8 = nd_matrix_is_fp8(&x->a);
    nd_call call = {.kind = fp8 ? ND_CALL_PRODUCT_FP8 : ND_CALL_PRODUCT,
                    .a_transposed = x->a_transposed,
                    .b_transposed = x->b_transposed,
                    .beta = x->beta != 0.0f,
                    .fast = x->fast_accumulation,
                    .c = matrix(x->c),
                    .a = operand(&x->a),
                    .b = operand(&x->b)};
    return is_empty(x->c) ? ND_OK : note(s, &call);
}

static nd_status note_amax(nd_stream *s, const nd_amax_args *x)
{
    nd_call call = {.kind = ND_CALL_AMAX, .merges = x->merge, .a = matrix(x->x)};
    call.a.along = (int32_t)x->granularity;
    return note(s, &call);
}

static nd_status note_fp8_scale(nd_stream *s, const nd_fp8_scale_args *x)
{
    nd_call call = {.kind = ND_CALL_FP8_SCALE,
                    .a = matrix(nd_tensor_1d(x->scale, ND_DTYPE_F32, x->count))};
    return note(s, &call);
}

static nd_status note_make_form(nd_stream *s, const nd_make_form_args *x)
{
    const bool codes = nd_dtype_is_fp8(x->x.dtype);
    nd_call call = {.kind = codes ? ND_CALL_FP8_TRANSPOSE : ND_CALL_FP8_CAST,
                    .merges = x->amax != NULL,
                    .c = matrix(codes ? x->transposed : x->out.stored),
                    .a = matrix(x->x),
                    .b = matrix(codes ? (nd_tensor){0} : x->transposed)};
    call.a.along = (int32_t)x->out.granularity;
    return note(s, &call);
}

/* Casts of matrices and vectors; casts of other views are the same in BF16 and FP8. */
static nd_status note_cast(nd_stream *s, const nd_cast_args *x)
{
    nd_call call = {.kind = ND_CALL_CAST, .c = matrix(x->out), .a = matrix(x->x)};
    return x->x.axes > 2 || x->out.axes > 2 ? ND_OK : note(s, &call);
}

#define SKIP(op, prefix)                                                                           \
    static nd_status prefix##op(nd_stream *s, const nd_##op##_args *x)                             \
    {                                                                                              \
        return ND_OK;                                                                              \
    }
ND_EACH_OP(SKIP, skip_)

nd_ops nd_dry_idle_ops(const nd_ops *real)
{
#define QUERY_OF_REAL(query, type, parameters, prefix) .query = real->query,
    return (nd_ops){.name = real->name,
                    .limits = real->limits,
                    .fp8_rows = real->fp8_rows,
                    ND_EACH_OP(ND_OP_ENTRY, skip_) ND_EACH_QUERY(QUERY_OF_REAL, )};
#undef QUERY_OF_REAL
}

/* The ops that are skipped take the same time whatever the linears' precision, or nearly so: a norm
 * or SwiGLU that measures or casts its results takes no longer for it. */
nd_ops nd_dry_ops(const nd_ops *real)
{
    nd_ops ops = nd_dry_idle_ops(real);
    ops.product = note_product;
    ops.amax = note_amax;
    ops.fp8_scale = note_fp8_scale;
    ops.make_form = note_make_form;
    ops.cast = note_cast;
    return ops;
}
