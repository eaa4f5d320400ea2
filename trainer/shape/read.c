// SPDX-License-Identifier: Apache-2.0
/* Reads a config.json as Hugging Face writes it. What is not supported is refused by its key. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/suggest.h"
#include "trainer/shape/keys.h"

enum { CONFIG_LIMIT = 1 << 20 };

/* Keys that are read at the top of the map, and keys with names near theirs that change nothing;
 * without ids of tokens, of which models have many with names of three letters. */
static const char known_keys[] =
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

/* Refuses a key at the top of the map that is nearly, but not quite, one that is read: else it
 * would be passed over, as keys that change nothing are. */
static nd_status check_keys(const json_t *map, const char *file)
{
    enum { NEAR = 2 };
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)map, key, value)
    {
        char name[64], nearest[64] = "";
        int least = NEAR;
        for (const char *at = known_keys; sscanf(at, "%63s", name) == 1;
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

static nd_status read_switches(const json_t *map, const char *file, nd_shape *s)
{
    static const char *const keys[] = {"attention_bias",
                                       "attention_out_bias",
                                       "mlp_bias",
                                       "use_bias",
                                       "use_sliding_window",
                                       "use_qk_norm",
                                       "use_bidirectional_attention"};
    const nd_family_row *family = &nd_families[s->family];
    const nd_family_switch has[] = {family->qkv_bias, family->o_bias, family->mlp_bias};
    int64_t *const to[] = {&s->qkv_bias, &s->o_bias, &s->mlp_bias};
    s->qk_norm = family->qk_norm;
    s->post_norm = family->post_norm;
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        bool read = false;
        for (size_t i = 0; i < sizeof has / sizeof has[0]; i++) {
            read |= has[i].key && strcmp(has[i].key, keys[k]) == 0;
        }
        read |= family->window == ND_WINDOW_SWITCHED && strcmp(keys[k], "use_sliding_window") == 0;
        /* Else it asks for what this program has in other families alone, or in none. */
        bool on = false;
        ND_TRY(read ? ND_OK : nd_key_bool(map, file, keys[k], false, &on));
        if (on) {
            return nd_fail(ND_ERR_DATA, "%s: %s is true; for model_type %s only false is supported",
                           file, keys[k], family->model_type);
        }
    }
    for (size_t i = 0; i < sizeof has / sizeof has[0]; i++) {
        bool on = has[i].on;
        ND_TRY(has[i].key ? nd_key_bool(map, file, has[i].key, on, &on) : ND_OK);
        *to[i] = on;
    }
    return ND_OK;
}

static nd_status read_multipliers(const json_t *map, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    const struct {
        const char *key;
        double *to;
    } multipliers[] = {{"embedding_multiplier", &s->embedding_scale},
                       {"residual_multiplier", &s->residual_scale},
                       {"attention_multiplier", &s->attention_scale},
                       {"logits_scaling", &s->logits_divisor}};
    for (size_t i = 0; i < sizeof multipliers / sizeof *multipliers; i++) {
        double value = 1;
        ND_TRY(nd_key_real(map, file, multipliers[i].key, 1e-6, 1e6, 1, &value));
        if (!family->scaled && value != 1) {
            return nd_fail(ND_ERR_DATA, "%s: %s is %g; for model_type %s only 1 is supported", file,
                           multipliers[i].key, value, family->model_type);
        }
        *multipliers[i].to = family->scaled ? value : 0;
    }
    if (family->query_scalar > 0) {
        int64_t scalar = 0;
        ND_TRY(nd_key_int(map, file, "query_pre_attn_scalar", 1, 1 << 20, family->query_scalar,
                          &scalar));
        s->attention_scale = 1 / sqrt((double)scalar);
    }
    return ND_OK;
}

/* An id, or the first of a list of ids; null is none. */
static nd_status get_token(const json_t *map, const char *file, const char *key, int64_t fallback,
                           int64_t *out)
{
    const json_t *value = json_object_get(map, key);
    if (!value) {
        *out = fallback;
        return ND_OK;
    }
    if (json_is_array(value) && json_array_size(value) > 0) {
        value = json_array_get(value, 0);
    }
    if (json_is_null(value)) {
        *out = -1;
        return ND_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < -1 ||
        json_integer_value(value) > INT32_MAX) {
        return nd_fail(ND_ERR_DATA, "%s: %s must be a token id, a list of ids, or null", file, key);
    }
    *out = json_integer_value(value);
    return ND_OK;
}

/* The ids of eos_token_id behind the first. */
static nd_status read_more_ends(const json_t *map, const char *file, nd_shape *s)
{
    const json_t *list = json_object_get(map, "eos_token_id"), *value;
    for (size_t i = 1; i < json_array_size(list); i++) {
        value = json_array_get(list, i);
        const json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id > INT32_MAX || i > ND_ENDS_MAX) {
            return nd_fail(ND_ERR_DATA,
                           "%s: entry %zu of eos_token_id is no token id, or one of too many; it "
                           "must be a token id, a list of up to %d ids, or null",
                           file, i, ND_ENDS_MAX + 1);
        }
        s->more_ends[s->more_end_count++] = (int32_t)id;
    }
    return ND_OK;
}

static nd_status read_family(const json_t *map, const char *file, nd_family *out)
{
    const json_t *value = json_object_get(map, "model_type");
    char known[256]; /* "llama, mistral" */
    nd_suggest search;
    size_t used = 0;
    for (int i = 0; i < ND_FAMILY_COUNT && used < sizeof known; i++) {
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "",
                                 nd_families[i].model_type);
    }
    if (!json_is_string(value)) {
        return nd_fail(ND_ERR_DATA, "%s: model_type is %s; supported are %s", file,
                       value ? nd_key_type(value) : "missing", known);
    }
    nd_suggest_init(&search, json_string_value(value));
    for (*out = 0; *out < ND_FAMILY_COUNT; (*out)++) {
        const char *name = nd_families[*out].model_type;
        if (strcmp(json_string_value(value), name) == 0) {
            return ND_OK;
        }
        nd_suggest_offer(&search, name);
    }
    return nd_fail(ND_ERR_DATA,
                   "%s: model_type is \"%.80s\"; supported are %s (docs/models.md)%s%s", file,
                   json_string_value(value), known, search.best ? "; the nearest is " : "",
                   search.best ? search.best : "");
}

/* Refuses what other models of the family have and this program does not support. */
static nd_status refuse_variants(const json_t *map, const char *file, const nd_family_row *family)
{
    ND_TRY(family->gelu ? nd_key_demand_text(map, file, "hidden_activation", "gelu_pytorch_tanh")
                        : nd_key_demand_text(map, file, "hidden_act", "silu"));
    static const char *const caps[] = {"attn_logit_softcapping", "final_logit_softcapping"};
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
        if (!nd_key_is_unset(json_object_get(map, caps[i]))) {
            return nd_fail(ND_ERR_DATA,
                           "%s: %s is set, but scores and logits are not capped here; use a model "
                           "whose config.json has null there",
                           file, caps[i]);
        }
    }
    static const char *const dropouts[] = {"attention_dropout", "residual_dropout", "resid_pdrop",
                                           "embd_pdrop"};
    for (size_t i = 0; i < sizeof dropouts / sizeof *dropouts; i++) {
        const bool absent = nd_key_is_unset(json_object_get(map, dropouts[i]));
        double dropout = i < 2 ? family->dropout : 0;
        ND_TRY(nd_key_real(map, file, dropouts[i], 0, 1, dropout, &dropout));
        if (dropout > 0) {
            return nd_fail(ND_ERR_DATA,
                           "%s: %s is %s%g for model_type %s; only 0 is supported, so write 0 "
                           "there to train without dropout",
                           file, dropouts[i], absent ? "absent, which means " : "", dropout,
                           family->model_type);
        }
    }
    if (family->window == ND_WINDOW_NEVER &&
        !nd_key_is_unset(json_object_get(map, "sliding_window"))) {
        return nd_fail(ND_ERR_DATA,
                       "%s: sliding_window is set, which model_type %s does not have; remove the "
                       "key, or use a model_type with windows, such as mistral",
                       file, family->model_type);
    }
    if (!nd_key_is_unset(json_object_get(map, "quantization_config"))) {
        return nd_fail(
            ND_ERR_DATA,
            "%s: quantization_config is set; quantised weights cannot be trained, use the "
            "original model",
            file);
    }
    const json_t *architectures = json_object_get(map, "architectures");
    bool found = !json_is_array(architectures) || json_array_size(architectures) == 0;
    for (size_t i = 0; json_is_array(architectures) && i < json_array_size(architectures); i++) {
        const char *name = json_string_value(json_array_get(architectures, i));
        found |= name && strcmp(name, family->architecture) == 0;
    }
    return found ? ND_OK
                 : nd_fail(ND_ERR_DATA,
                           "%s: architectures does not name %s, the only one supported for %s",
                           file, family->architecture, family->model_type);
}

static nd_status read_sizes(const json_t *map, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    /* The family's own numbers stand for absent keys. Null asks for those of the other sizes. */
    const bool no_kv = !json_object_get(map, "num_key_value_heads") && family->kv_heads;
    const bool no_head_dim = !json_object_get(map, "head_dim") && family->head_dim;
    /* The limits keep every product of the parameter count below 2^63. */
    ND_TRY(nd_key_int(map, file, "vocab_size", 1, 1 << 24, ND_KEY_NEEDED, &s->vocab));
    ND_TRY(nd_key_int(map, file, "hidden_size", 1, 1 << 20, ND_KEY_NEEDED, &s->hidden));
    ND_TRY(nd_key_int(map, file, "intermediate_size", 1, 1 << 22, ND_KEY_NEEDED, &s->ffn));
    ND_TRY(nd_key_int(map, file, "num_hidden_layers", 1, ND_LAYERS_MAX, ND_KEY_NEEDED, &s->layers));
    ND_TRY(nd_key_int(map, file, "num_attention_heads", 1, 4096, ND_KEY_NEEDED, &s->heads));
    ND_TRY(nd_key_int(map, file, "num_key_value_heads", 1, 4096,
                      no_kv ? family->kv_heads : s->heads, &s->kv_heads));
    if (s->heads % s->kv_heads != 0) {
        return nd_fail(ND_ERR_DATA,
                       "%s: num_attention_heads %lld is not a multiple of num_key_value_heads %lld",
                       file, (long long)s->heads, (long long)s->kv_heads);
    }
    if (nd_key_is_unset(json_object_get(map, "head_dim")) && !no_head_dim &&
        s->hidden % s->heads != 0) {
        return nd_fail(
            ND_ERR_DATA,
            "%s: hidden_size %lld is not a multiple of num_attention_heads %lld, and there "
            "is no head_dim",
            file, (long long)s->hidden, (long long)s->heads);
    }
    ND_TRY(nd_key_int(map, file, "head_dim", 1, 1024,
                      no_head_dim ? family->head_dim : s->hidden / s->heads, &s->head_dim));
    if (s->head_dim < 1 || s->head_dim > 1024 || s->head_dim % 2 != 0) {
        return nd_fail(
            ND_ERR_DATA,
            "%s: head_dim is %lld (hidden_size %lld, num_attention_heads %lld); it must be "
            "even, because RoPE turns pairs, and at most 1024",
            file, (long long)s->head_dim, (long long)s->hidden, (long long)s->heads);
    }
    ND_TRY(nd_key_int(map, file, "max_position_embeddings", 1, 1 << 30, family->max_positions,
                      &s->max_positions));
    ND_TRY(nd_key_real(map, file, "rms_norm_eps", 1e-12, 1, family->rms_eps, &s->rms_eps));
    ND_TRY(nd_key_real(map, file, "initializer_range", 0, 10, 0.02, &s->init_std));
    ND_TRY(nd_key_bool(map, file, "tie_word_embeddings", family->tied, &s->tied));
    ND_TRY(get_token(map, file, "bos_token_id", family->bos_id, &s->bos_id));
    s->eos_is_default = !json_object_get(map, "eos_token_id");
    ND_TRY(read_more_ends(map, file, s));
    return get_token(map, file, "eos_token_id", family->eos_id, &s->eos_id);
}

/* A list with an entry for each layer. */
static nd_status check_list(const json_t *list, const char *file, const char *key,
                            const nd_shape *s)
{
    const int64_t length = (int64_t)json_array_size(list);
    char of[32] = "";
    if (json_is_array(list) && length == s->layers) {
        return ND_OK;
    }
    if (json_is_array(list)) {
        snprintf(of, sizeof of, " of %lld", (long long)length);
    }
    return nd_fail(ND_ERR_DATA, "%s: %s is %s%s; it must be a list of num_hidden_layers %lld", file,
                   key, nd_key_type(list), of, (long long)s->layers);
}

static nd_status read_layer_types(const json_t *types, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    ND_TRY(check_list(types, file, "layer_types", s));
    s->full = (nd_layer_set){0};
    for (int64_t l = 0; l < s->layers; l++) {
        const json_t *type = json_array_get(types, (size_t)l);
        const char *text = json_string_value(type), *quote = text ? "\"" : "";
        const bool slides = text && strcmp(text, "sliding_attention") == 0;
        if (!slides && !(text && strcmp(text, "full_attention") == 0)) {
            return nd_fail(ND_ERR_DATA,
                           "%s: layer_types has %s%.40s%s for layer %lld; supported are "
                           "full_attention and sliding_attention",
                           file, quote, text ? text : nd_key_type(type), quote, (long long)l);
        }
        if (slides && family->window == ND_WINDOW_NEVER) {
            return nd_fail(ND_ERR_DATA,
                           "%s: layer_types is sliding_attention for layer %lld; for model_type "
                           "%s only full_attention is supported",
                           file, (long long)l, family->model_type);
        }
        if (!slides) {
            nd_layer_set_add(&s->full, l);
        }
    }
    return ND_OK;
}

/* The layers without RoPE: those of no_rope_layers, else each n-th one. After the sizes. */
static nd_status read_unturned(const json_t *map, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    s->unturned = family->full_unturned ? s->full : s->unturned;
    const json_t *list = json_object_get(map, "no_rope_layers");
    int64_t interval = 0;
    ND_TRY(nd_key_int(map, file, "no_rope_layer_interval", 1, 4096, family->unturned_period,
                      &interval));
    ND_TRY(nd_key_is_unset(list) ? ND_OK : check_list(list, file, "no_rope_layers", s));
    for (int64_t l = 0; l < s->layers; l++) {
        const json_t *turns = json_array_get(list, (size_t)l);
        const json_int_t number = turns ? json_integer_value(turns) : (l + 1) % nd_max(interval, 1);
        if (turns && (!json_is_integer(turns) || (number != 0 && number != 1))) {
            char text[32];
            snprintf(text, sizeof text, "%lld", (long long)number);
            return nd_fail(ND_ERR_DATA,
                           "%s: no_rope_layers has %s for layer %lld; supported are 0, which is a "
                           "layer without RoPE, and 1",
                           file, json_is_integer(turns) ? text : nd_key_type(turns), (long long)l);
        }
        if (number != 0 || (!turns && interval == 0)) {
            continue;
        }
        if (family->unturned_period == 0) {
            return nd_fail(ND_ERR_DATA,
                           "%s: layer %lld has no RoPE, which model_type %s does not support; "
                           "remove no_rope_layers and no_rope_layer_interval",
                           file, (long long)l, family->model_type);
        }
        nd_layer_set_add(&s->unturned, l);
    }
    return ND_OK;
}

/* Without layer_types. */
static nd_status read_window_period(const json_t *map, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    const char *const key = family->window_key;
    const json_t *value = key ? json_object_get(map, key) : NULL;
    int64_t period = family->window_period;
    if (json_is_string(value)) {
        return nd_fail(ND_ERR_DATA,
                       "%s: %s is \"%.80s\", and layer_types is absent; write layer_types, or a "
                       "number there, so that each so many-th layer has no window",
                       file, key, json_string_value(value));
    }
    ND_TRY(key ? nd_key_int(map, file, key, 1, ND_LAYERS_MAX, period, &period) : ND_OK);
    for (int64_t l = period - 1; l < s->layers; l += period) {
        nd_layer_set_add(&s->full, l);
    }
    return ND_OK;
}

/* After the sizes. */
static nd_status read_window(const json_t *map, const char *file, nd_shape *s)
{
    enum { DEFAULT_WINDOW = 4096, DEFAULT_FIRST = 28 };
    const nd_family_row *family = &nd_families[s->family];
    const nd_window_rule rule = family->window;
    const json_t *value = json_object_get(map, "sliding_window");
    const json_t *types = json_object_get(map, "layer_types");
    int64_t first = 0, sliding = 0;
    bool on = rule == ND_WINDOW_ALL || rule == ND_WINDOW_LISTED || (rule == ND_WINDOW_SET && value);
    if (rule == ND_WINDOW_SWITCHED) {
        ND_TRY(nd_key_bool(map, file, "use_sliding_window", false, &on));
        ND_TRY(nd_key_int(map, file, "max_window_layers", 0, 4096, DEFAULT_FIRST, &first));
        for (int64_t l = 0; l < nd_min(first, s->layers); l++) {
            nd_layer_set_add(&s->full, l);
        }
    }
    if (on && !(value && json_is_null(value))) {
        ND_TRY(nd_key_int(map, file, "sliding_window", 1, 1 << 30, DEFAULT_WINDOW, &s->window));
    }
    if (!nd_key_is_unset(types)) {
        if (rule == ND_WINDOW_SET || rule == ND_WINDOW_ALL) {
            return nd_fail(ND_ERR_DATA,
                           "%s: layer_types is set, which model_type %s does not have; remove the "
                           "key, or use model_type ministral",
                           file, family->model_type);
        }
        ND_TRY(read_layer_types(types, file, s));
    } else if (family->window_period > 0) {
        ND_TRY(read_window_period(map, file, s));
    }
    for (int64_t l = 0; l < s->layers; l++) {
        sliding += !nd_layer_set_has(&s->full, l);
    }
    if (s->window == 0 && sliding > 0 && family->window_theta > 0) {
        return nd_fail(ND_ERR_DATA,
                       "%s: sliding_window is null, but %lld layers are sliding_attention, with a "
                       "RoPE of their own; write their window, or full_attention in layer_types",
                       file, (long long)sliding);
    }
    if (s->window == 0 || (sliding == 0 && !family->full_unturned)) {
        s->window = 0;
        s->full = (nd_layer_set){0};
    }
    return ND_OK;
}

nd_status nd_shape_parse(const char *text, size_t bytes, const char *name, nd_shape *out)
{
    json_error_t error;
    nd_shape shape;
    memset(&shape, 0, sizeof shape);
    json_t *map = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!map && nd_json_no_memory(&error)) {
        return nd_fail_memory("reading %s", name);
    }
    if (!map) {
        return nd_fail(ND_ERR_DATA, "%s:%d:%d: broken JSON: %s", name, error.line, error.column,
                       error.text);
    }
    nd_status status = ND_OK;
    if (!json_is_object(map)) {
        status = nd_fail(ND_ERR_DATA, "%s is %s; a model's config.json is a map", name,
                         nd_key_type(map));
        goto out;
    }
    ND_TRY_OUT(read_family(map, name, &shape.family));
    ND_TRY_OUT(check_keys(map, name));
    ND_TRY_OUT(refuse_variants(map, name, &nd_families[shape.family]));
    ND_TRY_OUT(read_switches(map, name, &shape));
    ND_TRY_OUT(read_multipliers(map, name, &shape));
    ND_TRY_OUT(read_sizes(map, name, &shape));
    ND_TRY_OUT(read_window(map, name, &shape));
    ND_TRY_OUT(read_unturned(map, name, &shape));
    ND_TRY_OUT(nd_shape_read_rope(map, name, &shape));
    *out = shape;
out:
    json_decref(map);
    return status;
}

nd_status nd_shape_read(const char *path, nd_shape *out)
{
    char *text = NULL;
    size_t bytes = 0;
    ND_TRY(nd_fs_read(path, CONFIG_LIMIT, ND_ERR_DATA, &text, &bytes));
    nd_status status = nd_shape_parse(text, bytes, path, out);
    free(text);
    return status;
}
