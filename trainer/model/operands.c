// SPDX-License-Identifier: Apache-2.0
/*
 * Operands of linears: how they are cast, and what the ops that make them do of that while they
 * have the values in registers. Norms, attention and SwiGLU make inputs; SwiGLU's backward makes
 * the gradients of gate's and up's outputs. They do what goes with one scale per tensor; attention
 * does nothing.
 *
 * A scale that is known beforehand, from past steps (delayed) or from the forward (recompute), lets
 * the op write codes alone; otherwise the op finds the amax. In a step that the health log counts,
 * these ops leave plain rows.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

nd_vector_counts nd_operand_vectors(const nd_dims *d, bool forward_only)
{
    /* Kept weights have their own. A backward has those of dy and w of up to three linears. */
    const int64_t joint = forward_only ? d->T : 3 * (d->T + d->C);
    return (nd_vector_counts){nd_max(nd_max(d->T, d->C), nd_max(d->H * d->D, d->F)), joint};
}

/* Casts. */

static nd_matrix with_codes(nd_matrix out, const nd_tensor *x, const nd_cast *how)
{
    nd_dtype format = how->rule->format;
    if (how->by_products) {
        out.rows = *x;
        out.format = format;
    }
    if (how->codes) {
        out.codes = nd_tensor_2d(how->codes, format, x->shape[0], x->shape[1]);
    }
    if (how->transposed) {
        out.transposed = nd_tensor_2d(how->transposed, format, x->shape[1], x->shape[0]);
    }
    return out;
}

/* Finds the scales of a tensor that is not cast yet. */
static nd_status settle(nd_scales *s, const nd_operand *x, nd_scale_ref scale, const nd_cast *how)
{
    const nd_granularity along = how->rule->granularity;
    const int64_t count = along == ND_PER_TENSOR ? 1 : x->rows.shape[along == ND_PER_COLUMN];
    if (along != ND_PER_TENSOR || x->known != ND_KNOWN_AMAX) {
        ND_TRY(nd_scales_measure(s, scale, along, x->rows));
    }
    return nd_scales_settle(s, scale, count, how->rule->format, how->split);
}

/* The form that products read, of codes that are there. */
static nd_status read_codes(nd_model *m, nd_tensor codes, nd_matrix *form)
{
    form->codes = codes;
    if (form->transposed.data) {
        form->transposed =
            nd_tensor_2d(form->transposed.data, codes.dtype, codes.shape[1], codes.shape[0]);
        ND_OP(m->rank, ND_TRACE_CAST, make_form, .out = {.transposed = form->transposed},
              .x = codes);
    }
    return ND_OK;
}

nd_status nd_operand_cast(nd_model *m, nd_operand *x, const nd_cast *how)
{
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = how->rule;
    bool delayed = rule->scaling == ND_SCALING_DELAYED;
    nd_scale_ref scale = rule->granularity == ND_PER_TENSOR ? x->scale : how->vectors;
    x->cast = with_codes(nd_matrix_with(scale, rule->granularity), &x->rows, how);
    if (x->known == ND_KNOWN_CODES) {
        return read_codes(m, x->codes, &x->cast);
    }
    if (!delayed && !how->settled) {
        ND_TRY(settle(s, x, scale, how));
    }
    float *amax = delayed && how->record ? x->scale.amax : NULL;
    return nd_scales_cast(s, x->scale.site, x->cast, amax, x->rows);
}

void nd_cast_want(nd_cast *how, nd_form_rule form, void *codes, void *transposed)
{
    const bool by_op = form.maker == ND_FORM_BY_OP;
    how->by_products |= form.maker == ND_FORM_BY_PRODUCT;
    how->codes = by_op && !form.transposed ? codes : how->codes;
    how->transposed = by_op && form.transposed ? transposed : how->transposed;
}

static void raise(nd_form_rule form, int64_t before, size_t *codes, size_t *transposed)
{
    size_t *room = form.transposed ? transposed : codes;
    if (form.maker == ND_FORM_BY_OP) {
        *room = nd_max_bytes(*room, (size_t)before + form.bytes);
    }
}

void nd_cast_rooms(const nd_model *m, const nd_linear_part *p, int64_t dx, int64_t dw,
                   nd_fp8_bytes *bytes)
{
    raise(p->rules[ND_X_OF_Y], 0, &bytes->x, &bytes->x_transposed);
    raise(p->rules[ND_W_OF_Y], 0, &bytes->w, &bytes->w_transposed);
    if (!m->forward_only) {
        raise(p->rules[ND_X_OF_DW], 0, &bytes->x, &bytes->x_transposed);
        raise(p->rules[ND_W_OF_DX], 0, &bytes->w, &bytes->w_transposed);
        raise(p->rules[ND_DY_OF_DX], dx, &bytes->dy, &bytes->dy_transposed);
        raise(p->rules[ND_DY_OF_DW], dw, &bytes->dy, &bytes->dy_transposed);
    }
}

nd_status nd_operand_weight(nd_block_call c, const nd_linear_part *p, int i, nd_role role,
                            const nd_scale_ref *settled, nd_matrix *out)
{
    nd_model *m = c.model;
    nd_scales *s = &m->scales;
    const nd_recipe *recipe = &s->recipe;
    const nd_cast_rule *rule = role == ND_W_OF_Y ? &recipe->output.b : &recipe->input_gradient.b;
    const nd_param_id id = nd_linear_param(p->linear + i);
    nd_operand w = {.scale = nd_scales_of_weight(s, c.layer, p->linear + i)};
    nd_cast how = {
        .rule = rule,
        .settled = settled || rule->granularity == ND_PER_TENSOR,
        .vectors = s->codes_gathered ? w.scale
                   : settled         ? *settled
                                     : s->vectors[1],
    };
    nd_cast_want(&how, p->rules[role], m->work.fp8.w, m->work.fp8.w_transposed);
    if (s->codes_gathered) {
        w.codes = nd_fsdp_codes(&m->fsdp, id, c.layer);
        w.known = ND_KNOWN_CODES;
    } else {
        w.rows = nd_fsdp_weight(&m->fsdp, id, id, c.layer);
        s->casts.weights++;
    }
    ND_TRY(nd_operand_cast(m, &w, &how));
    *out = w.cast;
    return ND_OK;
}

/* Inputs. */

nd_operand nd_operand_of(nd_block_call c, nd_input input)
{
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    nd_operand x = {.scale = nd_set_input(c.set, c.layer, input)};
    switch (input) {
    case ND_INPUT_QKV:
        x.rows = a->h1;
        x.codes = a->h1_codes;
        break;
    case ND_INPUT_O:
        x.rows = a->o;
        break;
    case ND_INPUT_GATE_UP:
        x.rows = a->h2;
        x.codes = a->h2_codes;
        break;
    case ND_INPUT_DOWN:
        x.rows = a->act;
        x.codes = a->act_codes;
        break;
    case ND_INPUT_COUNT:
        break;
    }
    x.codes = nd_linear_group_of(c, input)->keeps ? x.codes : (nd_tensor){0};
    return x;
}

static bool may_fuse(const nd_scales *s)
{
    return nd_recipe_is_per_tensor(&s->recipe) && !s->counting;
}

/* What the op that makes an input can leave. */
static nd_known known_after(nd_block_call c, nd_input input)
{
    const nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    if (!may_fuse(s) || !g->fp8 || input == ND_INPUT_O) {
        return ND_KNOWN_NOTHING;
    }
    if (c.pass == ND_PASS_BACKWARD || nd_recipe_is_delayed(&s->recipe)) {
        return g->keeps ? ND_KNOWN_CODES : ND_KNOWN_NOTHING;
    }
    /* What is not kept as codes is measured after it was gathered. */
    return g->keeps || m->dims.Tl == m->dims.T ? ND_KNOWN_AMAX : ND_KNOWN_NOTHING;
}

nd_status nd_operand_prepare(nd_block_call c, nd_input input, nd_operand *out, nd_fuse *fuse)
{
    nd_model *m = c.model;
    nd_operand x = nd_operand_of(c, input);
    x.known = known_after(c, input);
    *fuse = (nd_fuse){0};
    if (x.known == ND_KNOWN_AMAX) {
        fuse->amax = x.scale.amax;
        ND_TRY(nd_zero(&m->rank->stream, fuse->amax, sizeof *fuse->amax));
    }
    if (x.known == ND_KNOWN_CODES) {
        bool record = c.pass == ND_PASS_TRAIN && nd_recipe_is_delayed(&m->scales.recipe);
        *fuse = (nd_fuse){
            .amax = record ? x.scale.amax : NULL, .codes = x.codes, .scale = x.scale.scale};
        x.rows.data = NULL;
    }
    *out = x;
    return ND_OK;
}

nd_status nd_operand_keep(nd_block_call c, nd_operand *x)
{
    nd_scales *s = &c.model->scales;
    nd_cast how = {
        .rule = &s->recipe.output.a,
        .split = true,
        .settled = c.pass == ND_PASS_BACKWARD,
        .record = c.pass == ND_PASS_TRAIN,
        .codes = x->codes.data,
    };
    if (!x->codes.data) {
        return ND_OK;
    }
    s->casts.inputs++;
    ND_TRY(nd_operand_cast(c.model, x, &how));
    x->cast = (nd_matrix){0}; /* products read the codes of all tp ranks */
    x->known = ND_KNOWN_CODES;
    return ND_OK;
}

/* Gradients of the residual stream. */

nd_known nd_gradient_known(nd_block_call c, nd_input input)
{
    const nd_scales *s = &c.model->scales;
    const bool current = s->recipe.input_gradient.a.scaling == ND_SCALING_CURRENT;
    return may_fuse(s) && current && nd_linear_group_of(c, input)->fp8 ? ND_KNOWN_AMAX
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

/* What SwiGLU's backward does with the gradient of linear i of gate and up. */
static void fuse_gradient(const nd_model *m, nd_scale_ref scale, const nd_operand *dy, int i,
                          nd_tensor *to, nd_fuse *fuse)
{
    fuse->amax = scale.amax + i;
    if (dy->known == ND_KNOWN_CODES) {
        to->data = NULL;
        fuse->scale = scale.scale + i;
        fuse->codes = nd_tensor_rows(dy->codes, i * m->dims.T, m->dims.T);
    }
}

nd_status nd_operand_prepare_gradients(nd_block_call c, nd_operand *dy, nd_tensor to[2],
                                       nd_fuse fuse[2])
{
    nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    const nd_dims *d = &m->dims;
    const nd_linear_group *g = nd_linear_group_of(c, ND_INPUT_GATE_UP);
    bool delayed = nd_recipe_is_delayed(&s->recipe);
    *dy = (nd_operand){.rows = nd_set_block(c.set, c.layer)->gu};
    for (int i = 0; i < g->count; i++) {
        to[i] = nd_tensor_columns(dy->rows, i * d->F, d->F);
        fuse[i] = (nd_fuse){0};
    }
    /* Gradients of biases and delayed ones of weights read rows. */
    if (!may_fuse(s) || !g->fp8 || m->delays || (delayed && g->bias)) {
        return ND_OK;
    }
    nd_scale_ref scale = nd_scales_at(s, nd_site_gradient(s, c.layer, g->first));
    dy->known = delayed ? ND_KNOWN_CODES : ND_KNOWN_AMAX;
    if (delayed) {
        dy->codes =
            nd_tensor_2d(m->work.fp8.dy, s->recipe.input_gradient.a.format, g->count * d->T, d->F);
    }
    for (int p = 0; p < g->alone_count; p++) {
        const int i = g->alone[p].linear - g->first; /* FP8 linears are alone */
        if (g->alone[p].fp8) {
            fuse_gradient(m, scale, dy, i, &to[i], &fuse[i]);
        }
    }
    return delayed ? ND_OK
                   : nd_zero(&m->rank->stream, scale.amax, (size_t)g->count * sizeof(float));
}
