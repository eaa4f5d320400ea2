// SPDX-License-Identifier: Apache-2.0
/*
 * Linears in FP8 with scales of rows and columns. Inputs and gradients are gathered, and kept, in
 * BF16. What tp splits of the scales is settled by one reduction for each input: before y of a
 * row-parallel linear, rows of its input and of its weight; before dx of column-parallel ones, rows
 * of the gradients and columns of the weights.
 */
#include "trainer/model/linear.h"

/* Scales of rows and columns that tp splits. The amaxes of all linears with one input lie one after
 * the other, so that one reduction settles them. */
typedef struct joint {
    bool rows, weight; /* whether x or dy, and the weight, have such scales */
    nd_scale_ref of_rows, of_weight;
    int64_t end; /* behind those of this linear */
} joint;

static const nd_gemm_rule *rule_of(nd_block_call c, bool backward)
{
    const nd_recipe *recipe = &c.model->scales.recipe;
    return backward ? &recipe->input_gradient : &recipe->output;
}

/* x or dy of the linear has `rows` rows. */
static joint joint_of(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                      bool backward, int64_t rows)
{
    const nd_scales *s = &c.model->scales;
    joint j = {.rows = p->fp8 && g->column == backward};
    if (j.rows) {
        j.weight = rule_of(c, backward)->b.granularity != ND_PER_TENSOR && !s->codes_gathered;
        int64_t of_weight = j.weight ? c.model->dims.C : 0;
        int64_t begin = p->fp8_before * (rows + of_weight);
        j.of_rows = nd_scales_joint(s, begin, rows);
        j.of_weight = nd_scales_joint(s, begin + rows, of_weight);
        j.end = begin + rows + of_weight;
    }
    return j;
}

/* x (T, K), or in backward dy (T, N) of all outputs. */
static nd_status settle(nd_block_call c, const nd_linear_group *g, bool backward, nd_tensor all)
{
    nd_scales *s = &c.model->scales;
    const nd_gemm_rule *rule = rule_of(c, backward);
    int64_t count = 0;
    for (int i = 0; i < g->alone_count; i++) {
        const nd_linear_part *p = &g->alone[i];
        const joint j = joint_of(c, g, p, backward, all.shape[0]);
        if (j.rows) {
            ND_TRY(nd_scales_measure(s, j.of_rows, rule->a.granularity,
                                     backward ? nd_tensor_columns(all, p->offset, p->rows) : all));
            count = j.end;
        }
        if (j.weight) {
            ND_ASSERT(rule->a.format == rule->b.format);
            ND_TRY(nd_scales_measure(s, j.of_weight, rule->b.granularity, nd_linear_weight(c, p)));
        }
    }
    return count == 0
               ? ND_OK
               : nd_scales_settle(s, nd_scales_joint(s, 0, count), count, rule->a.format, true);
}

static nd_status settle_gradients(nd_block_call c, const nd_linear_group *g, const nd_operand *dy)
{
    return settle(c, g, true, dy->rows);
}

/* Makes x->cast, the form of an input that products of y or (for_weight) of dw read. settled: its
 * scales; NULL: they are found here. */
static nd_status cast_input(nd_block_call c, bool for_weight, const nd_scale_ref *settled,
                            nd_operand *x)
{
    nd_model *m = c.model;
    const nd_recipe *recipe = &m->scales.recipe;
    nd_cast how = {.rule = for_weight ? &recipe->weight_gradient.b : &recipe->output.a,
                   .settled = settled,
                   .vectors = settled ? *settled : m->scales.vectors[0]};
    if (x->cast.inverse) {
        return ND_OK;
    }
    nd_cast_want(m, &how, for_weight && nd_products_transpose(m), m->fp8.x, m->fp8.x_transposed);
    m->scales.casts.inputs++;
    return nd_operand_cast(m, x, &how);
}

/* The same of a gradient, which dx and dw read with other scales. */
static nd_status cast_gradient(nd_block_call c, bool for_weight, const nd_scale_ref *settled,
                               nd_operand *dy)
{
    nd_model *m = c.model;
    const nd_recipe *recipe = &m->scales.recipe;
    nd_cast how = {.rule = for_weight ? &recipe->weight_gradient.a : &recipe->input_gradient.a,
                   .settled = settled,
                   .vectors = settled ? *settled : m->scales.vectors[2]};
    nd_cast_want(m, &how, for_weight && nd_products_transpose(m), m->fp8.dy, m->fp8.dy_transposed);
    m->scales.casts.gradients++;
    return nd_operand_cast(m, dy, &how);
}

static nd_status weight_of(nd_block_call c, const nd_linear_part *p, bool backward, const joint *j,
                           nd_matrix *w)
{
    ND_TRY(nd_operand_weight(c, p->linear, &rule_of(c, backward)->b, backward,
                             j->weight ? &j->of_weight : NULL, w));
    w->kept = nd_linear_kept(c, p, !backward);
    return ND_OK;
}

static nd_status forward(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                         nd_operand *x, nd_tensor y)
{
    const joint j = joint_of(c, g, p, false, x->rows.shape[0]);
    nd_matrix w;
    if (j.rows) {
        ND_TRY(settle(c, g, false, x->rows));
    }
    ND_TRY(cast_input(c, false, j.rows ? &j.of_rows : NULL, x));
    ND_TRY(weight_of(c, p, false, &j, &w));
    return nd_linear_output_fp8(c, g, x->cast, w, y);
}

static nd_status input_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                nd_operand *dy, nd_tensor dx)
{
    const joint j = joint_of(c, g, p, true, dy->rows.shape[0]);
    nd_matrix w;
    ND_TRY(cast_gradient(c, false, j.rows ? &j.of_rows : NULL, dy));
    ND_TRY(weight_of(c, p, true, &j, &w));
    return nd_linear_input_gradient_fp8(c, p, dy->cast, w, dx);
}

static nd_status weight_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                 nd_operand *x, nd_operand *dy)
{
    if (c.model->scales.recipe.weight_gradient.a.scaling == ND_SCALING_NONE) {
        return nd_linear_bf16.weight_gradient(c, g, p, x, dy);
    }
    ND_TRY(cast_gradient(c, true, NULL, dy));
    ND_TRY(cast_input(c, true, NULL, x));
    return nd_linear_weight_gradient_fp8(c, p, dy->cast, x->cast);
}

const nd_linear_method nd_linear_fp8_rows = {.settle_gradients = settle_gradients,
                                             .gather_gradient = nd_linear_gather_rows,
                                             .forward = forward,
                                             .input_gradient = input_gradient,
                                             .weight_gradient = weight_gradient};
