// SPDX-License-Identifier: Apache-2.0
/*
 * Linears in FP8 whose operands have one scale each. The amax of a tensor that is split over tp is
 * its maximum over tp. Inputs that the block keeps as codes, and gradients of the outputs of
 * row-parallel linears, are cast before they are gathered, and travel as codes.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

static void plan(const nd_model *m, nd_linear_group *g, size_t bytes[ND_FP8_BUFFERS])
{
    const nd_dims *d = &m->dims;
    const nd_linear_part *last = &g->dx_parts[g->dx_part_count - 1];
    const size_t outputs = (size_t)(d->T * (last->offset + last->rows));
    const bool at_once = nd_recipe_is_delayed(&m->scales.recipe) && g->input == ND_INPUT_GATE_UP;
    if (!m->forward_only && at_once) {
        bytes[ND_FP8_DY] = nd_max_bytes(bytes[ND_FP8_DY], outputs);
    }
    if (!m->forward_only && g->travels) {
        bytes[ND_FP8_DY_LOCAL] = nd_max_bytes(bytes[ND_FP8_DY_LOCAL], (size_t)(d->Tl * d->C));
    }
}

static nd_status settle_gradients(nd_block_call c, const nd_linear_group *g, nd_operand *dy)
{
    nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.rules[ND_DY_OF_DX];
    const nd_scale_ref all = nd_scales_at(s, nd_site_gradient(s, c.layer, g->first));
    if (rule->scaling == ND_SCALING_CURRENT) {
        for (int i = 0; i < g->dx_part_count; i++) {
            if (g->dx_parts[i].fp8 && dy->known != ND_KNOWN_AMAX) {
                const nd_operand part = nd_linear_part_gradient(c, g, &g->dx_parts[i], dy);
                ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = part.scale.amax, .x = part.stored,
                      .granularity = ND_PER_TENSOR);
            }
        }
        ND_TRY(nd_scales_settle(&m->scales, all, g->count, rule->format, true));
        dy->known = ND_KNOWN_SCALE;
    }
    if (g->travels) { /* one linear */
        dy->scale = all;
        dy->codes = nd_tensor_2d(m->work.fp8[ND_FP8_DY_LOCAL], rule->format, dy->stored.shape[0],
                                 dy->stored.shape[1]);
    }
    return g->travels ? nd_operand_encode(c, ND_DY_OF_DX, dy) : ND_OK;
}

const nd_linear_method nd_linear_fp8_tensor = {.plan = plan, .settle_gradients = settle_gradients};
