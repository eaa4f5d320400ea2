// SPDX-License-Identifier: Apache-2.0
#include "trainer/layout/layout.h"

const nd_linear_row nd_linears[ND_LINEAR_COUNT] = {
#define ND_LINEAR(id, module, rows, cols, split, input)                                            \
    [ND_LINEAR_##id] = {ND_PARAM_##id, ND_PARAM_##id##_BIAS, ND_INPUT_##input, module},
#include "trainer/layout/params.def"
};

const char *nd_input_name(nd_input input)
{
    static const char *const names[] = {[ND_INPUT_QKV] = "self_attn.qkv_proj",
                                        [ND_INPUT_O] = "self_attn.o_proj",
                                        [ND_INPUT_GATE_UP] = "mlp.gate_up_proj",
                                        [ND_INPUT_DOWN] = "mlp.down_proj"};
    return names[input];
}

int nd_input_linears(nd_input input, int *first)
{
    int count = 0;
    for (int i = ND_LINEAR_COUNT - 1; i >= 0; i--) {
        if (nd_linears[i].input == input) {
            *first = i;
            count++;
        }
    }
    return count;
}

int nd_linear_of_param(nd_param_id id)
{
    for (int i = 0; i < ND_LINEAR_COUNT; i++) {
        if (nd_linears[i].param == id) {
            return i;
        }
    }
    return -1;
}
