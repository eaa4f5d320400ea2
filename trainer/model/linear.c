// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/linear.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM, CAST = ND_TRACE_CAST;
static const nd_trace_kind COMM = ND_TRACE_COMMUNICATION;
static const nd_tensor none = {0};

/* Linears of a group, as numbered in filter.h. */
static const struct {
    int first, last;
} groups[ND_INPUTS_OF_BLOCK] = {
    [ND_INPUT_QKV] = {0, 2},
    [ND_INPUT_O] = {3, 3},
    [ND_INPUT_GATE_UP] = {4, 5},
    [ND_INPUT_DOWN] = {6, 6},
};

/* Transformer Engine's validation runs in BF16, where the BF16 weights are at hand. */
static bool in_fp8(const nd_model *m, int64_t layer, int linear)
{
    const nd_scales *s = &m->scales;
    bool in_bf16 =
        m->pass == ND_PASS_EVAL && nd_recipe_is_delayed(&s->recipe) && !s->codes_gathered;
    return !in_bf16 && nd_filter_converts(&s->filter, layer, linear);
}

static bool any_in_fp8(const nd_model *m, nd_input input, int64_t layer)
{
    bool any = false;
    for (int l = groups[input].first; l <= groups[input].last; l++) {
        any |= in_fp8(m, layer, l);
    }
    return any;
}

bool nd_linear_keeps_codes(const nd_scales *s, nd_input input, int64_t layer)
{
    bool all = input != ND_INPUT_O && nd_recipe_is_per_tensor(&s->recipe);
    for (int l = groups[input].first; l <= groups[input].last; l++) {
        all &= nd_filter_converts(&s->filter, layer, l);
    }
    return all;
}

/* ---- the parts of a group: neighbours in BF16 together, each FP8 linear alone ---- */

typedef struct part {
    int first, last; /* linears */
    bool fp8;
    int64_t offset, rows; /* columns of the group's output */
} part;

static int64_t rows_of(const nd_model *m, int64_t layer, int linear)
{
    return m->layout->params[nd_layout_find(m->layout, nd_linear_param(linear), layer)].local_rows;
}

static part first_part(nd_input input)
{
    return (part){.last = groups[input].first - 1};
}

static bool next_part(const nd_model *m, nd_input input, int64_t layer, part *p)
{
    int last = groups[input].last;
    if (p->last == last) {
        return false;
    }
    p->offset += p->rows;
    p->first = ++p->last;
    p->fp8 = in_fp8(m, layer, p->first);
    p->rows = rows_of(m, layer, p->first);
    while (!p->fp8 && p->last < last && !in_fp8(m, layer, p->last + 1)) {
        p->rows += rows_of(m, layer, ++p->last);
    }
    return true;
}

static nd_tensor weight_of(const nd_model *m, int64_t layer, const part *p)
{
    return nd_fsdp_weight(&m->fsdp, nd_linear_param(p->first), nd_linear_param(p->last), layer);
}

static nd_tensor gradient_of(const nd_model *m, int64_t layer, const part *p)
{
    return nd_fsdp_grad(&m->fsdp, nd_linear_param(p->first), nd_linear_param(p->last), layer);
}

/* ---- operands ---- */

typedef struct cast_request {
    const nd_cast_rule *rule;
    int64_t site;
    nd_tensor x;
    bool split;                /* each tp rank sees a part of what one scale covers */
    bool known;                /* the site has the scale of this tensor already */
    bool record;               /* delayed: its amax counts in this step */
    nd_scale_vectors *vectors; /* scales of rows or columns */
    void *codes, *transposed;  /* NULL: not wanted */
} cast_request;

static nd_fp8 with_codes(nd_fp8 out, const cast_request *q)
{
    nd_dtype format = q->rule->format;
    if (q->codes) {
        out.codes = nd_tensor_2d(q->codes, format, q->x.shape[0], q->x.shape[1]);
    }
    if (q->transposed) {
        out.transposed = nd_tensor_2d(q->transposed, format, q->x.shape[1], q->x.shape[0]);
    }
    return out;
}

static nd_status settle_vector(nd_model *m, const cast_request *q, nd_fp8 *out)
{
    nd_scale_vectors *v = q->vectors;
    bool rows = q->rule->granularity == ND_PER_ROW;
    ND_OP(m->rank, CAST, amax, v->amax, q->x, q->rule->granularity, false);
    *out = (nd_fp8){.scale = v->scale, .inverse = v->inverse, .granularity = q->rule->granularity};
    return nd_scales_settle_vector(&m->scales, v, q->x.shape[rows ? 0 : 1], q->rule->format,
                                   q->split);
}

static nd_status cast_operand(nd_model *m, const cast_request *q, nd_fp8 *out)
{
    nd_scales *s = &m->scales;
    bool delayed = q->rule->scaling == ND_SCALING_DELAYED;
    nd_fp8 result = nd_scales_at(s, q->site);
    if (q->rule->granularity != ND_PER_TENSOR) {
        ND_TRY(settle_vector(m, q, &result));
    } else if (!delayed && !q->known) {
        ND_TRY(nd_scales_measure(s, q->site, q->x));
        ND_TRY(nd_scales_settle(s, q->site, 1, q->rule->format, q->split));
    }
    result = with_codes(result, q);
    ND_TRY(
        nd_scales_cast(s, q->site, result, delayed && q->record ? s->amax + q->site : NULL, q->x));
    *out = result;
    return ND_OK;
}

/* A backend that reads products' operands along the summed axis only needs the transpose of codes that are there. */
static nd_status add_transposed(nd_model *m, nd_fp8 *operand, void *buffer)
{
    if (m->rank->ops->fp8_needs_transposed) {
        operand->transposed = nd_tensor_2d(buffer, operand->codes.dtype, operand->codes.shape[1],
                                           operand->codes.shape[0]);
        ND_OP(m->rank, CAST, fp8_transpose, operand->transposed, operand->codes);
    }
    return ND_OK;
}

/* The weight of a product; summed over its rows (dx) or its columns (y). */
static nd_status weight_operand(nd_model *m, int64_t layer, int linear, const nd_cast_rule *rule,
                                bool over_rows, nd_fp8 *out)
{
    nd_scales *s = &m->scales;
    nd_param_id id = nd_linear_param(linear);
    int64_t site = nd_site_weight(s, layer, linear);
    bool transposed = over_rows && m->rank->ops->fp8_needs_transposed;
    if (s->codes_gathered) {
        *out = nd_scales_at(s, site);
        out->codes = nd_fsdp_codes(&m->fsdp, id, layer);
        return transposed ? add_transposed(m, out, m->fp8.w_transposed) : ND_OK;
    }
    bool row_parallel =
        m->layout->params[nd_layout_find(m->layout, id, layer)].split == ND_SPLIT_COLS;
    cast_request q = {
        .rule = rule,
        .site = site,
        .x = nd_fsdp_weight(&m->fsdp, id, id, layer),
        .split = over_rows ? !row_parallel : row_parallel,
        .known = true,
        .vectors = &s->vectors[1],
        .codes = transposed ? NULL : m->fp8.w,
        .transposed = transposed ? m->fp8.w_transposed : NULL,
    };
    s->casts.weights++;
    return cast_operand(m, &q, out);
}

static nd_tensor as_bytes(nd_tensor codes)
{
    codes.dtype = ND_DTYPE_U8;
    return codes;
}

/* (Tl, X) codes -> (T, X); `codes` itself when tp is 1. */
static nd_status gather_codes(nd_model *m, nd_tensor codes, void *buffer, nd_tensor *full)
{
    ND_TRY(nd_tp_gather(m->rank, as_bytes(codes), buffer, COMM, full));
    full->dtype = codes.dtype;
    return ND_OK;
}

static cast_request input_request(nd_model *m, nd_input input, int64_t layer,
                                  const nd_cast_rule *rule, nd_tensor x)
{
    return (cast_request){
        .rule = rule,
        .site = nd_site_input(&m->scales, layer, (int)input),
        .x = x,
        .known = m->pass == ND_PASS_BACKWARD,
        .record = m->pass == ND_PASS_TRAIN,
        .vectors = &m->scales.vectors[0],
    };
}

static void want(cast_request *q, bool transposed, void *codes, void *transposed_codes)
{
    q->codes = transposed ? NULL : codes;
    q->transposed = transposed ? transposed_codes : NULL;
}

nd_status nd_linear_recast(nd_model *m, nd_input input, int64_t layer, nd_tensor x, nd_tensor codes)
{
    nd_fp8 out;
    if (!codes.data) {
        return ND_OK;
    }
    cast_request q = input_request(m, input, layer, &m->scales.recipe.output.a, x);
    q.split = true;
    q.codes = codes.data;
    m->scales.casts.inputs++;
    return cast_operand(m, &q, &out);
}

/* The gathered input of a column-parallel group, for y or (weight_gradient) for dw. `full`: gathered BF16, if any. */
static nd_status column_input(nd_model *m, nd_input input, int64_t layer, nd_tensor codes,
                              nd_tensor full, bool weight_gradient, nd_fp8 *out)
{
    const nd_recipe *recipe = &m->scales.recipe;
    const nd_cast_rule *rule = weight_gradient ? &recipe->weight_gradient.b : &recipe->output.a;
    if (codes.data) {
        *out = nd_scales_at(&m->scales, nd_site_input(&m->scales, layer, (int)input));
        ND_TRY(gather_codes(m, codes, m->fp8.x, &out->codes));
        return weight_gradient ? add_transposed(m, out, m->fp8.x_transposed) : ND_OK;
    }
    cast_request q = input_request(m, input, layer, rule, full);
    want(&q, weight_gradient && m->rank->ops->fp8_needs_transposed, m->fp8.x, m->fp8.x_transposed);
    m->scales.casts.inputs++;
    return cast_operand(m, &q, out);
}

/* ---- column-parallel ---- */

nd_status nd_linear_column_fwd(nd_model *m, nd_input input, int64_t layer, nd_tensor local,
                               nd_tensor codes, nd_tensor y)
{
    nd_rank *r = m->rank;
    const nd_recipe *recipe = &m->scales.recipe;
    nd_tensor full = none;
    nd_fp8 x = {0}, w;
    bool any = any_in_fp8(m, input, layer);
    codes = any ? codes : none;
    if (!codes.data) {
        ND_TRY(nd_tp_gather(r, local, m->full_a, COMM, &full));
    } else {
        ND_TRY(nd_linear_recast(m, input, layer, local, codes));
    }
    if (any) {
        ND_TRY(column_input(m, input, layer, codes, full, false, &x));
    }
    for (part p = first_part(input); next_part(m, input, layer, &p);) {
        nd_tensor out = nd_tensor_columns(y, p.offset, p.rows);
        if (p.fp8) {
            ND_TRY(weight_operand(m, layer, p.first, &recipe->output.b, false, &w));
            ND_OP(r, GEMM, matmul_fp8, out, x, false, w, true, 0.0f,
                  recipe->output.fast_accumulation, m->fp8.gemm);
        } else {
            ND_OP(r, GEMM, matmul, out, full, false, weight_of(m, layer, &p), true, 0.0f);
        }
    }
    return ND_OK;
}

/* The gradient of one part's output. */
static nd_status gradient_operand(nd_model *m, int64_t layer, const part *p,
                                  const nd_cast_rule *rule, nd_tensor dy, bool weight_gradient,
                                  nd_fp8 *out)
{
    bool per_tensor = rule->granularity == ND_PER_TENSOR;
    bool transposes = m->rank->ops->fp8_needs_transposed;
    cast_request q = {
        .rule = rule,
        .site = nd_site_gradient(&m->scales, layer, p->first),
        .x = nd_tensor_columns(dy, p->offset, p->rows),
        .split = rule->granularity == ND_PER_ROW,
        .known = per_tensor, /* measured with the others of the group */
        .record = true,
        .vectors = &m->scales.vectors[2],
        .codes = m->fp8.dy,
        .transposed = transposes ? m->fp8.dy_transposed : NULL,
    };
    if (!per_tensor) { /* each product has its own cast; with one scale both use this one */
        want(&q, weight_gradient && transposes, m->fp8.dy, m->fp8.dy_transposed);
    }
    m->scales.casts.gradients++;
    return cast_operand(m, &q, out);
}

/* Scales of a group's gradients by one reduction. */
static nd_status settle_gradients(nd_model *m, nd_input input, int64_t layer, nd_tensor dy)
{
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.input_gradient.a;
    int first = groups[input].first, count = groups[input].last - first + 1;
    if (rule->granularity != ND_PER_TENSOR || rule->scaling != ND_SCALING_CURRENT ||
        !any_in_fp8(m, input, layer)) {
        return ND_OK;
    }
    for (part p = first_part(input); next_part(m, input, layer, &p);) {
        if (p.fp8) {
            ND_TRY(nd_scales_measure(s, nd_site_gradient(s, layer, p.first),
                                     nd_tensor_columns(dy, p.offset, p.rows)));
        }
    }
    return nd_scales_settle(s, nd_site_gradient(s, layer, first), count, rule->format, true);
}

static nd_status column_part_bwd_bf16(nd_model *m, int64_t layer, const part *p, nd_tensor dx,
                                      float dx_beta, nd_tensor dy, nd_tensor full, float beta)
{
    nd_rank *r = m->rank;
    nd_tensor d = nd_tensor_columns(dy, p->offset, p->rows);
    ND_OP(r, GEMM, matmul, dx, d, false, weight_of(m, layer, p), false, dx_beta);
    ND_OP(r, GEMM, matmul, gradient_of(m, layer, p), d, true, full, false, beta);
    return ND_OK;
}

static nd_status column_part_bwd_fp8(nd_model *m, int64_t layer, const part *p, nd_tensor dx,
                                     float dx_beta, nd_tensor dy, nd_tensor full, nd_fp8 x,
                                     float beta)
{
    nd_rank *r = m->rank;
    const nd_gemm_rule *for_dx = &m->scales.recipe.input_gradient;
    const nd_gemm_rule *for_dw = &m->scales.recipe.weight_gradient;
    nd_tensor dw = gradient_of(m, layer, p);
    nd_fp8 g, w;
    ND_TRY(gradient_operand(m, layer, p, &for_dx->a, dy, false, &g));
    ND_TRY(weight_operand(m, layer, p->first, &for_dx->b, true, &w));
    ND_OP(r, GEMM, matmul_fp8, dx, g, false, w, false, dx_beta, for_dx->fast_accumulation,
          m->fp8.gemm);
    if (for_dw->a.scaling == ND_SCALING_NONE) {
        ND_OP(r, GEMM, matmul, dw, nd_tensor_columns(dy, p->offset, p->rows), true, full, false,
              beta);
        return ND_OK;
    }
    if (for_dw->a.granularity != ND_PER_TENSOR) {
        ND_TRY(gradient_operand(m, layer, p, &for_dw->a, dy, true, &g));
    }
    ND_OP(r, GEMM, matmul_fp8, dw, g, true, x, false, beta, for_dw->fast_accumulation, m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_column_bwd(nd_model *m, nd_input input, int64_t layer, nd_tensor dlocal,
                               nd_tensor dy, nd_tensor local, nd_tensor codes, float beta)
{
    bool cast = m->scales.recipe.weight_gradient.a.scaling != ND_SCALING_NONE;
    nd_tensor dx = nd_tp_partial(m->rank, dlocal, m->full_b), full = none;
    nd_fp8 x = {0};
    float dx_beta = 0.0f;
    ND_TRY(settle_gradients(m, input, layer, dy));
    if (!codes.data) {
        ND_TRY(nd_tp_gather(m->rank, local, m->full_a, COMM, &full));
    }
    if (cast && any_in_fp8(m, input, layer)) {
        ND_TRY(column_input(m, input, layer, codes, full, true, &x));
    }
    for (part p = first_part(input); next_part(m, input, layer, &p); dx_beta = 1.0f) {
        ND_TRY(p.fp8 ? column_part_bwd_fp8(m, layer, &p, dx, dx_beta, dy, full, x, beta)
                     : column_part_bwd_bf16(m, layer, &p, dx, dx_beta, dy, full, beta));
    }
    return nd_tp_reduce(m->rank, dx, dlocal, COMM);
}

/* ---- row-parallel: one linear ---- */

/* The input, for y or for dw; codes that were kept are there already in backward. */
static nd_status row_input(nd_model *m, nd_input input, int64_t layer, nd_tensor x, nd_tensor codes,
                           bool weight_gradient, nd_fp8 *out)
{
    const nd_recipe *recipe = &m->scales.recipe;
    const nd_cast_rule *rule = weight_gradient ? &recipe->weight_gradient.b : &recipe->output.a;
    if (weight_gradient && codes.data) {
        *out = nd_scales_at(&m->scales, nd_site_input(&m->scales, layer, (int)input));
        out->codes = codes;
        return add_transposed(m, out, m->fp8.x_transposed);
    }
    cast_request q = input_request(m, input, layer, rule, x);
    q.split = rule->granularity != ND_PER_COLUMN;
    want(&q, weight_gradient && m->rank->ops->fp8_needs_transposed,
         codes.data ? codes.data : m->fp8.x, m->fp8.x_transposed);
    m->scales.casts.inputs++;
    return cast_operand(m, &q, out);
}

nd_status nd_linear_row_fwd(nd_model *m, nd_input input, int64_t layer, nd_tensor x,
                            nd_tensor codes, nd_tensor out)
{
    nd_rank *r = m->rank;
    const nd_gemm_rule *rule = &m->scales.recipe.output;
    nd_tensor partial = nd_tp_partial(r, out, m->full_b);
    part p = first_part(input);
    nd_fp8 x8, w;
    (void)next_part(m, input, layer, &p);
    if (p.fp8) {
        ND_TRY(row_input(m, input, layer, x, codes, false, &x8));
        ND_TRY(weight_operand(m, layer, p.first, &rule->b, false, &w));
        ND_OP(r, GEMM, matmul_fp8, partial, x8, false, w, true, 0.0f, rule->fast_accumulation,
              m->fp8.gemm);
    } else {
        ND_OP(r, GEMM, matmul, partial, x, false, weight_of(m, layer, &p), true, 0.0f);
    }
    return nd_tp_reduce(r, partial, out, COMM);
}

static nd_status row_bwd_bf16(nd_model *m, int64_t layer, const part *p, nd_tensor dx,
                              nd_tensor dy_local, nd_tensor x, float beta)
{
    nd_rank *r = m->rank;
    nd_tensor dy;
    ND_TRY(nd_tp_gather(r, dy_local, m->full_a, COMM, &dy));
    ND_OP(r, GEMM, matmul, dx, dy, false, weight_of(m, layer, p), false, 0.0f);
    ND_OP(r, GEMM, matmul, gradient_of(m, layer, p), dy, true, x, false, beta);
    return ND_OK;
}

/* One scale: cast where it is, gathered as codes, used by both products. */
static nd_status row_gradient_per_tensor(nd_model *m, int64_t layer, const part *p,
                                         nd_tensor dy_local, nd_fp8 *out)
{
    cast_request q = {
        .rule = &m->scales.recipe.input_gradient.a,
        .site = nd_site_gradient(&m->scales, layer, p->first),
        .x = dy_local,
        .split = true,
        .record = true,
        .codes = m->fp8.dy_local ? m->fp8.dy_local : m->fp8.dy,
        .transposed = m->fp8.dy_local ? NULL : m->fp8.dy_transposed,
    };
    m->scales.casts.gradients++;
    ND_TRY(cast_operand(m, &q, out));
    ND_TRY(gather_codes(m, out->codes, m->fp8.dy, &out->codes));
    return m->fp8.dy_local ? add_transposed(m, out, m->fp8.dy_transposed) : ND_OK;
}

static nd_status row_gradient(nd_model *m, int64_t layer, const part *p, const nd_cast_rule *rule,
                              nd_tensor dy, bool weight_gradient, nd_fp8 *out)
{
    cast_request q = {
        .rule = rule,
        .site = nd_site_gradient(&m->scales, layer, p->first),
        .x = dy,
        .vectors = &m->scales.vectors[2],
    };
    want(&q, weight_gradient && m->rank->ops->fp8_needs_transposed, m->fp8.dy,
         m->fp8.dy_transposed);
    m->scales.casts.gradients++;
    return cast_operand(m, &q, out);
}

static nd_status row_bwd_fp8(nd_model *m, nd_input input, int64_t layer, const part *p,
                             nd_tensor dx, nd_tensor dy_local, nd_tensor x, nd_tensor codes,
                             float beta)
{
    nd_rank *r = m->rank;
    const nd_gemm_rule *for_dx = &m->scales.recipe.input_gradient;
    const nd_gemm_rule *for_dw = &m->scales.recipe.weight_gradient;
    bool per_tensor = for_dx->a.granularity == ND_PER_TENSOR;
    nd_tensor dy = none, dw = gradient_of(m, layer, p);
    nd_fp8 g, w, x8;
    if (per_tensor) {
        ND_TRY(row_gradient_per_tensor(m, layer, p, dy_local, &g));
    } else {
        ND_TRY(nd_tp_gather(r, dy_local, m->full_a, COMM, &dy));
        ND_TRY(row_gradient(m, layer, p, &for_dx->a, dy, false, &g));
    }
    ND_TRY(weight_operand(m, layer, p->first, &for_dx->b, true, &w));
    ND_OP(r, GEMM, matmul_fp8, dx, g, false, w, false, 0.0f, for_dx->fast_accumulation,
          m->fp8.gemm);
    if (for_dw->a.scaling == ND_SCALING_NONE) {
        ND_OP(r, GEMM, matmul, dw, dy, true, x, false, beta);
        return ND_OK;
    }
    if (!per_tensor) {
        ND_TRY(row_gradient(m, layer, p, &for_dw->a, dy, true, &g));
    }
    ND_TRY(row_input(m, input, layer, x, codes, true, &x8));
    ND_OP(r, GEMM, matmul_fp8, dw, g, true, x8, false, beta, for_dw->fast_accumulation,
          m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_row_bwd(nd_model *m, nd_input input, int64_t layer, nd_tensor dx,
                            nd_tensor dy_local, nd_tensor x, nd_tensor codes, float beta)
{
    part p = first_part(input);
    (void)next_part(m, input, layer, &p);
    return p.fp8 ? row_bwd_fp8(m, input, layer, &p, dx, dy_local, x, codes, beta)
                 : row_bwd_bf16(m, layer, &p, dx, dy_local, x, beta);
}
