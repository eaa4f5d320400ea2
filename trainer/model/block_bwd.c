// SPDX-License-Identifier: Apache-2.0
/*
 * The backward list, in mirror order of llama_fwd.c; each step names the forward step it mirrors.
 *
 * m->dx (Tl, C) carries the gradient of the residual stream downwards. Weight gradients are F32,
 * written by products with beta 0 the first time in a unit's buffer and added afterwards.
 */
#include "trainer/model/linear.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;
static const nd_trace_kind COMM = ND_TRACE_COMMUNICATION;

static nd_status mlp_half_backward(nd_model *m, int64_t layer, float beta)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    nd_tensor gate = nd_tensor_columns(a->gu, 0, d->F), up = nd_tensor_columns(a->gu, d->F, d->F);
    nd_making d8[2];
    /* 11. down: the reduce-scatter becomes a gather */
    ND_TRY(nd_linear_row_bwd(m, ND_INPUT_DOWN, layer, m->dact, m->dx, a->act, a->act_codes, beta));
    /* 10. SwiGLU, in place of gate and up */
    ND_TRY(nd_linear_make_gradients(m, layer, gate, up, d8));
    ND_OP(r, ELEMENTWISE, swiglu_bwd, .dgate = d8[0].to, .dup = d8[1].to, .dout = m->dact,
          .gate = gate, .up = up, .fuse_gate = d8[0].fuse, .fuse_up = d8[1].fuse);
    ND_TRY(nd_block_recompute_codes(m, layer, true));
    /* 9. gate and up; 8. the gather becomes a reduce-scatter, the input is gathered again */
    ND_TRY(
        nd_linear_column_bwd(m, ND_INPUT_GATE_UP, layer, m->dh, a->gu, a->h2, a->h2_codes, beta));
    /* 7. norm; the residual's own gradient joins */
    ND_OP(r, ELEMENTWISE, rmsnorm_bwd, .dx = m->dx,
          .dweight = nd_fsdp_grad(&m->fsdp, ND_PARAM_NORM_2, ND_PARAM_NORM_2, layer), .dy = m->dh,
          .dres = m->dx, .x = a->x_mid,
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_2, ND_PARAM_NORM_2, layer),
          .rstd = a->rstd2);
    return ND_OK;
}

static nd_status attention_half_backward(nd_model *m, int64_t layer, float beta)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    /* 6. output projection */
    ND_TRY(nd_linear_row_bwd(m, ND_INPUT_O, layer, m->dout, m->dx, a->o, (nd_tensor){0}, beta));
    /* 5. attention */
    ND_TRY(nd_cp_attention_bwd(&m->cp, m->dqkv, a->qkv, a->o, a->lse.data, m->dout));
    /* 4. RoPE */
    nd_tensor dqk = nd_tensor_3d(m->dqkv.data, d->act, d->T, d->H + d->K, d->D);
    dqk.stride[0] = d->QKV;
    ND_OP(r, ELEMENTWISE, rope, .out = dqk, .x = dqk,
          .positions = nd_tensor_1d(m->batches.positions, ND_DTYPE_I32, d->T), .table = m->rope,
          .inverse = true);
    ND_TRY(nd_block_recompute_codes(m, layer, false));
    /* 3. q, k, v; 2. the gather becomes a reduce-scatter, the input is gathered again */
    ND_TRY(nd_linear_column_bwd(m, ND_INPUT_QKV, layer, m->dh, m->dqkv, a->h1, a->h1_codes, beta));
    /* 1. norm */
    ND_OP(r, ELEMENTWISE, rmsnorm_bwd, .dx = m->dx,
          .dweight = nd_fsdp_grad(&m->fsdp, ND_PARAM_NORM_1, ND_PARAM_NORM_1, layer), .dy = m->dh,
          .dres = m->dx, .x = a->x_in,
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_1, ND_PARAM_NORM_1, layer),
          .rstd = a->rstd1);
    return ND_OK;
}

static nd_status backward_ops(nd_model *m, int64_t layer, float beta)
{
    ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_NORM_1, layer));
    ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_NORM_2, layer));
    ND_TRY(nd_block_recompute(m, layer));
    ND_TRY(mlp_half_backward(m, layer, beta));
    return attention_half_backward(m, layer, beta);
}

static nd_status block_backward(nd_model *m, int64_t layer)
{
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, layer);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(nd_fsdp_prefetch(&m->fsdp, nd_layout_unit(m->layout, ND_UNIT_BLOCK, layer - 1)));
    ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
    float beta = nd_fsdp_grad_beta(&m->fsdp, unit);
    nd_graph_key key = nd_block_graph_key(m, "backward", layer);
    key.variant = beta != 0.0f;
    key.buffers[2] = nd_fsdp_grad(&m->fsdp, ND_PARAM_NORM_1, ND_PARAM_NORM_1, layer).data;
    ND_TRY(nd_graphs_begin(m->graphs, &key));
    ND_TRY(nd_graphs_end(m->graphs, backward_ops(m, layer, beta)));
    nd_fsdp_release(&m->fsdp, unit);
    return nd_fsdp_grad_release(&m->fsdp, unit);
}

static nd_status embed_backward(nd_model *m)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit;
    nd_tensor dx_full;
    ND_TRY(nd_tp_gather(r, m->dx, m->full_a, COMM, &dx_full));
    /* A tied table's gradient was begun by the head and is released here, last. */
    if (unit->kind != ND_UNIT_HEAD) {
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_EMBED, -1));
    }
    ND_OP(r, ELEMENTWISE, embedding_bwd,
          .dtable = nd_fsdp_grad(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1),
          .ids = nd_tensor_1d(nd_batches_at(&m->batches, ND_BATCH_IDS), ND_DTYPE_I32, d->T),
          .dout = dx_full, .first = d->vocab_first);
    return nd_fsdp_grad_release(&m->fsdp, unit);
}

nd_status nd_model_backward(nd_model *m)
{
    const nd_layer_range layers = m->layout->stages[0].layers;
    m->pass = ND_PASS_BACKWARD;
    ND_TRY(nd_head_backward(m));
    for (int64_t l = layers.end - 1; l >= layers.begin; l--) {
        ND_TRY(block_backward(m, l));
    }
    ND_TRY(embed_backward(m));
    return nd_fsdp_grad_finish(&m->fsdp);
}
