// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/dcp.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"

static const char sharding_key[] = "DCP_SHARDING_INFO";
static const int64_t largest_offset = (int64_t)1 << 60;

void nd_dcp_list_fini(nd_dcp_list *list)
{
    for (int64_t i = 0; i < list->count; i++) {
        free(list->entries[i].name);
    }
    free(list->entries);
    *list = (nd_dcp_list){0};
}

nd_status nd_dcp_list_add(nd_dcp_list *list, const char *name, nd_safetensors_dtype dtype,
                          const nd_rect *rect)
{
    if (list->count == list->capacity) {
        int64_t capacity = list->capacity ? 2 * list->capacity : 64;
        void *entries = realloc(list->entries, (size_t)capacity * sizeof *list->entries);
        if (!entries) {
            return nd_fail_memory("%lld entries of a checkpoint", (long long)capacity);
        }
        list->entries = entries;
        list->capacity = capacity;
    }
    nd_dcp_entry entry = {.dtype = dtype, .rect = *rect};
    ND_TRY(nd_fs_format(&entry.name, "%s", name));
    list->entries[list->count++] = entry;
    return ND_OK;
}

const char *nd_dcp_file_name(char name[ND_DCP_FILE_NAME_MAX], int rank, int index, int count)
{
    snprintf(name, ND_DCP_FILE_NAME_MAX, "shard-%05d-model-%05d-of-%05d.safetensors", rank + 1,
             index + 1, count);
    return name;
}

/* Writing. */

/* "[0,128]", as many numbers as the tensor has axes. */
static void put_pair(FILE *out, int axes, int64_t first, int64_t second)
{
    fputc('[', out);
    if (axes > 0) {
        fprintf(out, "%lld", (long long)first);
    }
    if (axes > 1) {
        fprintf(out, ",%lld", (long long)second);
    }
    fputc(']', out);
}

/* The sharding string is JSON inside a JSON string: its quotes have a backslash. */
static void put_json(FILE *out, const nd_dcp_list *list)
{
    fputs("{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{",
          out);
    for (int64_t i = 0; i < list->count; i++) {
        const nd_dcp_entry *e = &list->entries[i];
        fprintf(out, "%s\\\"%s\\\":{\\\"saved_offsets\\\":", i > 0 ? "," : "", e->name);
        put_pair(out, e->rect.axes, e->rect.row, e->rect.col);
        fputc('}', out);
    }
    fputs("}\"}", out);
    for (int64_t i = 0; i < list->count; i++) {
        const nd_dcp_entry *e = &list->entries[i];
        fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":", e->name,
                nd_safetensors_dtype_name(e->dtype));
        put_pair(out, e->rect.axes, e->rect.rows, e->rect.cols);
        fprintf(out, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)e->begin,
                (unsigned long long)e->end);
    }
    fputc('}', out);
}

static bool is_plain(const char *name)
{
    for (const char *c = name; *c; c++) {
        if (*c < ' ' || *c > '~' || *c == '"' || *c == '\\') {
            return false;
        }
    }
    return true;
}

nd_status nd_dcp_head(nd_dcp_list *list, char **head, size_t *head_bytes)
{
    uint64_t at = 0;
    for (int64_t i = 0; i < list->count; i++) {
        nd_dcp_entry *e = &list->entries[i];
        ND_ASSERT(is_plain(e->name));
        e->begin = at;
        at += (uint64_t)nd_rect_elements(&e->rect) * (uint64_t)nd_safetensors_dtype_bits(e->dtype) /
              8;
        e->end = at;
    }
    char *text = NULL, *padded = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (out) {
        fputs("........", out); /* the length of what follows */
        put_json(out, list);
    }
    bool written = out && fclose(out) == 0;
    size_t bytes = nd_round_up_bytes(length, ND_DCP_ALIGNMENT);
    if (!written || nd_alloc(bytes, 1, (void **)&padded) != ND_OK) {
        free(text);
        return nd_fail_memory("the header of %lld entries", (long long)list->count);
    }
    memcpy(padded, text, length);
    free(text);
    memset(padded + length, ' ', bytes - length);
    for (int i = 0; i < 8; i++) {
        padded[i] = (char)((uint64_t)(bytes - 8) >> (8 * i));
    }
    for (int64_t i = 0; i < list->count; i++) {
        list->entries[i].begin += bytes;
        list->entries[i].end += bytes;
    }
    *head = padded;
    *head_bytes = bytes;
    return ND_OK;
}

/* Reading. */

static nd_status fail_entry(const char *path, const char *name, const char *what)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the sharding information of \"%.200s\" %s", path, name,
                   what);
}

static nd_status parse_offsets(const char *path, const char *name, const json_t *info,
                               const nd_safetensors_tensor *tensor, int64_t offsets[2])
{
    const json_t *list = json_object_get(info, "saved_offsets");
    if (!json_is_array(list) || json_array_size(list) != (size_t)tensor->axes) {
        return fail_entry(path, name, "does not hold one offset for each axis");
    }
    for (int a = 0; a < tensor->axes; a++) {
        const json_t *value = json_array_get(list, (size_t)a);
        json_int_t n = json_integer_value(value);
        if (!json_is_integer(value) || n < 0 || n > largest_offset ||
            tensor->shape[a] > largest_offset) {
            return fail_entry(path, name, "holds an offset that is no natural number below 2^60");
        }
        if (a < 2) {
            offsets[a] = n;
        }
    }
    return ND_OK;
}

static nd_rect rect_of(const nd_safetensors_tensor *tensor, const int64_t offsets[2])
{
    nd_rect rect = {.axes = tensor->axes, .rows = 1, .cols = 1};
    if (tensor->axes >= 1) {
        rect.row = offsets[0];
        rect.rows = tensor->shape[0];
    }
    if (tensor->axes == 2) {
        rect.col = offsets[1];
        rect.cols = tensor->shape[1];
    }
    return rect;
}

static nd_status add_entry(const nd_safetensors_tensor *tensor, const json_t *sharding,
                           const char *path, nd_dcp_list *out)
{
    int64_t offsets[2] = {0, 0};
    const char *name = tensor->name;
    if (sharding) {
        const json_t *info = json_object_get(sharding, name);
        if (!json_is_object(info)) {
            return fail_entry(path, name, "is missing");
        }
        ND_TRY(parse_offsets(path, name, info, tensor, offsets));
        const json_t *logical = json_object_get(info, "logical_fqn");
        if (logical && !json_is_string(logical)) {
            return fail_entry(path, name, "has a logical_fqn that is not a string");
        }
        name = logical ? json_string_value(logical) : name;
    }
    nd_rect rect = rect_of(tensor, offsets);
    ND_TRY(nd_dcp_list_add(out, name, tensor->dtype, &rect));
    out->entries[out->count - 1].begin = tensor->begin;
    out->entries[out->count - 1].end = tensor->end;
    return ND_OK;
}

static int by_name_and_corner(const void *a, const void *b)
{
    const nd_dcp_entry *x = *(const nd_dcp_entry *const *)a, *y = *(const nd_dcp_entry *const *)b;
    int order = strcmp(x->name, y->name);
    if (order == 0 && x->rect.row != y->rect.row) {
        order = x->rect.row < y->rect.row ? -1 : 1;
    }
    if (order == 0 && x->rect.col != y->rect.col) {
        order = x->rect.col < y->rect.col ? -1 : 1;
    }
    return order;
}

/* torch would let one of two rectangles with the same corner overwrite the other. */
static nd_status check_corners(const nd_dcp_list *list, const char *path)
{
    const nd_dcp_entry **sorted = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(list->count, &sorted));
    for (int64_t i = 0; i < list->count; i++) {
        sorted[i] = &list->entries[i];
    }
    qsort(sorted, (size_t)list->count, sizeof *sorted, by_name_and_corner);
    for (int64_t i = 1; i < list->count && status == ND_OK; i++) {
        if (sorted[i]->rect.axes <= 2 && by_name_and_corner(&sorted[i - 1], &sorted[i]) == 0) {
            status = fail_entry(path, sorted[i]->name, "places two entries at the same offsets");
        }
    }
    free(sorted);
    return status;
}

static nd_status check_names(const nd_safetensors_list *list, json_t *sharding, const char *path)
{
    const char *name;
    json_t *info;
    if (json_object_size(sharding) == (size_t)list->count) {
        return ND_OK; /* every entry was found in it */
    }
    json_object_foreach(sharding, name, info)
    {
        if (!nd_safetensors_list_find(list, name)) {
            return fail_entry(path, name, "belongs to no tensor of the file");
        }
    }
    return ND_OK;
}

nd_status nd_dcp_entries(const nd_safetensors_list *list, const char *path, nd_dcp_list *out)
{
    nd_dcp_list entries = {0};
    nd_status status = ND_OK;
    json_t *sharding = NULL;
    const char *text = nd_safetensors_list_metadata(list, sharding_key);
    if (text) {
        json_error_t error;
        sharding = json_loads(text, JSON_REJECT_DUPLICATES, &error);
        if (!json_is_object(sharding)) {
            status = nd_fail(ND_ERR_DATA, "\"%s\": %s in __metadata__ is not a JSON object: %s",
                             path, sharding_key, sharding ? "another type" : error.text);
            goto out;
        }
    }
    for (int64_t i = 0; i < list->count; i++) {
        ND_TRY_OUT(add_entry(&list->tensors[i], sharding, path, &entries));
    }
    ND_TRY_OUT(sharding ? check_names(list, sharding, path) : ND_OK);
    ND_TRY_OUT(check_corners(&entries, path));
    *out = entries;
    entries = (nd_dcp_list){0};
out:
    nd_dcp_list_fini(&entries);
    json_decref(sharding);
    return status;
}

nd_status nd_dcp_read_head(int fd, const char *path, nd_dcp_list *out)
{
    nd_safetensors_list list = {0};
    ND_TRY(nd_safetensors_read_header(fd, path, &list));
    nd_status status = nd_dcp_entries(&list, path, out);
    nd_safetensors_list_fini(&list);
    return status;
}
