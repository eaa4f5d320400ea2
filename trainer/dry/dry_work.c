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

static double product_flops(nd_tensor c, int64_t k)
{
    return 2.0 * (double)c.shape[0] * (double)c.shape[1] * (double)k;
}

static nd_status work_product(nd_stream *s, const nd_product_args *x)
{
    nd_step_work *w = work_of(s);
    const nd_matrix *a = &x->a;
    add(s,
        nd_matrix_is_fp8(a)               ? &w->flops_fp8
        : a->stored.dtype == ND_DTYPE_F32 ? &w->flops_f32
                                          : &w->flops_bf16,
        product_flops(x->c, a->stored.shape[a->transposed == x->a_transposed ? 1 : 0]));
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

/* An op of our kernels: what it reads and writes. */
#define MOVES(op, bytes)                                                                           \
    static nd_status work_##op(nd_stream *s, const nd_##op##_args *x)                              \
    {                                                                                              \
        add(s, &work_of(s)->moved_bytes, bytes);                                                   \
        return ND_OK;                                                                              \
    }
MOVES(embedding_fwd, 2.0 * bytes_of(x->out))
MOVES(embedding_bwd, bytes_of(x->dout) + 8.0 * (double)nd_tensor_count(x->dout))
MOVES(rmsnorm_fwd,
      bytes_of_result(x->y, &x->fuse) + bytes_of(x->sum) + bytes_of(x->x) + bytes_of(x->delta))
MOVES(rmsnorm_bwd, bytes_of(x->dx) + bytes_of(x->dy) + bytes_of(x->dres) + bytes_of(x->x))
MOVES(row_dots, bytes_of(x->x) + bytes_of(x->y))
MOVES(rope, bytes_of(x->out) + bytes_of(x->x))
MOVES(swiglu_fwd, bytes_of_result(x->out, &x->fuse) + bytes_of(x->gate) + bytes_of(x->up))
MOVES(swiglu_bwd, bytes_of_result(x->dgate, &x->fuse[0]) + bytes_of_result(x->dup, &x->fuse[1]) +
                      bytes_of(x->dout) + bytes_of(x->gate) + bytes_of(x->up))
MOVES(bias_fwd, bytes_of(x->out))
MOVES(bias_bwd, bytes_of(x->dout))
MOVES(attention_delta, bytes_of(x->delta) + bytes_of(x->out) + bytes_of(x->dout))
MOVES(lse_merge, 2.0 * bytes_of(x->acc) + bytes_of(x->out))
MOVES(ce_stats, bytes_of(x->logits))
MOVES(ce_bwd, 2.0 * bytes_of(x->logits))
MOVES(accumulate, 2.0 * bytes_of(x->acc) + bytes_of(x->x))
MOVES(cast, bytes_of(x->out) + bytes_of(x->x))
MOVES(amax, bytes_of(x->x))
MOVES(make_form, bytes_of(x->out.stored) + bytes_of(x->transposed) + bytes_of(x->x))

nd_ops nd_dry_work_ops(const nd_ops *real)
{
    nd_ops ops = nd_dry_idle_ops(real);
#define COUNTED(op) ops.op = work_##op
    COUNTED(product);
    COUNTED(attention_fwd);
    COUNTED(attention_bwd);
    COUNTED(embedding_fwd);
    COUNTED(embedding_bwd);
    COUNTED(rmsnorm_fwd);
    COUNTED(rmsnorm_bwd);
    COUNTED(row_dots);
    COUNTED(rope);
    COUNTED(swiglu_fwd);
    COUNTED(swiglu_bwd);
    COUNTED(bias_fwd);
    COUNTED(bias_bwd);
    COUNTED(attention_delta);
    COUNTED(lse_merge);
    COUNTED(ce_stats);
    COUNTED(ce_bwd);
    COUNTED(accumulate);
    COUNTED(cast);
    COUNTED(amax);
    COUNTED(make_form);
#undef COUNTED
    return ops;
}
