// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sdpa_parts.h"

#include <string.h>

nd_sdpa_call nd_sdpa_forward_call(nd_cuda_context *context, const nd_attention_fwd_args *x)
{
    return (nd_sdpa_call){.context = context,
                          .x = {.attention = x->attention,
                                .q = x->q,
                                .k = x->k,
                                .v = x->v,
                                .out = x->out,
                                .lse = x->lse,
                                .first_key = x->first_key,
                                .end_key = x->end_key,
                                .scratch = x->scratch}};
}

bool nd_sdpa_is_aligned(nd_tensor t)
{
    return (uintptr_t)t.data % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 &&
           t.stride[2] % 8 == 0;
}

nd_tensor nd_sdpa_at(nd_tensor t, int64_t row, int64_t head)
{
    t.data =
        (char *)t.data + (row * t.stride[1] + head * t.stride[2]) * (int64_t)nd_dtype_size(t.dtype);
    return t;
}

nd_tensor nd_sdpa_part(nd_tensor t, int64_t row, int64_t rows, int64_t head, int64_t heads)
{
    t = nd_sdpa_at(t, row, head);
    t.shape[1] = rows;
    t.shape[2] = heads;
    return t;
}

static int64_t group_of(const nd_sdpa_call *c)
{
    return c->x.attention.heads / c->x.attention.kv_heads;
}

static nd_sdpa_strides strides_of(nd_tensor t)
{
    return (nd_sdpa_strides){t.stride[0], t.stride[1], t.stride[2]};
}

nd_sdpa_form nd_sdpa_form_of(const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    nd_sdpa_form form;
    memset(&form, 0, sizeof form); /* compared by bytes */
    form.batch = c->x.attention.batch;
    form.sq = p->rows;
    form.sk = p->keys;
    form.heads = p->kvs * group_of(c);
    form.kv_heads = p->kvs;
    form.head_dim = c->x.attention.head_dim;
    form.q = strides_of(c->x.q);
    form.k = strides_of(c->x.k);
    form.v = strides_of(c->x.v);
    form.out = strides_of(c->documents.count > 0 && !c->backward ? c->to_q : c->x.out);
    form.window = c->x.attention.window;
    form.scale = c->x.attention.scale;
    form.mask = (int32_t)p->mask;
    if (c->backward) {
        form.backward = true;
        form.deterministic = c->context->deterministic;
        form.dout = strides_of(c->x.dout);
        form.dq = strides_of(c->to_q);
        form.dk = strides_of(c->to_k);
        form.dv = strides_of(c->to_v);
    }
    return form;
}

/* Contiguous, and somewhere in the scratch. */
static nd_tensor room(const nd_sdpa_call *c, nd_dtype dtype, int64_t rows, int64_t heads)
{
    return nd_tensor_4d(NULL, dtype, c->x.attention.batch, rows, heads, c->x.attention.head_dim);
}

static void choose_results(nd_sdpa_call *c)
{
    const nd_sdpa_cut *cut = &c->cut;
    c->through_q =
        c->x.dq.dtype != ND_DTYPE_BF16 || cut->adds_queries || !nd_sdpa_is_aligned(c->x.dq);
    c->through_kv = c->x.dk.dtype != ND_DTYPE_BF16 || cut->adds_keys ||
                    !nd_sdpa_is_aligned(c->x.dk) || !nd_sdpa_is_aligned(c->x.dv);
    nd_tensor q = room(c, ND_DTYPE_BF16, cut->rows, cut->kvs * group_of(c));
    nd_tensor k = room(c, ND_DTYPE_BF16, cut->keys, cut->kvs);
    c->to_q = c->through_q ? q : c->x.dq;
    c->to_k = c->through_kv ? k : c->x.dk;
    c->to_v = c->through_kv ? k : c->x.dv;
    c->sum_q = room(c, ND_DTYPE_F32, cut->rows, cut->kvs * group_of(c));
    c->sum_k = c->sum_v = room(c, ND_DTYPE_F32, c->x.attention.sk, c->x.attention.kv_heads);
}

nd_status nd_sdpa_plan(nd_sdpa_call *c)
{
    const nd_cuda_context *context = c->context;
    bool ordered = c->backward && context->deterministic;
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    size_t workspace = 0, bytes = 0;
    bool hopper = context->facts.capability / 10 == 9;
    c->cut = nd_sdpa_cut_block(&c->x.attention, ordered ? context->ordered_bytes : 0,
                               c->backward && hopper);
    if (c->backward) {
        choose_results(c);
    }
    while (nd_sdpa_next(&c->cut, &walk, &p)) {
        if (p.shows_form) {
            nd_sdpa_form form = nd_sdpa_form_of(c, &p);
            ND_TRY(nd_cudnn_workspace(context->cudnn, &form, &bytes));
            workspace = bytes > workspace ? bytes : workspace;
        }
    }
    c->layout = nd_sdpa_layout_of(&c->x.attention, &c->cut, workspace, c->backward);
    return ND_OK;
}

nd_status nd_sdpa_check_scratch(const nd_sdpa_call *c, size_t bytes)
{
    return bytes <= c->context->attention_scratch
               ? ND_OK
               : nd_fail(ND_ERR_INTERNAL,
                         "attention's %s of %lld rows and %lld keys needs %zu bytes of scratch; "
                         "%zu were planned",
                         c->backward ? "backward" : "forward", (long long)c->x.attention.sq,
                         (long long)c->x.attention.sk, bytes, c->context->attention_scratch);
}
