// SPDX-License-Identifier: Apache-2.0
/* Row-parallel groups of one linear: o, and down. */
#include "trainer/model/linear_impl.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM;
static const nd_trace_kind COMM = ND_TRACE_COMMUNICATION;
static const nd_tensor none = {0};

/* The input, for y or for dw; codes that were kept are there already in backward. */
static nd_status row_input(nd_model *m, nd_input input, int64_t layer, nd_tensor x, nd_tensor codes,
                           bool weight_gradient, nd_fp8 *out)
{
    const nd_recipe *recipe = &m->scales.recipe;
    const nd_cast_rule *rule = weight_gradient ? &recipe->weight_gradient.b : &recipe->output.a;
    if (weight_gradient && codes.data) {
        *out = nd_scales_at(&m->scales, nd_site_input(&m->scales, layer, input));
        out->codes = codes;
        return nd_linear_add_transposed(m, out, m->fp8.x_transposed);
    }
    nd_cast_request q = nd_linear_input_request(m, input, layer, rule, x);
    q.split = rule->granularity != ND_PER_COLUMN;
    nd_linear_want(&q, weight_gradient && m->rank->ops->fp8_needs_transposed,
                   codes.data ? codes.data : m->fp8.x, m->fp8.x_transposed);
    m->scales.casts.inputs++;
    return nd_linear_cast(m, &q, out);
}

nd_status nd_linear_row_fwd(nd_model *m, nd_input input, int64_t layer, nd_tensor x,
                            nd_tensor codes, nd_tensor out)
{
    nd_rank *r = m->rank;
    const nd_gemm_rule *rule = &m->scales.recipe.output;
    nd_tensor partial = nd_tp_partial(r, out, m->full_b);
    nd_linear_part p = nd_linear_first_part(input);
    nd_fp8 x8, w;
    (void)nd_linear_next_part(m, input, layer, &p);
    if (p.fp8) {
        ND_TRY(row_input(m, input, layer, x, codes, false, &x8));
        ND_TRY(nd_linear_weight_operand(m, layer, p.first, &rule->b, false, &w));
        ND_OP(r, GEMM, matmul_fp8, .c = partial, .a = x8, .b = w, .b_transposed = true,
              .fast_accumulation = rule->fast_accumulation, .scratch = m->fp8.gemm);
    } else {
        ND_OP(r, GEMM, matmul, .c = partial, .a = x, .b = nd_linear_weight(m, layer, &p),
              .b_transposed = true);
    }
    return nd_tp_reduce(r, partial, out, COMM);
}

static nd_status row_bwd_bf16(nd_model *m, int64_t layer, const nd_linear_part *p, nd_tensor dx,
                              nd_tensor dy_local, nd_tensor x, float beta)
{
    nd_rank *r = m->rank;
    nd_tensor dy;
    ND_TRY(nd_tp_gather(r, dy_local, m->full_a, COMM, &dy));
    ND_OP(r, GEMM, matmul, .c = dx, .a = dy, .b = nd_linear_weight(m, layer, p));
    ND_OP(r, GEMM, matmul, .c = nd_linear_gradient(m, layer, p), .a = dy, .a_transposed = true,
          .b = x, .beta = beta);
    return ND_OK;
}

/* One scale: cast where it is, gathered as codes, used by both products. */
static nd_status row_gradient_per_tensor(nd_model *m, int64_t layer, const nd_linear_part *p,
                                         nd_tensor dy_local, nd_fp8 *out)
{
    nd_cast_request q = {
        .rule = &m->scales.recipe.input_gradient.a,
        .site = nd_site_gradient(&m->scales, layer, p->first),
        .x = dy_local,
        .split = true,
        .record = true,
        .codes = m->fp8.dy_local ? m->fp8.dy_local : m->fp8.dy,
        .transposed = m->fp8.dy_local ? NULL : m->fp8.dy_transposed,
    };
    m->scales.casts.gradients++;
    ND_TRY(nd_linear_cast(m, &q, out));
    ND_TRY(nd_linear_gather_codes(m, out->codes, m->fp8.dy, &out->codes));
    return m->fp8.dy_local ? nd_linear_add_transposed(m, out, m->fp8.dy_transposed) : ND_OK;
}

static nd_status row_gradient(nd_model *m, int64_t layer, const nd_linear_part *p,
                              const nd_cast_rule *rule, nd_tensor dy, bool weight_gradient,
                              nd_fp8 *out)
{
    nd_cast_request q = {
        .rule = rule,
        .site = nd_site_gradient(&m->scales, layer, p->first),
        .x = dy,
        .vectors = &m->scales.vectors[2],
    };
    nd_linear_want(&q, weight_gradient && m->rank->ops->fp8_needs_transposed, m->fp8.dy,
                   m->fp8.dy_transposed);
    m->scales.casts.gradients++;
    return nd_linear_cast(m, &q, out);
}

static nd_status row_bwd_fp8(nd_model *m, nd_input input, int64_t layer, const nd_linear_part *p,
                             nd_tensor dx, nd_tensor dy_local, nd_tensor x, nd_tensor codes,
                             float beta)
{
    nd_rank *r = m->rank;
    const nd_gemm_rule *for_dx = &m->scales.recipe.input_gradient;
    const nd_gemm_rule *for_dw = &m->scales.recipe.weight_gradient;
    bool per_tensor = for_dx->a.granularity == ND_PER_TENSOR;
    nd_tensor dy = none, dw = nd_linear_gradient(m, layer, p);
    nd_fp8 g, w, x8;
    if (per_tensor) {
        ND_TRY(row_gradient_per_tensor(m, layer, p, dy_local, &g));
    } else {
        ND_TRY(nd_tp_gather(r, dy_local, m->full_a, COMM, &dy));
        ND_TRY(row_gradient(m, layer, p, &for_dx->a, dy, false, &g));
    }
    ND_TRY(nd_linear_weight_operand(m, layer, p->first, &for_dx->b, true, &w));
    ND_OP(r, GEMM, matmul_fp8, .c = dx, .a = g, .b = w,
          .fast_accumulation = for_dx->fast_accumulation, .scratch = m->fp8.gemm);
    if (for_dw->a.scaling == ND_SCALING_NONE) {
        ND_OP(r, GEMM, matmul, .c = dw, .a = dy, .a_transposed = true, .b = x, .beta = beta);
        return ND_OK;
    }
    if (!per_tensor) {
        ND_TRY(row_gradient(m, layer, p, &for_dw->a, dy, true, &g));
    }
    ND_TRY(row_input(m, input, layer, x, codes, true, &x8));
    ND_OP(r, GEMM, matmul_fp8, .c = dw, .a = g, .a_transposed = true, .b = x8, .beta = beta,
          .fast_accumulation = for_dw->fast_accumulation, .scratch = m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_row_bwd(nd_model *m, nd_input input, int64_t layer, nd_tensor dx,
                            nd_tensor dy_local, nd_tensor x, nd_tensor codes, float beta)
{
    nd_linear_part p = nd_linear_first_part(input);
    (void)nd_linear_next_part(m, input, layer, &p);
    return p.fp8 ? row_bwd_fp8(m, input, layer, &p, dx, dy_local, x, codes, beta)
                 : row_bwd_bf16(m, layer, &p, dx, dy_local, x, beta);
}
