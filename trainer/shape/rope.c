// SPDX-License-Identifier: Apache-2.0
/* Reads RoPE in a config.json, in both spellings. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/shape/keys.h"

/* words: with blanks in between; NULL: none. */
static bool is_listed(const char *key, const char *words)
{
    char word[64];
    bool found = false;
    for (; words && !found && sscanf(words, "%63s", word) == 1; words += strlen(word)) {
        words += strspn(words, " ");
        found = strcmp(key, word) == 0;
    }
    return found;
}

/* Keys of a RoPE map that this program understands; another one could change the angles. */
static nd_status refuse_rope_keys(const json_t *rope, const char *name, const nd_shape *s)
{
    const nd_rope_type type = s->rope.type;
    static const char of_all[] =
        "rope_type type rope_theta factor low_freq_factor high_freq_factor "
        "partial_rotary_factor original_max_position_embeddings";
    static const char *const of_type[ND_ROPE_TYPES] = {
        [ND_ROPE_YARN] = "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate",
        [ND_ROPE_LONGROPE] = "short_factor long_factor attention_factor"};
    static const char by_position[] = "llama_4_scaling_beta max_position_embeddings";
    const bool scales_queries = nd_families[s->family].query_scaled && type == ND_ROPE_YARN;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)rope, key, value)
    {
        if (!json_is_null(value) && !is_listed(key, of_all) && !is_listed(key, of_type[type]) &&
            !(scales_queries && is_listed(key, by_position))) {
            return nd_fail(ND_ERR_DATA,
                           "%s: the key %.80s is not supported for model_type %s with rope_type "
                           "%s; remove it",
                           name, key, nd_families[s->family].model_type, nd_rope_type_name(type));
        }
    }
    return ND_OK;
}

/* The map of RoPE and its key; NULL: there is none. Where layers with windows have a RoPE of their
 * own, it is that of the other layers. */
static const json_t *rope_map(const json_t *map, const nd_shape *s, const char **key)
{
    const json_t *parameters = json_object_get(map, "rope_parameters");
    *key = nd_key_is_unset(parameters) ? "rope_scaling" : "rope_parameters";
    if (nd_families[s->family].window_theta > 0 && json_is_object(parameters)) {
        *key = "rope_parameters: full_attention";
        return json_object_get(parameters, "full_attention");
    }
    return json_object_get(map, *key);
}

/* RoPE of the layers with windows, where the family has one for them. */
static nd_status read_window_rope(const json_t *map, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    const json_t *parameters = json_object_get(map, "rope_parameters"), *value;
    const json_t *rope = json_object_get(parameters, "sliding_attention");
    const char *const type = json_object_get(rope, "rope_type") ? "rope_type" : "type", *key;
    const char *const old_key = family->window_theta_key;
    double theta = family->window_theta;
    char name[600];
    if (theta == 0) {
        return ND_OK;
    }
    snprintf(name, sizeof name, "%.500s: rope_parameters: sliding_attention", file);
    bool good = nd_key_is_unset(parameters) || json_is_object(parameters);
    json_object_foreach((json_t *)parameters, key, value)
    {
        good &= (strcmp(key, "full_attention") == 0 || strcmp(key, "sliding_attention") == 0) &&
                (json_is_null(value) || json_is_object(value));
    }
    if (!good) {
        return nd_fail(ND_ERR_DATA,
                       "%s: for model_type %s rope_parameters must be a map of the maps "
                       "full_attention and sliding_attention, and nothing else",
                       file, family->model_type);
    }
    json_object_foreach((json_t *)rope, key, value)
    {
        if (!json_is_null(value) && strcmp(key, type) != 0 && strcmp(key, "rope_theta") != 0) {
            return nd_fail(ND_ERR_DATA, "%s: the key %.80s is not supported; remove it", name, key);
        }
    }
    ND_TRY(rope ? nd_key_demand_text(rope, name, type, "default") : ND_OK);
    ND_TRY(old_key ? nd_key_real(map, file, old_key, 1, 1e15, theta, &theta) : ND_OK);
    ND_TRY(nd_key_real(rope, name, "rope_theta", 1, 1e15, theta, &theta));
    if (!old_key && nd_key_is_unset(json_object_get(rope, "rope_theta")) &&
        s->rope.theta != theta && !nd_key_is_unset(json_object_get(map, "rope_theta"))) {
        return nd_fail(ND_ERR_DATA,
                       "%s: rope_theta is %g, and that of layers with windows is absent; write "
                       "both as rope_theta in full_attention and sliding_attention of "
                       "rope_parameters",
                       file, s->rope.theta);
    }
    s->window_theta = s->window > 0 ? theta : 0;
    return ND_OK;
}

static nd_status read_rope_type(const json_t *rope, const char *name, nd_shape *s)
{
    nd_rope_config *out = &s->rope;
    const json_t *type = json_object_get(rope, "rope_type");
    type = nd_key_is_unset(type) ? json_object_get(rope, "type") : type;
    if (nd_key_is_unset(type)) {
        out->type = ND_ROPE_DEFAULT;
        return ND_OK;
    }
    const char *text = json_is_string(type) ? json_string_value(type) : nd_key_type(type);
    /* Its older names. */
    if (s->family == ND_FAMILY_PHI3 && (strcmp(text, "su") == 0 || strcmp(text, "yarn") == 0)) {
        text = "longrope";
    }
    for (out->type = 0; out->type < ND_ROPE_TYPES; out->type++) {
        if (strcmp(text, nd_rope_type_name(out->type)) == 0) {
            return ND_OK;
        }
    }
    return nd_fail(ND_ERR_DATA,
                   "%s: rope_type is \"%.80s\"; supported are default, linear, dynamic, "
                   "llama3, yarn and longrope",
                   name, text);
}

/* 0.1 mscale ln(factor) + 1 */
static double yarn_scale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

static nd_status read_yarn(const json_t *rope, const char *name, nd_shape *s)
{
    nd_rope_config *out = &s->rope;
    double mscale = 0, mscale_all = 0;
    bool truncate = true;
    ND_TRY(nd_key_real(rope, name, "beta_fast", 1e-3, 1e6, 32, &out->beta_fast));
    ND_TRY(nd_key_real(rope, name, "beta_slow", 1e-3, 1e6, 1, &out->beta_slow));
    ND_TRY(nd_key_real(rope, name, "mscale", 0, 1e3, 0, &mscale));
    ND_TRY(nd_key_real(rope, name, "mscale_all_dim", 0, 1e3, 0, &mscale_all));
    const double factor = mscale > 0 && mscale_all > 0 ? yarn_scale(out->factor, mscale) /
                                                             yarn_scale(out->factor, mscale_all)
                                                       : yarn_scale(out->factor, 1);
    ND_TRY(nd_key_real(rope, name, "attention_factor", 1e-3, 1e3, factor, &out->attention_factor));
    ND_TRY(nd_key_bool(rope, name, "truncate", true, &truncate));
    out->exact_range = !truncate;
    if (nd_families[s->family].query_scaled) {
        ND_TRY(nd_key_real(rope, name, "llama_4_scaling_beta", 0, 1e3, 0, &out->query_beta));
    }
    return nd_key_int(rope, name, "original_max_position_embeddings", 1, 1 << 30, ND_KEY_NEEDED,
                      &out->original_max_positions);
}

static nd_status read_factors(const json_t *rope, const char *name, const char *key, int64_t pairs,
                              float *out)
{
    const json_t *list = json_object_get(rope, key);
    bool good = json_is_array(list) && (int64_t)json_array_size(list) == pairs;
    for (int64_t i = 0; good && i < pairs; i++) {
        const json_t *factor = json_array_get(list, (size_t)i);
        out[i] = (float)json_number_value(factor);
        good = out[i] > 0 && out[i] <= 1e6f;
    }
    return good ? ND_OK
                : nd_fail(ND_ERR_DATA,
                          "%s: %s must be a list of %lld numbers above 0 and up to 1e6, one for "
                          "each pair of elements that RoPE turns",
                          name, key, (long long)pairs);
}

/* After the sizes: the number of factors follows from them. */
static nd_status read_longrope(const json_t *map, const char *file, nd_shape *s)
{
    const char *const key = "original_max_position_embeddings", *rope_key;
    const json_t *rope = rope_map(map, s, &rope_key);
    const int64_t pairs = nd_shape_rotated(s) / 2;
    if (s->rope.type != ND_ROPE_LONGROPE) {
        return ND_OK;
    }
    /* At the top it counts first, and Phi 3 has a number where it is absent. */
    const int64_t absent = s->family == ND_FAMILY_PHI3 ? 4096 : s->max_positions;
    int64_t *const original = &s->rope.original_max_positions;
    ND_TRY(nd_key_int(rope, file, key, 2, 1 << 30, absent, original));
    ND_TRY(nd_key_int(map, file, key, 2, 1 << 30, s->family == ND_FAMILY_PHI3 ? absent : *original,
                      original));
    if (pairs > ND_ROPE_LONG_PAIRS) {
        return nd_fail(ND_ERR_DATA,
                       "%s: RoPE turns %lld elements of a head; of rope_type longrope up to %d are "
                       "supported",
                       file, (long long)(2 * pairs), 2 * ND_ROPE_LONG_PAIRS);
    }
    ND_TRY(read_factors(rope, file, "short_factor", pairs, s->rope.short_factor));
    ND_TRY(read_factors(rope, file, "long_factor", pairs, s->rope.long_factor));
    double factor = (double)s->max_positions / (double)*original;
    ND_TRY(nd_key_real(rope, file, "factor", 1e-3, 1e6, factor, &factor));
    const double size = factor <= 1 ? 1 : sqrt(1 + log(factor) / log((double)*original));
    s->rope.factor = 1;
    return nd_key_real(rope, file, "attention_factor", 1e-3, 1e3, size, &s->rope.attention_factor);
}

/* partial_rotary_factor, at the top or with the other keys of RoPE. */
static nd_status read_rotated(const json_t *map, const char *file, nd_shape *s)
{
    const char *const key = "partial_rotary_factor", *rope_key;
    const nd_family_row *family = &nd_families[s->family];
    double share = 1;
    ND_TRY(nd_key_real(map, file, key, 0, 1, family->partial > 0 ? family->partial : 1, &share));
    ND_TRY(nd_key_real(rope_map(map, s, &rope_key), file, key, 0, 1, share, &share));
    const int64_t rotated = (int64_t)((double)s->head_dim * share);
    if (share < 1 && family->partial == 0) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %g; for model_type %s only 1 is supported", file,
                       key, share, family->model_type);
    }
    if (rotated < 2 || rotated % 2 != 0) {
        return nd_fail(ND_ERR_DATA,
                       "%s: %s %g of head_dim %lld is %lld; it must be even, because RoPE turns "
                       "pairs, and at least 2",
                       file, key, share, (long long)s->head_dim, (long long)rotated);
    }
    const bool phi3 = s->family == ND_FAMILY_PHI3;
    if (family->partial > 0 && s->rope.type != ND_ROPE_DEFAULT &&
        !(phi3 && s->rope.type == ND_ROPE_LONGROPE)) {
        return nd_fail(ND_ERR_DATA,
                       "%s: rope_type is \"%s\"; for model_type %s only default %s supported", file,
                       nd_rope_type_name(s->rope.type), family->model_type,
                       phi3 ? "and longrope are" : "is");
    }
    s->rotated = rotated < s->head_dim ? rotated : 0;
    return read_longrope(map, file, s);
}

/* The old spelling (rope_theta, rope_scaling) or the new one (rope_parameters). */
static nd_status read_rope(const json_t *map, const char *file, nd_shape *s)
{
    const nd_family_row *family = &nd_families[s->family];
    nd_rope_config *out = &s->rope;
    double theta = family->theta > 0 ? family->theta : 10000;
    /* The values that transformers takes where the file has none. */
    static const nd_rope_config ministral3 = {.type = ND_ROPE_YARN,
                                              .theta = 1e6,
                                              .factor = 16,
                                              .low_freq_factor = 1,
                                              .high_freq_factor = 1,
                                              .original_max_positions = 16384,
                                              .beta_fast = 32,
                                              .beta_slow = 1,
                                              .attention_factor = 1,
                                              .query_beta = 0.1};
    const json_t *scaling = json_object_get(map, "rope_scaling");
    const json_t *parameters = json_object_get(map, "rope_parameters");
    if (!nd_key_is_unset(scaling) && !nd_key_is_unset(parameters)) {
        return nd_fail(ND_ERR_DATA,
                       "%s: rope_scaling and rope_parameters are both there; keep one of them",
                       file);
    }
    const char *key;
    const json_t *rope = rope_map(map, s, &key);
    char name[600];
    snprintf(name, sizeof name, "%.500s: %s", file, key);
    ND_TRY(nd_key_real(map, file, "rope_theta", 1, 1e15, theta, &out->theta));
    out->type = ND_ROPE_DEFAULT;
    out->factor = out->low_freq_factor = out->high_freq_factor = 1;
    out->original_max_positions = 0;
    if (nd_key_is_unset(rope)) {
        *out = family->query_scaled ? ministral3 : *out;
        return ND_OK;
    }
    if (!json_is_object(rope)) {
        return nd_fail(ND_ERR_DATA, "%s is %s; it must be a map or null", name, nd_key_type(rope));
    }
    ND_TRY(read_rope_type(rope, name, s));
    if (family->query_scaled && out->type != ND_ROPE_YARN) {
        return nd_fail(ND_ERR_DATA,
                       "%s: rope_type is \"%s\"; for model_type %s only yarn is supported", name,
                       nd_rope_type_name(out->type), family->model_type);
    }
    ND_TRY(refuse_rope_keys(rope, name, s));
    ND_TRY(nd_key_real(rope, name, "rope_theta", 1, 1e15, out->theta, &theta));
    if (theta != out->theta && !nd_key_is_unset(json_object_get(map, "rope_theta"))) {
        return nd_fail(ND_ERR_DATA,
                       "%s: rope_theta is %g there and %g at the top; keep one of them", name,
                       theta, out->theta);
    }
    out->theta = theta;
    if (out->type == ND_ROPE_DEFAULT || out->type == ND_ROPE_LONGROPE) {
        return ND_OK; /* read_longrope reads the rest */
    }
    ND_TRY(nd_key_real(rope, name, "factor", 1, 1e6, ND_KEY_NEEDED, &out->factor));
    if (out->type == ND_ROPE_LINEAR || out->type == ND_ROPE_DYNAMIC) {
        return ND_OK;
    }
    if (out->type == ND_ROPE_YARN) {
        return read_yarn(rope, name, s);
    }
    ND_TRY(nd_key_real(rope, name, "low_freq_factor", 1e-3, 1e6, ND_KEY_NEEDED,
                       &out->low_freq_factor));
    ND_TRY(nd_key_real(rope, name, "high_freq_factor", 1e-3, 1e6, ND_KEY_NEEDED,
                       &out->high_freq_factor));
    ND_TRY(nd_key_int(rope, name, "original_max_position_embeddings", 1, 1 << 30, ND_KEY_NEEDED,
                      &out->original_max_positions));
    if (out->high_freq_factor <= out->low_freq_factor) {
        return nd_fail(ND_ERR_DATA,
                       "%s: high_freq_factor %g must be larger than low_freq_factor %g", name,
                       out->high_freq_factor, out->low_freq_factor);
    }
    return ND_OK;
}

nd_status nd_shape_read_rope(const json_t *map, const char *file, nd_shape *s)
{
    ND_TRY(read_rope(map, file, s));
    ND_TRY(read_window_rope(map, file, s));
    return read_rotated(map, file, s);
}

const char *nd_rope_type_name(nd_rope_type type)
{
    static const char *const names[ND_ROPE_TYPES] = {"default", "linear", "llama3",
                                                     "dynamic", "yarn",   "longrope"};
    return names[type];
}
