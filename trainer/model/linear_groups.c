// SPDX-License-Identifier: Apache-2.0
/* Decides, when a model is made, what computes its linears. */
#include <stdlib.h>

#include "trainer/model/linear.h"

enum { TRAINS, VALIDATES, TABLES }; /* as nd_linear_groups has them */

/* Appends a linear to the last product of a list where they are adjacent and of one precision, in
 * FP8 only if such linears are joined; else it makes a product of its own. */
static void add_linear(const nd_model *m, nd_linear_part *parts, int *count, int64_t layer,
                       int linear, bool fp8, bool joined)
{
    const nd_linear_method *method = !fp8 ? &nd_linear_bf16
                                     : nd_recipe_is_per_tensor(&m->scales.recipe)
                                         ? &nd_linear_fp8_tensor
                                         : &nd_linear_fp8_rows;
    const nd_param *param = nd_layout_param(m->layout, nd_linear_param(linear), layer);
    nd_linear_part *p = *count > 0 ? &parts[*count - 1] : NULL;
    if (!p || p->fp8 != fp8 || (fp8 && !joined)) {
        const nd_linear_part before = p ? *p : (nd_linear_part){0};
        p = &parts[(*count)++];
        *p = (nd_linear_part){.method = method,
                              .fp8 = fp8,
                              .linear = linear,
                              .first = param->id,
                              .offset = before.offset + before.rows,
                              .fp8_before = before.fp8_before + (before.fp8 ? before.count : 0)};
    }
    p->last = param->id;
    p->lines[p->count++] = param->local_rows;
    p->rows += param->local_rows;
}

static void make_group(const nd_model *m, nd_linear_group *g, nd_input input, int64_t layer,
                       bool in_bf16)
{
    const bool joins = nd_linears_join(m);
    *g = (nd_linear_group){.input = input,
                           .column = input == ND_INPUT_QKV || input == ND_INPUT_GATE_UP,
                           .method = &nd_linear_bf16};
    g->count = nd_input_linears(input, &g->first);
    g->bias = nd_shape_has(&m->rank->shape, nd_linear_bias(g->first));
    g->beta = g->bias && (g->column || m->rank->coord.at[ND_AXIS_TP] == 0) ? 1.0f : 0.0f;
    for (int l = g->first; l < g->first + g->count; l++) {
        const bool fp8 = !in_bf16 && nd_filter_converts(&m->scales.filter, layer, l);
        add_linear(m, g->parts, &g->part_count, layer, l, fp8, joins);
        add_linear(m, g->alone, &g->alone_count, layer, l, fp8, false);
        g->fp8 |= fp8;
        g->method = fp8 ? g->alone[g->alone_count - 1].method : g->method;
    }
}

nd_status nd_linears_create(nd_model *m)
{
    const nd_layer_range layers = m->stage->layers;
    const nd_scales *s = &m->scales;
    /* Transformer Engine's validation runs in BF16, where the BF16 weights are at hand. */
    const bool validates_in_bf16 = nd_recipe_is_delayed(&s->recipe) && !s->codes_gathered;
    ND_TRY(ND_ALLOC(TABLES * (layers.end - layers.begin) * ND_INPUT_COUNT, &m->linears));
    for (int table = 0; table < TABLES; table++) {
        for (int64_t l = layers.begin; l < layers.end; l++) {
            for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
                make_group(m, nd_linear_groups(m, table, l) + input, input, l,
                           table == VALIDATES && validates_in_bf16);
            }
        }
    }
    return ND_OK;
}
