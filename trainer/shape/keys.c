// SPDX-License-Identifier: Apache-2.0
/* Keys of a config.json, and their values with types and limits. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "trainer/shape/keys.h"

/* What is read at the top of the map, and neighbours of such keys that change nothing; but for ids
 * of tokens, of which models have many with names of three letters. */
static const char known[] =
    "_sliding_window_pattern architectures attention_bias attention_dropout attention_multiplier "
    "attention_out_bias attn_logit_softcapping dtype embd_pdrop embedding_multiplier "
    "final_logit_softcapping head_dim hidden_act hidden_activation hidden_size initializer_range "
    "intermediate_size layer_types logits_scaling max_position_embeddings max_window_layers "
    "mlp_bias model_type no_rope_layer_interval no_rope_layers num_attention_heads "
    "num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor "
    "quantization_config query_pre_attn_scalar resid_pdrop residual_dropout residual_multiplier "
    "rms_norm_eps rope_local_base_freq rope_parameters rope_scaling rope_theta sliding_window "
    "sliding_window_pattern tie_word_embeddings use_bias use_bidirectional_attention use_qk_norm "
    "use_sliding_window vocab_size";

nd_status nd_keys_check(const json_t *map, const char *file)
{
    enum { NEAR = 2 };
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)map, key, value)
    {
        char name[64], nearest[64] = "";
        int least = NEAR;
        for (const char *at = known; sscanf(at, "%63s", name) == 1;
             at += strspn(at, " ") + strlen(name)) {
            const int distance = strcmp(key, name) == 0 ? -1 : nd_suggest_distance(key, name);
            if (distance <= least) {
                least = distance;
                memcpy(nearest, name, sizeof nearest);
            }
        }
        if (nearest[0] && least >= 0) {
            return nd_fail(ND_ERR_DATA,
                           "%s: the key %.80s is not known; write %s if that is meant, or remove "
                           "the key",
                           file, key, nearest);
        }
    }
    return ND_OK;
}

const char *nd_key_type(const json_t *value)
{
    static const char *const names[] = {"a map",  "a list", "text",  "an integer",
                                        "a real", "true",   "false", "null"};
    return names[json_typeof(value)];
}

bool nd_key_is_unset(const json_t *value)
{
    return !value || json_is_null(value);
}

static nd_status refuse(const char *file, const char *key, const json_t *value, const char *wanted)
{
    return nd_fail(ND_ERR_DATA, "%s: %s is %s; it must be %s", file, key,
                   value ? nd_key_type(value) : "missing", wanted);
}

nd_status nd_key_int(const json_t *map, const char *file, const char *key, int64_t min, int64_t max,
                     int64_t fallback, int64_t *out)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value) && fallback != ND_KEY_NEEDED) {
        *out = fallback;
        return ND_OK;
    }
    if (!json_is_integer(value)) {
        return refuse(file, key, value, "an integer");
    }
    int64_t number = json_integer_value(value);
    if (number < min || number > max) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %lld; supported are %lld to %lld", file, key,
                       (long long)number, (long long)min, (long long)max);
    }
    *out = number;
    return ND_OK;
}

nd_status nd_key_real(const json_t *map, const char *file, const char *key, double min, double max,
                      double fallback, double *out)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value) && fallback != (double)ND_KEY_NEEDED) {
        *out = fallback;
        return ND_OK;
    }
    if (!json_is_number(value)) {
        return refuse(file, key, value, "a number");
    }
    double number = json_number_value(value);
    if (!(number >= min && number <= max)) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %g; supported are %g to %g", file, key, number, min,
                       max);
    }
    *out = number;
    return ND_OK;
}

nd_status nd_key_bool(const json_t *map, const char *file, const char *key, bool fallback,
                      bool *out)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value)) {
        *out = fallback;
        return ND_OK;
    }
    if (!json_is_boolean(value)) {
        return refuse(file, key, value, "true or false");
    }
    *out = json_is_true(value);
    return ND_OK;
}

nd_status nd_key_demand_text(const json_t *map, const char *file, const char *key,
                             const char *wanted)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value)) {
        return ND_OK;
    }
    if (!json_is_string(value)) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %s; it must be \"%s\"", file, key,
                       nd_key_type(value), wanted);
    }
    if (strcmp(json_string_value(value), wanted) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "%s: %s is \"%.80s\"; only \"%s\" is supported, so use a "
                       "model that has it",
                       file, key, json_string_value(value), wanted);
    }
    return ND_OK;
}
