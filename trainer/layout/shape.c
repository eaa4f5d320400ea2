// SPDX-License-Identifier: Apache-2.0
/* Which meshes can hold a shape, and the config.json that transformers reads. */
#include "trainer/layout/layout.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/math.h"

enum { OFFERED_MAX = 8 };

const nd_family_row nd_families[ND_FAMILY_COUNT] = {
#define WINDOW(rule)       ND_WINDOW_##rule
#define ND_FAMILY(id, ...) [ND_FAMILY_##id] = {__VA_ARGS__},
#include "trainer/layout/family.def"
#undef ND_FAMILY
};

/* "1, 2 or 4" */
static void print_sizes(const int64_t *fits, int count, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < count && used < size; i++) {
        const char *between = i == 0 ? "" : i == count - 1 ? " or " : ", ";
        used += (size_t)snprintf(text + used, size - used, "%s%lld", between, (long long)fits[i]);
    }
}

static nd_status check_divides(const nd_shape *shape, const char *what, int64_t extent, int size)
{
    int64_t fits[OFFERED_MAX];
    int count = 0;
    char sizes[160];
    if (extent % size == 0) {
        return ND_OK;
    }
    for (int64_t n = 1; n <= shape->heads && count < OFFERED_MAX; n++) {
        if (shape->heads % n == 0 && shape->ffn % n == 0) {
            fits[count++] = n;
        }
    }
    print_sizes(fits, count, sizes, sizeof sizes);
    return nd_fail(ND_ERR_CONFIG,
                   "the model's %s is %lld, which mesh.tp %d does not divide, but each "
                   "tensor-parallel rank holds an equal part; give --tp-size %s",
                   what, (long long)extent, size, sizes);
}

/* "give --ulysses 2 or 4 and ...": the sizes that divide cp and deal the heads of a rank evenly. */
static void advise_ulysses(int64_t heads, int64_t kv_heads, int cp, char *text, size_t size)
{
    int64_t fits[OFFERED_MAX];
    int count = 0;
    char sizes[160];
    for (int64_t n = 2; n <= nd_min(cp, heads) && count < OFFERED_MAX; n++) {
        if (cp % n == 0 && heads % n == 0 && (kv_heads % n == 0 || n % kv_heads == 0)) {
            fits[count++] = n;
        }
    }
    print_sizes(fits, count, sizes, sizeof sizes);
    if (count == 0) {
        snprintf(
            text, size,
            "with mesh.cp %d no --ulysses above 1 is possible, so leave it out, with --cp-comm "
            "allgather or ring",
            cp);
    } else {
        snprintf(text, size, "give --ulysses %s and --cp-comm allgather or ring", sizes);
    }
}

/* Heads of a tensor-parallel rank are dealt to the ranks of the group ulysses; KV heads too, or
 * several ranks have the same one. */
static nd_status check_ulysses(const nd_shape *shape, const nd_mesh *mesh)
{
    char advice[256];
    const int64_t tp = mesh->size[ND_AXIS_TP], ranks = nd_mesh_group_size(mesh, ND_GROUP_ULYSSES);
    const int64_t heads = shape->heads / tp;
    const int64_t kv_heads = nd_shape_local_kv_heads(shape, tp);
    advise_ulysses(heads, kv_heads, mesh->size[ND_AXIS_CP], advice, sizeof advice);
    if (heads % ranks != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "the model's num_attention_heads %lld / mesh.tp %lld = %lld heads cannot be "
                       "dealt evenly to %lld ranks (parallel.ulysses, or mesh.cp with "
                       "parallel.cp_comm ulysses); %s",
                       (long long)shape->heads, (long long)tp, (long long)heads, (long long)ranks,
                       advice);
    }
    if (kv_heads % ranks != 0 && ranks % kv_heads != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "a rank of mesh.tp %lld has %lld of num_key_value_heads %lld, which neither divide "
            "%lld "
            "ranks (parallel.ulysses, or mesh.cp with parallel.cp_comm ulysses) nor are a multiple "
            "of them; %s",
            (long long)tp, (long long)kv_heads, (long long)shape->kv_heads, (long long)ranks,
            advice);
    }
    return ND_OK;
}

/* The next longer sequence that cp and tp divide. */
static long long next_length(int64_t micro_batch, int64_t sequence, int cp, int tp)
{
    const int64_t unit = cp > 1 ? 2 * (int64_t)cp : 1;
    int64_t length = (sequence / unit + 1) * unit;
    while (micro_batch * (length / cp) % tp != 0) {
        length += unit;
    }
    return (long long)length;
}

nd_status nd_shape_check_mesh(const nd_shape *shape, const nd_mesh *mesh, int64_t micro_batch,
                              int64_t sequence)
{
    int tp = mesh->size[ND_AXIS_TP], cp = mesh->size[ND_AXIS_CP];
    ND_TRY(check_divides(shape, "num_attention_heads", shape->heads, tp));
    ND_TRY(check_divides(shape, "intermediate_size", shape->ffn, tp));
    ND_TRY(check_ulysses(shape, mesh));
    if (shape->head_dim % 2 != 0) {
        return nd_fail(ND_ERR_CONFIG, "the model's head_dim %lld is odd; RoPE needs an even one",
                       (long long)shape->head_dim);
    }
    if (cp > 1 && sequence % (2 * (int64_t)cp) != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.sequence_length %lld is not divisible by 2 x mesh.cp = %lld; context "
                       "parallelism gives each rank two chunks, so take a length such as %lld",
                       (long long)sequence, 2 * (long long)cp,
                       next_length(micro_batch, sequence, cp, tp));
    }
    int64_t tokens = micro_batch * (sequence / cp);
    if (tokens % tp != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.micro_batch_size %lld x train.sequence_length %lld / mesh.cp %d = %lld "
            "local tokens are not divisible by mesh.tp %d; take a length such as %lld",
            (long long)micro_batch, (long long)sequence, cp, (long long)tokens, tp,
            next_length(micro_batch, sequence, cp, tp));
    }
    return ND_OK;
}

int64_t nd_shape_window(const nd_shape *s, int64_t layer, int64_t keys)
{
    return nd_layer_set_has(&s->full, layer) || s->window >= keys ? 0 : s->window;
}

/* What the family's config.json says of windows; NULL: no memory. */
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
        for (int64_t l = 0; types && l < s->layers; l++) {
            json_array_append_new(types,
                                  json_string(nd_shape_window(s, l, INT64_MAX) ? "sliding_attention"
                                                                               : "full_attention"));
        }
        nd_json_set(map, "layer_types", types);
    }
}

static void set_unturned(const nd_shape *s, json_t **map)
{
    json_t *turns = json_array();
    for (int64_t l = 0; turns && l < s->layers; l++) {
        json_array_append_new(turns, json_integer(nd_shape_turns(s, l)));
    }
    nd_json_set(map, "no_rope_layers", turns);
}

const char *nd_rope_type_name(nd_rope_type type)
{
    static const char *const names[ND_ROPE_TYPES] = {"default", "linear", "llama3",
                                                     "dynamic", "yarn",   "longrope"};
    return names[type];
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

/* rope_theta of the layers with windows, where the family has one for them; else 0. */
static double window_theta_of(const nd_shape *s)
{
    return s->window_theta > 0 ? s->window_theta : nd_families[s->family].window_theta;
}

/* For each type of layers; NULL: no memory. */
static json_t *rope_parameters_of(const nd_shape *s)
{
    json_t *full = rope_scaling_of(s);
    full = json_is_null(full) ? json_pack("{s:s}", "rope_type", "default") : full;
    nd_json_set(&full, "rope_theta", json_real(s->rope.theta));
    return json_pack("{s:o, s:{s:s, s:f}}", "full_attention", full, "sliding_attention",
                     "rope_type", "default", "rope_theta", window_theta_of(s));
}

static json_t *token_of(int64_t id)
{
    return id < 0 ? json_null() : json_integer(id);
}

/* An id, or all of a list. */
static json_t *ends_of(const nd_shape *s)
{
    json_t *list = s->more_end_count > 0 ? json_array() : token_of(s->eos_id);
    for (int64_t i = -1; i < s->more_end_count && s->more_end_count > 0; i++) {
        nd_json_append(&list, json_integer(i < 0 ? s->eos_id : s->more_ends[i]));
    }
    return list;
}

/* Numbers have 15 digits where they read back unchanged (1e-05), else 17. The file is written
 * atomically, as every file of a model folder is. */
static nd_status write_json(const json_t *map, const char *path)
{
    nd_status status = ND_ERR_INTERNAL;
    char *text = NULL;
    json_t *back = NULL;
    for (size_t digits = 15; digits <= 17 && !json_equal(map, back); digits += 2) {
        free(text);
        json_decref(back);
        text = nd_json_text(map, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits));
        back = text ? json_loads(text, 0, NULL) : NULL;
    }
    status =
        text ? nd_fs_write_atomic(path, text, strlen(text)) : nd_fail_memory("writing %s", path);
    json_decref(back);
    free(text);
    return status;
}

nd_status nd_shape_write(const nd_shape *s, const char *dtype_name, const char *path)
{
    const nd_family_row *family = &nd_families[s->family];
    /* The old spelling, which all releases read, names the theta of layers with windows by a key of
     * the family, or means the family's for all layers. */
    const char *const local = family->window_theta_key;
    const bool by_type =
        family->window_theta > 0 && !local &&
        (s->rope.theta != family->window_theta || window_theta_of(s) != family->window_theta);
    const int64_t scalar =
        family->query_scalar > 0 ? llround(1 / (s->attention_scale * s->attention_scale)) : 0;
    json_t *map = json_pack("{s:[s], s:s, s:s, s:f, s:i, s:b}", "architectures",
                            family->architecture, "model_type", family->model_type,
                            family->gelu ? "hidden_activation" : "hidden_act",
                            family->gelu ? "gelu_pytorch_tanh" : "silu", "attention_dropout", 0.0,
                            "pretraining_tp", 1, "use_cache", 1);
    int bad = !map;
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
        {by_type ? NULL : "rope_theta", json_real(s->rope.theta)},
        {by_type ? "rope_parameters" : "rope_scaling",
         by_type ? rope_parameters_of(s) : rope_scaling_of(s)},
        {local, json_real(window_theta_of(s))},
        {s->family == ND_FAMILY_PHI3 && s->rope.type == ND_ROPE_LONGROPE
             ? "original_max_position_embeddings"
             : NULL,
         json_integer(s->rope.original_max_positions)},
        {"bos_token_id", token_of(s->bos_id)},
        {"eos_token_id", ends_of(s)},
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
            bad |= json_object_set_new(map, entries[i].key, entries[i].value) != 0;
        } else { /* the family has no such key */
            json_decref(entries[i].value);
        }
    }
    set_windows(s, &map);
    if (family->unturned_period > 0) {
        set_unturned(s, &map);
    }
    if (s->rotated > 0 || (family->partial > 0 && family->partial < 1)) {
        /* Readers take the whole part of the product with head_dim. */
        const int64_t rotated = nd_shape_rotated(s);
        double share = (double)rotated / (double)s->head_dim;
        share = (int64_t)((double)s->head_dim * share) < rotated ? nextafter(share, 1) : share;
        nd_json_set(&map, "partial_rotary_factor", json_real(share));
    }
    if (bad || !map) {
        json_decref(map);
        return nd_fail_memory("writing %s", path);
    }
    nd_status status = write_json(map, path);
    json_decref(map);
    return status;
}
