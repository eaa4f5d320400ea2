// SPDX-License-Identifier: Apache-2.0
/*
 * The forward list. Shapes: (Tl, C) between the tensor-parallel regions, (T, ...) inside. T = B s
 * local tokens, Tl = T / tp.
 */
#include "trainer/model/linear.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

static const nd_tensor none = {0};

/* Steps 1 to 10 make everything a backward needs; step 11 only the output. */
static nd_status attention_half(nd_model *m, int64_t layer, nd_tensor x, nd_tensor delta)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    nd_tensor w1 = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_1, ND_PARAM_NORM_1, layer);
    nd_making h1;
    ND_TRY(nd_linear_make_input(m, ND_INPUT_QKV, layer, a->h1, a->h1_codes, &h1));
    /* 1. residual sum and norm. Without delta the input is the sum already. */
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, .y = h1.to, .sum = delta.data ? a->x_in : none,
          .rstd = a->rstd1, .x = x, .delta = delta, .weight = w1, .eps = (float)r->shape.rms_eps,
          .fuse = h1.fuse);
    /* 2. tp: (Tl, C) -> (T, C); 3. q, k, v */
    ND_TRY(nd_linear_column_fwd(m, ND_INPUT_QKV, layer, a->h1, a->h1_codes, a->qkv));
    /* 4. RoPE on q and k, in place: they are neighbours and have the same head size */
    nd_tensor qk = nd_tensor_3d(a->qkv.data, d->act, d->T, d->H + d->K, d->D);
    qk.stride[0] = d->QKV;
    ND_OP(r, ELEMENTWISE, rope, .out = qk, .x = qk,
          .positions = nd_tensor_1d(m->batches.positions, ND_DTYPE_I32, d->T), .table = m->rope);
    /* 5. attention, through context parallel */
    ND_TRY(nd_cp_attention_fwd(&m->cp, a->qkv, a->o, a->lse.data));
    /* 6. output projection; tp: partial sums (T, C) -> (Tl, C) */
    return nd_linear_row_fwd(m, ND_INPUT_O, layer, a->o, none, m->branch);
}

static nd_status swiglu(nd_model *m, int64_t layer)
{
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    nd_making act;
    ND_TRY(nd_linear_make_input(m, ND_INPUT_DOWN, layer, a->act, a->act_codes, &act));
    ND_OP(m->rank, ELEMENTWISE, swiglu_fwd, .out = act.to,
          .gate = nd_tensor_columns(a->gu, 0, d->F), .up = nd_tensor_columns(a->gu, d->F, d->F),
          .fuse = act.fuse);
    return ND_OK;
}

static nd_status mlp_half(nd_model *m, int64_t layer, bool with_output)
{
    nd_rank *r = m->rank;
    const nd_block_acts *a = &m->acts[layer];
    nd_tensor w2 = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_2, ND_PARAM_NORM_2, layer);
    nd_making h2;
    ND_TRY(nd_linear_make_input(m, ND_INPUT_GATE_UP, layer, a->h2, a->h2_codes, &h2));
    /* 7. residual sum and norm */
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, .y = h2.to, .sum = a->x_mid, .rstd = a->rstd2, .x = a->x_in,
          .delta = m->branch, .weight = w2, .eps = (float)r->shape.rms_eps, .fuse = h2.fuse);
    /* 8. tp: (Tl, C) -> (T, C); 9. gate and up */
    ND_TRY(nd_linear_column_fwd(m, ND_INPUT_GATE_UP, layer, a->h2, a->h2_codes, a->gu));
    /* 10. SwiGLU */
    ND_TRY(swiglu(m, layer));
    if (!with_output) {
        return nd_linear_recast(m, ND_INPUT_DOWN, layer, a->act, a->act_codes);
    }
    /* 11. down projection; tp: partial sums (T, C) -> (Tl, C) */
    return nd_linear_row_fwd(m, ND_INPUT_DOWN, layer, a->act, a->act_codes, m->branch);
}

nd_graph_key nd_block_graph_key(const nd_model *m, const char *name, int64_t layer)
{
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, layer);
    const nd_weight_slot *slot = nd_fsdp_slot_holding(&m->fsdp, unit);
    return (nd_graph_key){.name = name,
                          .number = layer,
                          .buffers = {slot->data[ND_SEGMENT_HP], slot->data[ND_SEGMENT_FP8]}};
}

nd_status nd_block_forward(nd_model *m, int64_t layer, nd_tensor x, nd_tensor delta)
{
    ND_TRY(attention_half(m, layer, x, delta));
    return mlp_half(m, layer, true);
}

static nd_status norm_again(nd_model *m, int64_t layer, bool second)
{
    nd_rank *r = m->rank;
    const nd_block_acts *a = &m->acts[layer];
    nd_param_id id = second ? ND_PARAM_NORM_2 : ND_PARAM_NORM_1;
    nd_making h;
    ND_TRY(nd_linear_make_input(m, second ? ND_INPUT_GATE_UP : ND_INPUT_QKV, layer,
                                second ? a->h2 : a->h1, second ? a->h2_codes : a->h1_codes, &h));
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, .y = h.to, .rstd = second ? a->rstd2 : a->rstd1,
          .x = second ? a->x_mid : a->x_in, .weight = nd_fsdp_weight(&m->fsdp, id, id, layer),
          .eps = (float)r->shape.rms_eps, .fuse = h.fuse);
    return ND_OK;
}

/* Everything that the block did not keep, by the same ops on the same operands. */
nd_status nd_block_recompute(nd_model *m, int64_t layer)
{
    const nd_block_acts *a = &m->acts[layer];
    if (m->recompute == ND_RECOMPUTE_NONE) {
        return ND_OK;
    }
    if (m->recompute == ND_RECOMPUTE_FULL) {
        ND_TRY(attention_half(m, layer, a->x_in, none));
        return mlp_half(m, layer, false);
    }
    if (!a->h1_codes.data) {
        ND_TRY(norm_again(m, layer, false));
    }
    if (!a->h2_codes.data) {
        ND_TRY(norm_again(m, layer, true));
    }
    ND_TRY(swiglu(m, layer));
    return nd_linear_recast(m, ND_INPUT_DOWN, layer, a->act, a->act_codes);
}

nd_status nd_block_recompute_codes(nd_model *m, int64_t layer, bool second)
{
    const nd_block_acts *a = &m->acts[layer];
    nd_tensor codes = second ? a->h2_codes : a->h1_codes;
    if (m->recompute == ND_RECOMPUTE_NONE || !codes.data) {
        return ND_OK;
    }
    ND_TRY(norm_again(m, layer, second));
    return nd_linear_recast(m, second ? ND_INPUT_GATE_UP : ND_INPUT_QKV, layer,
                            second ? a->h2 : a->h1, codes);
}

static nd_status embed(nd_model *m)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit;
    nd_tensor x = m->acts[0].x_in; /* (Tl, C) */
    nd_tensor partial = nd_tp_partial(r, x, m->full_b);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(nd_fsdp_prefetch(&m->fsdp, nd_layout_unit(m->layout, ND_UNIT_BLOCK, 0)));
    ND_OP(r, ELEMENTWISE, embedding_fwd, .out = partial,
          .ids = nd_tensor_1d(nd_batches_at(&m->batches, ND_BATCH_IDS), ND_DTYPE_I32, d->T),
          .table = nd_fsdp_weight(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1),
          .first = d->vocab_first);
    if (unit->kind != ND_UNIT_HEAD) { /* a tied table stays until the end of backward */
        nd_fsdp_release(&m->fsdp, unit);
    }
    return nd_tp_reduce(r, partial, x, ND_TRACE_COMMUNICATION);
}

nd_status nd_model_forward(nd_model *m, bool train)
{
    const nd_layout *layout = m->layout;
    const nd_layer_range layers = layout->stages[0].layers;
    const nd_unit *head = nd_layout_unit(layout, ND_UNIT_HEAD, -1);
    m->pass = train ? ND_PASS_TRAIN : ND_PASS_EVAL;
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    ND_TRY(embed(m));
    nd_tensor x = m->acts[0].x_in, delta = none;
    for (int64_t l = layers.begin; l < layers.end; l++) {
        const nd_unit *unit = nd_layout_unit(layout, ND_UNIT_BLOCK, l);
        const nd_unit *next = nd_layout_unit(layout, ND_UNIT_BLOCK, l + 1);
        ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_prefetch(&m->fsdp, next ? next : head));
        nd_graph_key key = nd_block_graph_key(m, "forward", l);
        nd_graphs *graphs = train ? m->graphs : NULL;
        ND_TRY(nd_graphs_begin(graphs, &key));
        ND_TRY(nd_graphs_end(graphs, nd_block_forward(m, l, x, delta)));
        nd_fsdp_release(&m->fsdp, unit);
        x = m->acts[l].x_mid;
        delta = m->branch;
    }
    ND_TRY(nd_fsdp_acquire(&m->fsdp, head));
    ND_TRY(nd_head_forward(m, x, delta, train));
    nd_fsdp_release(&m->fsdp, head);
    return ND_OK;
}
