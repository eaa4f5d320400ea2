// SPDX-License-Identifier: Apache-2.0
/* Linears whose products read BF16, or F32, as it is. */
#include "trainer/model/linear.h"

static void plan_nothing(const nd_model *m, nd_linear_group *g, nd_fp8_bytes *bytes)
{
}

static nd_status settle_nothing(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    return ND_OK;
}

static nd_status form(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                      nd_role role, nd_operand *x, nd_matrix *out)
{
    *out = nd_rows(x ? x->rows : nd_linear_weight(c, p));
    out->kept = x ? NULL : nd_linear_kept(c, p, role == ND_W_OF_Y);
    return ND_OK;
}

const nd_linear_method nd_linear_bf16 = {
    .plan = plan_nothing, .settle_gradients = settle_nothing, .form = form};
