// SPDX-License-Identifier: Apache-2.0
/*
 * The operands of a linear's products (an input, a weight, the gradient of outputs): what their ops
 * do while they have the values in registers, how they are cast, and the form that products read.
 *
 * Norms, attention and SwiGLU make inputs; SwiGLU's backward makes the gradients of gate's and up's
 * outputs. With one scale per tensor they measure or cast what they make; attention does neither. A
 * scale that is known beforehand, from past steps (delayed) or from the forward (recompute), lets
 * the op write codes alone; otherwise the op finds the amax. In a step that the health log counts,
 * or that is dumped, these ops leave plain rows.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/* Casts. */

/* Says how an operand of a role becomes codes. */
typedef struct cast {
    const nd_cast_rule *rule;
    nd_scale_ref scale;       /* of its rows or columns; with one scale the operand has it */
    bool settled;             /* those are settled already */
    bool split;               /* one scale covers the rows of all tp ranks */
    bool record;              /* delayed scaling: the amax counts in this step */
    void *codes, *transposed; /* where they are made; NULL: they are not wanted */
    bool by_product;          /* products cast while they read */
} cast;

/* Wants a form in addition to others. */
static void want(cast *how, nd_form_rule form, void *codes, void *transposed)
{
    const bool by_op = form.maker == ND_FORM_BY_OP;
    how->by_product |= form.maker == ND_FORM_BY_PRODUCT;
    how->codes = by_op && !form.transposed ? codes : how->codes;
    how->transposed = by_op && form.transposed ? transposed : how->transposed;
}

/* Scales of rows or columns lie in the vectors of the operand's kind, or where tp splits them among
 * those that are settled together. */
static cast cast_of(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                    nd_role role)
{
    const nd_scales *s = &c.model->scales;
    const nd_operand_kind of = nd_role_operand(role);
    char *codes = c.model->work.fp8[nd_operand_buffer(of)];
    char *transposed = c.model->work.fp8[nd_operand_buffer(of) + 1];
    const bool one_scale = p->rules[role]->granularity == ND_PER_TENSOR;
    cast how = {.rule = p->rules[role],
                .settled = p->joint[role] >= 0,
                .split = role == ND_X_OF_Y && !g->column,
                .record =
                    of == ND_OPERAND_INPUT ? c.pass == ND_PASS_TRAIN : of == ND_OPERAND_GRADIENT};
    if (!one_scale) {
        how.scale = how.settled ? nd_scales_joint(s, p->joint[role], 1) : s->vectors[of];
    }
    if (of == ND_OPERAND_GRADIENT) {
        codes += p->dy_codes;
        transposed += p->dy_transposed;
    }
    /* With one scale dx and dw read the same codes of a gradient. */
    const bool both = of == ND_OPERAND_GRADIENT && one_scale;
    want(&how, p->forms[both ? ND_DY_OF_DX : role], codes, transposed);
    want(&how, p->forms[both ? ND_DY_OF_DW : role], codes, transposed);
    return how;
}

/* Makes x->form. Codes that are there are read; otherwise scales are found unless they are settled,
 * and the rows are cast, here or by products. */
static nd_status make_operand(nd_model *m, const cast *how, nd_operand *x)
{
    const nd_tensor from = x->stored;
    const nd_granularity along = how->rule->granularity;
    const bool coded = nd_dtype_is_fp8(from.dtype), one_scale = along == ND_PER_TENSOR;
    const bool delayed = how->rule->scaling == ND_SCALING_DELAYED;
    const nd_dtype format = coded ? from.dtype : how->rule->format;
    const nd_scale_ref scale = one_scale || coded ? x->scale : how->scale;
    const int64_t rows = from.shape[0], columns = from.shape[1];
    const nd_tensor codes = nd_tensor_2d(how->codes, format, rows, columns);
    x->form =
        (nd_made_form){nd_matrix_with(scale, how->rule, coded || how->by_product ? from : codes),
                       nd_tensor_2d(how->transposed, format, columns, rows)};
    if (coded) {
        if (how->transposed) {
            ND_OP(m->rank, ND_TRACE_CAST, make_form, .transposed = x->form.transposed, .x = from);
        }
        return ND_OK;
    }
    if (!delayed && !(one_scale ? x->known == ND_KNOWN_SCALE : how->settled)) {
        if (!one_scale || x->known != ND_KNOWN_AMAX) {
            ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = scale.amax, .x = from,
                  .granularity = along);
        }
        const int64_t count = one_scale ? 1 : from.shape[along == ND_PER_COLUMN];
        ND_TRY(nd_scales_settle(&m->scales, scale, count, format, how->split));
    }
    if (!how->by_product) {
        ND_OP(m->rank, ND_TRACE_CAST, make_form, .out = x->form.matrix,
              .transposed = x->form.transposed, .amax = delayed && how->record ? scale.amax : NULL,
              .x = from);
    }
    return nd_scales_count(&m->scales, x->scale.site, &x->form.matrix, from);
}

nd_status nd_operand_encode(nd_block_call c, nd_role role, nd_operand *x)
{
    nd_scales *s = &c.model->scales;
    const cast how = {.rule = &s->recipe.rules[role],
                      .split = true,
                      .record =
                          nd_role_operand(role) != ND_OPERAND_INPUT || c.pass == ND_PASS_TRAIN,
                      .codes = x->codes.data};
    if (!x->codes.data) {
        return ND_OK;
    }
    s->casts.inputs += nd_role_operand(role) == ND_OPERAND_INPUT;
    if (x->known != ND_KNOWN_CODES) {
        ND_TRY(make_operand(c.model, &how, x));
    }
    x->stored = x->codes;
    x->codes = (nd_tensor){0};
    x->form = (nd_made_form){0}; /* products read the codes of all tp ranks */
    return ND_OK;
}

/* Turns the matrix of the first of several FP8 linears into that of all. */
static void join(const nd_linear_part *p, nd_tensor rows, nd_matrix *first)
{
    ND_ASSERT(!nd_dtype_is_fp8(first->stored.dtype) && p->count <= ND_FP8_PARTS);
    first->stored = rows;
    first->parts = p->count;
    memcpy(first->lines, p->lines, sizeof first->lines);
}

nd_status nd_operand_form(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                          nd_role role, nd_operand *x, nd_matrix *a)
{
    nd_scales *s = &c.model->scales;
    const nd_operand_kind of = nd_role_operand(role);
    if (!p->rules[role]) {
        *a = nd_rows(x->stored);
        return ND_OK;
    }
    /* A form that was made by an equal rule is read again. */
    if (!nd_matrix_is_fp8(&x->form.matrix) ||
        x->form.matrix.granularity != p->rules[role]->granularity) {
        const cast how = cast_of(c, g, p, role);
        const bool codes = nd_dtype_is_fp8(x->stored.dtype);
        s->casts.gradients += of == ND_OPERAND_GRADIENT;
        s->casts.inputs += of == ND_OPERAND_INPUT && !codes;
        s->casts.weights += of == ND_OPERAND_WEIGHT && !codes;
        ND_TRY(make_operand(c.model, &how, x));
    }
    *a = x->form.matrix;
    if (p->forms[role].transposed) {
        a->stored = x->form.transposed;
        a->transposed = true;
    }
    if (of == ND_OPERAND_GRADIENT && p->count > 1) {
        join(p, x->stored, a);
    }
    return ND_OK;
}

nd_kept_form *nd_packed_form(nd_packed_weights *p, int number)
{
    nd_packed_weight *w = number > 0 && number <= p->count ? &p->weights[number - 1] : NULL;
    if (!w || !w->form.memory) {
        return NULL;
    }
    w->form.made = w->form.made && w->version == p->fsdp->version;
    w->version = p->fsdp->version;
    return &w->form;
}

nd_status nd_weight_form(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                         nd_role role, nd_matrix *b)
{
    nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    for (int i = p->rules[role] ? p->count - 1 : -1; i >= 0; i--) { /* the first one's stays in b */
        const nd_param_id id = nd_linears[p->linear + i].param;
        nd_operand w = {.stored = s->codes_gathered ? nd_fsdp_codes(&m->fsdp, id, c.layer)
                                                    : nd_fsdp_weight(&m->fsdp, id, id, c.layer),
                        .scale = nd_scales_of_weight(s, c.layer, p->linear + i),
                        .known = ND_KNOWN_SCALE};
        ND_TRY(nd_operand_form(c, g, p, role, &w, b));
    }
    if (!p->rules[role]) {
        *b = nd_rows(nd_fsdp_weight(&m->fsdp, p->first, p->last, c.layer));
    } else if (p->count > 1) {
        join(p, nd_fsdp_weight(&m->fsdp, p->first, p->last, c.layer), b);
    }
    b->kept = nd_packed_form(&m->packed, p->packed);
    return ND_OK;
}

/* Inputs. */

static bool may_fuse(const nd_model *m)
{
    return nd_recipe_is_per_tensor(&m->scales.recipe) && !m->scales.counting && !m->dump;
}

nd_status nd_operand_prepare(nd_block_call c, nd_input input, nd_operand *x, nd_fuse *fuse)
{
    const nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_input_acts acts = nd_set_input(c, input);
    const bool again = c.pass == ND_PASS_BACKWARD, delayed = nd_recipe_is_delayed(&s->recipe);
    *x = (nd_operand){.stored = acts.rows,
                      .codes = g->keeps ? acts.codes : (nd_tensor){0},
                      .scale = acts.scale,
                      .known = again ? ND_KNOWN_SCALE : ND_KNOWN_NOTHING};
    *fuse = (nd_fuse){0};
    /* Attention, and a copy of the residual stream, leave rows. */
    const bool fuses = input == ND_INPUT_DOWN || (input != ND_INPUT_O && m->dims.pre_norm);
    if (!may_fuse(m) || !g->fp8 || !fuses) {
        return ND_OK;
    }
    if ((again || delayed) && g->keeps) {
        x->known = ND_KNOWN_CODES;
        x->stored.data = NULL;
        fuse->codes = x->codes;
        fuse->scale = x->scale.scale;
        fuse->amax = c.pass == ND_PASS_TRAIN ? x->scale.amax : NULL;
    } else if (!again && !delayed && (g->keeps || m->dims.Tl == m->dims.T)) {
        /* An input that is not kept as codes is measured after it was gathered. */
        x->known = ND_KNOWN_AMAX;
        fuse->amax = x->scale.amax;
        return nd_zero(&m->rank->stream, fuse->amax, sizeof *fuse->amax);
    }
    return ND_OK;
}

nd_operand nd_operand_kept(nd_block_call c, nd_input input)
{
    const nd_input_acts acts = nd_set_input(c, input);
    return (nd_operand){.stored = nd_linear_group_of(c, input)->keeps ? acts.codes : acts.rows,
                        .scale = acts.scale,
                        .known = ND_KNOWN_SCALE};
}

/* Gradients of the residual stream. */

nd_known nd_gradient_known(nd_block_call c, nd_input input)
{
    const nd_scales *s = &c.model->scales;
    const bool current = s->recipe.rules[ND_DY_OF_DX].scaling == ND_SCALING_CURRENT;
    return may_fuse(c.model) && current && nd_linear_group_of(c, input)->fp8 ? ND_KNOWN_AMAX
                                                                             : ND_KNOWN_NOTHING;
}

nd_status nd_gradient_prepare(nd_block_call c, nd_input input, float **amax)
{
    const nd_scales *s = &c.model->scales;
    *amax = NULL;
    if (nd_gradient_known(c, input) != ND_KNOWN_AMAX) {
        return ND_OK;
    }
    const int linear = nd_linear_group_of(c, input)->first;
    *amax = nd_scales_at(s, nd_site_gradient(s, c.layer, linear)).amax;
    return nd_zero(&c.model->rank->stream, *amax, sizeof **amax);
}

/* Gradients of gate and up. */

nd_status nd_operand_prepare_gradients(nd_block_call c, nd_tensor gu, nd_operand *dy,
                                       nd_tensor to[2], nd_fuse fuse[2])
{
    nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    const nd_dims *d = &m->dims;
    const nd_linear_group *g = nd_linear_group_of(c, ND_INPUT_GATE_UP);
    const bool delayed = nd_recipe_is_delayed(&s->recipe);
    *dy = (nd_operand){.stored = gu};
    for (int i = 0; i < g->count; i++) {
        to[i] = nd_tensor_columns(dy->stored, i * d->F, d->F);
        fuse[i] = (nd_fuse){0};
    }
    /* Gradients of biases and delayed ones of weights read rows. */
    if (!may_fuse(m) || !g->fp8 || m->delays || (delayed && g->bias)) {
        return ND_OK;
    }
    const nd_scale_ref scale = nd_scales_at(s, nd_site_gradient(s, c.layer, g->first));
    dy->known = delayed ? ND_KNOWN_CODES : ND_KNOWN_AMAX;
    if (delayed) {
        dy->codes = nd_tensor_2d(m->work.fp8[ND_FP8_DY], s->recipe.rules[ND_DY_OF_DX].format,
                                 g->count * d->T, d->F);
    }
    for (int p = 0; p < g->dx_part_count; p++) {
        const int i = g->dx_parts[p].linear - g->first; /* FP8 linears have parts of their own */
        if (g->dx_parts[p].fp8) {
            fuse[i].amax = scale.amax + i;
        }
        if (g->dx_parts[p].fp8 && delayed) {
            to[i].data = NULL;
            fuse[i].scale = scale.scale + i;
            fuse[i].codes = nd_tensor_rows(dy->codes, i * d->T, d->T);
        }
    }
    return delayed ? ND_OK
                   : nd_zero(&m->rank->stream, scale.amax, (size_t)g->count * sizeof(float));
}
