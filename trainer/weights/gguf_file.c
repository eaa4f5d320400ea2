// SPDX-License-Identifier: Apache-2.0
/* GGUF files: keys with values, a list of tensors, and the values of these. */
#include <byteswap.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/weights/gguf.h"

enum { VERSION = 3, VALUES_MAX = 1 << 23, RUN_VALUES = 8192, ALIGNMENT = 32 };
enum { FILE_FLAGS = JSON_INDENT(1) | JSON_REAL_PRECISION(9) };

/* Kinds of values (gguf_type). */
enum { U32 = 4, I32, F32, FLAG, TEXT, ARRAY, F64 = 12 };

/* Reading. */

/* Bytes as a number; zero behind the end. */
static uint64_t take(nd_gguf_head *h, size_t bytes)
{
    uint64_t number = 0;
    h->cut |= h->map.size - h->at < bytes;
    if (!h->cut) {
        memcpy(&number, h->map.data + h->at, bytes);
        h->at += bytes;
    }
    return number;
}

/* A text, lent; an empty one behind the end. */
static const char *take_text(nd_gguf_head *h, size_t *size)
{
    const uint64_t bytes = take(h, 8);
    h->cut |= bytes > h->map.size - h->at;
    *size = h->cut ? 0 : (size_t)bytes;
    h->at += *size;
    return *size > 0 ? (const char *)h->map.data + h->at - *size : "";
}

/* NULL: no such kind, a text that is not UTF-8, no finite number. */
static json_t *take_value(nd_gguf_head *h, uint64_t kind)
{
    static const int sizes[] = {1, -1, 2, -2, 4, -4, 4, 1, 0, 0, 8, -8, 8}; /* below 0: signed */
    const int size = kind < sizeof sizes / sizeof *sizes ? sizes[kind] : 0;
    size_t bytes;
    float f32;
    double f64;
    if (kind == TEXT) {
        const char *text = take_text(h, &bytes);
        return json_stringn(text, bytes);
    }
    const uint64_t bits = take(h, (size_t)abs(size));
    const int unused = 64 - 8 * abs(size);
    memcpy(&f32, &bits, sizeof f32);
    memcpy(&f64, &bits, sizeof f64);
    return size == 0      ? NULL
           : kind == FLAG ? json_boolean(bits != 0)
           : kind == F32  ? json_real((double)f32)
           : kind == F64  ? json_real(f64)
           : size < 0     ? json_integer((json_int_t)(bits << unused) >> unused)
                          : json_integer((json_int_t)bits);
}

/* The value of a key, or a list of values. */
static nd_status take_key(nd_gguf_head *h)
{
    size_t size;
    char key[256];
    const char *text = take_text(h, &size);
    uint64_t kind = take(h, 4), count = 0;
    const bool list = kind == ARRAY;
    if (list) {
        kind = take(h, 4);
        count = take(h, 8);
    }
    h->cut |= count > h->map.size - h->at;
    snprintf(key, sizeof key, "%.*s", (int)nd_min((int64_t)size, sizeof key), text);
    json_t *value = list ? json_array() : take_value(h, kind);
    for (uint64_t i = 0; i < count && value && !h->cut && h->values < VALUES_MAX; i++) {
        nd_json_append(&value, take_value(h, kind));
        h->values++;
    }
    const bool good = strlen(key) == size && !json_object_get(h->keys, key) &&
                      h->values < VALUES_MAX && json_object_set(h->keys, key, value) == 0;
    json_decref(value);
    return good || h->cut
               ? ND_OK
               : nd_gguf_refuse(h,
                                "the key %s is there twice, or no number, text in UTF-8 or "
                                "list of them, or one of too many values",
                                key);
}

/* A tensor by llama.cpp's name; its place counts from that of the first one. */
static nd_status take_tensor(nd_gguf_head *h, nd_safetensors_tensor *t)
{
    static const char *const names[] = {
        [0] = "F32",     [1] = "F16",      [2] = "Q4_0",   [3] = "Q4_1",    [6] = "Q5_0",
        [7] = "Q5_1",    [8] = "Q8_0",     [9] = "Q8_1",   [10] = "Q2_K",   [11] = "Q3_K",
        [12] = "Q4_K",   [13] = "Q5_K",    [14] = "Q6_K",  [15] = "Q8_K",   [16] = "IQ2_XXS",
        [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",
        [22] = "IQ2_S",  [23] = "IQ4_XS",  [28] = "F64",   [29] = "IQ1_M",  [30] = "BF16",
        [34] = "TQ1_0",  [35] = "TQ2_0",   [39] = "MXFP4", [40] = NULL};
    size_t size;
    uint64_t shape[2] = {1, 1}; /* the axis of adjacent elements first */
    const char *text = take_text(h, &size);
    ND_TRY(nd_fs_format(&t->name, "%.*s", (int)nd_min((int64_t)size, 64), text));
    t->axes = (int)take(h, 4);
    for (int i = 0; i < t->axes && i < 2; i++) {
        shape[i] = take(h, 8);
    }
    t->number = (int64_t)take(h, 4);
    t->begin = take(h, 8);
    const nd_gguf_type *type = t->number < ND_GGUF_TYPES ? &nd_gguf_types[t->number] : NULL;
    if (h->cut || strlen(t->name) != size || t->axes < 1 || t->axes > 2 ||
        shape[0] - 1 >= INT32_MAX || shape[1] - 1 >= INT32_MAX) {
        return h->cut
                   ? ND_OK
                   : nd_gguf_refuse(h, "its tensor \"%s\" is neither vector nor matrix", t->name);
    }
    if (!type || type->bytes == 0 || shape[0] % (uint64_t)type->block != 0) {
        const char *name = names[nd_min(t->number, 40)];
        return nd_gguf_refuse(h,
                              "its tensor %s is of the type %s (%lld), or has rows that are no "
                              "blocks of it; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K are "
                              "read",
                              t->name, name ? name : "unknown", (long long)t->number);
    }
    t->shape[0] = (int64_t)shape[t->axes - 1];
    t->shape[1] = (int64_t)shape[0];
    t->end = shape[0] * shape[1] / (uint64_t)type->block * (uint64_t)type->bytes;
    return ND_OK;
}

static int by_place(const void *a, const void *b)
{
    const nd_safetensors_tensor *const x = a, *const y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Tensors lie in the file, and no two share a byte. */
static nd_status place_tensors(nd_gguf_head *h)
{
    const json_t *said = json_object_get(h->keys, "general.alignment");
    const json_int_t alignment = said ? json_integer_value(said) : ALIGNMENT;
    uint64_t end = alignment > 0 && alignment < 1 << 20
                       ? nd_round_up_bytes(h->at, (size_t)alignment)
                       : UINT64_MAX;
    const uint64_t first = end;
    qsort(h->list.tensors, (size_t)h->list.count, sizeof *h->list.tensors, by_place);
    for (int64_t i = 0; i < h->list.count; i++) {
        nd_safetensors_tensor *t = &h->list.tensors[i];
        const bool inside = first <= h->map.size && t->begin <= h->map.size - first &&
                            t->end <= h->map.size - first - t->begin;
        if (!inside || first + t->begin < end) {
            return nd_gguf_refuse(h, "its tensor %s %s", t->name,
                                  inside
                                      ? "overlaps the one before it; the file is damaged"
                                      : "ends behind the file, which was cut off; copy it again");
        }
        t->begin += first;
        t->end += t->begin;
        end = t->end;
    }
    return ND_OK;
}

static nd_status take_head(nd_gguf_head *h)
{
    const uint64_t magic = take(h, 4);
    const uint32_t version = (uint32_t)take(h, 4);
    if (magic != 0x46554747) { /* "GGUF" */
        return nd_gguf_refuse(h, "it is a file, and no GGUF file; a model is one of these, or a "
                                 "folder with config.json");
    }
    if (version != 2 && version != 3) {
        return nd_gguf_refuse(h, "it is of GGUF's version %u%s; 2 and 3 are read", version,
                              bswap_32(version) - 1 < 3 ? ", as its numbers are big-endian" : "");
    }
    const uint64_t tensors = take(h, 8);
    for (uint64_t left = take(h, 8); left > 0 && !h->cut; left--) {
        ND_TRY(take_key(h));
    }
    h->cut |= tensors > (h->map.size - h->at) / 32; /* bytes of a tensor's entry at least */
    ND_TRY(h->cut ? ND_OK : ND_ALLOC(tensors + 1, &h->list.tensors));
    while (!h->cut && h->list.count < (int64_t)tensors) {
        ND_TRY(take_tensor(h, &h->list.tensors[h->list.count++]));
    }
    return h->cut ? nd_gguf_refuse(h, "it ends within its head: it was cut off; copy it again")
                  : place_tensors(h);
}

/* A tensor that is there gets another name and number, and the type as which it is read: one that
 * has the name of a model folder from the beginning stays without. */
static nd_status rename_tensor(nd_gguf_head *h, const char *from, const char *to, int64_t number)
{
    nd_safetensors_tensor *t = (nd_safetensors_tensor *)nd_safetensors_list_find(&h->list, from);
    if (!t) {
        return ND_OK;
    }
    t->number += number;
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
    ND_TRY(nd_gguf_check_keys(h, shape));
    ND_TRY(nd_gguf_layout(shape, &layout));
    for (int i = 0; i < layout->param_count && status == ND_OK; i++) {
        const nd_param *p = &layout->params[i];
        char name[ND_PARAM_NAME];
        nd_gguf_name(p, name);
        status = rename_tensor(h, name, p->file_name, p->paired > 0 ? ND_GGUF_TURNED : 0);
    }
    nd_layout_destroy(layout);
    return status == ND_OK ? rename_tensor(h, ND_GGUF_FACTORS, "rotary_emb.inv_freq", 0) : status;
}

/* Under nd_fs_map_guard: all that lasts hangs at the context. */
static nd_status read_head(void *context)
{
    ND_TRY(take_head(context));
    ND_TRY(nd_gguf_read_config(context));
    return nd_gguf_read_tokenizer(context);
}

/* A file that has this text stays; anything else under its name is replaced. */
static nd_status make_file(const char *folder, const char *name, const json_t *file)
{
    char *path = NULL, *there = NULL, *text = nd_json_text(file, FILE_FLAGS);
    size_t size;
    nd_status status =
        text ? nd_fs_format(&path, "%s/%s", folder, name) : nd_fail_memory("%s", name);
    ND_TRY_OUT(status);
    status = nd_fs_read(path, strlen(text), ND_ERR_DATA, &there, &size);
    if (status == ND_ERR_DATA || (status == ND_OK && strcmp(there, text) != 0)) {
        nd_error_clear();
        status = nd_fs_write_atomic(path, text, strlen(text));
    }
out:
    free(there);
    free(text);
    free(path);
    return status;
}

static nd_status make_folder(const nd_gguf_head *h, char **out)
{
    char hex[65], *cache = NULL, *folder = NULL, *text = nd_json_text(h->files, FILE_FLAGS);
    const char *name;
    json_t *file;
    nd_status status = text ? nd_sha256(text, strlen(text), hex) : nd_fail_memory("%s", h->path);
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_token_cache_folder("", &cache));
    ND_TRY_OUT(nd_fs_format(&folder, "%s/%.32s.model", cache, hex));
    ND_TRY_OUT(nd_fs_make_folders(folder, "the folder of the model's tokenizer",
                                  "set XDG_CACHE_HOME to a folder that can be written"));
    json_object_foreach(h->files, name, file)
    {
        ND_TRY_OUT(make_file(folder, name, file));
    }
    *out = folder;
    folder = NULL;
out:
    free(text);
    free(folder);
    free(cache);
    return status;
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

struct nd_gguf_writer {
    FILE *out; /* a failure shows in ferror */
    const char *path;
    nd_layout *layout;
    int type;         /* ggml_type of matrices */
    uint64_t *begins; /* [layout->param_count]: places of tensors behind the first one's */
    uint64_t first;   /* the place of that */
    uint64_t end;     /* of the file */
    int64_t left;     /* elements that are not written yet */
};

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
    static const int kinds[] = {[JSON_ARRAY] = ARRAY, [JSON_STRING] = TEXT, [JSON_INTEGER] = U32,
                                [JSON_REAL] = F32,    [JSON_TRUE] = FLAG,   [JSON_FALSE] = FLAG};
    const int kind = kinds[json_typeof(value)];
    const json_t *one = json_array_get(value, 0);
    const float real = (float)json_real_value(value);
    uint64_t bits = json_is_true(value) ? 1 : (uint64_t)json_integer_value(value);
    size_t i;
    put(w, (uint64_t)kind, listed ? 0 : 4);
    if (kind == TEXT) {
        put_text(w, json_string_value(value), json_string_length(value));
    } else if (kind == ARRAY) {
        put(w, json_is_integer(one) ? I32 : TEXT, 4);
        put(w, json_array_size(value), 8);
        json_array_foreach(value, i, one)
        {
            put_value(w, one, true);
        }
    } else {
        memcpy(&bits, &real, kind == F32 ? sizeof real : 0);
        put(w, bits, kind == FLAG ? 1 : 4);
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
    w->end += nd_round_up_bytes((size_t)(rows * cols / t->block * t->bytes), ALIGNMENT);
    return begin;
}

static void write_head(nd_gguf_writer *w, const nd_shape *s, json_t *keys)
{
    const bool factors = s->rope.type == ND_ROPE_LLAMA3;
    const char *key;
    json_t *value;
    fwrite("GGUF", 1, 4, w->out);
    put(w, VERSION, 4);
    put(w, (uint64_t)w->layout->param_count + factors, 8);
    put(w, json_object_size(keys), 8);
    json_object_foreach(keys, key, value)
    {
        put_text(w, key, strlen(key));
        put_value(w, value, false);
    }
    if (factors) {
        list_tensor(w, ND_GGUF_FACTORS, 0, 1, s->head_dim / 2, 1);
    }
    for (int i = 0; i < w->layout->param_count; i++) {
        const nd_param *p = &w->layout->params[i];
        char name[ND_PARAM_NAME];
        nd_gguf_name(p, name);
        w->begins[i] = list_tensor(w, name, type_of(w, p), p->axes, p->rows, p->cols);
        w->left += p->rows * p->cols;
    }
    w->first = nd_round_up_bytes((size_t)ftello(w->out), ALIGNMENT);
    w->end += w->first;
    fseeko(w->out, (off_t)w->first, SEEK_SET);
    for (int64_t i = 0; factors && i < s->head_dim / 2; i++) {
        const float factor = nd_gguf_factor(&s->rope, s->head_dim, i);
        fwrite(&factor, sizeof factor, 1, w->out);
    }
}

/* A write that failed is tried again here, and says why. */
static nd_status check_written(const nd_gguf_writer *w)
{
    return w->out && fflush(w->out) == 0 && !ferror(w->out)
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", w->path, strerror(errno));
}

nd_status nd_gguf_write_rows(nd_gguf_writer *w, const char *name, int64_t begin, int64_t count,
                             const float *values)
{
    const nd_param *p = w->layout->params;
    while (strcmp(p->name, name) != 0) {
        p++;
    }
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
        fseeko(w->out, (off_t)(w->first + w->begins[p - w->layout->params]) + block * type->bytes,
               SEEK_SET);
        fwrite(stored, (size_t)type->bytes, (size_t)(n / type->block), w->out);
    }
    return held ? check_written(w)
                : nd_fail(ND_ERR_DATA,
                          "the tensor %s has a value that F16 cannot hold; export it as bf16 or "
                          "fp32",
                          p->name);
}

nd_status nd_gguf_write(const char *path, const nd_gguf_options *options,
                        nd_status (*fill)(void *context, nd_gguf_writer *writer), void *context)
{
    nd_gguf_writer w = {.path = path, .type = options->type};
    json_t *keys = NULL;
    char *parent = NULL, *temporary = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_exists(path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE, "%s exists; remove it, or give another name", path);
    }
    ND_TRY(nd_gguf_check_shape(options->shape));
    ND_TRY_OUT(nd_gguf_layout(options->shape, &w.layout));
    ND_TRY_OUT(ND_ALLOC(w.layout->param_count, &w.begins));
    ND_TRY_OUT(nd_gguf_make_keys(options, &keys));
    ND_TRY_OUT(keys ? nd_fs_temporary(path, &temporary)
                    : nd_fail_memory("the head of \"%s\"", path));
    ND_TRY_OUT(nd_fs_parent(path, &parent));
    w.out = nd_fs_stream_new(temporary);
    ND_TRY_OUT(check_written(&w));
    write_head(&w, options->shape, keys);
    ND_TRY_OUT(check_written(&w));
    ND_TRY_OUT(nd_fs_check_space(parent, w.end, "the GGUF file"));
    ND_TRY_OUT(fill(context, &w));
    ND_ASSERT(w.left == 0);
    fseeko(w.out, 0, SEEK_END);
    for (uint64_t at = (uint64_t)ftello(w.out); at < w.end; at++) { /* padding */
        fputc(0, w.out);
    }
    ND_TRY_OUT(check_written(&w));
    ND_TRY_OUT(nd_fs_sync_file(temporary));
    status = nd_fs_rename(temporary, path);
out:
    if (w.out) {
        fclose(w.out);
        nd_fs_remove_tree(temporary); /* where all went well nothing has that name */
    }
    nd_layout_destroy(w.layout);
    json_decref(keys);
    free(w.begins);
    free(temporary);
    free(parent);
    return status;
}
