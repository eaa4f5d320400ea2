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

static size_t gemm_scratch(const nd_model *m, int64_t n, int64_t k)
{
    const nd_dims *d = &m->dims;
    const nd_device *device = m->rank->device;
    const nd_ops *ops = m->rank->ops;
    size_t y = ops->product_scratch(device, d->T, n, k, d->act);
    if (m->forward_only) {
        return y;
    }
    size_t dx = ops->product_scratch(device, d->T, k, n, d->act);
    size_t dw = ops->product_scratch(device, n, k, d->T, d->act);
    return nd_max_bytes(y, nd_max_bytes(dx, dw));
}

void nd_operands_plan(nd_model *m, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    const nd_scales *s = &m->scales;
    nd_fp8_scratch *f = &m->fp8;
    int64_t per_tensor = nd_recipe_is_per_tensor(&s->recipe);
    /* A forward alone multiplies rows of inputs by rows of weights. */
    const int64_t backward = !m->forward_only;
    int64_t transposes = backward && nd_products_transpose(m);
    int64_t inputs = nd_max(d->C, d->H * d->D), outputs = nd_max(inputs, d->F);
    /* Delayed: SwiGLU's backward makes the codes of gate's and of up's gradient at once. */
    int64_t together = nd_recipe_is_delayed(&s->recipe) ? nd_max(outputs, 2 * d->F) : outputs;
    /* Where products cast, only what is gathered over tp as codes has a buffer: inputs of q k v and
     * of gate up, gradients of o and of down. */
    const int64_t casts = !nd_products_cast(m);
    const int64_t gathered = per_tensor && d->T != d->Tl ? d->T * d->C : 0;
    int64_t weight = 0;
    size_t scratch = 0;
    if (!s->recipe.name) {
        return;
    }
    for (int i = 0; i < m->layout->param_count; i++) {
        const nd_param *p = &m->layout->params[i];
        if (p->fp8) {
            size_t bytes = gemm_scratch(m, p->local_rows, p->local_cols);
            weight = nd_max(weight, p->local_rows * p->local_cols);
            scratch = nd_max_bytes(scratch, bytes);
        }
    }
    if (nd_linears_join(m)) {
        scratch = nd_max_bytes(scratch, gemm_scratch(m, nd_max(d->QKV, 2 * d->F), d->C));
    }
    const struct {
        const char *name;
        int64_t bytes;
        void **pointer;
    } wants[] = {
        {"fp8: input of a product",
         !casts ? gathered : d->T * (per_tensor ? inputs : nd_max(inputs, d->F)), &f->x},
        {"fp8: input, transposed", transposes * d->T * nd_max(inputs, d->F), &f->x_transposed},
        {"fp8: output gradients", backward * (!casts ? gathered : d->T * together), &f->dy},
        {"fp8: output gradients, transposed", transposes * d->T * outputs, &f->dy_transposed},
        {"fp8: gradient before its gather", d->T == d->Tl ? 0 : backward * d->Tl * d->C,
         &f->dy_local},
        {"fp8: weight of a product", s->codes_gathered ? 0 : casts * weight, &f->w},
        {"fp8: weight, transposed", transposes * weight, &f->w_transposed},
        {"fp8: work space of products", (int64_t)scratch, &f->gemm},
    };
    for (size_t i = 0; i < sizeof wants / sizeof *wants; i++) {
        nd_memplan_want(plan, ND_MEM_SCRATCH, wants[i].name, (size_t)wants[i].bytes,
                        wants[i].pointer);
    }
}

/* Casts. */

/* How FP8 products read an operand that is stored in BF16: the same answer for all extents. */
static nd_form_rule rule_of(const nd_model *m, nd_role role)
{
    const nd_form_need need = {.role = role,
                               .rows = 1,
                               .columns = 1,
                               .others = 1,
                               .stored = m->dims.act,
                               .format = ND_DTYPE_F8_E4M3,
                               .measured = nd_recipe_is_delayed(&m->scales.recipe),
                               .uses = 1};
    return m->rank->ops->form(m->rank->device, &need);
}

bool nd_products_cast(const nd_model *m)
{
    return rule_of(m, ND_X_OF_Y).maker == ND_FORM_BY_PRODUCT;
}

bool nd_products_transpose(const nd_model *m)
{
    return rule_of(m, ND_W_OF_DX).transposed;
}

bool nd_linears_join(const nd_model *m)
{
    const nd_scales *s = &m->scales;
    return nd_products_cast(m) && nd_recipe_is_per_tensor(&s->recipe) && !s->codes_gathered;
}

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

nd_status nd_operand_cast(nd_model *m, nd_operand *x, const nd_cast *how)
{
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = how->rule;
    bool delayed = rule->scaling == ND_SCALING_DELAYED;
    bool per_tensor = rule->granularity == ND_PER_TENSOR;
    nd_scale_ref scale = per_tensor ? x->scale : how->vectors;
    if (!delayed && !how->settled) {
        int64_t count = per_tensor                        ? 1
                        : rule->granularity == ND_PER_ROW ? x->rows.shape[0]
                                                          : x->rows.shape[1];
        if (!per_tensor || x->known != ND_KNOWN_AMAX) {
            ND_TRY(nd_scales_measure(s, scale, rule->granularity, x->rows));
        }
        ND_TRY(nd_scales_settle(s, scale, count, rule->format, how->split));
    }
    nd_matrix result = with_codes(nd_matrix_with(scale, rule->granularity), &x->rows, how);
    if (x->known != ND_KNOWN_CODES) {
        float *amax = delayed && how->record ? x->scale.amax : NULL;
        ND_TRY(nd_scales_cast(s, x->scale.site, result, amax, x->rows));
    }
    x->cast = result;
    return ND_OK;
}

void nd_cast_want(const nd_model *m, nd_cast *how, bool transposed, void *codes,
                  void *transposed_codes)
{
    how->by_products = nd_products_cast(m);
    how->codes = how->by_products || transposed ? NULL : codes;
    how->transposed = !how->by_products && transposed ? transposed_codes : NULL;
}

nd_status nd_operand_transpose(nd_model *m, nd_matrix *operand, void *buffer)
{
    if (nd_products_transpose(m)) {
        operand->transposed = nd_tensor_2d(buffer, operand->codes.dtype, operand->codes.shape[1],
                                           operand->codes.shape[0]);
        ND_OP(m->rank, ND_TRACE_CAST, make_form, .out = {.transposed = operand->transposed},
              .x = operand->codes);
    }
    return ND_OK;
}

nd_status nd_operand_weight(nd_block_call c, int linear, const nd_cast_rule *rule, bool over_rows,
                            const nd_scale_ref *settled, nd_matrix *out)
{
    nd_model *m = c.model;
    nd_scales *s = &m->scales;
    nd_param_id id = nd_linear_param(linear);
    nd_operand w = {.scale = nd_scales_of_weight(s, c.layer, linear)};
    bool transposed = over_rows && nd_products_transpose(m);
    if (s->codes_gathered) {
        *out = nd_matrix_with(w.scale, rule->granularity);
        out->codes = nd_fsdp_codes(&m->fsdp, id, c.layer);
        return transposed ? nd_operand_transpose(m, out, m->fp8.w_transposed) : ND_OK;
    }
    nd_cast how = {
        .rule = rule,
        .settled = settled || rule->granularity == ND_PER_TENSOR,
        .vectors = settled ? *settled : s->vectors[1],
    };
    nd_cast_want(m, &how, transposed, m->fp8.w, m->fp8.w_transposed);
    w.rows = nd_fsdp_weight(&m->fsdp, id, id, c.layer);
    s->casts.weights++;
    ND_TRY(nd_operand_cast(m, &w, &how));
    *out = w.cast;
    return ND_OK;
}

nd_status nd_operand_gather_codes(nd_model *m, nd_tensor codes, void *buffer, nd_tensor *full)
{
    nd_tensor bytes = codes;
    bytes.dtype = ND_DTYPE_U8;
    ND_TRY(nd_tp_gather(m->rank, bytes, buffer, ND_TRACE_COMMUNICATION, full));
    full->dtype = codes.dtype;
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
    bool keeps = nd_scales_keep_codes(s, input, c.layer);
    if (!may_fuse(s) || !nd_linear_group_of(c, input)->fp8 || input == ND_INPUT_O) {
        return ND_KNOWN_NOTHING;
    }
    if (c.pass == ND_PASS_BACKWARD || nd_recipe_is_delayed(&s->recipe)) {
        return keeps ? ND_KNOWN_CODES : ND_KNOWN_NOTHING;
    }
    /* What is not kept as codes is measured after it was gathered. */
    return keeps || m->dims.Tl == m->dims.T ? ND_KNOWN_AMAX : ND_KNOWN_NOTHING;
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
    int first;
    *amax = NULL;
    if (nd_gradient_known(c, input) != ND_KNOWN_AMAX) {
        return ND_OK;
    }
    (void)nd_input_linears(input, &first);
    *amax = nd_scales_at(s, nd_site_gradient(s, c.layer, first)).amax;
    return nd_zero(&c.model->rank->stream, *amax, sizeof **amax);
}

/* Gradients of gate and up. */

nd_status nd_operand_prepare_gradients(nd_block_call c, nd_operand *dy, nd_tensor to[2],
                                       nd_fuse fuse[2])
{
    nd_model *m = c.model;
    nd_scales *s = &m->scales;
    const nd_dims *d = &m->dims;
    int first, count = nd_input_linears(ND_INPUT_GATE_UP, &first);
    bool delayed = nd_recipe_is_delayed(&s->recipe);
    *dy = (nd_operand){.rows = nd_set_block(c.set, c.layer)->gu};
    for (int i = 0; i < count; i++) {
        to[i] = nd_tensor_columns(dy->rows, i * d->F, d->F);
        fuse[i] = (nd_fuse){0};
    }
    const nd_linear_group *g = nd_linear_group_of(c, ND_INPUT_GATE_UP);
    if (!may_fuse(s) || !g->fp8 || (delayed && g->bias)) { /* a bias's gradient reads the rows */
        return ND_OK;
    }
    dy->known = delayed ? ND_KNOWN_CODES : ND_KNOWN_AMAX;
    nd_scale_ref scale = nd_scales_at(s, nd_site_gradient(s, c.layer, first));
    if (delayed) {
        dy->codes = nd_tensor_2d(m->fp8.dy, s->recipe.input_gradient.a.format, count * d->T, d->F);
    }
    for (int i = 0; i < count; i++) {
        if (nd_filter_converts(&s->filter, c.layer, first + i)) {
            fuse[i].amax = scale.amax + i;
            if (delayed) {
                to[i].data = NULL;
                fuse[i].scale = scale.scale + i;
                fuse[i].codes = nd_tensor_rows(dy->codes, i * d->T, d->T);
            }
        }
    }
    return delayed ? ND_OK : nd_zero(&m->rank->stream, scale.amax, (size_t)count * sizeof(float));
}
