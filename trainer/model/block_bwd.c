// SPDX-License-Identifier: Apache-2.0
/*
 * The backward of blocks, in mirror order of block_fwd.c; each step names the forward step that it
 * mirrors.
 *
 * dout and dmid (Tl, C) carry the gradient of the residual stream downwards, one buffer unless
 * weight gradients are delayed. Those are F32, written by products with beta 0 the first time in a
 * unit's buffer and added afterwards.
 */
#include "trainer/model/linear.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

nd_tensor nd_stream_gradient(const nd_model *m, const nd_activation_set *set, int64_t layer)
{
    return layer < m->stage->layers.begin ? m->work.dx : nd_set_block(set, layer)->dout;
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
          .x = second ? a->x_mid : a->x_in, .weight = nd_fsdp_weight(&m->fsdp, id, id, c.layer),
          .plus = m->dims.norm_plus, .rstd = second ? a->rstd2 : a->rstd1, .amax = amax);
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
          .x = second ? a->out2 : a->out1, .weight = nd_fsdp_weight(&m->fsdp, id, id, c.layer),
          .plus = m->dims.norm_plus, .rstd = second ? a->out2_rstd : a->out1_rstd, .amax = amax);
    return ND_OK;
}

static nd_status mlp_half_backward(nd_block_call c)
{
    nd_model *m = c.model;
    const int64_t F = m->dims.F;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand dout, dgu;
    nd_tensor to[2];
    nd_fuse fuse[2];
    ND_TRY(branch_gradient(c, ND_INPUT_DOWN, &dout));
    if (nd_mlp_has_pieces(m)) { /* 11. to 8. */
        ND_TRY(nd_mlp_pieces_backward(c, &dout, m->work.dh));
        return norm_backward(c, true);
    }
    /* 11. down: the reduce-scatter becomes a gather */
    ND_TRY(nd_linear_backward(c, ND_INPUT_DOWN, &dout, m->work.dact));
    ND_TRY(nd_block_show(c, ND_DUMP_D_ACT, 1, 0, m->work.dact));
    /* 10. SwiGLU, in place of gate and up */
    ND_TRY(nd_operand_prepare_gradients(c, &dgu, to, fuse));
    ND_OP(m->rank, ELEMENTWISE, swiglu_bwd, .dgate = to[0], .dup = to[1], .dout = m->work.dact,
          .gate = nd_tensor_columns(a->gu, 0, F), .up = nd_tensor_columns(a->gu, F, F),
          .gelu = m->dims.gelu, .fuse = {fuse[0], fuse[1]});
    ND_TRY(nd_block_show(c, ND_DUMP_D_GATE, 2, 0, a->gu));
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
    ND_TRY(nd_cp_attention_bwd(&m->cp, nd_block_sight(c), &b));
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
    nd_graph_key key = nd_block_graph_key(c, "backward");
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
