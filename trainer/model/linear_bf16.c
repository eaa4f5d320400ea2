// SPDX-License-Identifier: Apache-2.0
/* Linears whose products read BF16, or F32, as it is. */
#include "trainer/model/linear.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM;

static nd_status forward(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                         nd_operand *x, nd_tensor y)
{
    ND_OP(c.model->rank, GEMM, product, .c = y, .a = nd_rows(x->rows),
          .b = {.rows = nd_linear_weight(c, p), .kept = nd_linear_kept(c, p, true)},
          .b_transposed = true, .beta = g->beta, .few_rows = c.pass == ND_PASS_GENERATE);
    return ND_OK;
}

static nd_status input_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                nd_operand *dy, nd_tensor dx)
{
    ND_OP(c.model->rank, GEMM, product, .c = dx, .a = nd_rows(dy->rows),
          .b = {.rows = nd_linear_weight(c, p), .kept = nd_linear_kept(c, p, false)},
          .beta = p->offset > 0 ? 1.0f : 0.0f);
    return ND_OK;
}

static nd_status weight_gradient(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                                 nd_operand *x, nd_operand *dy)
{
    float beta;
    const nd_tensor dw = nd_linear_gradient(c, p, &beta);
    ND_OP(c.model->rank, GEMM, product, .c = dw, .a = nd_rows(dy->rows), .a_transposed = true,
          .b = nd_rows(x->rows), .beta = beta);
    return ND_OK;
}

static void plan_nothing(const nd_model *m, nd_linear_group *g, nd_fp8_bytes *bytes)
{
}

static nd_status settle_nothing(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    return ND_OK;
}

const nd_linear_method nd_linear_bf16 = {.name = "bf16",
                                         .plan = plan_nothing,
                                         .settle_gradients = settle_nothing,
                                         .forward = forward,
                                         .input_gradient = input_gradient,
                                         .weight_gradient = weight_gradient};
