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
            nd_cast_rooms(m, p, 0, 0, bytes);
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

/* Makes the form of x or dy, which dx and dw read with other scales. Where tp splits them, they are
 * settled. */
static nd_status cast(nd_block_call c, const nd_linear_part *p, nd_role role, bool settled,
                      nd_operand *x)
{
    nd_model *m = c.model;
    nd_scales *s = &m->scales;
    const nd_recipe *recipe = &s->recipe;
    const bool is_x = role == ND_X_OF_Y || role == ND_X_OF_DW;
    const nd_cast_rule *const rules[ND_ROLE_COUNT] = {[ND_X_OF_Y] = &recipe->output.a,
                                                      [ND_DY_OF_DX] = &recipe->input_gradient.a,
                                                      [ND_DY_OF_DW] = &recipe->weight_gradient.a,
                                                      [ND_X_OF_DW] = &recipe->weight_gradient.b};
    nd_cast how = {.rule = rules[role],
                   .settled = settled,
                   .vectors = settled ? nd_scales_joint(s, p->joint_rows, x->rows.shape[0])
                                      : s->vectors[is_x ? 0 : 2]};
    if (is_x && x->cast.inverse) {
        return ND_OK;
    }
    nd_cast_want(&how, p->rules[role], is_x ? m->work.fp8.x : m->work.fp8.dy,
                 is_x ? m->work.fp8.x_transposed : m->work.fp8.dy_transposed);
    *(is_x ? &s->casts.inputs : &s->casts.gradients) += 1;
    return nd_operand_cast(m, x, &how);
}

static nd_status weight_of(nd_block_call c, const nd_linear_part *p, nd_role role, bool split,
                           nd_matrix *w)
{
    nd_scale_ref settled = {0};
    split = split && p->joint_weight >= 0;
    if (split) {
        settled = nd_scales_joint(&c.model->scales, p->joint_weight, c.model->dims.C);
    }
    ND_TRY(nd_operand_weight(c, p, 0, role, split ? &settled : NULL, w));
    w->kept = nd_linear_kept(c, p, role == ND_W_OF_Y);
    return ND_OK;
}

static nd_status form(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                      nd_role role, nd_operand *x, nd_matrix *out)
{
    const bool of_dw = role == ND_DY_OF_DW || role == ND_X_OF_DW;
    const bool backward = role == ND_DY_OF_DX || role == ND_W_OF_DX;
    const bool split = !of_dw && g->column == backward; /* what tp splits for this product */
    if (of_dw && c.model->scales.recipe.weight_gradient.a.scaling == ND_SCALING_NONE) {
        return nd_linear_bf16.form(c, g, p, role, x, out);
    }
    if (!x) {
        return weight_of(c, p, role, split, out);
    }
    if (role == ND_X_OF_Y && split) {
        ND_TRY(settle(c, g, false, x->rows));
    }
    ND_TRY(cast(c, p, role, split, x));
    *out = x->cast;
    return ND_OK;
}

const nd_linear_method nd_linear_fp8_rows = {
    .plan = plan, .settle_gradients = settle_gradients, .form = form};
