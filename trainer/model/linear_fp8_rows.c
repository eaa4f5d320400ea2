// SPDX-License-Identifier: Apache-2.0
/*
 * Linears in FP8 with scales of rows and columns. Inputs and gradients are gathered, and kept, in
 * BF16. What tp splits of the scales is settled by one reduction for each input: before y of a
 * row-parallel linear, rows of its input and of its weight; before dx of column-parallel ones, rows
 * of the gradients and columns of the weights.
 */
#include "trainer/model/linear.h"

/* The product whose sum tp splits, so that x or dy has rows on all ranks. */
static nd_role split_role(const nd_linear_group *g)
{
    return g->column ? ND_DY_OF_DX : ND_X_OF_Y;
}

static nd_role split_weight(const nd_linear_group *g)
{
    return g->column ? ND_W_OF_DX : ND_W_OF_Y;
}

/* The amaxes of all linears with one input lie one after the other in nd_scales.joint, for each
 * those of x or dy and then those of the weight, so that one reduction settles them. */
static void plan(const nd_model *m, nd_linear_group *g, size_t bytes[ND_FP8_BUFFERS])
{
    const nd_scales *s = &m->scales;
    const bool of_weight =
        s->recipe.rules[split_weight(g)].granularity != ND_PER_TENSOR && !s->codes_gathered;
    int64_t end = 0;
    for (int i = 0; i < g->dx_part_count; i++) {
        nd_linear_part *p = &g->dx_parts[i];
        if (p->fp8) {
            p->joint[split_role(g)] = end;
            p->joint[split_weight(g)] = of_weight ? end + m->dims.T : -1;
            end += m->dims.T + (of_weight ? m->dims.C : 0);
            g->parts[i] = *p; /* FP8 linears have parts of their own in both lists */
        }
    }
}

/* x (T, K), or dy (T, N) of all outputs. */
static nd_status settle(nd_block_call c, const nd_linear_group *g, nd_tensor all)
{
    nd_model *m = c.model;
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.rules[split_role(g)],
                       *weight = &s->recipe.rules[split_weight(g)];
    const int64_t rows = all.shape[0], C = m->dims.C;
    int64_t count = 0;
    for (int i = 0; i < g->dx_part_count; i++) {
        const nd_linear_part *p = &g->dx_parts[i];
        const int64_t at = p->joint[split_role(g)], weight_at = p->joint[split_weight(g)];
        if (p->fp8) {
            count = at + rows;
            ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = nd_scales_joint(s, at, rows).amax,
                  .x = g->column ? nd_tensor_columns(all, p->offset, p->rows) : all,
                  .granularity = rule->granularity);
        }
        if (weight_at >= 0) {
            count = weight_at + C;
            ND_ASSERT(rule->format == weight->format);
            ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = nd_scales_joint(s, weight_at, C).amax,
                  .x = nd_weight_rows(c, p), .granularity = weight->granularity);
        }
    }
    return nd_scales_settle(s, nd_scales_joint(s, 0, count), count, rule->format, true);
}

static nd_status settle_gradients(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    return g->column ? settle(c, g, dy->stored) : ND_OK;
}

const nd_linear_method nd_linear_fp8_rows = {
    .plan = plan, .settle_input = settle, .settle_gradients = settle_gradients};
