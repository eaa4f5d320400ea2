// SPDX-License-Identifier: Apache-2.0
/* The linears with one input: exchanges over tp beside products, part by part. */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/*
 * Rows of an FP8 product for y or dx as the backend takes them: those of the micro-batch and, up to
 * a multiple of nd_ops.fp8_rows, rows behind them. Every buffer has them (nd_model_create). What
 * the input holds there is left from earlier, and enters no amax; what the output gets there is not
 * read. Only y is summed with fewer bits where it is of FP8.
 */
static nd_status multiply(nd_model *m, nd_product_args *x)
{
    const bool fp8 = nd_matrix_is_fp8(&x->a);
    if (fp8 && !x->a_transposed) {
        const int64_t rows = nd_round_up(x->c.shape[0], nd_max(m->rank->ops->fp8_rows, 1));
        ND_ASSERT(rows <= m->dims.T);
        x->c.shape[0] = x->a.stored.shape[0] = rows;
    }
    ND_OP(m->rank, ND_TRACE_GEMM, product, .c = x->c, .a = x->a, .a_transposed = x->a_transposed,
          .b = x->b, .b_transposed = x->b_transposed, .beta = x->beta,
          .few_rows = !fp8 && x->few_rows, .fast_accumulation = fp8 && x->b_transposed,
          .scratch = fp8 ? m->work.fp8[ND_FP8_GEMM] : NULL);
    return ND_OK;
}

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

nd_status nd_linear_products(nd_block_call c, const nd_linear_group *g, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    if (!g->column && g->method->settle_input) {
        ND_TRY(g->method->settle_input(c, g, x->stored));
    }
    if (g->beta != 0.0f) { /* the products are added to the biases */
        const nd_tensor bias = nd_fsdp_weight(&m->fsdp, g->first_bias, g->last_bias, c.layer);
        ND_OP(m->rank, ELEMENTWISE, bias_fwd, .out = y, .bias = bias);
    }
    for (int i = 0; i < g->part_count; i++) {
        const nd_linear_part *p = &g->parts[i];
        nd_product_args args = {.c = nd_tensor_columns(y, p->offset, p->rows),
                                .b_transposed = true,
                                .beta = g->beta,
                                .few_rows = c.pass == ND_PASS_GENERATE};
        ND_TRY(nd_operand_form(c, g, p, ND_X_OF_Y, x, &args.a));
        ND_TRY(nd_weight_form(c, g, p, ND_W_OF_Y, &args.b));
        ND_TRY(multiply(m, &args));
    }
    return ND_OK;
}

nd_status nd_linear_gather(nd_block_call c, nd_operand *x, nd_operand *full)
{
    ND_TRY(nd_operand_encode(c, ND_X_OF_Y, x));
    *full = *x;
    return nd_tp_gather(c.model->rank, x->stored, c.model->work.full_a, NULL, &full->stored);
}

nd_status nd_linear_forward(nd_block_call c, nd_input input, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_tensor sums = g->column ? y : nd_tp_partial(m->rank, y, m->work.full_b);
    nd_operand full;
    if (g->column) {
        ND_TRY(nd_linear_gather(c, x, &full));
    } else {
        ND_TRY(nd_operand_encode(c, ND_X_OF_Y, x));
        full = *x;
    }
    ND_TRY(nd_linear_products(c, g, &full, sums));
    return g->column ? ND_OK : nd_tp_reduce(m->rank, sums, y, NULL);
}

nd_operand nd_linear_part_gradient(nd_block_call c, const nd_linear_group *g,
                                   const nd_linear_part *p, const nd_operand *dy)
{
    const nd_scales *s = &c.model->scales;
    const int64_t T = c.model->dims.T;
    nd_operand part = *dy;
    part.stored = nd_tensor_columns(dy->stored, p->offset, p->rows);
    if (p->fp8) {
        part.scale = nd_scales_at(s, nd_site_gradient(s, c.layer, p->linear));
    }
    if (p->fp8 && dy->codes.data) {
        part.stored = nd_tensor_rows(dy->codes, (p->linear - g->first) * T, T);
    }
    return part;
}

static nd_status settle_gradient(nd_linear_rest *rest)
{
    const nd_linear_group *g = rest->group;
    return g->method->settle_gradients ? g->method->settle_gradients(rest->call, g, &rest->dy)
                                       : ND_OK;
}

nd_status nd_linear_begin_gradient(nd_linear_rest *rest)
{
    const nd_block_call c = rest->call;
    const nd_linear_group *g = rest->group;
    if (g->bias) { /* sums of a row-parallel group's tp ranks are added up later */
        ND_OP(c.model->rank, ELEMENTWISE, bias_bwd,
              .dbias = nd_block_vector_gradient(c, g->first_bias, g->last_bias),
              .dout = rest->dy.stored);
    }
    return settle_gradient(rest);
}

nd_status nd_linear_gradient_products(nd_linear_rest *rest, nd_tensor dx)
{
    const nd_block_call c = rest->call;
    nd_model *m = c.model;
    const nd_linear_group *g = rest->group;
    for (int i = 0; i < g->dx_part_count; i++) {
        const nd_linear_part *p = &g->dx_parts[i];
        nd_operand part = nd_linear_part_gradient(c, g, p, &rest->dy);
        nd_product_args args = {.c = dx, .beta = p->offset > 0 ? 1.0f : 0.0f};
        ND_TRY(nd_operand_form(c, g, p, ND_DY_OF_DX, &part, &args.a));
        ND_TRY(nd_weight_form(c, g, p, ND_W_OF_DX, &args.b));
        ND_TRY(multiply(m, &args));
        rest->forms[i] = part.form;
    }
    return ND_OK;
}

nd_status nd_linear_input_gradient(nd_block_call c, nd_input input, const nd_operand *dy,
                                   nd_tensor dx, nd_linear_rest *rest)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_tensor sums = g->column ? nd_tp_partial(m->rank, dx, m->work.full_b) : dx;
    *rest = (nd_linear_rest){.call = c, .group = g, .x = nd_operand_kept(c, input), .dy = *dy};
    ND_TRY(nd_linear_begin_gradient(rest));
    if (!g->column) {
        ND_TRY(nd_tp_gather(m->rank, rest->dy.stored, m->work.full_a, NULL, &rest->dy.stored));
    } else if (!m->delays) { /* the input is gathered again */
        ND_TRY(nd_tp_gather(m->rank, rest->x.stored, m->work.full_a, &rest->exchange,
                            &rest->x.stored));
    }
    ND_TRY(nd_linear_gradient_products(rest, sums));
    ND_TRY(nd_exchange_finish(m->rank, &rest->exchange));
    return g->column ? nd_tp_reduce(m->rank, sums, dx, &rest->exchange) : ND_OK;
}

nd_status nd_linear_weight_gradient(nd_linear_rest *rest)
{
    const nd_block_call c = rest->call;
    nd_model *m = c.model;
    const nd_linear_group *g = rest->group;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, c.layer);
    const nd_made_form *form = rest->forms;
    for (int i = 0; i < g->part_count; i++) {
        const nd_linear_part *p = &g->parts[i];
        nd_operand part = nd_linear_part_gradient(c, g, p, &rest->dy);
        nd_product_args args = {.c = nd_fsdp_grad(&m->fsdp, p->first, p->last, c.layer),
                                .a_transposed = true,
                                .beta = rest->adds ? 1.0f : nd_fsdp_grad_beta(&m->fsdp, unit)};
        part.form = *form;
        form += p->fp8 ? p->count : 1; /* linears in BF16 are one part also where dx is made */
        ND_TRY(nd_operand_form(c, g, p, ND_DY_OF_DW, &part, &args.a));
        ND_TRY(nd_operand_form(c, g, p, ND_X_OF_DW, &rest->x, &args.b));
        ND_TRY(multiply(m, &args));
    }
    return ND_OK;
}

nd_status nd_linear_backward(nd_block_call c, nd_input input, const nd_operand *dy, nd_tensor dx)
{
    nd_linear_rest rest;
    ND_TRY(nd_linear_input_gradient(c, input, dy, dx, &rest));
    ND_TRY(c.model->delays ? ND_OK : nd_linear_weight_gradient(&rest));
    return nd_exchange_finish(c.model->rank, &rest.exchange);
}

nd_status nd_linear_delayed_gradient(nd_block_call c, nd_input input, nd_tensor dy)
{
    const nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    nd_linear_rest rest = {.call = c,
                           .group = g,
                           .x = nd_operand_kept(c, input),
                           .dy = {.stored = dy, .known = ND_KNOWN_SCALE}};
    if (g->column) { /* the scales of dy are settled */
        ND_TRY(nd_tp_gather(m->rank, rest.x.stored, m->work.full_a, NULL, &rest.x.stored));
    } else {
        ND_TRY(settle_gradient(&rest));
        ND_TRY(nd_tp_gather(m->rank, rest.dy.stored, m->work.full_a, NULL, &rest.dy.stored));
    }
    return nd_linear_weight_gradient(&rest);
}
