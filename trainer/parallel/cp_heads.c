// SPDX-License-Identifier: Apache-2.0
/* Attention of the heads that a rank has, by the method of exchanging keys and values. */
#include "trainer/parallel/cp_method.h"

/* All keys where there is no method. */
static nd_kv_source local_kv(const nd_cp *cp, nd_tensor qkv)
{
    nd_kv_source kv = nd_cp_local_source(&cp->dims, qkv);
    kv.bounds = cp->sight.first_keys;
    return kv;
}

nd_status nd_cp_heads_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    if (cp->method) {
        return cp->method->forward(cp, qkv, o, lse);
    }
    nd_attention_block whole[ND_CP_BLOCKS];
    nd_cp_blocks_of(cp, 0, cp->dims.s, whole);
    nd_kv_source kv = local_kv(cp, qkv);
    return nd_cp_block_forward(cp, &whole[0], qkv, &kv, o, lse);
}

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    const int64_t rows = cp->sight.first_keys ? d->s : d->chunk;
    for (int64_t at = 0; at < d->s && cp->delta; at += rows) {
        const nd_attention_block all = {at, rows, 0, rows, 0};
        const nd_attention a = nd_cp_attention_of(cp, &all);
        if (!cp->sight.first_keys &&
            !cp->rank->ops->attention_uses_delta(cp->rank->device, &a, d->act)) {
            return ND_OK; /* other layers have a window */
        }
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, .attention = a,
              .delta = nd_cp_row_view(d, cp->delta, &all), .out = nd_cp_q_view(d, o, &all),
              .dout = nd_cp_q_view(d, dout, &all));
    }
    return ND_OK;
}

nd_status nd_cp_heads_backward(nd_cp *cp, const nd_cp_backward *b)
{
    ND_TRY(make_delta(cp, b->o, b->dout));
    if (cp->method) {
        return cp->method->backward(cp, b);
    }
    nd_attention_block whole[ND_CP_BLOCKS];
    nd_cp_blocks_of(cp, 0, cp->dims.s, whole);
    nd_kv_source kv = local_kv(cp, b->qkv);
    const nd_block_gradients to = {.dq = b->dqkv, .dkv = nd_cp_local_source(&cp->dims, b->dqkv)};
    return nd_cp_block_backward(cp, &whole[0], b, &kv, &to);
}

nd_status nd_cp_heads_backward_finish(nd_cp *cp, nd_tensor dqkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t kv = 2 * d->K * d->D;
    ND_TRY(nd_exchange_finish(cp->rank, &cp->arriving));
    ND_TRY(cp->method && cp->method->finish ? cp->method->finish(cp) : ND_OK);
    if (cp->method) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_columns(dqkv, d->H * d->D, kv),
              .x = nd_tensor_2d((float *)cp->arrived, ND_DTYPE_F32, d->T, kv));
    }
    return ND_OK;
}
