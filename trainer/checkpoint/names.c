// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/names.h"

#include <stdio.h>
#include <string.h>

static const char *const array_names[ND_STATE_KINDS] = {"master", "exp_avg", "exp_avg_sq"};

const char *nd_state_kind_name(nd_state_kind array)
{
    return array_names[array];
}

const char *nd_state_name(char name[ND_STATE_NAME_MAX], nd_state_kind array, const char *param)
{
    if (array == ND_STATE_MASTER) {
        snprintf(name, ND_STATE_NAME_MAX, "%s", param);
    } else {
        snprintf(name, ND_STATE_NAME_MAX, "optimizer.state.%s.%s", param, array_names[array]);
    }
    return name;
}

const char *nd_state_step_name(char name[ND_STATE_NAME_MAX], const char *param)
{
    snprintf(name, ND_STATE_NAME_MAX, "optimizer.state.%s.step", param);
    return name;
}

static const struct {
    const char *hf, *titan; /* inside of a layer, or alone */
    bool in_layer;
} titan_names[] = {
    {"model.embed_tokens.weight", "tok_embeddings.weight", false},
    {"model.norm.weight", "norm.weight", false},
    {"lm_head.weight", "output.weight", false},
    {"input_layernorm.weight", "attention_norm.weight", true},
    {"self_attn.q_proj.weight", "attention.wq.weight", true},
    {"self_attn.k_proj.weight", "attention.wk.weight", true},
    {"self_attn.v_proj.weight", "attention.wv.weight", true},
    {"self_attn.o_proj.weight", "attention.wo.weight", true},
    {"post_attention_layernorm.weight", "ffn_norm.weight", true},
    {"mlp.gate_proj.weight", "feed_forward.w1.weight", true},
    {"mlp.up_proj.weight", "feed_forward.w3.weight", true},
    {"mlp.down_proj.weight", "feed_forward.w2.weight", true},
};

const char *nd_torchtitan_name(char name[ND_STATE_NAME_MAX], const char *param)
{
    long long layer = 0;
    int length = 0;
    bool in_layer = sscanf(param, "model.layers.%lld.%n", &layer, &length) == 1 && length > 0;
    name[0] = '\0';
    for (size_t i = 0; i < sizeof titan_names / sizeof *titan_names; i++) {
        if (titan_names[i].in_layer != in_layer ||
            strcmp(param + (in_layer ? length : 0), titan_names[i].hf) != 0) {
            continue;
        }
        if (in_layer) {
            snprintf(name, ND_STATE_NAME_MAX, "layers.%lld.%s", layer, titan_names[i].titan);
        } else {
            snprintf(name, ND_STATE_NAME_MAX, "%s", titan_names[i].titan);
        }
    }
    return name;
}

bool nd_name_is_plain(const char *name)
{
    if (!name[0] || name[0] == '.') {
        return false;
    }
    for (const char *c = name; *c; c++) {
        if (*c <= ' ' || *c > '~' || *c == '/' || *c == '\\') {
            return false;
        }
    }
    return true;
}
