// SPDX-License-Identifier: Apache-2.0
/* What the ops of a step compute and move. */
#include "kernels/ops_check.h"
#include "runtime/base/math.h"
#include "trainer/dry/dry.h"

static nd_step_work *work_of(const nd_stream *stream)
{
    return stream->native;
}

static void add(const nd_stream *stream, double *sum, double amount)
{
    *sum += amount * (double)work_of(stream)->calls.weight;
}

/* Bytes of the elements, not of the gaps; 0 for an absent tensor. */
static double bytes_of(nd_tensor t)
{
    return t.data ? (double)nd_tensor_count(t) * (double)nd_dtype_size(t.dtype) : 0.0;
}

/* Bytes of a result that is stored, as codes, or both. */
static double bytes_of_result(nd_tensor t, const nd_fuse *fuse)
{
    return bytes_of(t) + bytes_of(fuse->codes);
}

static nd_status work_product(nd_stream *s, const nd_product_args *x)
{
    nd_step_work *w = work_of(s);
    const nd_matrix *a = &x->a;
    const int64_t k = a->stored.shape[a->transposed == x->a_transposed ? 1 : 0];
    add(s,
        nd_matrix_is_fp8(a)               ? &w->flops_fp8
        : a->stored.dtype == ND_DTYPE_F32 ? &w->flops_f32
                                          : &w->flops_bf16,
        2.0 * (double)nd_tensor_count(x->c) * (double)k);
    return ND_OK;
}

/* Pairs of a query and a key that it sees. */
static double visible_pairs(const nd_attention *a)
{
    double pairs = 0.0;
    for (int64_t i = 0; i < a->sq; i++) {
        const nd_key_range keys = nd_visible_keys(a, (nd_tensor){0}, (nd_tensor){0}, 0, i);
        pairs += (double)nd_max(0, keys.end - keys.begin);
    }
    return pairs * (double)(a->batch * a->heads);
}

/* Scores, and their product with the values. */
static nd_status work_attention_fwd(nd_stream *s, const nd_attention_fwd_args *x)
{
    const nd_attention *a = &x->attention;
    add(s, &work_of(s)->flops_attention, 4.0 * visible_pairs(a) * (double)a->head_dim);
    return ND_OK;
}

/* Scores again, and the gradients of probabilities, values, queries and keys. */
static nd_status work_attention_bwd(nd_stream *s, const nd_attention_bwd_args *x)
{
    const nd_attention *a = &x->attention;
    add(s, &work_of(s)->flops_attention, 10.0 * visible_pairs(a) * (double)a->head_dim);
    return ND_OK;
}

/* X(op, bytes): the ops of our kernels, and what each reads and writes. */
#define EACH_MOVE(X)                                                                               \
    X(embedding_fwd, 2.0 * bytes_of(x->out))                                                       \
    X(embedding_bwd, bytes_of(x->dout) + 8.0 * (double)nd_tensor_count(x->dout))                   \
    X(rmsnorm_fwd,                                                                                 \
      bytes_of_result(x->y, &x->fuse) + bytes_of(x->sum) + bytes_of(x->x) + bytes_of(x->delta))    \
    X(rmsnorm_bwd, bytes_of(x->dx) + bytes_of(x->dy) + bytes_of(x->dres) + bytes_of(x->x))         \
    X(row_dots, bytes_of(x->x) + bytes_of(x->y))                                                   \
    X(rope, bytes_of(x->out) + bytes_of(x->x))                                                     \
    X(swiglu_fwd, bytes_of_result(x->out, &x->fuse) + bytes_of(x->gate) + bytes_of(x->up))         \
    X(swiglu_bwd, bytes_of_result(x->dgate, &x->fuse[0]) + bytes_of_result(x->dup, &x->fuse[1]) +  \
                      bytes_of(x->dout) + bytes_of(x->gate) + bytes_of(x->up))                     \
    X(bias_fwd, bytes_of(x->out))                                                                  \
    X(bias_bwd, bytes_of(x->dout))                                                                 \
    X(attention_delta, bytes_of(x->delta) + bytes_of(x->out) + bytes_of(x->dout))                  \
    X(lse_merge, 2.0 * bytes_of(x->acc) + bytes_of(x->out))                                        \
    X(ce_stats, bytes_of(x->logits))                                                               \
    X(ce_bwd, 2.0 * bytes_of(x->logits))                                                           \
    X(accumulate, 2.0 * bytes_of(x->acc) + bytes_of(x->x))                                         \
    X(cast, bytes_of(x->out) + bytes_of(x->x))                                                     \
    X(amax, bytes_of(x->x))                                                                        \
    X(make_form, bytes_of(x->out.stored) + bytes_of(x->transposed) + bytes_of(x->x))

#define MOVE(op, bytes)                                                                            \
    static nd_status work_##op(nd_stream *s, const nd_##op##_args *x)                              \
    {                                                                                              \
        add(s, &work_of(s)->moved_bytes, bytes);                                                   \
        return ND_OK;                                                                              \
    }
EACH_MOVE(MOVE)

nd_ops nd_dry_work_ops(const nd_ops *real)
{
    nd_ops ops = nd_dry_idle_ops(real);
#define COUNTED(op, bytes) ops.op = work_##op;
    EACH_MOVE(COUNTED)
#undef COUNTED
    ops.product = work_product;
    ops.attention_fwd = work_attention_fwd;
    ops.attention_bwd = work_attention_bwd;
    return ops;
}
