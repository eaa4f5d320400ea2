// SPDX-License-Identifier: Apache-2.0
#include <byteswap.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/weights/gguf.h"
#include "trainer/weights/weights.h"

enum { VALUES_MAX = 1 << 23, TURNED = 64, FILE_FLAGS = JSON_INDENT(1) | JSON_REAL_PRECISION(9) };

/* A place in the head of a file. */
typedef struct cursor {
    nd_gguf *gguf;
    const uint8_t *at, *end;
    int64_t values; /* of all keys so far */
    bool cut;       /* the file ended before what was to be read */
} cursor;

/* Bytes as a number; zero behind the end. */
static uint64_t take(cursor *c, size_t bytes)
{
    uint64_t number = 0;
    c->cut |= (size_t)(c->end - c->at) < bytes;
    if (!c->cut) {
        memcpy(&number, c->at, bytes);
        c->at += bytes;
    }
    return number;
}

/* A text, lent; an empty one behind the end. */
static const char *take_text(cursor *c, size_t *size)
{
    const uint64_t bytes = take(c, 8);
    const char *text = (const char *)c->at;
    c->cut |= bytes > (uint64_t)(c->end - c->at);
    *size = c->cut ? 0 : (size_t)bytes;
    c->at += *size;
    return text;
}

/* NULL: no such kind, a text that is not UTF-8, no finite number. */
static json_t *take_value(cursor *c, uint64_t kind)
{
    enum { F64 = 12 };
    static const int sizes[] = {1, -1, 2, -2, 4, -4, 4, 1, 0, 0, 8, -8, 8}; /* below 0: signed */
    const int size = kind < sizeof sizes / sizeof *sizes ? sizes[kind] : 0;
    size_t bytes;
    float f32;
    double f64;
    if (kind == ND_GGUF_TEXT) {
        const char *text = take_text(c, &bytes);
        return json_stringn(text, bytes);
    }
    const uint64_t bits = take(c, (size_t)abs(size));
    const int unused = 64 - 8 * abs(size);
    memcpy(&f32, &bits, sizeof f32);
    memcpy(&f64, &bits, sizeof f64);
    return size == 0              ? NULL
           : kind == ND_GGUF_FLAG ? json_boolean(bits != 0)
           : kind == ND_GGUF_F32  ? json_real((double)f32)
           : kind == F64          ? json_real(f64)
           : size < 0             ? json_integer((json_int_t)(bits << unused) >> unused)
                                  : json_integer((json_int_t)bits);
}

/* The value of a key, or a list of values. */
static nd_status take_key(cursor *c)
{
    size_t size;
    char key[256];
    json_t *const keys = c->gguf->keys;
    const char *text = take_text(c, &size);
    uint64_t kind = take(c, 4), count = 0;
    const bool list = kind == ND_GGUF_ARRAY;
    if (list) {
        kind = take(c, 4);
        count = take(c, 8);
    }
    c->cut |= count > (uint64_t)(c->end - c->at);
    snprintf(key, sizeof key, "%.*s", (int)nd_min((int64_t)size, sizeof key), text);
    json_t *value = list ? json_array() : take_value(c, kind);
    for (uint64_t i = 0; i < count && value && !c->cut && c->values < VALUES_MAX; i++) {
        nd_json_append(&value, take_value(c, kind));
        c->values++;
    }
    const bool good = strlen(key) == size && !json_object_get(keys, key) &&
                      c->values < VALUES_MAX && json_object_set(keys, key, value) == 0;
    json_decref(value);
    return good || c->cut
               ? ND_OK
               : nd_gguf_refuse(c->gguf,
                                "the key %s is there twice, or no number, text in UTF-8 or "
                                "list of them, or one of too many values",
                                key);
}

/* A tensor by llama.cpp's name; its place counts from that of the first one. */
static nd_status take_tensor(cursor *c, nd_safetensors_tensor *t)
{
    size_t size;
    uint64_t shape[2] = {1, 1}; /* the axis of adjacent elements first */
    const char *text = take_text(c, &size);
    ND_TRY(nd_fs_format(&t->name, "%.*s", (int)nd_min((int64_t)size, 64), text));
    t->axes = (int)take(c, 4);
    for (int i = 0; i < t->axes && i < 2; i++) {
        shape[i] = take(c, 8);
    }
    t->number = (int64_t)take(c, 4);
    t->begin = take(c, 8);
    const nd_gguf_type *type = t->number < ND_GGUF_TYPES ? &nd_gguf_types[t->number] : NULL;
    if (c->cut || strlen(t->name) != size || t->axes < 1 || t->axes > 2 ||
        shape[0] - 1 >= INT32_MAX || shape[1] - 1 >= INT32_MAX) {
        return c->cut ? ND_OK
                      : nd_gguf_refuse(c->gguf, "its tensor \"%s\" is neither vector nor matrix",
                                       t->name);
    }
    if (!type || type->bytes == 0 || shape[0] % (uint64_t)type->block != 0) {
        return nd_gguf_refuse(c->gguf,
                              "its tensor %s is of the type %s (%lld), or has rows that are no "
                              "blocks of it; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K are "
                              "read",
                              t->name, nd_gguf_type_name(t->number), (long long)t->number);
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
static nd_status place_tensors(cursor *c)
{
    nd_gguf *g = c->gguf;
    const json_t *said = json_object_get(g->keys, "general.alignment");
    const json_int_t alignment = said ? json_integer_value(said) : ND_GGUF_ALIGNMENT;
    const size_t head = (size_t)(c->at - g->map.data);
    uint64_t end = alignment > 0 && alignment < 1 << 20 ? nd_round_up_bytes(head, (size_t)alignment)
                                                        : UINT64_MAX;
    const uint64_t first = end;
    qsort(g->list.tensors, (size_t)g->list.count, sizeof *g->list.tensors, by_place);
    for (int64_t i = 0; i < g->list.count; i++) {
        nd_safetensors_tensor *t = &g->list.tensors[i];
        const bool inside = first <= g->map.size && t->begin <= g->map.size - first &&
                            t->end <= g->map.size - first - t->begin;
        if (!inside || first + t->begin < end) {
            return nd_gguf_refuse(g, "its tensor %s %s", t->name,
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

static nd_status take_head(nd_gguf *g)
{
    static const uint8_t nothing[1];
    const uint8_t *data = g->map.size > 0 ? g->map.data : nothing; /* an empty file has no map */
    cursor c = {.gguf = g, .at = data, .end = data + g->map.size};
    const uint64_t magic = take(&c, 4);
    const uint32_t version = (uint32_t)take(&c, 4);
    if (magic != 0x46554747) { /* "GGUF" */
        return nd_gguf_refuse(g, "it is a file, and no GGUF file; a model is one of these, or a "
                                 "folder with config.json");
    }
    if (version != 2 && version != 3) {
        return nd_gguf_refuse(g, "it is of GGUF's version %u%s; 2 and 3 are read", version,
                              bswap_32(version) - 1 < 3 ? ", as its numbers are big-endian" : "");
    }
    const uint64_t tensors = take(&c, 8);
    for (uint64_t left = take(&c, 8); left > 0 && !c.cut; left--) {
        ND_TRY(take_key(&c));
    }
    c.cut |= tensors > (uint64_t)(c.end - c.at) / 32; /* bytes of a tensor's entry at least */
    ND_TRY(c.cut ? ND_OK : ND_ALLOC(tensors + 1, &g->list.tensors));
    while (!c.cut && g->list.count < (int64_t)tensors) {
        ND_TRY(take_tensor(&c, &g->list.tensors[g->list.count++]));
    }
    return c.cut ? nd_gguf_refuse(g, "it ends within its head: it was cut off; copy it again")
                 : place_tensors(&c);
}

/* A tensor that is there gets another name and number, and the type as which it is read: one that
 * has the name of a model folder from the beginning stays without. */
static nd_status rename_tensor(nd_gguf *g, const char *from, const char *to, int64_t number)
{
    nd_safetensors_tensor *t = (nd_safetensors_tensor *)nd_safetensors_list_find(&g->list, from);
    if (!t) {
        return ND_OK;
    }
    t->number += number;
    t->dtype = ND_SAFETENSORS_F32;
    free(t->name);
    t->name = NULL;
    return nd_fs_format(&t->name, "%s", to);
}

/* What is the same in all models that are computed here. */
static nd_status check_heads(const nd_gguf *g)
{
    for (int i = 0; i < ND_GGUF_KEYS; i++) {
        const nd_gguf_key *k = &nd_gguf_keys[i];
        const json_t *said = k->config ? NULL : nd_gguf_get(g, k->key);
        if (said && json_integer_value(said) != g->shape.head_dim) {
            return nd_gguf_refuse(g, "its key %s is %lld; only %lld, as its heads have, is read",
                                  k->key + 1, (long long)json_integer_value(said),
                                  (long long)g->shape.head_dim);
        }
    }
    return ND_OK;
}

/* Tensors get the names that they have in a model folder; what no model has keeps its own. */
static nd_status name_tensors(nd_gguf *g)
{
    nd_layout *layout = NULL;
    char *text = nd_json_text(json_object_get(g->files, "config.json"), FILE_FLAGS);
    nd_status status = text ? nd_shape_parse(text, strlen(text), g->path, &g->shape)
                            : nd_fail_memory("%s", g->path);
    free(text);
    ND_TRY(status);
    ND_TRY(check_heads(g));
    ND_TRY(nd_gguf_layout(&g->shape, &layout));
    for (int i = 0; i < layout->param_count && status == ND_OK; i++) {
        const nd_param *p = &layout->params[i];
        char name[ND_PARAM_NAME];
        nd_gguf_name(p, name);
        status = rename_tensor(g, name, p->file_name, p->paired > 0 ? TURNED : 0);
    }
    nd_layout_destroy(layout);
    return status == ND_OK ? rename_tensor(g, ND_GGUF_FACTORS, "rotary_emb.inv_freq", 0) : status;
}

/* Under nd_fs_map_guard: all that lasts hangs at the context. */
static nd_status read_head(void *context)
{
    ND_TRY(take_head(context));
    return nd_gguf_make_files(context);
}

nd_status nd_gguf_open(const char *path, nd_gguf **out)
{
    nd_gguf *g = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &g));
    g->keys = json_object();
    g->files = json_object();
    ND_TRY_OUT(nd_fs_format(&g->path, "%s", path));
    ND_TRY_OUT(nd_fs_map_open(path, ND_ERR_DATA, &g->map));
    ND_TRY_OUT(nd_fs_map_guard(&g->map, path, read_head, g));
    ND_TRY_OUT(name_tensors(g));
    json_decref(g->keys); /* a vocabulary takes some 50 MB */
    g->keys = NULL;
    *out = g;
    g = NULL;
out:
    nd_gguf_close(g);
    return status;
}

void nd_gguf_close(nd_gguf *g)
{
    if (g) {
        json_decref(g->keys);
        json_decref(g->files);
        nd_safetensors_list_fini(&g->list);
        nd_fs_map_close(&g->map);
        free(g->path);
        free(g);
    }
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

nd_status nd_gguf_make_folder(nd_gguf *g, char **out)
{
    char hex[65], *cache = NULL, *folder = NULL, *text = nd_json_text(g->files, FILE_FLAGS);
    const char *name;
    json_t *file;
    nd_status status = text ? nd_sha256(text, strlen(text), hex) : nd_fail_memory("%s", g->path);
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_token_cache_folder("", &cache));
    ND_TRY_OUT(nd_fs_format(&folder, "%s/%.32s.model", cache, hex));
    ND_TRY_OUT(nd_fs_make_folders(folder, "the folder of the model's tokenizer",
                                  "set XDG_CACHE_HOME to a folder that can be written"));
    json_object_foreach(g->files, name, file)
    {
        ND_TRY_OUT(make_file(folder, name, file));
    }
    json_decref(g->files);
    g->files = NULL;
    *out = folder;
    folder = NULL;
out:
    free(text);
    free(folder);
    free(cache);
    return status;
}

/* Values. */

typedef struct values {
    const uint8_t *data; /* of the tensor */
    const nd_gguf_type *type;
    nd_param param; /* for the places of its elements */
    int64_t begin, count;
    float *out;
} values;

/* Elements from `place` on, adjacent in the file. */
static void load_run(const values *v, int64_t place, int64_t count, float *out)
{
    const nd_gguf_type *type = v->type;
    float part[ND_GGUF_BLOCK_MAX];
    for (int64_t n = 0; count > 0; count -= n, place += n, out += n) {
        const int64_t at = place % type->block;
        n = nd_min(count, type->block - at);
        type->load(v->data + place / type->block * type->bytes, n < type->block ? part : out);
        if (n < type->block) {
            memcpy(out, part + at, (size_t)n * sizeof *part);
        }
    }
}

static nd_status load(void *context)
{
    const values *v = context;
    int64_t n = 0;
    for (int64_t done = 0; done < v->count; done += n) {
        const int64_t at = v->begin + done;
        n = nd_min(nd_param_adjacent(&v->param, at), v->count - done);
        load_run(v, nd_param_in_file(&v->param, at), n, v->out + done);
    }
    return ND_OK;
}

nd_status nd_gguf_read(const nd_gguf *g, const nd_safetensors_tensor *t, int64_t begin,
                       int64_t count, float *out)
{
    const int64_t turned = t->number >= TURNED ? g->shape.head_dim : 0;
    values v = {.data = g->map.data + t->begin,
                .type = &nd_gguf_types[t->number % TURNED],
                .param = {.rows = t->shape[0], .paired = turned, .head_rows = turned},
                .begin = begin,
                .count = count,
                .out = out};
    v.param.cols = t->axes > 1 ? t->shape[1] : 1;
    return nd_fs_map_guard(&g->map, g->path, load, &v);
}
