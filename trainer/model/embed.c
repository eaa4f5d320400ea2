// SPDX-License-Identifier: Apache-2.0
/* The vocabulary-parallel embedding: each tp rank looks up the rows that it holds, and the sum over
 * tp leaves each rank its tokens. */
#include "trainer/model/model.h"

static nd_tensor ids_of(const nd_activation_set *set)
{
    return nd_tensor_1d(set->batch.ids, ND_DTYPE_I32, set->T);
}

nd_status nd_model_scale(nd_model *m, nd_trace_kind kind, nd_tensor x, float scale)
{
    if (scale != 1.0f) {
        ND_OP(m->rank, kind, axpy, .out = x, .x = x, .scale = scale);
    }
    return ND_OK;
}

nd_status nd_embed_forward(nd_model *m, nd_activation_set *set, nd_residual *out)
{
    nd_rank *r = m->rank;
    const int64_t first = m->stage->layers.begin;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit;
    nd_tensor x = nd_set_block(set, first)->x_in; /* (Tl, C) */
    nd_tensor partial = nd_tp_partial(r, x, m->work.full_b);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(nd_fsdp_prefetch(&m->fsdp, nd_layout_unit(m->layout, ND_UNIT_BLOCK, first)));
    ND_OP(r, ND_TRACE_ELEMENTWISE, embedding_fwd, .out = partial, .ids = ids_of(set),
          .table = nd_fsdp_weight(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1),
          .first = m->dims.vocab_first);
    if (unit->kind != ND_UNIT_HEAD) { /* a tied table stays until the end of backward */
        nd_fsdp_release(&m->fsdp, unit);
    }
    ND_TRY(nd_tp_reduce(r, partial, x, NULL));
    ND_TRY(nd_model_scale(m, ND_TRACE_ELEMENTWISE, x, m->dims.lookup_scale));
    *out = (nd_residual){.x = x};
    return ND_OK;
}

nd_status nd_embed_backward(nd_model *m, nd_activation_set *set)
{
    nd_rank *r = m->rank;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit;
    nd_tensor dx;
    ND_TRY(nd_model_scale(m, ND_TRACE_ELEMENTWISE, m->work.dx, m->dims.lookup_scale));
    ND_TRY(nd_tp_gather(r, m->work.dx, m->work.full_a, NULL, &dx));
    /* A tied table's gradient was begun by the head and is released here, last. */
    if (unit->kind != ND_UNIT_HEAD) {
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_EMBED, -1));
    }
    ND_OP(r, ND_TRACE_ELEMENTWISE, embedding_bwd,
          .dtable = nd_fsdp_grad(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1), .ids = ids_of(set),
          .dout = dx, .first = m->dims.vocab_first);
    return nd_fsdp_grad_release(&m->fsdp, unit);
}
