// SPDX-License-Identifier: Apache-2.0
/*
 * The forward of blocks. Shapes: (Tl, C) between the tensor-parallel regions, (T, ...) inside. T =
 * B s local tokens, Tl = T / tp.
 */
#include "trainer/model/linear.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

static nd_tensor norm_weight(nd_block_call c, nd_param_id id)
{
    return nd_fsdp_weight(&c.model->fsdp, id, id, c.layer);
}

nd_sight nd_block_sight(nd_block_call c)
{
    return (nd_sight){.window = nd_shape_window(&c.model->rank->shape, c.layer, c.model->dims.S),
                      .first_keys = c.set->batch.first_keys,
                      .sent = c.set->batch.sent};
}

/* (Tl, C) of the micro-batch. */
static nd_tensor branch_of(const nd_model *m, const nd_activation_set *set)
{
    return nd_tensor_rows(m->work.branch, 0, set->Tl);
}

/* Steps 1 to 10 make everything that a backward needs; step 11 makes only the output. */

/* The residual sum, and what reads it: its norm, or a copy where none is before the branches. */
static nd_status norm(nd_block_call c, bool second, nd_residual in, const nd_operand *h,
                      nd_fuse fuse)
{
    nd_model *m = c.model;
    nd_rank *r = m->rank;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_tensor sum = second ? a->x_mid : a->x_in, x = in.delta.data ? sum : in.x;
    if (m->dims.pre_norm) {
        ND_OP(r, ELEMENTWISE, rmsnorm_fwd, .y = h->stored,
              .sum = in.delta.data ? sum : (nd_tensor){0}, .rstd = second ? a->rstd2 : a->rstd1,
              .x = in.x, .delta = in.delta,
              .weight = norm_weight(c, second ? ND_PARAM_NORM_2 : ND_PARAM_NORM_1),
              .plus = m->dims.norm_plus, .eps = m->dims.stream_eps, .fuse = fuse);
        ND_TRY(nd_block_show(c, second ? ND_DUMP_MIDDLE : ND_DUMP_INPUT, 1, 0, x));
        return nd_block_show(c, second ? ND_DUMP_NORM_2 : ND_DUMP_NORM_1, 1, 0, h->stored);
    }
    if (in.delta.data) {
        ND_OP(r, ELEMENTWISE, axpy, .out = sum, .x = in.x, .plus = in.delta, .scale = 1.0f);
    }
    ND_OP(r, ELEMENTWISE, cast, .out = h->stored, .x = x);
    return nd_block_show(c, second ? ND_DUMP_MLP_INPUT : ND_DUMP_INPUT, 1, 0, x);
}

/* The output of o or of down as the branch that joins the stream, through the norm behind it. x:
 * their input, or with an MLP in pieces that of gate and up. */
static nd_status branch_output(nd_block_call c, nd_input input, nd_operand *x)
{
    nd_model *m = c.model;
    const bool second = input == ND_INPUT_DOWN;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_tensor branch = branch_of(m, c.set), out = second ? a->out2 : a->out1;
    const nd_tensor y = m->dims.post_norm ? out : branch;
    if (second && nd_mlp_has_pieces(m)) {
        ND_TRY(nd_mlp_pieces_forward(c, x, y));
    } else {
        ND_TRY(nd_linear_forward(c, input, x, y));
    }
    ND_TRY(nd_block_show(c, second ? ND_DUMP_MLP : ND_DUMP_ATTENTION, 1, 0, y));
    if (!m->dims.post_norm) {
        return ND_OK;
    }
    ND_OP(m->rank, ELEMENTWISE, rmsnorm_fwd, .y = branch,
          .rstd = second ? a->out2_rstd : a->out1_rstd, .x = out,
          .weight = norm_weight(c, second ? ND_PARAM_POST_2 : ND_PARAM_POST_1),
          .plus = m->dims.norm_plus, .eps = (float)m->rank->shape.rms_eps);
    const nd_dump_point point = second ? ND_DUMP_POST_2 : ND_DUMP_POST_1;
    return m->dims.pre_norm ? ND_OK : nd_block_show(c, point, 1, 0, branch);
}

/* Steps 1 to 4. */
static nd_status queries_keys_values(nd_block_call c, nd_residual in)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand h1;
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, ND_INPUT_QKV, &h1, &fuse));
    /* 1. residual sum and norm. Without delta the input is the sum already. */
    ND_TRY(norm(c, false, in, &h1, fuse));
    /* 2. tp: (Tl, C) -> (T, C); 3. q, k, v */
    ND_TRY(nd_linear_forward(c, ND_INPUT_QKV, &h1, a->qkv));
    ND_TRY(nd_block_show(c, ND_DUMP_Q, 3, 0, a->qkv));
    /* 4. norms of the heads, and RoPE on q and k */
    return nd_block_heads(c, a->qkv, false);
}

/* Steps 1 to 6. */
static nd_status attention_half(nd_block_call c, nd_residual in)
{
    nd_model *m = c.model;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand o;
    nd_fuse none; /* attention leaves rows */
    ND_TRY(queries_keys_values(c, in));
    ND_TRY(nd_operand_prepare(c, ND_INPUT_O, &o, &none));
    /* 5. attention, through the cache or through context parallel */
    if (c.pass == ND_PASS_GENERATE) {
        ND_TRY(nd_kv_cache_attention(&m->kv, c.layer, a->qkv, o.stored));
    } else {
        ND_TRY(nd_cp_attention_fwd(&m->cp, nd_block_sight(c), a->qkv, o.stored, a->lse.data));
    }
    ND_TRY(nd_block_show(c, ND_DUMP_HEADS, 1, 0, o.stored));
    /* 6. output projection; tp: partial sums (T, C) -> (Tl, C) */
    return branch_output(c, ND_INPUT_O, &o);
}

/* Steps 8 to 10, where the MLP is one piece; else mlp_pieces.c has them, and *act is h2. */
static nd_status gate_up_swiglu(nd_block_call c, nd_operand *h2, nd_operand *act)
{
    const nd_tensor gu = nd_set_block(c.set, c.layer)->gu;
    if (nd_mlp_has_pieces(c.model)) {
        *act = *h2;
        return ND_OK;
    }
    /* 8. tp: (Tl, C) -> (T, C); 9. gate and up */
    ND_TRY(nd_linear_forward(c, ND_INPUT_GATE_UP, h2, gu));
    return nd_block_swiglu(c, gu, 0, act);
}

/* Steps 7 to 10. */
static nd_status mlp_half(nd_block_call c, nd_operand *act)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand h2;
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, ND_INPUT_GATE_UP, &h2, &fuse));
    /* 7. residual sum and norm */
    ND_TRY(norm(c, true, (nd_residual){a->x_in, branch_of(c.model, c.set)}, &h2, fuse));
    return gate_up_swiglu(c, &h2, act);
}

static nd_status norm_again(nd_block_call c, bool second, nd_operand *h)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, second ? ND_INPUT_GATE_UP : ND_INPUT_QKV, h, &fuse));
    return norm(c, second, (nd_residual){.x = second ? a->x_mid : a->x_in}, h, fuse);
}

/* What the mode keeps is read. Of norms whose outputs are kept as codes, those wait until
 * nd_block_recompute_codes. */
nd_status nd_block_recompute(nd_block_call c)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_recompute mode = c.model->recompute;
    nd_operand h, act = {0};
    if (mode == ND_RECOMPUTE_NONE) {
        return ND_OK;
    }
    if (mode == ND_RECOMPUTE_FULL) {
        ND_TRY(attention_half(c, (nd_residual){.x = a->x_in}));
        ND_TRY(mlp_half(c, &act));
    } else if (mode == ND_RECOMPUTE_ALL_BUT_ATTENTION) {
        ND_TRY(queries_keys_values(c, (nd_residual){.x = a->x_in}));
        ND_TRY(norm_again(c, true, &h));
        ND_TRY(gate_up_swiglu(c, &h, &act));
    } else {
        ND_TRY(a->h1_codes.data ? ND_OK : norm_again(c, false, &h));
        ND_TRY(a->h2_codes.data ? ND_OK : norm_again(c, true, &h));
        ND_TRY(nd_mlp_has_pieces(c.model) ? ND_OK : nd_block_swiglu(c, a->gu, 0, &act));
    }
    return nd_operand_encode(c, ND_X_OF_Y, &act);
}

nd_status nd_block_recompute_codes(nd_block_call c, bool second)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand h;
    if (c.model->recompute == ND_RECOMPUTE_NONE || !(second ? a->h2_codes : a->h1_codes).data) {
        return ND_OK;
    }
    ND_TRY(norm_again(c, second, &h));
    return nd_operand_encode(c, ND_X_OF_Y, &h);
}

nd_graph_key nd_block_graph_key(nd_block_call c, const char *name)
{
    const nd_unit *unit = nd_layout_unit(c.model->layout, ND_UNIT_BLOCK, c.layer);
    const nd_weight_slot *slot = nd_fsdp_slot_holding(&c.model->fsdp, unit);
    return (nd_graph_key){.name = name,
                          .number = c.layer,
                          .buffers = {slot->data[ND_SEGMENT_HP], slot->data[ND_SEGMENT_FP8],
                                      nd_set_block(c.set, c.layer)->x_in.data}};
}

static nd_status forward_ops(nd_block_call c, nd_residual in)
{
    nd_operand act;
    ND_TRY(attention_half(c, in));
    ND_TRY(mlp_half(c, &act));
    /* 11. down projection (of pieces: 8 to 11); tp: partial sums (T, C) -> (Tl, C) */
    return branch_output(c, ND_INPUT_DOWN, &act);
}

nd_status nd_blocks_forward(nd_model *m, nd_activation_set *set, nd_layer_range range, nd_pass pass,
                            const nd_unit *after, nd_residual *stream)
{
    nd_graphs *graphs = pass == ND_PASS_TRAIN ? m->graphs : NULL;
    for (int64_t l = range.begin; l < range.end; l++) {
        const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, l);
        bool last = l + 1 == range.end;
        ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_prefetch(&m->fsdp,
                                last ? after : nd_layout_unit(m->layout, ND_UNIT_BLOCK, l + 1)));
        const nd_block_call call = {m, set, l, pass};
        nd_graph_key key = nd_block_graph_key(call, "forward");
        ND_TRY(nd_graphs_begin(graphs, &key));
        ND_TRY(nd_graphs_end(graphs, forward_ops(call, *stream)));
        nd_fsdp_release(&m->fsdp, unit);
        *stream = (nd_residual){.x = nd_set_block(set, l)->x_mid, .delta = branch_of(m, set)};
    }
    return ND_OK;
}
