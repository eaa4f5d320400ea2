// SPDX-License-Identifier: Apache-2.0
/* The linears with one input: exchanges over tp beside products, part by part. */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/* What the methods share. */

nd_tensor nd_linear_weight(nd_block_call c, const nd_linear_part *p)
{
    return nd_fsdp_weight(&c.model->fsdp, p->first, p->last, c.layer);
}

nd_kept_form *nd_linear_kept(nd_block_call c, const nd_linear_part *p, bool transposed)
{
    const nd_packed_weight w = {
        .first = p->first, .last = p->last, .layer = c.layer, .transposed = transposed};
    return nd_packed_form_of(&c.model->packed, &w);
}

void nd_linear_join(const nd_linear_part *p, nd_tensor rows, nd_matrix *first)
{
    if (p->count > 1) {
        ND_ASSERT(first->rows.data && p->count <= ND_FP8_PARTS);
        first->rows = rows;
        first->parts = p->count;
        memcpy(first->lines, p->lines, sizeof first->lines);
    }
}

nd_operand nd_linear_part_of(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                             const nd_operand *dy)
{
    const nd_scales *s = &c.model->scales;
    const int64_t T = c.model->dims.T;
    nd_operand part = *dy;
    part.rows = nd_tensor_columns(dy->rows, p->offset, p->rows);
    if (p->fp8) {
        part.scale = nd_scales_at(s, nd_site_gradient(s, c.layer, p->linear));
        part.codes = dy->codes.data ? nd_tensor_rows(dy->codes, (p->linear - g->first) * T, T)
                                    : (nd_tensor){0};
    }
    return part;
}

/* Products. */

/*
 * Rows of an FP8 product as the backend takes them: those of the micro-batch and, up to a multiple
 * of nd_ops.fp8_rows, rows behind them. Every buffer has them (nd_model_create). What x holds there
 * is left from earlier, and enters no amax; what y gets there is not read.
 */
static nd_tensor padded_rows(const nd_model *m, nd_tensor rows)
{
    if (m->rank->ops->fp8_rows > 0) {
        rows.shape[0] = nd_round_up(rows.shape[0], m->rank->ops->fp8_rows);
    }
    ND_ASSERT(rows.shape[0] <= m->dims.T);
    return rows;
}

static nd_status multiply(nd_model *m, const nd_product_args *x, const nd_gemm_rule *rule)
{
    const bool fp8 = nd_matrix_is_fp8(&x->a);
    ND_OP(m->rank, ND_TRACE_GEMM, product, .c = x->c, .a = x->a, .a_transposed = x->a_transposed,
          .b = x->b, .b_transposed = x->b_transposed, .beta = x->beta,
          .few_rows = !fp8 && x->few_rows, .fast_accumulation = fp8 && rule->fast_accumulation,
          .scratch = fp8 ? m->work.fp8.gemm : NULL);
    return ND_OK;
}

static nd_status output(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                        nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    nd_product_args args = {
        .b_transposed = true, .beta = g->beta, .few_rows = c.pass == ND_PASS_GENERATE};
    ND_TRY(p->method->form(c, g, p, ND_X_OF_Y, x, &args.a));
    ND_TRY(p->method->form(c, g, p, ND_W_OF_Y, NULL, &args.b));
    args.c = p->fp8 ? padded_rows(m, y) : y;
    args.a.codes = p->fp8 ? padded_rows(m, args.a.codes) : args.a.codes;
    args.a.rows = p->fp8 ? padded_rows(m, args.a.rows) : args.a.rows;
    return multiply(m, &args, &m->scales.recipe.output);
}

static nd_status input_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                nd_operand *dy, nd_tensor dx)
{
    nd_product_args args = {.c = dx, .beta = p->offset > 0 ? 1.0f : 0.0f};
    ND_TRY(p->method->form(c, g, p, ND_DY_OF_DX, dy, &args.a));
    ND_TRY(p->method->form(c, g, p, ND_W_OF_DX, NULL, &args.b));
    return multiply(c.model, &args, &c.model->scales.recipe.input_gradient);
}

static nd_status weight_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                 nd_operand *x, nd_operand *dy)
{
    nd_fsdp *fsdp = &c.model->fsdp;
    const nd_unit *unit = nd_layout_unit(c.model->layout, ND_UNIT_BLOCK, c.layer);
    nd_product_args args = {.c = nd_fsdp_grad(fsdp, p->first, p->last, c.layer),
                            .a_transposed = true,
                            .beta = nd_fsdp_grad_beta(fsdp, unit)};
    ND_TRY(p->method->form(c, g, p, ND_DY_OF_DW, dy, &args.a));
    ND_TRY(p->method->form(c, g, p, ND_X_OF_DW, x, &args.b));
    return multiply(c.model, &args, &c.model->scales.recipe.weight_gradient);
}

/* Groups. */

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

/* The products are added to the biases. */
static nd_status begin_with_bias(nd_block_call c, const nd_linear_group *g, nd_tensor y)
{
    const nd_param_id first = nd_linear_bias(g->first),
                      last = nd_linear_bias(g->first + g->count - 1);
    if (g->beta == 0.0f) {
        return ND_OK;
    }
    nd_tensor bias = nd_fsdp_weight(&c.model->fsdp, first, last, c.layer);
    ND_OP(c.model->rank, ELEMENTWISE, bias_fwd, .out = y, .bias = bias);
    return ND_OK;
}

/* dy (T, N), or (Tl, C) of a row-parallel group, whose sums of tp ranks are added up later. */
static nd_status bias_gradient(nd_block_call c, const nd_linear_group *g, nd_tensor dy)
{
    if (!g->bias) {
        return ND_OK;
    }
    const nd_param_id first = nd_linear_bias(g->first),
                      last = nd_linear_bias(g->first + g->count - 1);
    ND_OP(c.model->rank, ELEMENTWISE, bias_bwd, .dbias = nd_block_vector_gradient(c, first, last),
          .dout = dy);
    return ND_OK;
}

/* Gathers x or dy over tp, as codes or as rows. */
static nd_status gather(nd_model *m, nd_operand *x, void *codes, nd_exchange *later)
{
    nd_tensor *what = x->codes.data ? &x->codes : &x->rows;
    return nd_tp_gather(m->rank, *what, x->codes.data ? codes : m->work.full_a, later, what);
}

nd_status nd_linear_forward(nd_block_call c, nd_input input, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_tensor all = g->column ? y : nd_tp_partial(m->rank, y, m->work.full_b);
    ND_TRY(nd_operand_keep(c, x));
    if (g->column) {
        ND_TRY(gather(m, x, m->work.fp8.x, NULL));
    }
    ND_TRY(begin_with_bias(c, g, all));
    for (int i = 0; i < g->part_count; i++) {
        const nd_linear_part *p = &g->parts[i];
        ND_TRY(output(c, g, p, x, nd_tensor_columns(all, p->offset, p->rows)));
    }
    return g->column ? ND_OK : nd_tp_reduce(m->rank, all, y, NULL);
}

nd_status nd_linear_input_gradient(nd_block_call c, nd_input input, nd_operand *dy, nd_tensor dx,
                                   nd_linear_rest *rest)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_tensor all = g->column ? nd_tp_partial(m->rank, dx, m->work.full_b) : dx;
    *rest = (nd_linear_rest){.call = c, .group = g, .x = nd_operand_of(c, input)};
    rest->x.known = rest->x.codes.data ? ND_KNOWN_CODES : ND_KNOWN_NOTHING;
    ND_TRY(bias_gradient(c, g, dy->rows));
    ND_TRY(g->method->settle_gradients(c, g, dy));
    if (!g->column) {
        ND_TRY(gather(m, dy, m->work.fp8.dy, NULL));
    } else if (!m->delays) {
        ND_TRY(gather(m, &rest->x, m->work.fp8.x, &rest->exchange));
    }
    for (int i = 0; i < g->alone_count; i++) {
        const nd_linear_part *p = &g->alone[i];
        nd_operand part = nd_linear_part_of(c, g, p, dy);
        ND_TRY(input_gradient(c, g, p, &part, all));
        rest->casts[i] = part.cast;
    }
    rest->dy = *dy;
    ND_TRY(nd_exchange_finish(m->rank, &rest->exchange));
    return g->column ? nd_tp_reduce(m->rank, all, dx, &rest->exchange) : ND_OK;
}

nd_status nd_linear_weight_gradient(nd_linear_rest *rest)
{
    const nd_linear_group *g = rest->group;
    const nd_matrix *cast = rest->casts;
    for (int i = 0; i < g->part_count; i++) {
        const nd_linear_part *p = &g->parts[i];
        nd_operand part = nd_linear_part_of(rest->call, g, p, &rest->dy);
        part.cast = *cast;
        cast += p->fp8 ? p->count : 1; /* linears in BF16 are one part also where dx is made */
        ND_TRY(weight_gradient(rest->call, g, p, &rest->x, &part));
    }
    return ND_OK;
}

nd_status nd_linear_backward(nd_block_call c, nd_input input, nd_operand *dy, nd_tensor dx)
{
    nd_linear_rest rest;
    ND_TRY(nd_linear_input_gradient(c, input, dy, dx, &rest));
    ND_TRY(c.model->delays ? ND_OK : nd_linear_weight_gradient(&rest));
    return nd_exchange_finish(c.model->rank, &rest.exchange);
}

nd_status nd_linear_delayed_gradient(nd_block_call c, nd_input input, nd_tensor dy)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    nd_linear_rest rest = {.call = c, .group = g, .x = nd_operand_of(c, input), .dy = {.rows = dy}};
    rest.x.known = rest.x.codes.data ? ND_KNOWN_CODES : ND_KNOWN_NOTHING;
    if (g->column) { /* whose scales are settled */
        ND_TRY(gather(m, &rest.x, m->work.fp8.x, NULL));
    } else {
        ND_TRY(g->method->settle_gradients(c, g, &rest.dy));
        ND_TRY(gather(m, &rest.dy, m->work.fp8.dy, NULL));
    }
    return nd_linear_weight_gradient(&rest);
}
