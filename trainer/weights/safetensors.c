// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/safetensors.h"

#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/tensor/dtype.h"

static const struct {
    const char *name;
    int bits;
} dtypes[ND_SAFETENSORS_DTYPE_COUNT] = {
    [ND_SAFETENSORS_BOOL] = {"BOOL", 8},
    [ND_SAFETENSORS_F4] = {"F4", 4},
    [ND_SAFETENSORS_F6_E2M3] = {"F6_E2M3", 6},
    [ND_SAFETENSORS_F6_E3M2] = {"F6_E3M2", 6},
    [ND_SAFETENSORS_U8] = {"U8", 8},
    [ND_SAFETENSORS_I8] = {"I8", 8},
    [ND_SAFETENSORS_F8_E5M2] = {"F8_E5M2", 8},
    [ND_SAFETENSORS_F8_E4M3] = {"F8_E4M3", 8},
    [ND_SAFETENSORS_F8_E8M0] = {"F8_E8M0", 8},
    [ND_SAFETENSORS_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [ND_SAFETENSORS_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [ND_SAFETENSORS_I16] = {"I16", 16},
    [ND_SAFETENSORS_U16] = {"U16", 16},
    [ND_SAFETENSORS_F16] = {"F16", 16},
    [ND_SAFETENSORS_BF16] = {"BF16", 16},
    [ND_SAFETENSORS_I32] = {"I32", 32},
    [ND_SAFETENSORS_U32] = {"U32", 32},
    [ND_SAFETENSORS_F32] = {"F32", 32},
    [ND_SAFETENSORS_C64] = {"C64", 64},
    [ND_SAFETENSORS_F64] = {"F64", 64},
    [ND_SAFETENSORS_I64] = {"I64", 64},
    [ND_SAFETENSORS_U64] = {"U64", 64},
};

const char *nd_safetensors_dtype_name(nd_safetensors_dtype dtype)
{
    return dtypes[dtype].name;
}

int nd_safetensors_dtype_bits(nd_safetensors_dtype dtype)
{
    return dtypes[dtype].bits;
}

void nd_safetensors_list_fini(nd_safetensors_list *list)
{
    for (int64_t i = 0; i < list->count; i++) {
        free(list->tensors[i].name);
        free(list->tensors[i].note);
    }
    free(list->tensors);
    *list = (nd_safetensors_list){0};
}

const nd_safetensors_tensor *nd_safetensors_list_find(const nd_safetensors_list *list,
                                                      const char *name)
{
    for (int64_t i = 0; i < list->count; i++) {
        if (strcmp(list->tensors[i].name, name) == 0) {
            return &list->tensors[i];
        }
    }
    return NULL;
}

int64_t nd_safetensors_tensor_count(const nd_safetensors_tensor *tensor)
{
    int64_t n = 1;
    for (int a = 0; a < tensor->axes; a++) {
        n *= tensor->shape[a];
    }
    return n;
}

static nd_status parse_dtype(const char *path, const char *name, const json_t *value,
                             nd_safetensors_dtype *out)
{
    const char *text = json_string_value(value);
    for (int d = 0; text && d < ND_SAFETENSORS_DTYPE_COUNT; d++) {
        if (strcmp(text, dtypes[d].name) == 0) {
            *out = (nd_safetensors_dtype)d;
            return ND_OK;
        }
    }
    return nd_fail(ND_ERR_DATA, "\"%s\": tensor \"%.200s\" has %s dtype%s%.40s%s", path, name,
                   text ? "the unknown" : "no", text ? " \"" : "", text ? text : "",
                   text ? "\"" : "");
}

static nd_status parse_shape(const char *path, nd_safetensors_tensor *tensor, const json_t *value,
                             uint64_t *bytes)
{
    if (!json_is_array(value) || json_array_size(value) > ND_SAFETENSORS_AXES_MAX) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the shape of tensor \"%.200s\" is not a list of at most %d "
                       "numbers",
                       path, tensor->name, ND_SAFETENSORS_AXES_MAX);
    }
    uint64_t bits = (uint64_t)dtypes[tensor->dtype].bits;
    bool overflow = false;
    tensor->axes = (int)json_array_size(value);
    for (int a = 0; a < tensor->axes; a++) {
        const json_t *extent = json_array_get(value, (size_t)a);
        json_int_t n = json_integer_value(extent);
        if (!json_is_integer(extent) || n < 0) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": the shape of tensor \"%.200s\" has an extent that is "
                           "not a natural number",
                           path, tensor->name);
        }
        tensor->shape[a] = n;
        overflow |= __builtin_mul_overflow(bits, (uint64_t)n, &bits);
    }
    if (overflow || bits % 8 != 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\": the shape of tensor \"%.200s\" gives %s", path,
                       tensor->name, overflow ? "more than 2^64 bits" : "no whole number of bytes");
    }
    *bytes = bits / 8;
    return ND_OK;
}

/* Offsets in the header count from `data`, the first byte after it; makes them absolute. */
static nd_status parse_offsets(const char *path, nd_safetensors_tensor *tensor, const json_t *value,
                               uint64_t bytes, uint64_t data)
{
    const json_t *first = json_array_get(value, 0), *last = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(first) || !json_is_integer(last) ||
        json_integer_value(first) < 0 || json_integer_value(last) < json_integer_value(first)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": data_offsets of tensor \"%.200s\" are not two rising "
                       "numbers",
                       path, tensor->name);
    }
    uint64_t begin = (uint64_t)json_integer_value(first), end = (uint64_t)json_integer_value(last);
    if (end - begin != bytes) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": tensor \"%.200s\" has %llu bytes by its data_offsets, but "
                       "%llu by its shape and dtype",
                       path, tensor->name, (unsigned long long)(end - begin),
                       (unsigned long long)bytes);
    }
    tensor->begin = data + begin; /* below 2^63 + 2^27 */
    tensor->end = data + end;
    return ND_OK;
}

static nd_status parse_tensor(const char *path, const char *name, const json_t *value,
                              uint64_t data, nd_safetensors_tensor *tensor)
{
    if (!json_is_object(value)) {
        return nd_fail(ND_ERR_DATA, "\"%s\": the entry of tensor \"%.200s\" is not an object", path,
                       name);
    }
    uint64_t bytes = 0;
    ND_TRY(parse_dtype(path, name, json_object_get(value, "dtype"), &tensor->dtype));
    ND_TRY(parse_shape(path, tensor, json_object_get(value, "shape"), &bytes));
    return parse_offsets(path, tensor, json_object_get(value, "data_offsets"), bytes, data);
}

int nd_safetensors_by_place(const void *a, const void *b)
{
    const nd_safetensors_tensor *x = a, *y = b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
                                : (x->end > y->end) - (x->end < y->end);
}

static nd_status check_chain(const nd_safetensors_list *list, uint64_t data, uint64_t file_bytes,
                             const char *path)
{
    uint64_t end = data;
    for (int64_t i = 0; i < list->count; i++) {
        const nd_safetensors_tensor *t = &list->tensors[i];
        if (t->begin != end) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": tensor \"%.200s\" begins at byte %llu, %s byte %llu "
                           "where the one before it ends: the tensors %s",
                           path, t->name, (unsigned long long)t->begin,
                           t->begin < end ? "before" : "after", (unsigned long long)end,
                           t->begin < end ? "overlap" : "leave a hole");
        }
        end = t->end;
    }
    if (end != file_bytes) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has %llu bytes, but its tensors end at byte %llu: %s",
                       path, (unsigned long long)file_bytes, (unsigned long long)end,
                       end > file_bytes ? "it is truncated; copy or download it again"
                                        : "something was appended to it");
    }
    return ND_OK;
}

static nd_status check_metadata(const char *path, const json_t *metadata)
{
    const char *key;
    json_t *value;
    bool good = json_is_object(metadata);
    json_object_foreach((json_t *)metadata, key, value)
    {
        good = good && json_is_string(value);
    }
    return good ? ND_OK
                : nd_fail(ND_ERR_DATA, "\"%s\": __metadata__ is not an object of strings", path);
}

static nd_status parse_entries(json_t *root, uint64_t data, const char *path,
                               nd_safetensors_list *list)
{
    const json_t *metadata = json_object_get(root, "__metadata__");
    const char *name;
    json_t *value;
    ND_TRY(metadata ? check_metadata(path, metadata) : ND_OK);
    ND_TRY(ND_ALLOC(json_object_size(root), &list->tensors));
    json_object_foreach(root, name, value)
    {
        const char *note = json_string_value(json_object_get(metadata, name));
        if (value == metadata) {
            continue;
        }
        nd_safetensors_tensor *tensor = &list->tensors[list->count++];
        ND_TRY(nd_fs_format(&tensor->name, "%s", name));
        ND_TRY(note ? nd_fs_format(&tensor->note, "%s", note) : ND_OK);
        ND_TRY(parse_tensor(path, name, value, data, tensor));
    }
    qsort(list->tensors, (size_t)list->count, sizeof *list->tensors, nd_safetensors_by_place);
    return ND_OK;
}

nd_status nd_safetensors_parse(const char *header, size_t size, uint64_t file_bytes,
                               const char *path, nd_safetensors_list *out)
{
    nd_safetensors_list list = {0};
    json_error_t error;
    if (size == 0 || header[0] != '{') {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": its header does not begin with {: it is not a safetensors "
                       "file",
                       path);
    }
    json_t *root = json_loadb(header, size, JSON_REJECT_DUPLICATES, &error);
    if (!root && nd_json_no_memory(&error)) {
        return nd_fail_memory("the header of \"%s\"", path);
    }
    if (!root) {
        return nd_fail(ND_ERR_DATA, "\"%s\": its header is not valid JSON at byte %d: %s", path,
                       8 + error.position, error.text);
    }
    nd_status status = ND_OK;
    ND_TRY_OUT(parse_entries(root, 8 + size, path, &list));
    ND_TRY_OUT(check_chain(&list, 8 + size, file_bytes, path));
    *out = list;
    list = (nd_safetensors_list){0};
out:
    nd_safetensors_list_fini(&list);
    json_decref(root);
    return status;
}

nd_status nd_safetensors_read_header(int fd, const char *path, nd_safetensors_list *out)
{
    struct stat st;
    uint64_t n; /* bytes of the header; this program runs on little-endian machines alone */
    if (fstat(fd, &st) != 0) {
        return nd_fail(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(errno));
    }
    uint64_t bytes = (uint64_t)st.st_size;
    if (!S_ISREG(st.st_mode) || bytes < sizeof n) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %llu bytes: too short for a safetensors file; copy or "
                       "download it again",
                       path, (unsigned long long)bytes);
    }
    ND_TRY(nd_fs_pread(fd, path, &n, sizeof n, 0));
    if (n > ND_SAFETENSORS_HEADER_MAX || n > bytes - sizeof n) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %llu bytes, but announces a header of %llu (at most %d "
                       "are allowed): it is truncated, or not a safetensors file",
                       path, (unsigned long long)bytes, (unsigned long long)n,
                       ND_SAFETENSORS_HEADER_MAX);
    }
    char *header = NULL;
    ND_TRY(nd_alloc((size_t)n, 1, (void **)&header));
    nd_status status = nd_fs_pread(fd, path, header, (size_t)n, sizeof n);
    status = status == ND_OK ? nd_safetensors_parse(header, (size_t)n, bytes, path, out) : status;
    free(header);
    return status;
}

nd_status nd_safetensors_read(int fd, const char *path, const nd_safetensors_tensor *t,
                              int64_t begin, int64_t count, float *out)
{
    const bool wide = t->dtype == ND_SAFETENSORS_F32;
    const size_t size = wide ? 4 : 2;
    ND_ASSERT(wide || t->dtype == ND_SAFETENSORS_BF16 || t->dtype == ND_SAFETENSORS_F16);
    /* 16-bit values are read into the upper half of out and widened from the front. None is
     * overwritten before it is read, since value i lies at or after byte 4 i. */
    uint8_t *to = (uint8_t *)out + (4 - size) * (size_t)count;
    ND_TRY(
        nd_fs_pread(fd, path, to, (size_t)count * size, (int64_t)t->begin + begin * (int64_t)size));
    for (int64_t i = 0; i < count && !wide; i++) {
        uint16_t code;
        memcpy(&code, to + 2 * i, sizeof code);
        out[i] = t->dtype == ND_SAFETENSORS_F16 ? nd_f16_to_f32(code) : nd_bf16_to_f32(code);
    }
    return ND_OK;
}

static int by_size_then_name(const void *a, const void *b)
{
    const nd_safetensors_tensor *x = a, *y = b;
    int bits = dtypes[y->dtype].bits - dtypes[x->dtype].bits;
    return bits != 0 ? bits : strcmp(x->name, y->name);
}

nd_status nd_safetensors_layout(nd_safetensors_tensor *tensors, int64_t count, char **head,
                                size_t *head_bytes)
{
    qsort(tensors, (size_t)count, sizeof *tensors, by_size_then_name);
    json_t *notes = json_pack("{s:s}", "format", "pt"), *root = json_object();
    uint64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        if (tensors[i].note) {
            nd_json_set(&notes, tensors[i].name, json_string(tensors[i].note));
        }
    }
    nd_json_set(&root, "__metadata__", notes);
    for (int64_t i = 0; i < count; i++) {
        nd_safetensors_tensor *t = &tensors[i];
        uint64_t bytes =
            (uint64_t)nd_safetensors_tensor_count(t) * (uint64_t)dtypes[t->dtype].bits / 8;
        t->begin = at;
        at = t->end = at + bytes;
        json_t *shape = json_array();
        for (int a = 0; a < t->axes; a++) {
            nd_json_append(&shape, json_integer(t->shape[a]));
        }
        nd_json_set(&root, t->name,
                    json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtypes[t->dtype].name, "shape",
                              shape, "data_offsets", (json_int_t)t->begin, (json_int_t)t->end));
    }
    char *text = nd_json_text(root, JSON_COMPACT);
    json_decref(root);
    size_t length = text ? strlen(text) : 0, padded = (length + 7) / 8 * 8;
    char *buffer = NULL;
    nd_status status =
        text ? nd_alloc(8 + padded, 1, (void **)&buffer)
             : nd_fail_memory("a safetensors header of %lld tensors", (long long)count);
    if (status == ND_OK) {
        memcpy(buffer, &padded, 8);
        memcpy(buffer + 8, text, length);
        memset(buffer + 8 + length, ' ', padded - length);
        for (int64_t i = 0; i < count; i++) {
            tensors[i].begin += 8 + padded;
            tensors[i].end += 8 + padded;
        }
        *head = buffer;
        *head_bytes = 8 + padded;
    }
    free(text);
    return status;
}
