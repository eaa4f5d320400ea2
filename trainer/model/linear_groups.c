// SPDX-License-Identifier: Apache-2.0
/* Decides, when a model is made, what computes its linears, in which forms products read, and which
 * forms of weights are kept. */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

enum { TRAINS, VALIDATES, TABLES }; /* as nd_linear_groups has them */

/* In BF16, or F32, products read what is stored: there are no scales. */
static const nd_linear_method bf16;

/* The dtype in which a weight is gathered. */
static nd_dtype stored_weight(const nd_model *m, bool fp8)
{
    return fp8 && m->scales.codes_gathered ? m->scales.recipe.rules[ND_W_OF_Y].format : m->dims.act;
}

/* True where adjacent FP8 linears make one product for y, and one for dw, with a scale for each
 * (nd_matrix.parts). They do where products cast, and each weight has one scale. */
static bool joins(const nd_model *m)
{
    const nd_form_need need = {.role = ND_W_OF_Y,
                               .rows = 1,
                               .columns = 1,
                               .others = 1,
                               .stored = stored_weight(m, true),
                               .format = ND_DTYPE_F8_E4M3,
                               .measured = nd_recipe_is_delayed(&m->scales.recipe),
                               .uses = 1};
    return nd_recipe_is_per_tensor(&m->scales.recipe) &&
           m->rank->ops->form(m->rank->device, &need).maker == ND_FORM_BY_PRODUCT;
}

/* Appends a linear to the last product of a list where they are adjacent and of one precision, in
 * FP8 only if such linears are joined; else it makes a product of its own. */
static void add_linear(const nd_model *m, nd_linear_part *parts, int *count, int64_t layer,
                       int linear, bool fp8, bool joined)
{
    const nd_param *param = nd_layout_param(m->layout, nd_linears[linear].param, layer);
    nd_linear_part *p = *count > 0 ? &parts[*count - 1] : NULL;
    if (!p || p->fp8 != fp8 || (fp8 && !joined)) {
        const int64_t offset = p ? p->offset + p->rows : 0;
        p = &parts[(*count)++];
        *p = (nd_linear_part){.fp8 = fp8,
                              .linear = linear,
                              .first = param->id,
                              .offset = offset,
                              .columns = param->local_cols};
    }
    p->last = param->id;
    p->lines[p->count++] = param->local_rows;
    p->rows += param->local_rows;
}

/* Those of y and dw, then those of dx. */
static int parts_of(const nd_linear_group *g)
{
    return g->part_count + g->dx_part_count;
}

static nd_linear_part *part_at(nd_linear_group *g, int i)
{
    return i < g->part_count ? &g->parts[i] : &g->dx_parts[i - g->part_count];
}

/* Tokens of one product. */
static int64_t rows_of(const nd_model *m, const nd_linear_group *g)
{
    const bool mlp = g->input == ND_INPUT_GATE_UP || g->input == ND_INPUT_DOWN;
    return mlp ? m->dims.piece : m->dims.T;
}

/* Asks in which forms the products of a part read their operands. */
static void resolve(const nd_model *m, const nd_linear_group *g, nd_linear_part *p)
{
    const nd_recipe *recipe = &m->scales.recipe;
    const int64_t T = rows_of(m, g), N = p->rows, K = p->columns;
    const int64_t calls = m->rank->config->train.gradient_accumulation_steps *
                          nd_ceil_div(m->dims.T, T); /* of a product in a step */
    const bool again = nd_recompute_multiplies(m->recompute, g->input) || T < m->dims.T;
    const nd_dtype act = m->dims.act;
    const nd_form_need x = {.rows = T,
                            .columns = K,
                            .others = N,
                            .stored = g->keeps ? recipe->rules[ND_X_OF_Y].format : act,
                            .uses = 1};
    const nd_form_need w = {
        .rows = N, .columns = K, .others = T, .stored = stored_weight(m, p->fp8)};
    const nd_form_need dy = {.rows = T,
                             .columns = N,
                             .others = K,
                             .stored = g->travels ? recipe->rules[ND_DY_OF_DX].format : act,
                             .uses = 1};
    const nd_form_need needs[ND_ROLE_COUNT] = {
        [ND_X_OF_Y] = x,  [ND_W_OF_Y] = w,    [ND_DY_OF_DX] = dy,
        [ND_W_OF_DX] = w, [ND_DY_OF_DW] = dy, [ND_X_OF_DW] = x};
    for (nd_role role = 0; role < ND_ROLE_COUNT; role++) {
        const nd_cast_rule *rule = &recipe->rules[role];
        nd_form_need need = needs[role];
        p->rules[role] = p->fp8 && rule->scaling != ND_SCALING_NONE ? rule : NULL;
        p->joint[role] = -1;
        need.role = role;
        need.format = p->rules[role] ? rule->format : act;
        need.measured = nd_recipe_is_delayed(recipe);
        need.uses = need.uses ? need.uses : (int)(calls * (role == ND_W_OF_Y && again ? 2 : 1));
        p->forms[role] = m->rank->ops->form(m->rank->device, &need);
    }
    if (nd_recipe_is_per_tensor(recipe)) { /* codes that dw reads stay while other parts make dx */
        p->dy_transposed = T * p->offset;
        p->dy_codes = p->forms[ND_DY_OF_DW].transposed ? 0 : T * p->offset;
    }
}

static void make_group(const nd_model *m, nd_linear_group *g, nd_input input, int64_t layer,
                       bool in_bf16)
{
    const nd_scales *s = &m->scales;
    const bool joined = joins(m);
    *g = (nd_linear_group){.input = input,
                           .column = input == ND_INPUT_QKV || input == ND_INPUT_GATE_UP,
                           .keeps = !in_bf16 && nd_scales_keep_codes(s, input, layer)};
    g->count = nd_input_linears(input, &g->first);
    g->first_bias = nd_linears[g->first].bias;
    g->last_bias = nd_linears[g->first + g->count - 1].bias;
    g->bias = nd_shape_has(&m->rank->shape, g->first_bias);
    g->beta = g->bias && (g->column || m->rank->coord.at[ND_AXIS_TP] == 0) ? 1.0f : 0.0f;
    for (int l = g->first; l < g->first + g->count; l++) {
        const bool fp8 = !in_bf16 && nd_filter_converts(&s->filter, layer, l);
        add_linear(m, g->parts, &g->part_count, layer, l, fp8, joined);
        add_linear(m, g->dx_parts, &g->dx_part_count, layer, l, fp8, false);
        g->fp8 |= fp8;
    }
    g->method = !g->fp8                               ? &bf16
                : nd_recipe_is_per_tensor(&s->recipe) ? &nd_linear_fp8_tensor
                                                      : &nd_linear_fp8_rows;
    g->travels =
        g->fp8 && !g->column && m->dims.T != m->dims.Tl && nd_recipe_is_per_tensor(&s->recipe);
    for (int i = 0; i < parts_of(g); i++) {
        resolve(m, g, part_at(g, i));
    }
}

static size_t scratch_of(const nd_model *m, const nd_linear_group *g, const nd_linear_part *p)
{
    const nd_device *device = m->rank->device;
    const nd_ops *ops = m->rank->ops;
    const int64_t T = rows_of(m, g), N = p->rows, K = p->columns;
    const size_t y = ops->product_scratch(device, T, N, K, m->dims.act);
    const size_t dx = ops->product_scratch(device, T, K, N, m->dims.act);
    const size_t dw = ops->product_scratch(device, N, K, T, m->dims.act);
    return !p->fp8 ? 0 : m->forward_only ? y : nd_max_bytes(y, nd_max_bytes(dx, dw));
}

/* Raises the bytes of buffers to what the forms of a part need. */
static void add_rooms(const nd_model *m, const nd_linear_part *p, size_t bytes[ND_FP8_BUFFERS])
{
    const nd_role end = m->forward_only ? ND_DY_OF_DX : ND_ROLE_COUNT;
    for (nd_role role = 0; role < end; role++) {
        const nd_form_rule form = p->forms[role];
        const nd_operand_kind of = nd_role_operand(role);
        const int64_t before = form.transposed ? p->dy_transposed : p->dy_codes;
        const int64_t at = of == ND_OPERAND_GRADIENT ? before : 0;
        size_t *room = &bytes[nd_operand_buffer(of) + form.transposed];
        if (form.maker == ND_FORM_BY_OP) {
            *room = nd_max_bytes(*room, (size_t)at + form.bytes);
        }
    }
}

static void plan_group(const nd_model *m, nd_linear_group *g, size_t bytes[ND_FP8_BUFFERS])
{
    if (g->method->plan) {
        g->method->plan(m, g, bytes);
    }
    for (int i = 0; i < parts_of(g); i++) {
        const nd_linear_part *p = part_at(g, i);
        bytes[ND_FP8_GEMM] = nd_max_bytes(bytes[ND_FP8_GEMM], scratch_of(m, g, p));
        if (p->fp8 && i >= g->part_count) {
            add_rooms(m, p, bytes);
        }
    }
}

nd_status nd_linears_create(nd_model *m, nd_memplan *plan)
{
    static const char *const names[ND_FP8_BUFFERS] = {
        [ND_FP8_X] = "fp8: input of a product",
        [ND_FP8_X_TRANSPOSED] = "fp8: input, transposed",
        [ND_FP8_DY] = "fp8: output gradients",
        [ND_FP8_DY_TRANSPOSED] = "fp8: output gradients, transposed",
        [ND_FP8_DY_LOCAL] = "fp8: gradient before its gather",
        [ND_FP8_W] = "fp8: weight of a product",
        [ND_FP8_W_TRANSPOSED] = "fp8: weight, transposed",
        [ND_FP8_GEMM] = "fp8: work space of products",
    };
    const nd_layer_range layers = m->stage->layers;
    const nd_scales *s = &m->scales;
    /* Transformer Engine's validation runs in BF16, where the BF16 weights are at hand. */
    const bool validates_in_bf16 = nd_recipe_is_delayed(&s->recipe) && !s->codes_gathered;
    size_t bytes[ND_FP8_BUFFERS] = {0};
    ND_TRY(ND_ALLOC(TABLES * (layers.end - layers.begin) * ND_INPUT_COUNT, &m->linears));
    for (int table = 0; table < TABLES; table++) {
        for (int64_t l = layers.begin; l < layers.end; l++) {
            for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
                nd_linear_group *g = nd_linear_groups(m, table, l) + input;
                make_group(m, g, input, l, table == VALIDATES && validates_in_bf16);
                plan_group(m, g, bytes);
            }
        }
    }
    for (int i = 0; i < ND_FP8_BUFFERS && s->recipe.name; i++) {
        nd_memplan_want(plan, ND_MEM_SCRATCH, names[i], bytes[i], &m->work.fp8[i]);
    }
    return ND_OK;
}

/* Packed weights. */

/* Wants a form of a weight of the unit where products keep one and no other unit shares its buffer.
 * Returns its number; numbers are adjacent, from 1 on. */
static int want_form(nd_packed_weights *p, const nd_unit *unit, nd_form_rule form)
{
    const bool kept = form.maker == ND_FORM_BY_PRODUCT && nd_fsdp_has_own_slot(p->fsdp, unit);
    ND_ASSERT(p->count < p->most);
    p->weights[p->count++] =
        (nd_packed_weight){.head = unit->kind == ND_UNIT_HEAD, .bytes = kept ? form.bytes : 0};
    return p->count;
}

static void want_blocks(nd_model *m)
{
    for (int64_t l = m->stage->layers.begin; l < m->stage->layers.end; l++) {
        const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, l);
        for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
            nd_linear_group *g = nd_linear_groups(m, TRAINS, l) + input,
                            *validates = nd_linear_groups(m, VALIDATES, l) + input;
            for (int i = 0; i < parts_of(g); i++) {
                nd_linear_part *p = part_at(g, i);
                const nd_role role = i < g->part_count ? ND_W_OF_Y : ND_W_OF_DX;
                p->packed = want_form(&m->packed, unit, p->forms[role]);
            }
            if (validates->fp8 == g->fp8) { /* they are the same products */
                *validates = *g;
            }
        }
    }
}

/* Wants the form of the forward for each tile of the vocabulary, then that of the input
 * gradient. */
static void want_head(nd_model *m)
{
    const nd_dims *d = &m->dims;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_HEAD, -1)->unit;
    const int64_t micros = m->rank->config->train.gradient_accumulation_steps;
    nd_form_need need = {.columns = d->C,
                         .others = d->head_rows * (d->T / d->Tl),
                         .stored = d->act,
                         .format = d->act,
                         .uses = (int)(micros * nd_ceil_div(d->Tl, d->head_rows))};
    m->packed_head = m->packed.count + 1;
    for (int64_t begin = 0; begin < d->V; begin += d->head_columns) {
        need.rows = nd_min(d->head_columns, d->V - begin);
        need.role = ND_W_OF_Y;
        want_form(&m->packed, unit, m->rank->ops->form(m->rank->device, &need));
        need.role = ND_W_OF_DX;
        want_form(&m->packed, unit, m->rank->ops->form(m->rank->device, &need));
    }
}

nd_status nd_model_plan_weights(nd_model *m, bool shares, nd_memplan *plan)
{
    const int64_t tiles = nd_ceil_div(m->dims.V, m->dims.head_columns);
    ND_TRY(nd_fsdp_plan_weights(&m->fsdp, shares, plan));
    m->packed =
        (nd_packed_weights){.fsdp = &m->fsdp, .most = (int)(2 * (m->layout->param_count + tiles))};
    ND_TRY(ND_ALLOC(m->packed.most, &m->packed.weights));
    if (!m->forward_only) {
        want_blocks(m);
        want_head(m);
    }
    return ND_OK;
}

size_t nd_packed_plan(nd_packed_weights *p, bool head, nd_memplan *plan)
{
    const char *name = head ? "head, packed" : "decoder blocks, packed";
    const int want =
        plan ? nd_memplan_want(plan, ND_MEM_WEIGHTS, name, nd_packed_plan(p, head, NULL), NULL) : 0;
    size_t offset = 0;
    for (int i = 0; i < p->count; i++) {
        nd_packed_weight *w = &p->weights[i];
        if (w->head == head && w->bytes > 0) {
            if (plan) {
                nd_memplan_also(plan, want, offset, &w->form.memory);
            }
            offset += nd_round_up_bytes(w->bytes, 256);
        }
    }
    return offset;
}
