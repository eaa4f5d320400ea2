// SPDX-License-Identifier: Apache-2.0
#include "trainer/layout/layout.h"

static const struct {
    nd_param_id param;
    const char *module;
} linears[ND_LINEARS_OF_BLOCK] = {
    {ND_PARAM_Q, "self_attn.q_proj"}, {ND_PARAM_K, "self_attn.k_proj"},
    {ND_PARAM_V, "self_attn.v_proj"}, {ND_PARAM_O, "self_attn.o_proj"},
    {ND_PARAM_GATE, "mlp.gate_proj"}, {ND_PARAM_UP, "mlp.up_proj"},
    {ND_PARAM_DOWN, "mlp.down_proj"},
};

static const struct {
    int first, count;
} inputs[ND_INPUT_COUNT] = {
    [ND_INPUT_QKV] = {0, 3},
    [ND_INPUT_O] = {3, 1},
    [ND_INPUT_GATE_UP] = {4, 2},
    [ND_INPUT_DOWN] = {6, 1},
};

int nd_input_linears(nd_input input, int *first)
{
    *first = inputs[input].first;
    return inputs[input].count;
}

nd_input nd_linear_input(int linear)
{
    nd_input input = 0;
    while (linear >= inputs[input].first + inputs[input].count) {
        input++;
    }
    return input;
}

nd_param_id nd_linear_param(int linear)
{
    return linears[linear].param;
}

int nd_linear_of_param(nd_param_id id)
{
    for (int i = 0; i < ND_LINEARS_OF_BLOCK; i++) {
        if (linears[i].param == id) {
            return i;
        }
    }
    return -1;
}

const char *nd_linear_name(int linear)
{
    return linears[linear].module;
}

void nd_linear_sizes(const nd_shape *s, int linear, int64_t tp, int64_t *out, int64_t *in)
{
    int64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    const int64_t rows[ND_LINEARS_OF_BLOCK] = {q, kv, kv, s->hidden, s->ffn, s->ffn, s->hidden};
    bool by_rows = linears[linear].param != ND_PARAM_O && linears[linear].param != ND_PARAM_DOWN;
    int64_t columns = linears[linear].param == ND_PARAM_O      ? q
                      : linears[linear].param == ND_PARAM_DOWN ? s->ffn
                                                               : s->hidden;
    *out = by_rows ? rows[linear] / tp : rows[linear];
    *in = by_rows ? columns : columns / tp;
}
