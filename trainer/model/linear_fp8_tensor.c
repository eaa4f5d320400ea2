// SPDX-License-Identifier: Apache-2.0
/*
 * Linears in FP8 whose operands have one scale each. The amax of a tensor that is split over tp is
 * its maximum over tp. Inputs that the block keeps as codes, and gradients of the outputs of
 * row-parallel linears, are cast before they are gathered, and travel as codes.
 */
#include "trainer/model/linear.h"

/* Makes x->cast, the form of an input that products of y or (for_weight) of dw read. */
static nd_status cast_input(nd_block_call c, const nd_linear_group *g, bool for_weight,
                            nd_operand *x)
{
    nd_model *m = c.model;
    if (x->cast.inverse) {
        return ND_OK;
    }
    if (x->codes.data && (g->column || for_weight)) { /* they were made before */
        x->cast = nd_matrix_with(x->scale, ND_PER_TENSOR);
        x->cast.codes = x->codes;
        if (g->column) {
            ND_TRY(nd_operand_gather_codes(m, x->codes, m->fp8.x, &x->cast.codes));
        }
        return for_weight ? nd_operand_transpose(m, &x->cast, m->fp8.x_transposed) : ND_OK;
    }
    nd_cast how = {.rule = &m->scales.recipe.output.a,
                   .split = !g->column,
                   .settled = c.pass == ND_PASS_BACKWARD,
                   .record = c.pass == ND_PASS_TRAIN,
                   .codes = x->codes.data};
    if (!x->codes.data) {
        nd_cast_want(m, &how, for_weight && nd_products_transpose(m), m->fp8.x,
                     m->fp8.x_transposed);
    }
    m->scales.casts.inputs++;
    return nd_operand_cast(m, x, &how);
}

/* The weights of a part, for y, or (over_rows) for dx. */
static nd_status weight_of(nd_block_call c, const nd_linear_part *p, bool over_rows, nd_matrix *w)
{
    const nd_recipe *recipe = &c.model->scales.recipe;
    const nd_cast_rule *rule = over_rows ? &recipe->input_gradient.b : &recipe->output.b;
    for (int i = 0; i < p->count; i++) {
        nd_matrix one;
        ND_TRY(nd_operand_weight(c, p->linear + i, rule, over_rows, NULL, &one));
        *w = i == 0 ? one : *w;
    }
    nd_linear_join(p, nd_linear_weight(c, p), w);
    w->kept = nd_linear_kept(c, p, !over_rows);
    return ND_OK;
}

static nd_status forward(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                         nd_operand *x, nd_tensor y)
{
    nd_matrix w;
    ND_TRY(cast_input(c, g, false, x));
    ND_TRY(weight_of(c, p, false, &w));
    return nd_linear_output_fp8(c, g, x->cast, w, y);
}

static nd_status settle_gradients(nd_block_call c, const nd_linear_group *g, const nd_operand *dy)
{
    nd_scales *s = &c.model->scales;
    const nd_cast_rule *rule = &s->recipe.input_gradient.a;
    if (rule->scaling != ND_SCALING_CURRENT) {
        return ND_OK;
    }
    for (int i = 0; i < g->alone_count; i++) {
        if (g->alone[i].fp8 && dy->known != ND_KNOWN_AMAX) {
            const nd_operand part = nd_linear_part_of(c, g, &g->alone[i], dy);
            ND_TRY(nd_scales_measure(s, part.scale, ND_PER_TENSOR, part.rows));
        }
    }
    return nd_scales_settle(s, nd_scales_at(s, nd_site_gradient(s, c.layer, g->first)), g->count,
                            rule->format, true);
}

/* The gradient is cast, then gathered as codes, which both products read. */
static nd_status gather_gradient(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    nd_model *m = c.model;
    bool local = m->fp8.dy_local != NULL;
    nd_cast how = {.rule = &m->scales.recipe.input_gradient.a,
                   .split = true,
                   .record = true,
                   .codes = local ? m->fp8.dy_local : m->fp8.dy,
                   .transposed = local ? NULL : m->fp8.dy_transposed};
    dy->scale = nd_scales_at(&m->scales, nd_site_gradient(&m->scales, c.layer, g->first));
    m->scales.casts.gradients++;
    if (!local && nd_products_cast(m)) {
        nd_cast_want(m, &how, false, NULL, NULL);
        return nd_operand_cast(m, dy, &how);
    }
    ND_TRY(nd_operand_cast(m, dy, &how));
    ND_TRY(nd_operand_gather_codes(m, dy->cast.codes, m->fp8.dy, &dy->cast.codes));
    return local ? nd_operand_transpose(m, &dy->cast, m->fp8.dy_transposed) : ND_OK;
}

/* Makes dy->cast, which dx and dw read, unless it is made. Its scale is settled. */
static nd_status cast_gradient(nd_model *m, nd_operand *dy)
{
    nd_cast how = {.rule = &m->scales.recipe.input_gradient.a,
                   .settled = true,
                   .record = true,
                   .codes = m->fp8.dy,
                   .transposed = nd_products_transpose(m) ? m->fp8.dy_transposed : NULL};
    if (dy->cast.inverse) {
        return ND_OK;
    }
    m->scales.casts.gradients++;
    if (dy->known == ND_KNOWN_CODES) {
        how.codes = dy->codes.data;
        how.transposed = NULL;
        ND_TRY(nd_operand_cast(m, dy, &how));
        return nd_operand_transpose(m, &dy->cast, m->fp8.dy_transposed);
    }
    if (nd_products_cast(m)) {
        nd_cast_want(m, &how, false, NULL, NULL);
    }
    return nd_operand_cast(m, dy, &how);
}

static nd_status input_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                nd_operand *dy, nd_tensor dx)
{
    nd_matrix w;
    ND_TRY(cast_gradient(c.model, dy));
    ND_TRY(weight_of(c, p, true, &w));
    return nd_linear_input_gradient_fp8(c, p, dy->cast, w, dx);
}

static nd_status weight_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                 nd_operand *x, nd_operand *dy)
{
    nd_matrix of_dy = dy->cast;
    nd_linear_join(p, dy->rows, &of_dy);
    ND_TRY(cast_input(c, g, true, x));
    return nd_linear_weight_gradient_fp8(c, p, of_dy, x->cast);
}

const nd_linear_method nd_linear_fp8_tensor = {.settle_gradients = settle_gradients,
                                               .gather_gradient = gather_gradient,
                                               .forward = forward,
                                               .input_gradient = input_gradient,
                                               .weight_gradient = weight_gradient};
