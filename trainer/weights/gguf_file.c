// SPDX-License-Identifier: Apache-2.0
/* The head of a GGUF file: keys with values, and a list of tensors. */
#include <byteswap.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/weights/gguf.h"

enum { VERSION = 3, VALUES_MAX = 1 << 23, ALIGNMENT = 32 };

/* Kinds of values (gguf_type). */
enum { U32 = 4, I32, F32, FLAG, TEXT, ARRAY, F64 = 12 };

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

/* Bytes as a number; zero behind the end. */
static uint64_t take_number(nd_gguf_head *h, size_t bytes)
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
    const uint64_t bytes = take_number(h, 8);
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
    const uint64_t bits = take_number(h, (size_t)abs(size));
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
    uint64_t kind = take_number(h, 4), count = 0;
    const bool list = kind == ARRAY;
    if (list) {
        kind = take_number(h, 4);
        count = take_number(h, 8);
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
    t->axes = (int)take_number(h, 4);
    for (int i = 0; i < t->axes && i < 2; i++) {
        shape[i] = take_number(h, 8);
    }
    t->number = (int64_t)take_number(h, 4);
    t->begin = take_number(h, 8);
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

/* Tensors lie in the file, and no two share a byte. */
static nd_status place_tensors(nd_gguf_head *h)
{
    const json_t *said = json_object_get(h->keys, "general.alignment");
    const json_int_t alignment = said ? json_integer_value(said) : ALIGNMENT;
    uint64_t end = alignment > 0 && alignment < 1 << 20
                       ? nd_round_up_bytes(h->at, (size_t)alignment)
                       : UINT64_MAX;
    const uint64_t first = end;
    qsort(h->list.tensors, (size_t)h->list.count, sizeof *h->list.tensors, nd_safetensors_by_place);
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

nd_status nd_gguf_take_head(nd_gguf_head *h)
{
    const uint64_t magic = take_number(h, 4);
    const uint32_t version = (uint32_t)take_number(h, 4);
    if (magic != 0x46554747) { /* "GGUF" */
        return nd_gguf_refuse(h, "it is a file, and no GGUF file; a model is one of these, or a "
                                 "folder with config.json");
    }
    if (version != 2 && version != 3) {
        return nd_gguf_refuse(h, "it is of GGUF's version %u%s; 2 and 3 are read", version,
                              bswap_32(version) - 1 < 3 ? ", as its numbers are big-endian" : "");
    }
    const uint64_t tensors = take_number(h, 8);
    for (uint64_t left = take_number(h, 8); left > 0 && !h->cut; left--) {
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

/* Writing. */

static void put_number(FILE *out, uint64_t number, size_t bytes)
{
    fwrite(&number, bytes, 1, out);
}

static void put_text(FILE *out, const char *text, size_t size)
{
    put_number(out, size, 8);
    fwrite(text, 1, size, out);
}

/* With its kind, unless it is one of a list. */
static void put_value(FILE *out, const json_t *value, bool listed)
{
    static const int kinds[] = {[JSON_ARRAY] = ARRAY, [JSON_STRING] = TEXT, [JSON_INTEGER] = U32,
                                [JSON_REAL] = F32,    [JSON_TRUE] = FLAG,   [JSON_FALSE] = FLAG};
    const int kind = kinds[json_typeof(value)];
    const json_t *one = json_array_get(value, 0);
    const float real = (float)json_real_value(value);
    uint64_t bits = json_is_true(value) ? 1 : (uint64_t)json_integer_value(value);
    size_t i;
    put_number(out, (uint64_t)kind, listed ? 0 : 4);
    if (kind == TEXT) {
        put_text(out, json_string_value(value), json_string_length(value));
    } else if (kind == ARRAY) {
        put_number(out, json_is_integer(one) ? I32 : TEXT, 4);
        put_number(out, json_array_size(value), 8);
        json_array_foreach(value, i, one)
        {
            put_value(out, one, true);
        }
    } else {
        memcpy(&bits, &real, kind == F32 ? sizeof real : 0);
        put_number(out, bits, kind == FLAG ? 1 : 4);
    }
}

void nd_gguf_put_head(FILE *out, json_t *keys, nd_safetensors_list *list)
{
    const char *key;
    json_t *value;
    uint64_t at = 0;
    fwrite("GGUF", 1, 4, out);
    put_number(out, VERSION, 4);
    put_number(out, (uint64_t)list->count, 8);
    put_number(out, json_object_size(keys), 8);
    json_object_foreach(keys, key, value)
    {
        put_text(out, key, strlen(key));
        put_value(out, value, false);
    }
    for (int64_t i = 0; i < list->count; i++) {
        nd_safetensors_tensor *t = &list->tensors[i];
        const nd_gguf_type *type = &nd_gguf_types[t->number];
        const int64_t blocks = nd_safetensors_tensor_count(t) / type->block;
        put_text(out, t->name, strlen(t->name));
        put_number(out, (uint64_t)t->axes, 4);
        for (int a = t->axes; a-- > 0;) { /* the axis of adjacent elements first */
            put_number(out, (uint64_t)t->shape[a], 8);
        }
        put_number(out, (uint64_t)t->number, 4);
        put_number(out, at, 8);
        t->begin = at;
        at += nd_round_up_bytes((size_t)(blocks * type->bytes), ALIGNMENT);
    }
    const uint64_t first = nd_round_up_bytes((size_t)ftello(out), ALIGNMENT);
    for (int64_t i = list->count - 1; i >= 0; i--) {
        list->tensors[i].end = first + at;
        at = list->tensors[i].begin;
        list->tensors[i].begin += first;
    }
}
