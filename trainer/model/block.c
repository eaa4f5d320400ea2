// SPDX-License-Identifier: Apache-2.0
/*
 * A decoder block: its forward, and in mirror order its backward, each step of which names the
 * forward step that it mirrors. Shapes: (Tl, C) between the tensor-parallel regions, (T, ...)
 * inside. T = B s local tokens, Tl = T / tp.
 *
 * In the backward dout and dmid (Tl, C) carry the gradient of the residual stream downwards, one
 * buffer unless weight gradients are delayed. Those are F32, written by products with beta 0 the
 * first time in a unit's buffer and added afterwards.
 *
 * The MLP is computed in pieces of tokens (parallel.tiled_mlp; by default one). Of several, gate,
 * up and SwiGLU's output exist for the tokens of one at a time: the forward keeps nothing of them,
 * and the backward computes them again. A piece is adjacent tokens of (T, ...), as one piece has
 * them on all tp ranks: the input is gathered and the output reduced once, around all pieces. Rows
 * of y and of dx do not depend on other rows. Weight gradients are sums over tokens, which are
 * added up in the order of the tokens; where the backend sums in blocks of tokens they are added
 * block by block, and are the same bits.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

static nd_tensor norm_weight(nd_block_call c, nd_param_id id)
{
    return nd_fsdp_weight(&c.model->fsdp, id, id, c.layer);
}

static nd_sight sight_of(nd_block_call c)
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
static nd_status norm(nd_block_call c, bool second, nd_residual in, nd_operand *h)
{
    nd_model *m = c.model;
    nd_rank *r = m->rank;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_tensor sum = second ? a->x_mid : a->x_in, x = in.delta.data ? sum : in.x;
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, second ? ND_INPUT_GATE_UP : ND_INPUT_QKV, h, &fuse));
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

/* Rows [begin, begin + rows) of an operand that is not cast, or cast row by row. */
static nd_operand rows_of(const nd_operand *x, int64_t begin, int64_t rows)
{
    nd_operand piece = *x;
    piece.stored = nd_tensor_rows(x->stored, begin, rows);
    return piece;
}

/* 10. SwiGLU of gu, rows of the block's from `row` on, as an input of down. */
static nd_status swiglu(nd_block_call c, nd_tensor gu, int64_t row, nd_operand *act)
{
    const int64_t F = c.model->dims.F;
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, ND_INPUT_DOWN, act, &fuse));
    act->stored = nd_tensor_rows(act->stored, 0, gu.shape[0]);
    ND_OP(c.model->rank, ELEMENTWISE, swiglu_fwd, .out = act->stored,
          .gate = nd_tensor_columns(gu, 0, F), .up = nd_tensor_columns(gu, F, F),
          .gelu = c.model->dims.gelu, .fuse = fuse);
    ND_TRY(nd_block_show(c, ND_DUMP_GATE, 2, row, gu));
    return nd_block_show(c, ND_DUMP_ACT, 1, row, act->stored);
}

/* The part of gu for so many rows of a piece. */
static nd_tensor gu_of(nd_block_call c, int64_t rows)
{
    return nd_tensor_rows(nd_set_block(c.set, c.layer)->gu, 0, rows);
}

/* 9. gate and up, and 10., of a piece whose input is h, rows from `begin` on. */
static nd_status gate_up_swiglu(nd_block_call c, nd_operand *h, int64_t begin, nd_operand *act)
{
    const nd_tensor gu = gu_of(c, h->stored.shape[0]);
    ND_TRY(nd_linear_products(c, nd_linear_group_of(c, ND_INPUT_GATE_UP), h, gu));
    return swiglu(c, gu, begin, act);
}

/* Steps 8 to 11, piece by piece: y (Tl, C) of the norm's output h (Tl, C). */
static nd_status mlp(nd_block_call c, nd_operand *h, nd_tensor y)
{
    nd_model *m = c.model;
    const nd_tensor sums = nd_tp_partial(m->rank, y, m->work.full_b);
    nd_operand full;
    /* 8. tp: (Tl, C) -> (T, C) */
    ND_TRY(nd_linear_gather(c, h, &full));
    const int64_t T = full.stored.shape[0];
    for (int64_t begin = 0; begin < T; begin += m->dims.piece) {
        const int64_t rows = nd_min(m->dims.piece, T - begin);
        nd_operand x = rows_of(&full, begin, rows), act;
        ND_TRY(gate_up_swiglu(c, &x, begin, &act));
        ND_TRY(nd_operand_encode(c, ND_X_OF_Y, &act));
        /* 11. down projection; tp: partial sums (T, C) -> (Tl, C) */
        ND_TRY(nd_linear_products(c, nd_linear_group_of(c, ND_INPUT_DOWN), &act,
                                  nd_tensor_rows(sums, begin, rows)));
    }
    return nd_tp_reduce(m->rank, sums, y, NULL);
}

/* The output of o or of down as the branch that joins the stream, through the norm behind it. x:
 * the input of o, or for down that of gate and up. */
static nd_status branch_output(nd_block_call c, nd_input input, nd_operand *x)
{
    nd_model *m = c.model;
    const bool second = input == ND_INPUT_DOWN;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_tensor branch = branch_of(m, c.set), out = second ? a->out2 : a->out1;
    const nd_tensor y = m->dims.post_norm ? out : branch;
    ND_TRY(second ? mlp(c, x, y) : nd_linear_forward(c, input, x, y));
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
    /* 1. residual sum and norm. Without delta the input is the sum already. */
    ND_TRY(norm(c, false, in, &h1));
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
        ND_TRY(nd_cp_attention_fwd(&m->cp, sight_of(c), a->qkv, o.stored, a->lse.data));
    }
    ND_TRY(nd_block_show(c, ND_DUMP_HEADS, 1, 0, o.stored));
    /* 6. output projection; tp: partial sums (T, C) -> (Tl, C) */
    return branch_output(c, ND_INPUT_O, &o);
}

/* 7. residual sum and norm */
static nd_status middle(nd_block_call c, nd_operand *h2)
{
    const nd_tensor x_in = nd_set_block(c.set, c.layer)->x_in;
    return norm(c, true, (nd_residual){x_in, branch_of(c.model, c.set)}, h2);
}

static nd_status norm_again(nd_block_call c, bool second, nd_operand *h)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    return norm(c, second, (nd_residual){.x = second ? a->x_mid : a->x_in}, h);
}

/* The backward reads what the mode keeps. Of norms whose outputs are kept as codes, those wait
 * until nd_block_recompute_codes, and of an MLP in pieces all waits until its pieces come. */
nd_status nd_block_recompute(nd_block_call c)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_recompute mode = c.model->recompute;
    nd_operand h, full, act;
    if (mode == ND_RECOMPUTE_NONE) {
        return ND_OK;
    }
    if (mode == ND_RECOMPUTE_FULL) {
        ND_TRY(attention_half(c, (nd_residual){.x = a->x_in}));
        ND_TRY(middle(c, &h));
    } else if (mode == ND_RECOMPUTE_ALL_BUT_ATTENTION) {
        ND_TRY(queries_keys_values(c, (nd_residual){.x = a->x_in}));
        ND_TRY(norm_again(c, true, &h));
    } else {
        ND_TRY(a->h1_codes.data ? ND_OK : norm_again(c, false, &h));
        ND_TRY(a->h2_codes.data ? ND_OK : norm_again(c, true, &h));
    }
    if (nd_mlp_has_pieces(c.model)) {
        return ND_OK;
    }
    if (mode == ND_RECOMPUTE_SELECTIVE) {
        ND_TRY(swiglu(c, a->gu, 0, &act));
    } else {
        ND_TRY(nd_linear_gather(c, &h, &full));
        ND_TRY(gate_up_swiglu(c, &full, 0, &act));
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

static nd_graph_key graph_key(nd_block_call c, const char *name)
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
    nd_operand h2;
    ND_TRY(attention_half(c, in));
    ND_TRY(middle(c, &h2));
    return branch_output(c, ND_INPUT_DOWN, &h2);
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
        nd_graph_key key = graph_key(call, "forward");
        ND_TRY(nd_graphs_begin(graphs, &key));
        ND_TRY(nd_graphs_end(graphs, forward_ops(call, *stream)));
        nd_fsdp_release(&m->fsdp, unit);
        *stream = (nd_residual){.x = nd_set_block(set, l)->x_mid, .delta = branch_of(m, set)};
    }
    return ND_OK;
}

/* dy of o or of down. */
static nd_tensor output_gradient(nd_block_call c, nd_input input)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const bool post = c.model->dims.post_norm;
    return input == ND_INPUT_O ? (post ? a->dout1 : a->dmid) : (post ? a->dout2 : a->dout);
}

/* The norm's input gradient joins the gradient of the residual stream, which the next linear reads:
 * o, or down of the block before. */
static nd_status norm_backward(nd_block_call c, bool second)
{
    nd_model *m = c.model;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_param_id id = second ? ND_PARAM_NORM_2 : ND_PARAM_NORM_1;
    nd_block_call reader = c;
    float *amax = NULL;
    reader.layer -= !second;
    const nd_tensor dx = second ? a->dmid : nd_stream_gradient(m, c.set, reader.layer);
    const nd_tensor dres = second ? a->dout : a->dmid;
    if (!m->dims.pre_norm) {
        ND_OP(m->rank, ELEMENTWISE, axpy, .out = dx, .x = m->work.dh, .plus = dres, .scale = 1.0f);
        return nd_block_show(c, second ? ND_DUMP_D_MLP_INPUT : ND_DUMP_D_INPUT, 1, 0, dx);
    }
    ND_TRY(nd_block_show(c, second ? ND_DUMP_D_NORM_2 : ND_DUMP_D_NORM_1, 1, 0, m->work.dh));
    if (!m->dims.post_norm && reader.layer >= m->stage->layers.begin) {
        ND_TRY(nd_gradient_prepare(reader, second ? ND_INPUT_O : ND_INPUT_DOWN, &amax));
    }
    ND_OP(m->rank, ELEMENTWISE, rmsnorm_bwd, .dx = dx,
          .dweight = nd_block_vector_gradient(c, id, id), .dy = m->work.dh, .dres = dres,
          .x = second ? a->x_mid : a->x_in, .weight = norm_weight(c, id), .plus = m->dims.norm_plus,
          .rstd = second ? a->rstd2 : a->rstd1, .amax = amax);
    return nd_block_show(c, second ? ND_DUMP_D_MIDDLE : ND_DUMP_D_INPUT, 1, 0, dx);
}

/* The gradient of the output of o or of down: that of the stream, through a norm behind it. */
static nd_status branch_gradient(nd_block_call c, nd_input input, nd_operand *out)
{
    nd_model *m = c.model;
    const bool second = input == ND_INPUT_DOWN;
    const nd_param_id id = second ? ND_PARAM_POST_2 : ND_PARAM_POST_1;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    float *amax = NULL;
    *out = (nd_operand){.stored = output_gradient(c, input), .known = nd_gradient_known(c, input)};
    if (!m->dims.post_norm) {
        return ND_OK;
    }
    ND_TRY(nd_gradient_prepare(c, input, &amax));
    ND_OP(m->rank, ELEMENTWISE, rmsnorm_bwd, .dx = out->stored,
          .dweight = nd_block_vector_gradient(c, id, id), .dy = second ? a->dout : a->dmid,
          .x = second ? a->out2 : a->out1, .weight = norm_weight(c, id), .plus = m->dims.norm_plus,
          .rstd = second ? a->out2_rstd : a->out1_rstd, .amax = amax);
    return ND_OK;
}

/* dw += dy^T x of a piece, block by block. `first`: of the micro-batch. */
static nd_status weight_gradient(const nd_linear_rest *piece, bool first)
{
    const int64_t rows = piece->dy.stored.shape[0], block = piece->call.model->piece_block;
    for (int64_t begin = 0, count; begin < rows; begin += count) {
        nd_linear_rest rest = *piece;
        count = block > 0 ? nd_min(block, rows - begin) : rows;
        rest.x = rows_of(&piece->x, begin, count);
        rest.dy = rows_of(&piece->dy, begin, count);
        rest.adds = !first || begin > 0;
        for (int i = 0; i < ND_FP8_PARTS; i++) {
            rest.forms[i] = (nd_made_form){0}; /* those of all rows, which dw does not read */
        }
        ND_TRY(nd_linear_weight_gradient(&rest));
    }
    return ND_OK;
}

/* 10. SwiGLU, in place of gate and up: dgu of dact, rows from `row` on. */
static nd_status swiglu_backward(nd_block_call c, nd_tensor dact, int64_t row, nd_operand *dgu)
{
    const int64_t F = c.model->dims.F;
    const nd_tensor gu = gu_of(c, dact.shape[0]);
    nd_tensor to[2];
    nd_fuse fuse[2];
    ND_TRY(nd_block_show(c, ND_DUMP_D_ACT, 1, row, dact));
    ND_TRY(nd_operand_prepare_gradients(c, gu, dgu, to, fuse));
    ND_OP(c.model->rank, ELEMENTWISE, swiglu_bwd, .dgate = to[0], .dup = to[1], .dout = dact,
          .gate = nd_tensor_columns(gu, 0, F), .up = nd_tensor_columns(gu, F, F),
          .gelu = c.model->dims.gelu, .fuse = {fuse[0], fuse[1]});
    return nd_block_show(c, ND_DUMP_D_GATE, 2, row, gu);
}

/* Steps 11 to 8 of a piece, rows from `begin` on. h, dy: the inputs of both groups, and the
 * gradient of their output; dh: this rank's part of the sum. */
static nd_status piece_backward(nd_block_call c, nd_operand *h, const nd_operand *dy, nd_tensor dh,
                                int64_t begin)
{
    const bool first = begin == 0;
    const nd_tensor dact = nd_tensor_rows(c.model->work.dact, 0, h->stored.shape[0]);
    nd_linear_rest down = {.call = c, .group = nd_linear_group_of(c, ND_INPUT_DOWN), .dy = *dy};
    nd_linear_rest gate_up = {.call = c, .group = nd_linear_group_of(c, ND_INPUT_GATE_UP), .x = *h};
    ND_TRY(gate_up_swiglu(c, h, begin, &down.x));
    ND_TRY(nd_linear_gradient_products(&down, dact));
    ND_TRY(weight_gradient(&down, first));
    ND_TRY(swiglu_backward(c, dact, begin, &gate_up.dy));
    ND_TRY(nd_linear_begin_gradient(&gate_up));
    ND_TRY(nd_linear_gradient_products(&gate_up, dh));
    return weight_gradient(&gate_up, first);
}

static nd_status pieces_backward(nd_block_call c, const nd_operand *dy, nd_tensor dh)
{
    nd_model *m = c.model;
    const int64_t T = m->dims.T;
    const nd_tensor sums = nd_tp_partial(m->rank, dh, m->work.full_b);
    nd_linear_rest down = {.call = c, .group = nd_linear_group_of(c, ND_INPUT_DOWN), .dy = *dy};
    nd_operand h = nd_operand_kept(c, ND_INPUT_GATE_UP);
    ND_TRY(nd_linear_begin_gradient(&down));
    ND_TRY(nd_tp_gather(m->rank, dy->stored, m->work.full_a, NULL, &down.dy.stored));
    ND_TRY(nd_tp_gather(m->rank, h.stored, m->work.full_h, NULL, &h.stored));
    for (int64_t begin = 0; begin < T; begin += m->dims.piece) {
        const int64_t rows = nd_min(m->dims.piece, T - begin);
        nd_operand x = rows_of(&h, begin, rows), dout = rows_of(&down.dy, begin, rows);
        ND_TRY(piece_backward(c, &x, &dout, nd_tensor_rows(sums, begin, rows), begin));
    }
    return nd_tp_reduce(m->rank, sums, dh, NULL);
}

static nd_status mlp_half_backward(nd_block_call c)
{
    nd_model *m = c.model;
    nd_operand dout, dgu;
    ND_TRY(branch_gradient(c, ND_INPUT_DOWN, &dout));
    if (nd_mlp_has_pieces(m)) { /* 11. to 8. */
        ND_TRY(pieces_backward(c, &dout, m->work.dh));
        return norm_backward(c, true);
    }
    /* 11. down: the reduce-scatter becomes a gather */
    ND_TRY(nd_linear_backward(c, ND_INPUT_DOWN, &dout, m->work.dact));
    ND_TRY(swiglu_backward(c, m->work.dact, 0, &dgu));
    ND_TRY(nd_block_recompute_codes(c, true));
    /* 9. gate and up; 8. the gather becomes a reduce-scatter, the input is gathered again */
    ND_TRY(nd_linear_backward(c, ND_INPUT_GATE_UP, &dgu, m->work.dh));
    /* 7. norm */
    return norm_backward(c, true);
}

static nd_status attention_half_backward(nd_block_call c)
{
    nd_model *m = c.model;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand dout;
    nd_operand dqkv = {.stored = a->dqkv};
    nd_linear_rest rest;
    ND_TRY(branch_gradient(c, ND_INPUT_O, &dout));
    /* 6. output projection, whose weight gradient is made while dk and dv arrive */
    ND_TRY(nd_linear_input_gradient(c, ND_INPUT_O, &dout, m->work.dout, &rest));
    ND_TRY(nd_block_show(c, ND_DUMP_D_HEADS, 1, 0, m->work.dout));
    /* 5. attention */
    const nd_cp_backward b = {a->dqkv, a->qkv, a->o, m->work.dout, a->lse.data};
    ND_TRY(nd_cp_attention_bwd(&m->cp, sight_of(c), &b));
    ND_TRY(m->delays ? ND_OK : nd_linear_weight_gradient(&rest));
    ND_TRY(nd_cp_attention_bwd_finish(&m->cp, a->dqkv));
    /* 4. RoPE, and norms of the heads */
    ND_TRY(nd_block_heads(c, a->dqkv, true));
    ND_TRY(nd_block_show(c, ND_DUMP_D_Q, 3, 0, a->dqkv));
    ND_TRY(nd_block_recompute_codes(c, false));
    /* 3. q, k, v; 2. the gather becomes a reduce-scatter, the input is gathered again */
    ND_TRY(nd_linear_backward(c, ND_INPUT_QKV, &dqkv, m->work.dh));
    /* 1. norm */
    return norm_backward(c, false);
}

/* A norm that every block has. */
static nd_param_id first_vector(nd_block_call c)
{
    return c.model->dims.pre_norm ? ND_PARAM_NORM_1 : ND_PARAM_POST_1;
}

static nd_status backward_ops(nd_block_call c)
{
    nd_fsdp *fsdp = &c.model->fsdp;
    const nd_layout *layout = c.model->layout;
    const nd_unit *unit = nd_layout_unit(layout, ND_UNIT_BLOCK, c.layer);
    const nd_tensor waits = nd_set_block(c.set, c.layer)->dvectors;
    if (waits.data) {
        ND_TRY(nd_zero(&c.model->rank->stream, waits.data, nd_tensor_bytes(waits)));
    }
    for (int i = unit->first_param; !waits.data && i < unit->first_param + unit->param_count; i++) {
        if (layout->params[i].axes == 1) { /* norms and biases are added to */
            ND_TRY(nd_fsdp_grad_zero_if_fresh(fsdp, layout->params[i].id, c.layer));
        }
    }
    ND_TRY(nd_block_recompute(c));
    ND_TRY(mlp_half_backward(c));
    return attention_half_backward(c);
}

/* `next`: the unit that is prefetched meanwhile. */
static nd_status block_backward(nd_block_call c, const nd_unit *next)
{
    nd_model *m = c.model;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, c.layer);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(nd_fsdp_prefetch(&m->fsdp, next));
    ND_TRY(m->delays ? ND_OK : nd_fsdp_grad_acquire(&m->fsdp, unit));
    nd_graph_key key = graph_key(c, "backward");
    key.variant = nd_fsdp_grad_beta(&m->fsdp, unit) != 0.0f;
    key.buffers[3] = nd_block_vector_gradient(c, first_vector(c), first_vector(c)).data;
    ND_TRY(nd_graphs_begin(m->graphs, &key));
    ND_TRY(nd_graphs_end(m->graphs, backward_ops(c)));
    nd_fsdp_release(&m->fsdp, unit);
    return m->delays ? ND_OK : nd_fsdp_grad_release(&m->fsdp, unit);
}

nd_status nd_blocks_backward(nd_model *m, nd_activation_set *set, nd_layer_range range,
                             const nd_unit *after)
{
    for (int64_t l = range.end - 1; l >= range.begin; l--) {
        const nd_unit *next =
            l > range.begin ? nd_layout_unit(m->layout, ND_UNIT_BLOCK, l - 1) : after;
        ND_TRY(block_backward((nd_block_call){m, set, l, ND_PASS_BACKWARD}, next));
    }
    return ND_OK;
}

/* The steps of the backward that were left out, in its order. */
static nd_status weight_gradient_ops(nd_block_call c)
{
    nd_model *m = c.model;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, c.layer);
    const int vectors = a->dvectors.data ? unit->param_count : 0; /* and matrices */
    for (int i = unit->first_param; i < unit->first_param + vectors; i++) {
        const nd_param *p = &m->layout->params[i];
        const nd_tensor from = nd_block_vector_gradient(c, p->id, p->id);
        if (p->axes == 1) {
            ND_TRY(nd_copy(&m->rank->stream, nd_fsdp_grad(&m->fsdp, p->id, p->id, c.layer).data,
                           from.data, nd_tensor_bytes(from)));
        }
    }
    ND_TRY(nd_linear_delayed_gradient(c, ND_INPUT_DOWN, output_gradient(c, ND_INPUT_DOWN)));
    ND_TRY(nd_linear_delayed_gradient(c, ND_INPUT_GATE_UP, a->gu));
    ND_TRY(nd_linear_delayed_gradient(c, ND_INPUT_O, output_gradient(c, ND_INPUT_O)));
    return nd_linear_delayed_gradient(c, ND_INPUT_QKV, a->dqkv);
}

nd_status nd_blocks_weight_gradient(nd_model *m, nd_activation_set *set, nd_layer_range range)
{
    for (int64_t l = range.end - 1; l >= range.begin; l--) {
        const nd_block_call c = {m, set, l, ND_PASS_BACKWARD};
        const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, l);
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        const nd_graph_key key = {
            .name = "weight gradient",
            .number = l,
            .variant = nd_fsdp_grad_beta(&m->fsdp, unit) != 0.0f,
            .buffers = {nd_set_block(set, l)->x_in.data,
                        nd_fsdp_grad(&m->fsdp, first_vector(c), first_vector(c), l).data}};
        ND_TRY(nd_graphs_begin(m->graphs, &key));
        ND_TRY(nd_graphs_end(m->graphs, weight_gradient_ops(c)));
        ND_TRY(nd_fsdp_grad_release(&m->fsdp, unit));
    }
    return ND_OK;
}
