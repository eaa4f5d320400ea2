// SPDX-License-Identifier: Apache-2.0
/*
 * Linears in FP8 with scales of rows and columns. Inputs and gradients are gathered, and kept, in
 * BF16. What tp splits of the scales is settled by one reduction for each input: before y of a
 * row-parallel linear, rows of its input and of its weight; before dx of column-parallel ones, rows
 * of the gradients and columns of the weights.
 */
#include "trainer/model/linear.h"

static const nd_gemm_rule *rule_of(const nd_model *m, bool backward)
{
    const nd_recipe *recipe = &m->scales.recipe;
    return backward ? &recipe->input_gradient : &recipe->output;
}

static void plan_part(const nd_model *m, nd_linear_part *p, nd_fp8_bytes *bytes)
{
    nd_cast_room(p->rules[ND_X_OF_Y], 0, &bytes->x, &bytes->x_transposed);
    nd_cast_room(p->rules[ND_W_OF_Y], 0, &bytes->w, &bytes->w_transposed);
    if (!m->forward_only) {
        nd_cast_room(p->rules[ND_X_OF_DW], 0, &bytes->x, &bytes->x_transposed);
        nd_cast_room(p->rules[ND_W_OF_DX], 0, &bytes->w, &bytes->w_transposed);
        nd_cast_room(p->rules[ND_DY_OF_DX], 0, &bytes->dy, &bytes->dy_transposed);
        nd_cast_room(p->rules[ND_DY_OF_DW], 0, &bytes->dy, &bytes->dy_transposed);
    }
}

/* The amaxes of all linears with one input lie one after the other in nd_scales.joint, for each
 * those of x or dy and then those of the weight, so that one reduction settles them. FP8 linears
 * are parts of their own in both lists, which so are equal. */
static void plan(const nd_model *m, nd_linear_group *g, nd_fp8_bytes *bytes)
{
    const bool of_weight =
        rule_of(m, g->column)->b.granularity != ND_PER_TENSOR && !m->scales.codes_gathered;
    int64_t end = 0;
    for (int i = 0; i < g->alone_count; i++) {
        nd_linear_part *p = &g->alone[i];
        if (p->fp8) {
            p->joint_rows = end;
            p->joint_weight = of_weight ? end + m->dims.T : -1;
            end += m->dims.T + (of_weight ? m->dims.C : 0);
            g->parts[i] = *p;
            plan_part(m, p, bytes);
        }
    }
}

/* x (T, K), or in backward dy (T, N) of all outputs. */
static nd_status settle(nd_block_call c, const nd_linear_group *g, bool backward, nd_tensor all)
{
    nd_scales *s = &c.model->scales;
    const nd_gemm_rule *rule = rule_of(c.model, backward);
    const int64_t rows = all.shape[0];
    int64_t count = 0;
    for (int i = 0; i < g->alone_count; i++) {
        const nd_linear_part *p = &g->alone[i];
        if (p->fp8) {
            count = p->joint_rows + rows;
            ND_TRY(nd_scales_measure(s, nd_scales_joint(s, p->joint_rows, rows),
                                     rule->a.granularity,
                                     backward ? nd_tensor_columns(all, p->offset, p->rows) : all));
        }
        if (p->joint_weight >= 0) {
            count = p->joint_weight + c.model->dims.C;
            ND_ASSERT(rule->a.format == rule->b.format);
            ND_TRY(nd_scales_measure(s, nd_scales_joint(s, p->joint_weight, c.model->dims.C),
                                     rule->b.granularity, nd_linear_weight(c, p)));
        }
    }
    return nd_scales_settle(s, nd_scales_joint(s, 0, count), count, rule->a.format, true);
}

static nd_status settle_gradients(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    return g->column ? settle(c, g, true, dy->rows) : ND_OK;
}

/* The scales of x or dy where tp splits them; NULL: they are found when it is cast. */
static const nd_scale_ref *settled_rows(nd_block_call c, const nd_linear_part *p, bool split,
                                        int64_t rows, nd_scale_ref *out)
{
    if (split) {
        *out = nd_scales_joint(&c.model->scales, p->joint_rows, rows);
    }
    return split ? out : NULL;
}

/* Makes x->cast, the form of an input that products of y or (for_weight) of dw read. settled: its
 * scales; NULL: they are found here. */
static nd_status cast_input(nd_block_call c, const nd_linear_part *p, nd_role role,
                            const nd_scale_ref *settled, nd_operand *x)
{
    nd_model *m = c.model;
    const nd_recipe *recipe = &m->scales.recipe;
    nd_cast how = {.rule = role == ND_X_OF_DW ? &recipe->weight_gradient.b : &recipe->output.a,
                   .settled = settled,
                   .vectors = settled ? *settled : m->scales.vectors[0]};
    if (x->cast.inverse) {
        return ND_OK;
    }
    nd_cast_want(&how, p->rules[role], m->fp8.x, m->fp8.x_transposed);
    m->scales.casts.inputs++;
    return nd_operand_cast(m, x, &how);
}

/* The same of a gradient, which dx and dw read with other scales. */
static nd_status cast_gradient(nd_block_call c, const nd_linear_part *p, nd_role role,
                               const nd_scale_ref *settled, nd_operand *dy)
{
    nd_model *m = c.model;
    const nd_recipe *recipe = &m->scales.recipe;
    nd_cast how = {.rule =
                       role == ND_DY_OF_DW ? &recipe->weight_gradient.a : &recipe->input_gradient.a,
                   .settled = settled,
                   .vectors = settled ? *settled : m->scales.vectors[2]};
    nd_cast_want(&how, p->rules[role], m->fp8.dy, m->fp8.dy_transposed);
    m->scales.casts.gradients++;
    return nd_operand_cast(m, dy, &how);
}

static nd_status weight_of(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                           bool backward, nd_matrix *w)
{
    const bool split = g->column == backward && p->joint_weight >= 0;
    nd_scale_ref settled = {0};
    if (split) {
        settled = nd_scales_joint(&c.model->scales, p->joint_weight, c.model->dims.C);
    }
    ND_TRY(nd_operand_weight(c, p, 0, backward, split ? &settled : NULL, w));
    w->kept = nd_linear_kept(c, p, !backward);
    return ND_OK;
}

static nd_status forward(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                         nd_operand *x, nd_tensor y)
{
    nd_scale_ref rows;
    nd_matrix w;
    if (!g->column) {
        ND_TRY(settle(c, g, false, x->rows));
    }
    ND_TRY(cast_input(c, p, ND_X_OF_Y, settled_rows(c, p, !g->column, x->rows.shape[0], &rows), x));
    ND_TRY(weight_of(c, g, p, false, &w));
    return nd_linear_output_fp8(c, g, x->cast, w, y);
}

static nd_status input_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                nd_operand *dy, nd_tensor dx)
{
    nd_scale_ref rows;
    nd_matrix w;
    ND_TRY(cast_gradient(c, p, ND_DY_OF_DX, settled_rows(c, p, g->column, dy->rows.shape[0], &rows),
                         dy));
    ND_TRY(weight_of(c, g, p, true, &w));
    return nd_linear_input_gradient_fp8(c, p, dy->cast, w, dx);
}

static nd_status weight_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                 nd_operand *x, nd_operand *dy)
{
    if (c.model->scales.recipe.weight_gradient.a.scaling == ND_SCALING_NONE) {
        return nd_linear_bf16.weight_gradient(c, g, p, x, dy);
    }
    ND_TRY(cast_gradient(c, p, ND_DY_OF_DW, NULL, dy));
    ND_TRY(cast_input(c, p, ND_X_OF_DW, NULL, x));
    return nd_linear_weight_gradient_fp8(c, p, dy->cast, x->cast);
}

const nd_linear_method nd_linear_fp8_rows = {.name = "fp8 per row",
                                             .plan = plan,
                                             .settle_gradients = settle_gradients,
                                             .forward = forward,
                                             .input_gradient = input_gradient,
                                             .weight_gradient = weight_gradient};
