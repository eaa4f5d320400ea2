// SPDX-License-Identifier: Apache-2.0
/* The backward of attention of the heads that a rank has, around that of the method. */
#include "trainer/parallel/cp_method.h"

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
    return cp->method->backward(cp, b);
}

nd_status nd_cp_heads_backward_finish(nd_cp *cp, nd_tensor dqkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t kv = 2 * d->K * d->D;
    ND_TRY(nd_exchange_finish(cp->rank, &cp->arriving));
    ND_TRY(cp->method->finish ? cp->method->finish(cp) : ND_OK);
    if (!cp->method->in_place) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_columns(dqkv, d->H * d->D, kv),
              .x = nd_tensor_2d((float *)cp->arrived, ND_DTYPE_F32, d->T, kv));
    }
    return ND_OK;
}
