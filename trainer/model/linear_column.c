// SPDX-License-Identifier: Apache-2.0
/* Column-parallel groups: q k v, and gate up. */
#include "trainer/model/linear_impl.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM;
static const nd_trace_kind COMM = ND_TRACE_COMMUNICATION;
static const nd_tensor none = {0};

/* The gathered input of a column-parallel group, for y or (weight_gradient) for dw. `full`:
 * gathered BF16, if any. */
static nd_status column_input(nd_model *m, nd_input input, int64_t layer, nd_tensor codes,
                              nd_tensor full, bool weight_gradient, nd_fp8 *out)
{
    const nd_recipe *recipe = &m->scales.recipe;
    const nd_cast_rule *rule = weight_gradient ? &recipe->weight_gradient.b : &recipe->output.a;
    if (codes.data) {
        *out = nd_scales_at(&m->scales, nd_site_input(&m->scales, layer, input));
        ND_TRY(nd_linear_gather_codes(m, codes, m->fp8.x, &out->codes));
        return weight_gradient ? nd_linear_add_transposed(m, out, m->fp8.x_transposed) : ND_OK;
    }
    nd_cast_request q = nd_linear_input_request(m, input, layer, rule, full);
    nd_linear_want(&q, weight_gradient && m->rank->ops->fp8_needs_transposed, m->fp8.x,
                   m->fp8.x_transposed);
    m->scales.casts.inputs++;
    return nd_linear_cast(m, &q, out);
}

nd_status nd_linear_column_fwd(nd_model *m, nd_input input, int64_t layer, nd_tensor local,
                               nd_tensor codes, nd_tensor y)
{
    nd_rank *r = m->rank;
    const nd_recipe *recipe = &m->scales.recipe;
    nd_tensor full = none;
    nd_fp8 x = {0}, w;
    bool any = nd_linear_any_in_fp8(m, input, layer);
    codes = any ? codes : none;
    if (!codes.data) {
        ND_TRY(nd_tp_gather(r, local, m->full_a, COMM, &full));
    } else {
        ND_TRY(nd_linear_recast(m, input, layer, local, codes));
    }
    if (any) {
        ND_TRY(column_input(m, input, layer, codes, full, false, &x));
    }
    for (nd_linear_part p = nd_linear_first_part(input);
         nd_linear_next_part(m, input, layer, &p);) {
        nd_tensor out = nd_tensor_columns(y, p.offset, p.rows);
        if (p.fp8) {
            ND_TRY(nd_linear_weight_operand(m, layer, p.first, &recipe->output.b, false, &w));
            ND_OP(r, GEMM, matmul_fp8, .c = out, .a = x, .b = w, .b_transposed = true,
                  .fast_accumulation = recipe->output.fast_accumulation, .scratch = m->fp8.gemm);
        } else {
            ND_OP(r, GEMM, matmul, .c = out, .a = full, .b = nd_linear_weight(m, layer, &p),
                  .b_transposed = true);
        }
    }
    return ND_OK;
}

/* The gradient of one part's output. */
static nd_status gradient_operand(nd_model *m, int64_t layer, const nd_linear_part *p,
                                  const nd_cast_rule *rule, nd_tensor dy, nd_made made,
                                  bool weight_gradient, nd_fp8 *out)
{
    bool per_tensor = rule->granularity == ND_PER_TENSOR;
    bool transposes = m->rank->ops->fp8_needs_transposed;
    nd_cast_request q = {
        .rule = rule,
        .site = nd_site_gradient(&m->scales, layer, p->first),
        .x = nd_tensor_columns(dy, p->offset, p->rows),
        .split = rule->granularity == ND_PER_ROW,
        .known = per_tensor, /* measured with the others of the group */
        .record = true,
        .made = made,
        .vectors = &m->scales.vectors[2],
        .codes = m->fp8.dy,
        .transposed = transposes ? m->fp8.dy_transposed : NULL,
    };
    if (!per_tensor) { /* each product has its own cast; with one scale both use this one */
        nd_linear_want(&q, weight_gradient && transposes, m->fp8.dy, m->fp8.dy_transposed);
    }
    m->scales.casts.gradients++;
    if (made == ND_MADE_CODES) {
        q.codes = nd_linear_gradient_codes(m, p->first);
        q.transposed = NULL;
        ND_TRY(nd_linear_cast(m, &q, out));
        return nd_linear_add_transposed(m, out, m->fp8.dy_transposed);
    }
    return nd_linear_cast(m, &q, out);
}

/* Scales of a group's gradients by one reduction. */
static nd_status settle_gradients(nd_model *m, nd_input input, int64_t layer, nd_tensor dy,
                                  nd_made made)
{
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.input_gradient.a;
    int first, count = nd_input_linears(input, &first);
    if (rule->granularity != ND_PER_TENSOR || rule->scaling != ND_SCALING_CURRENT ||
        !nd_linear_any_in_fp8(m, input, layer)) {
        return ND_OK;
    }
    for (nd_linear_part p = nd_linear_first_part(input);
         nd_linear_next_part(m, input, layer, &p);) {
        if (p.fp8 && made != ND_MADE_AMAX) {
            ND_TRY(nd_scales_measure(s, nd_site_gradient(s, layer, p.first),
                                     nd_tensor_columns(dy, p.offset, p.rows)));
        }
    }
    return nd_scales_settle(s, nd_site_gradient(s, layer, first), count, rule->format, true);
}

static nd_status column_part_bwd_bf16(nd_model *m, int64_t layer, const nd_linear_part *p,
                                      nd_tensor dx, float dx_beta, nd_tensor dy, nd_tensor full,
                                      float beta)
{
    nd_rank *r = m->rank;
    nd_tensor d = nd_tensor_columns(dy, p->offset, p->rows);
    ND_OP(r, GEMM, matmul, .c = dx, .a = d, .b = nd_linear_weight(m, layer, p), .beta = dx_beta);
    ND_OP(r, GEMM, matmul, .c = nd_linear_gradient(m, layer, p), .a = d, .a_transposed = true,
          .b = full, .beta = beta);
    return ND_OK;
}

static nd_status column_part_bwd_fp8(nd_model *m, int64_t layer, const nd_linear_part *p,
                                     nd_tensor dx, float dx_beta, nd_tensor dy, nd_made made,
                                     nd_tensor full, nd_fp8 x, float beta)
{
    nd_rank *r = m->rank;
    const nd_gemm_rule *for_dx = &m->scales.recipe.input_gradient;
    const nd_gemm_rule *for_dw = &m->scales.recipe.weight_gradient;
    nd_tensor dw = nd_linear_gradient(m, layer, p);
    nd_fp8 g, w;
    ND_TRY(gradient_operand(m, layer, p, &for_dx->a, dy, made, false, &g));
    ND_TRY(nd_linear_weight_operand(m, layer, p->first, &for_dx->b, true, &w));
    ND_OP(r, GEMM, matmul_fp8, .c = dx, .a = g, .b = w, .beta = dx_beta,
          .fast_accumulation = for_dx->fast_accumulation, .scratch = m->fp8.gemm);
    if (for_dw->a.scaling == ND_SCALING_NONE) {
        ND_OP(r, GEMM, matmul, .c = dw, .a = nd_tensor_columns(dy, p->offset, p->rows),
              .a_transposed = true, .b = full, .beta = beta);
        return ND_OK;
    }
    if (for_dw->a.granularity != ND_PER_TENSOR) {
        ND_TRY(gradient_operand(m, layer, p, &for_dw->a, dy, made, true, &g));
    }
    ND_OP(r, GEMM, matmul_fp8, .c = dw, .a = g, .a_transposed = true, .b = x, .beta = beta,
          .fast_accumulation = for_dw->fast_accumulation, .scratch = m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_column_bwd(nd_model *m, nd_input input, int64_t layer, nd_tensor dlocal,
                               nd_tensor dy, nd_tensor local, nd_tensor codes, float beta)
{
    bool cast = m->scales.recipe.weight_gradient.a.scaling != ND_SCALING_NONE;
    nd_tensor dx = nd_tp_partial(m->rank, dlocal, m->full_b), full = none;
    nd_fp8 x = {0};
    nd_made made = nd_linear_take_gradients(m, input);
    float dx_beta = 0.0f;
    ND_TRY(settle_gradients(m, input, layer, dy, made));
    if (!codes.data) {
        ND_TRY(nd_tp_gather(m->rank, local, m->full_a, COMM, &full));
    }
    if (cast && nd_linear_any_in_fp8(m, input, layer)) {
        ND_TRY(column_input(m, input, layer, codes, full, true, &x));
    }
    for (nd_linear_part p = nd_linear_first_part(input); nd_linear_next_part(m, input, layer, &p);
         dx_beta = 1.0f) {
        ND_TRY(p.fp8 ? column_part_bwd_fp8(m, layer, &p, dx, dx_beta, dy, made, full, x, beta)
                     : column_part_bwd_bf16(m, layer, &p, dx, dx_beta, dy, full, beta));
    }
    return nd_tp_reduce(m->rank, dx, dlocal, COMM);
}
