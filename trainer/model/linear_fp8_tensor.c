// SPDX-License-Identifier: Apache-2.0
/*
 * Linears in FP8 whose operands have one scale each. The amax of a tensor that is split over tp is
 * its maximum over tp. Inputs that the block keeps as codes, and gradients of the outputs of
 * row-parallel linears, are cast before they are gathered, and travel as codes.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/* Where the codes of a part's gradient begin. Those that dw reads too stay while the other parts
 * make dx. */
static int64_t gradient_place(const nd_model *m, const nd_linear_part *p)
{
    return p->rules[ND_DY_OF_DW].transposed ? 0 : m->dims.T * p->offset;
}

static void plan(const nd_model *m, nd_linear_group *g, nd_fp8_bytes *bytes)
{
    const nd_dims *d = &m->dims;
    const nd_linear_part *last = &g->alone[g->alone_count - 1];
    const size_t outputs = (size_t)(d->T * (last->offset + last->rows));
    const bool at_once = nd_recipe_is_delayed(&m->scales.recipe) && g->input == ND_INPUT_GATE_UP;
    for (int i = 0; i < g->alone_count; i++) {
        if (g->alone[i].fp8) {
            nd_cast_rooms(m, &g->alone[i], gradient_place(m, &g->alone[i]),
                          d->T * g->alone[i].offset, bytes);
        }
    }
    if (g->column && g->keeps && d->T != d->Tl) { /* codes of all tp ranks arrive */
        bytes->x = nd_max_bytes(bytes->x, (size_t)(d->T * d->C));
    }
    if (!m->forward_only && (g->travels || at_once)) {
        bytes->dy = nd_max_bytes(bytes->dy, outputs);
    }
    if (!m->forward_only && g->travels) {
        bytes->dy_local = nd_max_bytes(bytes->dy_local, (size_t)(d->Tl * d->C));
    }
}

static nd_status weight_of(nd_block_call c, const nd_linear_part *p, nd_role role, nd_matrix *w)
{
    for (int i = 0; i < p->count; i++) {
        nd_matrix one;
        ND_TRY(nd_operand_weight(c, p, i, role, NULL, &one));
        *w = i == 0 ? one : *w;
    }
    nd_linear_join(p, nd_linear_weight(c, p), w);
    w->kept = nd_linear_kept(c, p, role == ND_W_OF_Y);
    return ND_OK;
}

/* Casts this rank's rows of a gradient, which are then gathered. */
static nd_status cast_before_gather(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    const nd_cast how = {.rule = &c.model->scales.recipe.input_gradient.a,
                         .settled = true,
                         .record = true,
                         .codes = c.model->work.fp8.dy_local};
    *dy = nd_linear_part_of(c, g, &g->alone[0], dy);
    ND_TRY(nd_operand_cast(c.model, dy, &how));
    dy->codes = dy->cast.codes;
    dy->cast = (nd_matrix){0}; /* products read those of all tp ranks */
    dy->known = ND_KNOWN_CODES;
    return ND_OK;
}

static nd_status settle_gradients(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    nd_scales *s = &c.model->scales;
    const nd_cast_rule *rule = &s->recipe.input_gradient.a;
    const bool current = rule->scaling == ND_SCALING_CURRENT;
    for (int i = 0; i < g->alone_count && current; i++) {
        if (g->alone[i].fp8 && dy->known != ND_KNOWN_AMAX) {
            const nd_operand part = nd_linear_part_of(c, g, &g->alone[i], dy);
            ND_TRY(nd_scales_measure(s, part.scale, ND_PER_TENSOR, part.rows));
        }
    }
    if (current) {
        const nd_scale_ref all = nd_scales_at(s, nd_site_gradient(s, c.layer, g->first));
        ND_TRY(nd_scales_settle(s, all, g->count, rule->format, true));
    }
    return g->travels ? cast_before_gather(c, g, dy) : ND_OK;
}

/* The form that dx and dw read. Its scale is settled. */
static nd_status gradient_form(nd_model *m, const nd_linear_part *p, nd_role role, nd_operand *dy,
                               nd_matrix *out)
{
    nd_cast how = {.rule = &m->scales.recipe.input_gradient.a, .settled = true, .record = true};
    void *transposed = (char *)m->work.fp8.dy_transposed + m->dims.T * p->offset;
    void *codes = (char *)m->work.fp8.dy + gradient_place(m, p);
    if (!dy->cast.inverse) {
        m->scales.casts.gradients++;
        nd_cast_want(&how, p->rules[ND_DY_OF_DX], codes, transposed);
        nd_cast_want(&how, p->rules[ND_DY_OF_DW], codes, transposed);
        ND_TRY(nd_operand_cast(m, dy, &how));
    }
    *out = dy->cast;
    if (role == ND_DY_OF_DW) {
        nd_linear_join(p, dy->rows, out);
    }
    return ND_OK;
}

static nd_status form(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                      nd_role role, nd_operand *x, nd_matrix *out)
{
    nd_model *m = c.model;
    nd_cast how = {.rule = &m->scales.recipe.output.a,
                   .split = !g->column,
                   .settled = c.pass == ND_PASS_BACKWARD,
                   .record = c.pass == ND_PASS_TRAIN};
    if (!x) {
        return weight_of(c, p, role, out);
    }
    if (role == ND_DY_OF_DX || role == ND_DY_OF_DW) {
        return gradient_form(m, p, role, x, out);
    }
    if (!x->cast.inverse) {
        nd_cast_want(&how, p->rules[role], m->work.fp8.x, m->work.fp8.x_transposed);
        m->scales.casts.inputs += x->known != ND_KNOWN_CODES; /* else it was counted before */
        ND_TRY(nd_operand_cast(m, x, &how));
    }
    *out = x->cast;
    return ND_OK;
}

const nd_linear_method nd_linear_fp8_tensor = {
    .plan = plan, .settle_gradients = settle_gradients, .form = form};
