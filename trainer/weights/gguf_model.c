// SPDX-License-Identifier: Apache-2.0
/* Models in GGUF files: keys and config.json, names of tensors, and their values. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/weights/gguf.h"

#define FACTORS "rope_freqs.weight"
enum { RUN_VALUES = 8192, FILE_FLAGS = JSON_INDENT(1) | JSON_REAL_PRECISION(9) };

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

/* Names of tensors, of all parameters that these families have. */
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

static void name_of(const nd_param *param, char name[ND_PARAM_NAME])
{
    const char *part = parts[param->id];
    ND_ASSERT(part);
    if (param->layer < 0) {
        snprintf(name, ND_PARAM_NAME, "%s", part);
    } else {
        snprintf(name, ND_PARAM_NAME, "blk.%lld.%s", (long long)param->layer, part);
    }
}

/* The layout of a whole model, whose parameters know where their elements are in a GGUF file
 * (nd_param_in_file). */
static nd_status make_layout(const nd_shape *shape, nd_layout **out)
{
    ND_TRY(nd_layout_create(&(nd_layout_options){.shape = shape}, out));
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
    const nd_safetensors_tensor *factors = nd_safetensors_list_find(&h->list, FACTORS);
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
                            : nd_gguf_refuse(h, "the factors of its RoPE (" FACTORS
                                                ") are not those of Llama 3.1 to 3.3");
}

static json_t *has(const nd_gguf_head *h, const char *tensor)
{
    return json_boolean(nd_safetensors_list_find(&h->list, tensor));
}

/* The head's config.json and generation_config.json. */
static nd_status read_config(nd_gguf_head *h)
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

/* Keys that are not read into config.json have the values that follow from the shape. */
static nd_status check_keys(const nd_gguf_head *h, const nd_shape *shape)
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

/* A tensor that is there gets another name, and the type as which it is read: one that
 * has the name of a model folder from the beginning stays without. */
static nd_status rename_tensor(nd_gguf_head *h, const char *from, const char *to, int64_t turned)
{
    nd_safetensors_tensor *t = (nd_safetensors_tensor *)nd_safetensors_list_find(&h->list, from);
    if (!t) {
        return ND_OK;
    }
    t->number += turned;
    t->dtype = ND_SAFETENSORS_F32;
    free(t->name);
    t->name = NULL;
    return nd_fs_format(&t->name, "%s", to);
}

/* Tensors get the names that they have in a model folder; what no model has keeps its own. */
static nd_status name_tensors(nd_gguf_head *h, nd_shape *shape)
{
    nd_layout *layout = NULL;
    char *text = nd_json_text(json_object_get(h->files, "config.json"), FILE_FLAGS);
    nd_status status = text ? nd_shape_parse(text, strlen(text), h->path, shape)
                            : nd_fail_memory("the head of \"%s\"", h->path);
    free(text);
    ND_TRY(status);
    ND_TRY(check_keys(h, shape));
    ND_TRY(make_layout(shape, &layout));
    for (int i = 0; i < layout->param_count && status == ND_OK; i++) {
        const nd_param *p = &layout->params[i];
        char name[ND_PARAM_NAME];
        name_of(p, name);
        status = rename_tensor(h, name, p->file_name, p->paired > 0 ? ND_GGUF_TURNED : 0);
    }
    nd_layout_destroy(layout);
    return status == ND_OK ? rename_tensor(h, FACTORS, "rotary_emb.inv_freq", 0) : status;
}

/* Under nd_fs_map_guard: all that lasts hangs at the context. */
static nd_status read_head(void *context)
{
    ND_TRY(nd_gguf_take_head(context));
    ND_TRY(read_config(context));
    return nd_gguf_read_tokenizer(context);
}

/* A file that has this text stays; anything else under its name is replaced. */
static nd_status make_file(const char *folder, const char *name, const json_t *file)
{
    char path[PATH_MAX], *there = NULL, *text = nd_json_text(file, FILE_FLAGS);
    size_t size;
    nd_status status = text ? nd_fs_path(path, "%s/%s", folder, name) : nd_fail_memory("%s", name);
    ND_TRY_OUT(status);
    status = nd_fs_read(path, strlen(text), ND_ERR_DATA, &there, &size);
    if (status == ND_ERR_DATA || (status == ND_OK && strcmp(there, text) != 0)) {
        nd_error_clear();
        status = nd_fs_write_atomic(path, text, strlen(text));
    }
out:
    free(there);
    free(text);
    return status;
}

static nd_status make_folder(const nd_gguf_head *h, char **out)
{
    char hex[65], folder[PATH_MAX], *cache = NULL, *text = nd_json_text(h->files, FILE_FLAGS);
    const char *name;
    json_t *file;
    nd_status status = text ? nd_sha256(text, strlen(text), hex) : nd_fail_memory("%s", h->path);
    free(text);
    ND_TRY(status);
    ND_TRY(nd_token_cache_folder("", &cache));
    status = nd_fs_path(folder, "%s/%.32s.model", cache, hex);
    free(cache);
    ND_TRY(status);
    ND_TRY(nd_fs_make_folders(folder, "the folder of the model's tokenizer",
                              "set XDG_CACHE_HOME to a folder that can be written"));
    json_object_foreach(h->files, name, file)
    {
        ND_TRY(make_file(folder, name, file));
    }
    return nd_fs_format(out, "%s", folder);
}

nd_status nd_gguf_open(const char *path, nd_safetensors_list *list, nd_shape *shape, char **folder)
{
    nd_gguf_head h = {.path = path, .keys = json_object(), .files = json_object()};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_map_open(path, ND_ERR_DATA, &h.map));
    ND_TRY_OUT(nd_fs_map_guard(&h.map, path, read_head, &h));
    ND_TRY_OUT(name_tensors(&h, shape));
    ND_TRY_OUT(folder ? make_folder(&h, folder) : ND_OK);
    *list = h.list;
    h.list = (nd_safetensors_list){0};
out:
    json_decref(h.keys);
    json_decref(h.files);
    nd_safetensors_list_fini(&h.list);
    nd_fs_map_close(&h.map);
    return status;
}

/* Writing. */

static nd_status check_shape(const nd_shape *s)
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

static void add_key(const nd_shape *s, json_t **keys, const char *key, json_t *value)
{
    char name[96];
    snprintf(name, sizeof name, "%s%s", *key == '.' ? nd_families[s->family].model_type : "", key);
    nd_json_set(keys, name, value);
}

static void add_shape(const nd_shape *s, json_t **keys)
{
    for (int i = 0; i < NUMBERS; i++) {
        const void *at = (const char *)s + numbers[i].place;
        const int64_t whole = numbers[i].whole ? *(const int64_t *)at : 0;
        if (whole >= 0) { /* below: there is no such token */
            add_key(s, keys, numbers[i].key,
                    numbers[i].whole ? json_integer((json_int_t)whole)
                                     : json_real(*(const double *)at));
        }
    }
    if (s->rope.type == ND_ROPE_LINEAR) {
        add_key(s, keys, ".rope.scaling.type", json_string("linear"));
        add_key(s, keys, ".rope.scaling.factor", json_real(s->rope.factor));
    }
}

struct nd_gguf_writer {
    nd_fs_draft draft;
    nd_layout *layout;
    /* Factors of RoPE if the model has them, then the tensors of the parameters. `number` is a
     * ggml_type. */
    nd_safetensors_list list;
    int64_t left; /* elements of parameters that are not written yet */
};

static nd_status list_tensor(nd_gguf_writer *w, const char *name, int type, int axes, int64_t rows,
                             int64_t cols)
{
    nd_safetensors_tensor *t = &w->list.tensors[w->list.count++];
    *t = (nd_safetensors_tensor){.number = type, .axes = axes, .shape = {rows, cols}};
    return nd_fs_format(&t->name, "%s", name);
}

static nd_status list_tensors(nd_gguf_writer *w, const nd_shape *s, int type)
{
    ND_TRY(ND_ALLOC(w->layout->param_count + 1, &w->list.tensors));
    ND_TRY(s->rope.type == ND_ROPE_LLAMA3
               ? list_tensor(w, FACTORS, ND_GGUF_FP32, 1, s->head_dim / 2, 1)
               : ND_OK);
    for (int i = 0; i < w->layout->param_count; i++) {
        const nd_param *p = &w->layout->params[i];
        const bool fits = p->cols % nd_gguf_types[type].block == 0;
        char name[ND_PARAM_NAME];
        name_of(p, name);
        ND_TRY(list_tensor(w, name,
                           p->axes == 1 ? ND_GGUF_FP32
                           : fits       ? type
                                        : ND_GGUF_FP16,
                           p->axes, p->rows, p->cols));
        w->left += p->rows * p->cols;
    }
    return ND_OK;
}

nd_status nd_gguf_write_rows(nd_gguf_writer *w, const char *name, int64_t begin, int64_t count,
                             const float *values)
{
    const nd_param *p = w->layout->params;
    while (strcmp(p->name, name) != 0) {
        p++;
    }
    const nd_safetensors_tensor *t =
        &w->list.tensors[p - w->layout->params + w->list.count - w->layout->param_count];
    const nd_gguf_type *type = &nd_gguf_types[t->number];
    uint8_t stored[4 * RUN_VALUES];
    bool held = true;
    w->left -= count;
    for (int64_t done = 0, n = 0; done < count; done += n) {
        const int64_t at = begin + done, block = nd_param_in_file(p, at) / type->block;
        n = nd_min(nd_min(nd_param_adjacent(p, at), count - done), RUN_VALUES);
        for (int64_t i = 0; i < n / type->block; i++) {
            held &= type->store(values + done + i * type->block, stored + i * type->bytes);
        }
        fseeko(w->draft.stream, (off_t)t->begin + block * type->bytes, SEEK_SET);
        fwrite(stored, (size_t)type->bytes, (size_t)(n / type->block), w->draft.stream);
    }
    return held ? nd_fs_draft_check(&w->draft)
                : nd_fail(ND_ERR_DATA,
                          "the tensor %s has a value that F16 cannot hold; export it as bf16 or "
                          "fp32",
                          p->name);
}

nd_status nd_gguf_write(const char *path, const nd_gguf_options *options,
                        nd_status (*fill)(void *context, nd_gguf_writer *writer), void *context)
{
    const nd_shape *shape = options->shape;
    nd_gguf_writer w = {.draft.is_new = true};
    json_t *keys[2] = {NULL}; /* those of the shape stand between them */
    char *parent = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_exists(path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE, "%s exists; remove it, or give another name", path);
    }
    ND_TRY(check_shape(shape));
    ND_TRY_OUT(make_layout(shape, &w.layout));
    ND_TRY_OUT(list_tensors(&w, shape, options->type));
    nd_shape told = *shape; /* with the tokenizer's ids */
    ND_TRY_OUT(nd_gguf_make_keys(options, &told, keys));
    add_shape(&told, &keys[0]);
    ND_TRY_OUT(keys[0] && keys[1] && json_object_update(keys[0], keys[1]) == 0
                   ? nd_fs_draft_open(&w.draft, path, 0666)
                   : nd_fail_memory("the head of \"%s\"", path));
    ND_TRY_OUT(nd_fs_parent(path, &parent));
    FILE *out = w.draft.stream;
    nd_gguf_put_head(out, keys[0], &w.list);
    ND_TRY_OUT(nd_fs_draft_check(&w.draft));
    const uint64_t end = w.list.tensors[w.list.count - 1].end;
    ND_TRY_OUT(nd_fs_check_space(parent, end, "the GGUF file"));
    fseeko(out, (off_t)w.list.tensors[0].begin, SEEK_SET);
    for (int64_t i = 0; w.list.count > w.layout->param_count && i < shape->head_dim / 2; i++) {
        const float factor = nd_gguf_factor(&shape->rope, shape->head_dim, i);
        fwrite(&factor, sizeof factor, 1, out);
    }
    ND_TRY_OUT(fill(context, &w));
    ND_ASSERT(w.left == 0);
    fseeko(out, 0, SEEK_END);
    for (uint64_t at = (uint64_t)ftello(out); at < end; at++) { /* padding */
        fputc(0, out);
    }
out:
    status = nd_fs_draft_close(&w.draft, status);
    nd_layout_destroy(w.layout);
    nd_safetensors_list_fini(&w.list);
    json_decref(keys[0]);
    json_decref(keys[1]);
    free(parent);
    return status;
}
