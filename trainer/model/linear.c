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

/* One part of the gradient dy of the outputs of all linears with an input. */
static nd_operand part_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                const nd_operand *dy)
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

/* The method of one scale for each operand: the amax of a tensor that is split over tp is its
 * maximum over tp. Inputs that the block keeps as codes, and gradients of the outputs of
 * row-parallel linears, are cast before they are gathered, and travel as codes. */

static void tensor_plan(const nd_model *m, nd_linear_group *g, size_t bytes[ND_FP8_BUFFERS])
{
    const nd_dims *d = &m->dims;
    const nd_linear_part *last = &g->dx_parts[g->dx_part_count - 1];
    const size_t outputs = (size_t)(d->T * (last->offset + last->rows));
    const bool at_once = nd_recipe_is_delayed(&m->scales.recipe) && g->input == ND_INPUT_GATE_UP;
    if (!m->forward_only && at_once) {
        bytes[ND_FP8_DY] = nd_max_bytes(bytes[ND_FP8_DY], outputs);
    }
    if (!m->forward_only && g->travels) {
        bytes[ND_FP8_DY_LOCAL] = nd_max_bytes(bytes[ND_FP8_DY_LOCAL], (size_t)(d->Tl * d->C));
    }
}

static nd_status tensor_settle(nd_block_call c, const nd_linear_group *g, nd_role role,
                               nd_operand *operand)
{
    nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.rules[ND_DY_OF_DX];
    const nd_scale_ref all = nd_scales_at(s, nd_site_gradient(s, c.layer, g->first));
    if (role != ND_DY_OF_DX) {
        return ND_OK;
    }
    if (rule->scaling == ND_SCALING_CURRENT) {
        for (int i = 0; i < g->dx_part_count; i++) {
            if (g->dx_parts[i].fp8 && operand->known != ND_KNOWN_AMAX) {
                const nd_operand part = part_gradient(c, g, &g->dx_parts[i], operand);
                ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = part.scale.amax, .x = part.stored,
                      .granularity = ND_PER_TENSOR);
            }
        }
        ND_TRY(nd_scales_settle(&m->scales, all, g->count, rule->format, true));
        operand->known = ND_KNOWN_SCALE;
    }
    if (g->travels) { /* one linear */
        operand->scale = all;
        operand->codes = nd_tensor_2d(m->work.fp8[ND_FP8_DY_LOCAL], rule->format,
                                      operand->stored.shape[0], operand->stored.shape[1]);
    }
    return g->travels ? nd_operand_encode(c, ND_DY_OF_DX, operand) : ND_OK;
}

const nd_linear_method nd_linear_fp8_tensor = {.plan = tensor_plan, .settle = tensor_settle};

/* The method of scales of rows and columns: inputs and gradients are gathered, and kept, in BF16.
 * What tp splits of the scales is settled by one reduction for each input: before y of a
 * row-parallel linear, rows of its input and of its weight; before dx of column-parallel ones, rows
 * of the gradients and columns of the weights. */

/* The product whose sum tp splits, so that x or dy has rows on all ranks. */
static nd_role split_role(const nd_linear_group *g)
{
    return g->column ? ND_DY_OF_DX : ND_X_OF_Y;
}

static nd_role split_weight(const nd_linear_group *g)
{
    return g->column ? ND_W_OF_DX : ND_W_OF_Y;
}

/* The amaxes of all linears with one input lie one after the other in nd_scales.joint, for each
 * those of x or dy and then those of the weight, so that one reduction settles them. */
static void rows_plan(const nd_model *m, nd_linear_group *g, size_t bytes[ND_FP8_BUFFERS])
{
    const nd_scales *s = &m->scales;
    const bool of_weight =
        s->recipe.rules[split_weight(g)].granularity != ND_PER_TENSOR && !s->codes_gathered;
    int64_t end = 0;
    for (int i = 0; i < g->dx_part_count; i++) {
        nd_linear_part *p = &g->dx_parts[i];
        if (p->fp8) {
            p->joint[split_role(g)] = end;
            p->joint[split_weight(g)] = of_weight ? end + m->dims.T : -1;
            end += m->dims.T + (of_weight ? m->dims.C : 0);
            g->parts[i] = *p; /* FP8 linears have parts of their own in both lists */
        }
    }
}

/* x (T, K), or dy (T, N) of all outputs. */
static nd_status rows_settle(nd_block_call c, const nd_linear_group *g, nd_role role,
                             nd_operand *operand)
{
    nd_model *m = c.model;
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.rules[split_role(g)],
                       *weight = &s->recipe.rules[split_weight(g)];
    const nd_tensor all = operand->stored;
    const int64_t rows = all.shape[0], C = m->dims.C;
    int64_t count = 0;
    if (role != split_role(g)) {
        return ND_OK;
    }
    for (int i = 0; i < g->dx_part_count; i++) {
        const nd_linear_part *p = &g->dx_parts[i];
        const int64_t at = p->joint[split_role(g)], weight_at = p->joint[split_weight(g)];
        if (p->fp8) {
            count = at + rows;
            ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = nd_scales_joint(s, at, rows).amax,
                  .x = g->column ? nd_tensor_columns(all, p->offset, p->rows) : all,
                  .granularity = rule->granularity);
        }
        if (weight_at >= 0) {
            count = weight_at + C;
            ND_ASSERT(rule->format == weight->format);
            ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = nd_scales_joint(s, weight_at, C).amax,
                  .x = nd_fsdp_weight(&m->fsdp, p->first, p->last, c.layer),
                  .granularity = weight->granularity);
        }
    }
    return nd_scales_settle(s, nd_scales_joint(s, 0, count), count, rule->format, true);
}

const nd_linear_method nd_linear_fp8_rows = {.plan = rows_plan, .settle = rows_settle};

/* Products. */

static nd_status settle(nd_block_call c, const nd_linear_group *g, nd_role role, nd_operand *x)
{
    return g->method->settle ? g->method->settle(c, g, role, x) : ND_OK;
}

nd_status nd_linear_products(nd_block_call c, const nd_linear_group *g, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    ND_TRY(settle(c, g, ND_X_OF_Y, x));
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

nd_status nd_linear_begin_gradient(nd_linear_rest *rest)
{
    const nd_block_call c = rest->call;
    const nd_linear_group *g = rest->group;
    if (g->bias) { /* sums of a row-parallel group's tp ranks are added up later */
        ND_OP(c.model->rank, ELEMENTWISE, bias_bwd,
              .dbias = nd_block_vector_gradient(c, g->first_bias, g->last_bias),
              .dout = rest->dy.stored);
    }
    return settle(c, g, ND_DY_OF_DX, &rest->dy);
}

nd_status nd_linear_gradient_products(nd_linear_rest *rest, nd_tensor dx)
{
    const nd_block_call c = rest->call;
    nd_model *m = c.model;
    const nd_linear_group *g = rest->group;
    for (int i = 0; i < g->dx_part_count; i++) {
        const nd_linear_part *p = &g->dx_parts[i];
        nd_operand part = part_gradient(c, g, p, &rest->dy);
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
        nd_operand part = part_gradient(c, g, p, &rest->dy);
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
        ND_TRY(settle(c, g, ND_DY_OF_DX, &rest.dy));
        ND_TRY(nd_tp_gather(m->rank, rest.dy.stored, m->work.full_a, NULL, &rest.dy.stored));
    }
    return nd_linear_weight_gradient(&rest);
}
