// SPDX-License-Identifier: Apache-2.0
/* Lists of calls, and the ops that make them. */
#include "trainer/dry/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN_MAX = 256 };

nd_call_entry *nd_calls_find(const nd_calls *calls, const nd_call *call)
{
    for (int i = 0; i < calls->count; i++) {
        if (memcmp(&calls->entries[i].call, call, sizeof *call) == 0) {
            return &calls->entries[i];
        }
    }
    return NULL;
}

nd_status nd_calls_add(nd_calls *calls, const nd_call *call)
{
    nd_call_entry *entry = nd_calls_find(calls, call);
    if (entry) {
        entry->times += calls->weight;
        return ND_OK;
    }
    if (calls->count == calls->capacity) {
        int capacity = calls->capacity > 0 ? 2 * calls->capacity : 64;
        void *grown = realloc(calls->entries, (size_t)capacity * sizeof *calls->entries);
        if (!grown) {
            return nd_fail_memory("the calls of a step");
        }
        calls->entries = grown;
        calls->capacity = capacity;
    }
    calls->entries[calls->count++] = (nd_call_entry){.call = *call, .times = calls->weight};
    return ND_OK;
}

nd_status nd_calls_add_all(nd_calls *calls, const nd_calls *from)
{
    for (int i = 0; i < from->count; i++) {
        calls->weight = from->entries[i].times;
        ND_TRY(nd_calls_add(calls, &from->entries[i].call));
    }
    return ND_OK;
}

static int64_t times_in(const nd_calls *step, const nd_call *call)
{
    const nd_call_entry *entry = nd_calls_find(step, call);
    return entry ? entry->times : 0;
}

double nd_calls_difference(const nd_calls *timed, const nd_calls *step, const nd_calls *other,
                           bool only_more)
{
    double seconds = 0.0;
    for (int i = 0; i < timed->count; i++) {
        const nd_call_entry *entry = &timed->entries[i];
        int64_t more = times_in(step, &entry->call) - times_in(other, &entry->call);
        if (more != 0 && entry->seconds < 0.0) {
            return NAN;
        }
        seconds += more > 0 || !only_more ? (double)more * entry->seconds : 0.0;
    }
    return seconds;
}

void nd_calls_free(nd_calls *calls)
{
    free(calls->entries);
    *calls = (nd_calls){0};
}

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
    return nd_tensor_count(x->c) == 0 ? ND_OK : nd_calls_add(s->native, &call);
}

static nd_status note_amax(nd_stream *s, const nd_amax_args *x)
{
    nd_call call = {.kind = ND_CALL_AMAX, .merges = x->merge, .a = matrix(x->x)};
    call.a.along = (int32_t)x->granularity;
    return nd_calls_add(s->native, &call);
}

static nd_status note_fp8_scale(nd_stream *s, const nd_fp8_scale_args *x)
{
    nd_call call = {.kind = ND_CALL_FP8_SCALE,
                    .a = matrix(nd_tensor_1d(x->scale, ND_DTYPE_F32, x->count))};
    return nd_calls_add(s->native, &call);
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
    return nd_calls_add(s->native, &call);
}

/* Casts of matrices and vectors; casts of other views are the same in BF16 and FP8. */
static nd_status note_cast(nd_stream *s, const nd_cast_args *x)
{
    nd_call call = {.kind = ND_CALL_CAST, .c = matrix(x->out), .a = matrix(x->x)};
    return x->x.axes > 2 || x->out.axes > 2 ? ND_OK : nd_calls_add(s->native, &call);
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
