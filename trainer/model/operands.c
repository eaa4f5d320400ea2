// SPDX-License-Identifier: Apache-2.0
/*
 * Operands of linears that are measured or cast by the op that makes them, while it has them in
 * registers: inputs by a norm or SwiGLU, the gradients of gate's and up's outputs by SwiGLU's
 * backward. With one scale per tensor only.
 *
 * A scale that is known by then, a past step's (delayed) or the forward's (recompute), lets the op
 * write codes alone; else it finds the amax. The health log counts what casts lose: then they are
 * made apart.
 */
#include "trainer/model/linear_impl.h"

static bool may_fuse(const nd_scales *s)
{
    return nd_recipe_is_per_tensor(&s->recipe) && !s->counting;
}

static nd_made input_made(const nd_model *m, nd_input input, int64_t layer)
{
    const nd_scales *s = &m->scales;
    bool keeps = nd_linear_keeps_codes(s, input, layer);
    if (!may_fuse(s) || !nd_linear_any_in_fp8(m, input, layer)) {
        return ND_MADE_PLAIN;
    }
    if (m->pass == ND_PASS_BACKWARD || nd_recipe_is_delayed(&s->recipe)) {
        return keeps ? ND_MADE_CODES : ND_MADE_PLAIN;
    }
    /* What is not kept as codes is measured after it was gathered. */
    return keeps || m->dims.Tl == m->dims.T ? ND_MADE_AMAX : ND_MADE_PLAIN;
}

nd_status nd_linear_make_input(nd_model *m, nd_input input, int64_t layer, nd_tensor x,
                               nd_tensor codes, nd_making *out)
{
    nd_scales *s = &m->scales;
    int64_t site = nd_site_input(s, layer, input);
    nd_made made = input_made(m, input, layer);
    *out = (nd_making){.to = x};
    m->made[input] = made;
    if (made == ND_MADE_AMAX) {
        out->fuse.amax = s->amax + site;
        return nd_zero(&m->rank->stream, out->fuse.amax, sizeof *out->fuse.amax);
    }
    if (made == ND_MADE_CODES) {
        bool record = m->pass == ND_PASS_TRAIN && nd_recipe_is_delayed(&s->recipe);
        out->to.data = NULL;
        out->fuse = (nd_fuse){
            .amax = record ? s->amax + site : NULL, .codes = codes, .scale = s->scale + site};
    }
    return ND_OK;
}

nd_made nd_linear_take_input(nd_model *m, nd_input input)
{
    nd_made made = m->made[input];
    m->made[input] = ND_MADE_PLAIN;
    return made;
}

void *nd_linear_gradient_codes(const nd_model *m, int linear)
{
    int first;
    (void)nd_input_linears(ND_INPUT_GATE_UP, &first);
    return (char *)m->fp8.dy + (linear - first) * m->dims.T * m->dims.F;
}

nd_status nd_linear_make_gradients(nd_model *m, int64_t layer, nd_tensor dgate, nd_tensor dup,
                                   nd_making out[2])
{
    nd_scales *s = &m->scales;
    const nd_cast_rule *rule = &s->recipe.input_gradient.a;
    int first, count = nd_input_linears(ND_INPUT_GATE_UP, &first);
    int64_t site = nd_site_gradient(s, layer, first);
    bool delayed = nd_recipe_is_delayed(&s->recipe);
    out[0] = (nd_making){.to = dgate};
    out[1] = (nd_making){.to = dup};
    m->made_gradients = ND_MADE_PLAIN;
    if (!may_fuse(s) || !nd_linear_any_in_fp8(m, ND_INPUT_GATE_UP, layer)) {
        return ND_OK;
    }
    m->made_gradients = delayed ? ND_MADE_CODES : ND_MADE_AMAX;
    for (int i = 0; i < count; i++) {
        if (nd_filter_converts(&s->filter, layer, first + i)) {
            out[i].fuse.amax = s->amax + site + i;
            if (delayed) {
                out[i].to.data = NULL;
                out[i].fuse.scale = s->scale + site + i;
                out[i].fuse.codes = nd_tensor_2d(nd_linear_gradient_codes(m, first + i),
                                                 rule->format, m->dims.T, m->dims.F);
            }
        }
    }
    return delayed ? ND_OK : nd_zero(&m->rank->stream, s->amax + site, (size_t)count * 4);
}

nd_made nd_linear_take_gradients(nd_model *m, nd_input input)
{
    nd_made made = input == ND_INPUT_GATE_UP ? m->made_gradients : ND_MADE_PLAIN;
    if (input == ND_INPUT_GATE_UP) {
        m->made_gradients = ND_MADE_PLAIN;
    }
    return made;
}
