// SPDX-License-Identifier: Apache-2.0
/* Writes a config.json that transformers opens. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "trainer/shape/keys.h"

/* Sets the keys of the family's config.json for windows; *map becomes NULL without memory. */
static void set_windows(const nd_shape *s, json_t **map)
{
    const nd_window_rule rule = nd_families[s->family].window;
    if (rule == ND_WINDOW_NEVER) {
        return;
    }
    nd_json_set(map, "sliding_window", s->window ? json_integer(s->window) : json_null());
    if (rule == ND_WINDOW_SWITCHED) { /* for readers that do not know the list */
        int64_t first = 0;
        while (first < s->layers && nd_layer_set_has(&s->full, first)) {
            first++;
        }
        nd_json_set(map, "use_sliding_window", json_boolean(s->window));
        nd_json_set(map, "max_window_layers", json_integer(s->window ? first : s->layers));
    }
    if (rule == ND_WINDOW_LISTED || rule == ND_WINDOW_SWITCHED) {
        json_t *types = json_array();
        for (int64_t l = 0; l < s->layers; l++) {
            const bool slides = nd_shape_window(s, l, INT64_MAX) > 0;
            nd_json_append(&types, json_string(slides ? "sliding_attention" : "full_attention"));
        }
        nd_json_set(map, "layer_types", types);
    }
}

static json_t *factors_of(const float *factors, int64_t pairs)
{
    json_t *list = json_array();
    for (int64_t i = 0; list && i < pairs; i++) {
        json_array_append_new(list, json_real((double)factors[i]));
    }
    return list;
}

static json_t *rope_scaling_of(const nd_shape *s)
{
    const nd_rope_config *rope = &s->rope;
    if (rope->type == ND_ROPE_LONGROPE) {
        return json_pack("{s:s, s:o, s:o, s:f, s:I}", "rope_type", "longrope", "short_factor",
                         factors_of(rope->short_factor, nd_shape_rotated(s) / 2), "long_factor",
                         factors_of(rope->long_factor, nd_shape_rotated(s) / 2), "attention_factor",
                         rope->attention_factor, "original_max_position_embeddings",
                         (json_int_t)rope->original_max_positions);
    }
    if (rope->type == ND_ROPE_LINEAR || rope->type == ND_ROPE_DYNAMIC) {
        return json_pack("{s:s, s:f}", "rope_type", nd_rope_type_name(rope->type), "factor",
                         rope->factor);
    }
    if (rope->type == ND_ROPE_YARN) {
        json_t *yarn = json_pack(
            "{s:s, s:f, s:f, s:f, s:f, s:b, s:I}", "rope_type", "yarn", "factor", rope->factor,
            "beta_fast", rope->beta_fast, "beta_slow", rope->beta_slow, "attention_factor",
            rope->attention_factor, "truncate", rope->exact_range == 0,
            "original_max_position_embeddings", (json_int_t)rope->original_max_positions);
        if (nd_families[s->family].query_scaled) {
            nd_json_set(&yarn, "llama_4_scaling_beta", json_real(rope->query_beta));
        }
        return yarn;
    }
    if (rope->type == ND_ROPE_LLAMA3) {
        return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", rope->factor,
                         "low_freq_factor", rope->low_freq_factor, "high_freq_factor",
                         rope->high_freq_factor, "original_max_position_embeddings",
                         (json_int_t)rope->original_max_positions);
    }
    return json_null();
}

/* Sets the keys of RoPE. The old spelling, which all releases read, names the theta of layers with
 * windows by a key of the family, or means the family's for all layers. */
static void set_rope(const nd_shape *s, json_t **map)
{
    const nd_family_row *family = &nd_families[s->family];
    /* The theta of the layers with windows, where the family has one for them; else 0. */
    const double window_theta = s->window_theta > 0 ? s->window_theta : family->window_theta;
    if (family->window_theta > 0 && !family->window_theta_key &&
        (s->rope.theta != family->window_theta || window_theta != family->window_theta)) {
        json_t *full = rope_scaling_of(s); /* for each type of layers */
        full = json_is_null(full) ? json_pack("{s:s}", "rope_type", "default") : full;
        nd_json_set(&full, "rope_theta", json_real(s->rope.theta));
        nd_json_set(map, "rope_parameters",
                    json_pack("{s:o, s:{s:s, s:f}}", "full_attention", full, "sliding_attention",
                              "rope_type", "default", "rope_theta", window_theta));
    } else {
        nd_json_set(map, "rope_theta", json_real(s->rope.theta));
        nd_json_set(map, "rope_scaling", rope_scaling_of(s));
    }
    if (family->window_theta_key) {
        nd_json_set(map, family->window_theta_key, json_real(window_theta));
    }
    if (s->family == ND_FAMILY_PHI3 && s->rope.type == ND_ROPE_LONGROPE) {
        nd_json_set(map, "original_max_position_embeddings",
                    json_integer(s->rope.original_max_positions));
    }
    if (s->rotated > 0 || (family->partial > 0 && family->partial < 1)) {
        /* Readers take the whole part of the product with head_dim. */
        const int64_t rotated = nd_shape_rotated(s);
        double share = (double)rotated / (double)s->head_dim;
        share = (int64_t)((double)s->head_dim * share) < rotated ? nextafter(share, 1) : share;
        nd_json_set(map, "partial_rotary_factor", json_real(share));
    }
    if (family->unturned_period > 0) {
        json_t *turns = json_array();
        for (int64_t l = 0; l < s->layers; l++) {
            nd_json_append(&turns, json_integer(nd_shape_turns(s, l)));
        }
        nd_json_set(map, "no_rope_layers", turns);
    }
}

static json_t *token_of(int64_t id)
{
    return id < 0 ? json_null() : json_integer(id);
}

/* Numbers have 15 digits where they read back unchanged (1e-05), else 17. The file is written
 * atomically, as every file of a model folder is. */
static nd_status write_json(const json_t *map, const char *path)
{
    char *text = NULL;
    json_t *back = NULL;
    for (size_t digits = 15; digits <= 17 && !json_equal(map, back); digits += 2) {
        free(text);
        json_decref(back);
        text = nd_json_text(map, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits));
        back = text ? json_loads(text, 0, NULL) : NULL;
    }
    const nd_status status =
        text ? nd_fs_write_atomic(path, text, strlen(text)) : nd_fail_memory("writing %s", path);
    json_decref(back);
    free(text);
    return status;
}

nd_status nd_shape_write(const nd_shape *s, const char *dtype_name, const char *path)
{
    const nd_family_row *family = &nd_families[s->family];
    const int64_t scalar =
        family->query_scalar > 0 ? llround(1 / (s->attention_scale * s->attention_scale)) : 0;
    json_t *map = json_pack("{s:[s], s:s, s:s, s:f, s:i, s:b}", "architectures",
                            family->architecture, "model_type", family->model_type,
                            family->gelu ? "hidden_activation" : "hidden_act",
                            family->gelu ? "gelu_pytorch_tanh" : "silu", "attention_dropout", 0.0,
                            "pretraining_tp", 1, "use_cache", 1);
    json_t *ends = s->more_end_count > 0 ? json_array() : token_of(s->eos_id);
    for (int64_t i = -1; i < s->more_end_count && s->more_end_count > 0; i++) {
        nd_json_append(&ends, json_integer(i < 0 ? s->eos_id : s->more_ends[i]));
    }
    const struct {
        const char *key;
        json_t *value; /* stolen */
    } entries[] = {
        {"vocab_size", json_integer(s->vocab)},
        {"hidden_size", json_integer(s->hidden)},
        {"intermediate_size", json_integer(s->ffn)},
        {"num_hidden_layers", json_integer(s->layers)},
        {"num_attention_heads", json_integer(s->heads)},
        {"num_key_value_heads", json_integer(s->kv_heads)},
        {"head_dim", json_integer(s->head_dim)},
        {"max_position_embeddings", json_integer(s->max_positions)},
        {"rms_norm_eps", json_real(s->rms_eps)},
        {"initializer_range", json_real(s->init_std)},
        {"tie_word_embeddings", json_boolean(s->tied)},
        {"bos_token_id", token_of(s->bos_id)},
        {"eos_token_id", ends},
        {"pad_token_id", json_null()}, /* families have one, whose row gets no gradient */
        {family->dropout > 0 ? "residual_dropout" : NULL, json_real(0)},
        {"torch_dtype", json_string(dtype_name)},
        {family->scaled ? "embedding_multiplier" : NULL, json_real(s->embedding_scale)},
        {family->scaled ? "residual_multiplier" : NULL, json_real(s->residual_scale)},
        {family->scaled ? "attention_multiplier" : NULL, json_real(s->attention_scale)},
        {family->scaled ? "logits_scaling" : NULL, json_real(s->logits_divisor)},
        {scalar > 0 ? "query_pre_attn_scalar" : NULL, json_integer(scalar)},
        {family->qkv_bias.key, json_boolean(s->qkv_bias)},
        {family->o_bias.key, json_boolean(s->o_bias)},
        {family->mlp_bias.key, json_boolean(s->mlp_bias)},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        if (entries[i].key) {
            nd_json_set(&map, entries[i].key, entries[i].value);
        } else { /* the family has no such key */
            json_decref(entries[i].value);
        }
    }
    set_rope(s, &map);
    set_windows(s, &map);
    if (!map) {
        return nd_fail_memory("writing %s", path);
    }
    nd_status status = write_json(map, path);
    json_decref(map);
    return status;
}
