// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/corpus/chat.h"
#include "trainer/weights/gguf.h"

enum { VERSION = 3, RUN_VALUES = 8192 };

struct nd_gguf_writer {
    FILE *out; /* a failure shows in ferror */
    char *path, *temporary;
    nd_shape shape;
    nd_layout *layout;
    int type;         /* ggml_type of matrices */
    uint64_t *begins; /* [layout->param_count]: places of tensors behind the first one's */
    uint64_t first;   /* the place of that */
    nd_tokenizer *tokenizer;
    json_t *json;   /* tokenizer.json; NULL: ids are bytes */
    json_t *config; /* tokenizer_config.json; NULL: there is none */
    char *template; /* of chats; NULL: there is none */
    json_t *keys;
    uint64_t end; /* of the file */
    int64_t left; /* elements that are not written yet */
};

static nd_status check_family(const nd_shape *s)
{
    const nd_rope_type rope = s->rope.type;
    const bool llama = s->family == ND_FAMILY_LLAMA;
    const char *why =
        !nd_gguf_has_family(s->family) ? "only llama, qwen2 and qwen3 can"
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

/* The tokenizer. */

/* llama.cpp's name for the way to cut a text into words. NULL: it has none for this tokenizer. */
static const char *find_splitting(const nd_tokenizer *t)
{
    bool known = t->byte_level && !t->prefix_blank && t->metaspace == ND_METASPACE_NONE;
    for (int i = 0; i < t->rewrite_count; i++) {
        known &= t->rewrites[i].compose;
    }
    for (int i = 0; i < t->added_count; i++) {
        known &= !t->added[i].single_word && !t->added[i].lstrip && !t->added[i].rstrip;
    }
    for (int i = 0; known && i < ND_GGUF_SPLITTINGS; i++) {
        const nd_gguf_splitting *way = &nd_gguf_splittings[i];
        if (!t->merges.any ||
            (t->splitter_count == way->count && t->bpe.ignore_merges == way->ignores_merges &&
             t->splitters[0] == way->splitters[0] && t->splitters[1] == way->splitters[1])) {
            return way->name;
        }
    }
    return NULL;
}

/* The id of a token that tokenizer_config.json names; -1: none. */
static int32_t named_token(const nd_gguf_writer *w, const char *key)
{
    const char *name = nd_tokenizer_config_token(w->config, key);
    return name ? nd_tokenizer_find(w->tokenizer, name, strlen(name)) : -1;
}

static nd_status read_tokenizer(nd_gguf_writer *w, const char *path)
{
    char *folder = NULL;
    nd_status status = ND_OK;
    if (!path) {
        return nd_byte_tokenizer_create(&w->tokenizer);
    }
    ND_TRY_OUT(nd_tokenizer_open(path, &w->tokenizer));
    ND_TRY_OUT(nd_fs_parent(path, &folder));
    const char *slash = strrchr(path, '/');
    ND_TRY_OUT(nd_json_read(folder, slash ? slash + 1 : path, 0, &w->json));
    ND_TRY_OUT(nd_tokenizer_config_read(folder, &w->config));
    status = nd_chat_template_read(folder, &w->template);
out:
    free(folder);
    return status;
}

static nd_status open_tokenizer(nd_gguf_writer *w, const nd_gguf_writer_options *options)
{
    ND_TRY(read_tokenizer(w, options->tokenizer));
    const nd_tokenizer *t = w->tokenizer;
    nd_shape *s = &w->shape;
    if (nd_tokenizer_vocab_size(t) > s->vocab) {
        return nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" has %d ids, and the model has %lld",
                       options->name, (int)nd_tokenizer_vocab_size(t), (long long)s->vocab);
    }
    /* What the tokenizer adds to texts counts, whatever config.json says. */
    s->bos_id = t->before_count > 0 ? t->before[0] : s->bos_id;
    s->eos_id = t->behind_count > 0 ? t->behind[0]
                : s->eos_id >= 0    ? s->eos_id
                                    : named_token(w, "eos_token");
    const char *why =
        !find_splitting(t)
            ? "is none of the forms of GPT-2, Llama 3, Qwen 2 and SmolLM, which are written, or "
              "has added tokens with single_word, lstrip or rstrip; convert_hf_to_gguf.py of "
              "llama.cpp reads its folder"
        : t->before_count > 1 || t->behind_count > 1
            ? "adds several tokens before or behind a text; a GGUF file can name one"
        : s->eos_id < 0 ? "names no end of text, and llama.cpp would take another token for it; "
                          "write eos_token_id in config.json (for bytes one that no text holds, "
                          "such as 0), and remove SHA256SUMS, which lists that file as it was"
                        : NULL;
    return why ? nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" %s", options->name, why) : ND_OK;
}

/* Keys, as JSON: integers become U32, reals F32. */

/* A key that begins with a point stands behind the family's name. */
static void set(nd_gguf_writer *w, const char *key, json_t *value)
{
    const char *family = *key == '.' ? nd_families[w->shape.family].model_type : "";
    char name[96];
    snprintf(name, sizeof name, "%s%s", family, key);
    nd_json_set(&w->keys, name, value);
}

/* A number from 0 on; below, there is none. */
static void set_whole(nd_gguf_writer *w, const char *key, int64_t number)
{
    if (number >= 0) {
        set(w, key, json_integer((json_int_t)number));
    }
}

static int kind_of(const nd_tokenizer *t, int32_t id)
{
    for (int i = 0; i < t->added_count; i++) {
        if (t->added[i].id == id) {
            return t->added[i].special ? ND_GGUF_CONTROL : ND_GGUF_USER_DEFINED;
        }
    }
    return nd_tokenizer_token(t, id, &(size_t){0}) ? ND_GGUF_NORMAL : ND_GGUF_UNUSED;
}

static nd_status make_keys(nd_gguf_writer *w, const char *name)
{
    const nd_shape *s = &w->shape;
    const nd_tokenizer *t = w->tokenizer;
    const bool linear = s->rope.type == ND_ROPE_LINEAR;
    const int32_t pad = named_token(w, "pad_token"), turn = named_token(w, "eos_token");
    json_t *tokens = json_array(), *kinds = json_array(), *merges = json_array(), *one;
    size_t i, size;
    for (int32_t id = 0; id < s->vocab; id++) {
        const char *text = nd_tokenizer_token(t, id, &size);
        nd_json_append(&tokens, text ? json_stringn(text, size) : json_sprintf("[PAD%d]", (int)id));
        nd_json_append(&kinds, json_integer(kind_of(t, id)));
    }
    json_array_foreach(json_object_get(json_object_get(w->json, "model"), "merges"), i, one)
    { /* "a b" or ["a", "b"] */
        const char *left = json_string_value(json_array_get(one, 0));
        const char *right = json_string_value(json_array_get(one, 1));
        nd_json_append(&merges,
                       left && right ? json_sprintf("%s %s", left, right) : json_incref(one));
    }
    w->keys = json_pack(
        "{s:s, s:o, s:i, s:i, s:s, s:s, s:s*, s:b, s:b, s:o, s:o, s:o}", "general.architecture",
        nd_families[s->family].model_type, "general.name", nd_json_string(name),
        "general.quantization_version", 2, "general.file_type", nd_gguf_types[w->type].file_type,
        "tokenizer.ggml.model", "gpt2", "tokenizer.ggml.pre", find_splitting(t),
        "tokenizer.chat_template", w->template, "tokenizer.ggml.add_bos_token", t->before_count > 0,
        "tokenizer.ggml.add_eos_token", t->behind_count > 0, "tokenizer.ggml.tokens", tokens,
        "tokenizer.ggml.token_type", kinds, "tokenizer.ggml.merges", merges);
    for (int k = 0; k < ND_GGUF_KEYS; k++) {
        const nd_gguf_key *key = &nd_gguf_keys[k];
        const void *number = (const char *)s + key->place;
        if (key->kind == ND_GGUF_F32) {
            set(w, key->key, json_real(*(const double *)number));
        } else {
            set_whole(w, key->key, *(const int64_t *)number);
        }
    }
    if (linear) {
        set(w, ".rope.scaling.type", json_string("linear"));
        set(w, ".rope.scaling.factor", json_real(s->rope.factor));
    }
    set_whole(w, "tokenizer.ggml.padding_token_id", pad);
    set_whole(w, "tokenizer.ggml.eot_token_id", turn);
    return w->keys ? ND_OK : nd_fail_memory("the head of \"%s\"", w->path);
}

/* The head of the file. */

static void put(nd_gguf_writer *w, uint64_t number, size_t bytes)
{
    fwrite(&number, bytes, 1, w->out);
}

static void put_text(nd_gguf_writer *w, const char *text, size_t size)
{
    put(w, size, 8);
    fwrite(text, 1, size, w->out);
}

/* With its kind, unless it is one of a list. */
static void put_value(nd_gguf_writer *w, const json_t *value, bool listed)
{
    static const int kinds[] = {
        [JSON_ARRAY] = ND_GGUF_ARRAY, [JSON_STRING] = ND_GGUF_TEXT, [JSON_INTEGER] = ND_GGUF_U32,
        [JSON_REAL] = ND_GGUF_F32,    [JSON_TRUE] = ND_GGUF_FLAG,   [JSON_FALSE] = ND_GGUF_FLAG};
    const int kind = kinds[json_typeof(value)];
    const json_t *one = json_array_get(value, 0);
    const float real = (float)json_real_value(value);
    uint64_t bits = json_is_true(value) ? 1 : (uint64_t)json_integer_value(value);
    size_t i;
    put(w, (uint64_t)kind, listed ? 0 : 4);
    if (kind == ND_GGUF_TEXT) {
        put_text(w, json_string_value(value), json_string_length(value));
    } else if (kind == ND_GGUF_ARRAY) {
        put(w, json_is_integer(one) ? ND_GGUF_I32 : ND_GGUF_TEXT, 4);
        put(w, json_array_size(value), 8);
        json_array_foreach(value, i, one)
        {
            put_value(w, one, true);
        }
    } else {
        memcpy(&bits, &real, kind == ND_GGUF_F32 ? sizeof real : 0);
        put(w, bits, kind == ND_GGUF_FLAG ? 1 : 4);
    }
}

static int type_of(const nd_gguf_writer *w, const nd_param *p)
{
    return p->axes == 1                                  ? ND_GGUF_FP32
           : p->cols % nd_gguf_types[w->type].block != 0 ? ND_GGUF_FP16
                                                         : w->type;
}

/* Lists a tensor of rows x cols, or a vector of `rows`; returns its place among the values. */
static uint64_t list_tensor(nd_gguf_writer *w, const char *name, int type, int axes, int64_t rows,
                            int64_t cols)
{
    const nd_gguf_type *t = &nd_gguf_types[type];
    const uint64_t begin = w->end;
    put_text(w, name, strlen(name));
    put(w, (uint64_t)axes, 4); /* then the axis of adjacent elements first */
    put(w, (uint64_t)cols, axes > 1 ? 8 : 0);
    put(w, (uint64_t)rows, 8);
    put(w, (uint64_t)type, 4);
    put(w, begin, 8);
    w->end += nd_round_up_bytes((size_t)(rows * cols / t->block * t->bytes), ND_GGUF_ALIGNMENT);
    return begin;
}

/* A write that failed is tried again here, and says why. */
static nd_status check_written(const nd_gguf_writer *w)
{
    FILE *out = w->out;
    return out && fflush(out) == 0 && !ferror(out)
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", w->path, strerror(errno));
}

static nd_status write_head(nd_gguf_writer *w)
{
    const nd_shape *s = &w->shape;
    const bool factors = s->rope.type == ND_ROPE_LLAMA3;
    const char *key;
    json_t *value;
    char name[ND_PARAM_NAME], *parent = NULL;
    ND_TRY(check_written(w));
    fwrite("GGUF", 1, 4, w->out);
    put(w, VERSION, 4);
    put(w, (uint64_t)w->layout->param_count + factors, 8);
    put(w, json_object_size(w->keys), 8);
    json_object_foreach(w->keys, key, value)
    {
        put_text(w, key, strlen(key));
        put_value(w, value, false);
    }
    if (factors) {
        list_tensor(w, ND_GGUF_FACTORS, 0, 1, s->head_dim / 2, 1);
    }
    for (int i = 0; i < w->layout->param_count; i++) {
        const nd_param *p = &w->layout->params[i];
        nd_gguf_name(p, name);
        w->begins[i] = list_tensor(w, name, type_of(w, p), p->axes, p->rows, p->cols);
        w->left += p->rows * p->cols;
    }
    w->first = nd_round_up_bytes((size_t)ftello(w->out), ND_GGUF_ALIGNMENT);
    fseeko(w->out, (off_t)w->first, SEEK_SET);
    for (int64_t i = 0; factors && i < s->head_dim / 2; i++) {
        const float factor = nd_gguf_factor(&s->rope, s->head_dim, i);
        fwrite(&factor, sizeof factor, 1, w->out);
    }
    ND_TRY(check_written(w));
    ND_TRY(nd_fs_parent(w->path, &parent));
    const nd_status status = nd_fs_check_space(parent, w->end, "the GGUF file");
    w->end += w->first;
    free(parent);
    return status;
}

/* The file. */

nd_status nd_gguf_writer_open(const char *path, const nd_gguf_writer_options *options,
                              nd_gguf_writer **out)
{
    nd_gguf_writer *w = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_exists(path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE, "%s exists; remove it, or give another name", path);
    }
    ND_TRY(check_family(options->shape));
    ND_TRY(ND_ALLOC(1, &w));
    w->shape = *options->shape;
    w->type = options->type;
    ND_TRY_OUT(nd_fs_format(&w->path, "%s", path));
    ND_TRY_OUT(nd_gguf_layout(&w->shape, &w->layout));
    ND_TRY_OUT(ND_ALLOC(w->layout->param_count, &w->begins));
    ND_TRY_OUT(open_tokenizer(w, options));
    ND_TRY_OUT(make_keys(w, options->name));
    ND_TRY_OUT(nd_fs_temporary(path, &w->temporary));
    w->out = nd_fs_stream_new(w->temporary);
    ND_TRY_OUT(write_head(w));
    *out = w;
    w = NULL;
out:
    nd_gguf_writer_abort(w);
    return status;
}

nd_status nd_gguf_writer_write(nd_gguf_writer *w, int param, int64_t begin, int64_t count,
                               const float *values)
{
    const nd_param *p = &w->layout->params[param];
    const nd_gguf_type *type = &nd_gguf_types[type_of(w, p)];
    uint8_t stored[4 * RUN_VALUES];
    bool held = true;
    w->left -= count;
    for (int64_t done = 0, n = 0; done < count; done += n) {
        const int64_t at = begin + done, block = nd_param_in_file(p, at) / type->block;
        n = nd_min(nd_min(nd_param_adjacent(p, at), count - done), RUN_VALUES);
        for (int64_t i = 0; i < n / type->block; i++) {
            held &= type->store(values + done + i * type->block, stored + i * type->bytes);
        }
        fseeko(w->out, (off_t)(w->first + w->begins[param]) + block * type->bytes, SEEK_SET);
        fwrite(stored, (size_t)type->bytes, (size_t)(n / type->block), w->out);
    }
    return held ? check_written(w)
                : nd_fail(ND_ERR_DATA,
                          "the tensor %s has a value that F16 cannot hold; export it as bf16 or "
                          "fp32",
                          p->name);
}

static nd_status finish(nd_gguf_writer *w)
{
    ND_ASSERT(w->left == 0);
    fseeko(w->out, 0, SEEK_END);
    for (uint64_t at = (uint64_t)ftello(w->out); at < w->end; at++) { /* padding */
        fputc(0, w->out);
    }
    ND_TRY(check_written(w));
    ND_TRY(nd_fs_sync_file(w->temporary));
    return nd_fs_rename(w->temporary, w->path);
}

nd_status nd_gguf_writer_commit(nd_gguf_writer *w)
{
    const nd_status status = finish(w);
    nd_gguf_writer_abort(w); /* the temporary name is gone where that went well */
    return status;
}

void nd_gguf_writer_abort(nd_gguf_writer *w)
{
    if (!w) {
        return;
    }
    if (w->out) {
        fclose(w->out);
    }
    if (w->temporary) {
        nd_fs_remove_tree(w->temporary);
    }
    json_decref(w->json);
    json_decref(w->config);
    json_decref(w->keys);
    nd_tokenizer_close(w->tokenizer);
    nd_layout_destroy(w->layout);
    free(w->template);
    free(w->begins);
    free(w->temporary);
    free(w->path);
    free(w);
}
