// SPDX-License-Identifier: Apache-2.0
/* The shape of a model: keys of a GGUF file, config.json, and the names of tensors. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/weights/gguf.h"

static bool has_family(nd_family family)
{
    return family == ND_FAMILY_LLAMA || family == ND_FAMILY_QWEN2 || family == ND_FAMILY_QWEN3;
}

/* Numbers of the shape. A key that begins with a point stands behind the family's name. */
typedef struct number {
    const char *key, *config; /* in config.json; NULL: the number follows from others */
    size_t place;             /* in nd_shape: an int64_t, or a double where it is no whole one */
    bool whole, needed;       /* needed: files without it are refused */
} number;

enum { NUMBERS = 14 };
static const number numbers[NUMBERS] = {
    {".vocab_size", "vocab_size", offsetof(nd_shape, vocab), true, false},
    {".context_length", "max_position_embeddings", offsetof(nd_shape, max_positions), true, true},
    {".embedding_length", "hidden_size", offsetof(nd_shape, hidden), true, true},
    {".block_count", "num_hidden_layers", offsetof(nd_shape, layers), true, true},
    {".feed_forward_length", "intermediate_size", offsetof(nd_shape, ffn), true, true},
    {".attention.head_count", "num_attention_heads", offsetof(nd_shape, heads), true, true},
    {".attention.head_count_kv", "num_key_value_heads", offsetof(nd_shape, kv_heads), true, false},
    {".attention.key_length", "head_dim", offsetof(nd_shape, head_dim), true, false},
    {".attention.value_length", NULL, offsetof(nd_shape, head_dim), true, false},
    {".rope.dimension_count", NULL, offsetof(nd_shape, head_dim), true, false},
    {".attention.layer_norm_rms_epsilon", "rms_norm_eps", offsetof(nd_shape, rms_eps), false, true},
    {".rope.freq_base", "rope_theta", offsetof(nd_shape, rope.theta), false, false},
    {"tokenizer.ggml.bos_token_id", "bos_token_id", offsetof(nd_shape, bos_id), true, false},
    {"tokenizer.ggml.eos_token_id", "eos_token_id", offsetof(nd_shape, eos_id), true, false},
};

/* Tensors of all parameters that these families have. */
static const char *const parts[ND_PARAM_COUNT] = {
    [ND_PARAM_EMBED] = "token_embd.weight",   [ND_PARAM_NORM_1] = "attn_norm.weight",
    [ND_PARAM_Q] = "attn_q.weight",           [ND_PARAM_K] = "attn_k.weight",
    [ND_PARAM_V] = "attn_v.weight",           [ND_PARAM_O] = "attn_output.weight",
    [ND_PARAM_NORM_2] = "ffn_norm.weight",    [ND_PARAM_GATE] = "ffn_gate.weight",
    [ND_PARAM_UP] = "ffn_up.weight",          [ND_PARAM_DOWN] = "ffn_down.weight",
    [ND_PARAM_NORM_F] = "output_norm.weight", [ND_PARAM_HEAD] = "output.weight",
    [ND_PARAM_Q_BIAS] = "attn_q.bias",        [ND_PARAM_K_BIAS] = "attn_k.bias",
    [ND_PARAM_V_BIAS] = "attn_v.bias",        [ND_PARAM_O_BIAS] = "attn_output.bias",
    [ND_PARAM_GATE_BIAS] = "ffn_gate.bias",   [ND_PARAM_UP_BIAS] = "ffn_up.bias",
    [ND_PARAM_DOWN_BIAS] = "ffn_down.bias",   [ND_PARAM_NORM_Q] = "attn_q_norm.weight",
    [ND_PARAM_NORM_K] = "attn_k_norm.weight",
};

void nd_gguf_name(const nd_param *param, char name[ND_PARAM_NAME])
{
    const char *part = parts[param->id];
    ND_ASSERT(part);
    if (param->layer < 0) {
        snprintf(name, ND_PARAM_NAME, "%s", part);
    } else {
        snprintf(name, ND_PARAM_NAME, "blk.%lld.%s", (long long)param->layer, part);
    }
}

nd_status nd_gguf_layout(const nd_shape *shape, nd_layout **out)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    ND_TRY(nd_layout_create(&(nd_layout_options){.shape = shape, .mesh = &one}, out));
    for (int i = 0; i < (*out)->param_count && shape->family == ND_FAMILY_LLAMA; i++) {
        nd_param *p = &(*out)->params[i];
        if (p->id == ND_PARAM_Q || p->id == ND_PARAM_K || p->id == ND_PARAM_Q_BIAS ||
            p->id == ND_PARAM_K_BIAS) {
            p->paired = p->head_rows = shape->head_dim;
        }
    }
    return ND_OK;
}

float nd_gguf_factor(const nd_rope_config *rope, int64_t head_dim, int64_t pair)
{
    const nd_rope_config plain = {.theta = rope->theta};
    return (float)(nd_rope_frequency(&plain, head_dim, pair) /
                   nd_rope_frequency(rope, head_dim, pair));
}

/* Reading. */

nd_status nd_gguf_refuse(const nd_gguf_head *h, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return nd_fail(ND_ERR_DATA, "\"%s\": %s", h->path, text);
}

json_t *nd_gguf_get(const nd_gguf_head *h, const char *key)
{
    const char *family = json_string_value(json_object_get(h->keys, "general.architecture"));
    char name[160];
    snprintf(name, sizeof name, "%.60s%s", *key == '.' && family ? family : "", key);
    return json_object_get(h->keys, name);
}

const char *nd_gguf_text(const nd_gguf_head *h, const char *key)
{
    return json_string_value(nd_gguf_get(h, key));
}

/* A real number as the decimal one of up to 6 digits that has this value as F32, if there is one;
 * any other value as it is. */
static json_t *shorten(json_t *value)
{
    char text[32];
    snprintf(text, sizeof text, "%.6g", json_real_value(value));
    const double decimal = strtod(text, NULL);
    return json_is_real(value) && (float)decimal == (float)json_real_value(value)
               ? json_real(decimal)
               : json_incref(value);
}

/* llama.cpp keeps the factors of Llama 3, not the numbers that they follow from: 1, 4, the greatest
 * factor, and a length. NULL: they follow from others. */
static json_t *find_llama3(const nd_gguf_head *h, const nd_safetensors_tensor *t, double theta)
{
    static const int64_t lengths[] = {8192, 4096, 2048, 16384, 32768, 1024, 512, 256, 128, 64};
    float given[ND_ROPE_LONG_PAIRS];
    const int64_t pairs = t->shape[0];
    nd_rope_config rope = {
        .type = ND_ROPE_LLAMA3, .theta = theta, .low_freq_factor = 1, .high_freq_factor = 4};
    if (t->number != ND_GGUF_FP32 || t->axes != 1 || pairs > ND_ROPE_LONG_PAIRS) {
        return NULL;
    }
    memcpy(given, h->map.data + t->begin, (size_t)pairs * sizeof *given);
    for (int64_t i = 0; i < pairs; i++) {
        rope.factor = fmax(rope.factor, (double)given[i]);
    }
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        int64_t same = 0;
        rope.original_max_positions = lengths[k];
        for (int64_t i = 0; i < pairs; i++) {
            const float own = nd_gguf_factor(&rope, 2 * pairs, i);
            same += fabsf(given[i] - own) < 1e-3f * own;
        }
        if (same == pairs) {
            return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor",
                             rope.factor, "low_freq_factor", 1.0, "high_freq_factor", 4.0,
                             "original_max_position_embeddings", (json_int_t)lengths[k]);
        }
    }
    return NULL;
}

/* The key rope_scaling of config.json; NULL: none. */
static nd_status find_scaling(const nd_gguf_head *h, json_t **out)
{
    const nd_safetensors_tensor *factors = nd_safetensors_list_find(&h->list, ND_GGUF_FACTORS);
    const char *kind = nd_gguf_text(h, ".rope.scaling.type");
    const json_t *said = nd_gguf_get(h, ".rope.scaling.factor"),
                 *base = nd_gguf_get(h, ".rope.freq_base");
    const double factor = json_number_value(said ? said : nd_gguf_get(h, ".rope.scale_linear"));
    const bool linear = (!kind || strcmp(kind, "linear") == 0) && factor != 0 && factor != 1;
    if (kind && strcmp(kind, "none") != 0 && strcmp(kind, "linear") != 0) {
        return nd_gguf_refuse(h, "its RoPE is scaled by %.60s; none and linear are read", kind);
    }
    if (json_integer_value(nd_gguf_get(h, ".attention.sliding_window")) > 0) {
        return nd_gguf_refuse(
            h, "its attention has a sliding window, which is not read from GGUF files");
    }
    *out = linear && !factors   ? json_pack("{s:s, s:f}", "rope_type", "linear", "factor", factor)
           : factors && !linear ? find_llama3(h, factors, base ? json_number_value(base) : 10000)
                                : NULL;
    return !factors || *out ? ND_OK
                            : nd_gguf_refuse(h, "the factors of its RoPE (" ND_GGUF_FACTORS
                                                ") are not those of Llama 3.1 to 3.3");
}

static json_t *has(const nd_gguf_head *h, const char *tensor)
{
    return json_boolean(nd_safetensors_list_find(&h->list, tensor));
}

nd_status nd_gguf_read_config(nd_gguf_head *h)
{
    const char *name = nd_gguf_text(h, "general.architecture");
    const nd_safetensors_tensor *table = nd_safetensors_list_find(&h->list, "token_embd.weight");
    nd_family family = 0;
    json_t *scaling = NULL;
    while (family < ND_FAMILY_COUNT &&
           !(name && has_family(family) && strcmp(nd_families[family].model_type, name) == 0)) {
        family++;
    }
    if (json_integer_value(nd_gguf_get(h, "split.count")) > 1) {
        return nd_gguf_refuse(
            h, "it is one of several files; join them with llama-gguf-split --merge");
    }
    if (family == ND_FAMILY_COUNT) {
        return nd_gguf_refuse(h, "its architecture is %.60s; llama, qwen2 and qwen3 are read",
                              name ? name : "not named");
    }
    if (!table || table->axes != 2) {
        return nd_gguf_refuse(h, "it has no token_embd.weight");
    }
    for (int i = 0; i < NUMBERS; i++) {
        if (numbers[i].needed && !nd_gguf_get(h, numbers[i].key)) {
            return nd_gguf_refuse(h, "it has no %s%s", name, numbers[i].key);
        }
    }
    ND_TRY(find_scaling(h, &scaling));
    json_t *config =
        json_pack("{s:s, s:[s], s:s, s:s, s:I, s:o*}", "model_type", name, "architectures",
                  nd_families[family].architecture, "torch_dtype", "float32", "hidden_act", "silu",
                  "vocab_size", (json_int_t)table->shape[0], "rope_scaling", scaling);
    json_t *generation = json_object();
    for (int i = 0; i < NUMBERS; i++) {
        const number *n = &numbers[i];
        json_t *value = nd_gguf_get(h, n->key);
        const bool token = n->key[0] != '.';
        if (n->config && (value || token)) {
            nd_json_set(&config, n->config, value ? shorten(value) : json_null());
        }
        if (token && value) {
            nd_json_set(&generation, n->config, json_incref(value));
        }
    }
    nd_json_set(&config, "tie_word_embeddings",
                json_boolean(!nd_safetensors_list_find(&h->list, "output.weight")));
    if (family != ND_FAMILY_QWEN2) {
        nd_json_set(&config, "attention_bias", has(h, "blk.0.attn_q.bias"));
    }
    if (family == ND_FAMILY_LLAMA) {
        nd_json_set(&config, "mlp_bias", has(h, "blk.0.ffn_up.bias"));
    }
    nd_json_set(&h->files, "config.json", config);
    nd_json_set(&h->files, "generation_config.json", generation);
    return ND_OK;
}

nd_status nd_gguf_check_keys(const nd_gguf_head *h, const nd_shape *shape)
{
    for (int i = 0; i < NUMBERS; i++) {
        const json_t *said = numbers[i].config ? NULL : nd_gguf_get(h, numbers[i].key);
        if (said && json_integer_value(said) != shape->head_dim) {
            return nd_gguf_refuse(h, "its key %s is %lld; only %lld, as its heads have, is read",
                                  numbers[i].key + 1, (long long)json_integer_value(said),
                                  (long long)shape->head_dim);
        }
    }
    return ND_OK;
}

/* Writing. */

nd_status nd_gguf_check_shape(const nd_shape *s)
{
    const nd_rope_type rope = s->rope.type;
    const bool llama = s->family == ND_FAMILY_LLAMA;
    const char *why =
        !has_family(s->family) ? "only llama, qwen2 and qwen3 can"
        : s->window > 0 || rope == ND_ROPE_DYNAMIC || rope == ND_ROPE_YARN ||
                rope == ND_ROPE_LONGROPE
            ? "it has a sliding window, or the rope_type dynamic, yarn or longrope"
        : s->o_bias && !llama
            ? "all linears of its attention have biases, and llama.cpp does not load it"
        : rope == ND_ROPE_LLAMA3 && !llama ? "llama.cpp has no rope_type llama3 for it"
                                           : NULL;
    return why ? nd_fail(ND_ERR_DATA, "a model of the type \"%s\" cannot be written as GGUF: %s",
                         nd_families[s->family].model_type, why)
               : ND_OK;
}

static void add(const nd_shape *s, json_t **keys, const char *key, json_t *value)
{
    char name[96];
    snprintf(name, sizeof name, "%s%s", *key == '.' ? nd_families[s->family].model_type : "", key);
    nd_json_set(keys, name, value);
}

void nd_gguf_add_shape(const nd_shape *s, json_t **keys)
{
    for (int i = 0; i < NUMBERS; i++) {
        const void *at = (const char *)s + numbers[i].place;
        const int64_t whole = numbers[i].whole ? *(const int64_t *)at : 0;
        if (whole >= 0) { /* below: there is no such token */
            add(s, keys, numbers[i].key,
                numbers[i].whole ? json_integer((json_int_t)whole)
                                 : json_real(*(const double *)at));
        }
    }
    if (s->rope.type == ND_ROPE_LINEAR) {
        add(s, keys, ".rope.scaling.type", json_string("linear"));
        add(s, keys, ".rope.scaling.factor", json_real(s->rope.factor));
    }
}
