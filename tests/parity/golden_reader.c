// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/golden_reader.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/tempdir.h"

enum { PATH_SIZE = 4096, GOLDEN_BYTES_MAX = 1 << 30 };

struct nd_golden {
    char path[PATH_SIZE];
    nd_safetensors_list list;
    char *bytes;    /* the whole file: malloc keeps it aligned for every dtype */
    json_t *record; /* golden.json, or NULL */
};

const char *nd_golden_folder(const char *name, char *buffer, size_t size)
{
    const char *named = getenv("ND_GOLDENS");
    snprintf(buffer, size, "%s/%s", named ? named : ND_GOLDENS_FOLDER, name);
    return buffer;
}

nd_status nd_golden_open(const char *path, nd_golden **out)
{
    nd_status status = ND_OK;
    int fd = -1;
    size_t size = 0;
    nd_golden *golden = NULL;
    ND_TRY(ND_ALLOC(1, &golden));
    nd_golden_folder(path, golden->path, sizeof(golden->path));
    fd = open(golden->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        status = nd_fail(ND_ERR_DATA, "%s is missing: run scripts/golden.py.", golden->path);
        goto out;
    }
    ND_TRY_OUT(nd_safetensors_read_header(fd, golden->path, &golden->list));
    ND_TRY_OUT(nd_fs_read(golden->path, GOLDEN_BYTES_MAX, ND_ERR_IO, &golden->bytes, &size));
out:
    if (fd >= 0) {
        close(fd);
    }
    if (status != ND_OK) {
        nd_golden_close(golden);
        return status;
    }
    *out = golden;
    return ND_OK;
}

nd_status nd_golden_open_model(const char *name, nd_golden **out)
{
    char path[PATH_SIZE];
    nd_golden *golden = NULL;
    snprintf(path, sizeof(path), "%s/golden.safetensors", name);
    ND_TRY(nd_golden_open(path, &golden));
    nd_golden_folder(name, path, sizeof path);
    snprintf(path + strlen(path), sizeof path - strlen(path), "/golden.json");
    json_error_t error;
    golden->record = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (golden->record == NULL) {
        nd_golden_close(golden);
        return nd_fail(ND_ERR_DATA, "%s:%d: %s.", path, error.line, error.text);
    }
    *out = golden;
    return ND_OK;
}

void nd_golden_close(nd_golden *golden)
{
    if (golden == NULL) {
        return;
    }
    nd_safetensors_list_fini(&golden->list);
    free(golden->bytes);
    json_decref(golden->record);
    free(golden);
}

const nd_safetensors_tensor *nd_golden_find(const nd_golden *golden, const char *name)
{
    return nd_safetensors_list_find(&golden->list, name);
}

static const void *values(const nd_golden *golden, const char *name, nd_safetensors_dtype dtype,
                          int64_t count)
{
    const nd_safetensors_tensor *tensor = nd_golden_find(golden, name);
    cr_assert_not_null(tensor, "%s holds no %s", golden->path, name);
    cr_assert_eq(tensor->dtype, dtype, "%s in %s is %s, wanted %s", name, golden->path,
                 nd_safetensors_dtype_name(tensor->dtype), nd_safetensors_dtype_name(dtype));
    int64_t has = nd_safetensors_tensor_count(tensor);
    cr_assert(count < 0 || has == count, "%s in %s has %lld elements, wanted %lld", name,
              golden->path, (long long)has, (long long)count);
    return golden->bytes + tensor->begin;
}

#define READER(function, type, dtype)                                                              \
    const type *function(const nd_golden *golden, const char *name, int64_t count)                 \
    {                                                                                              \
        return values(golden, name, dtype, count);                                                 \
    }

READER(nd_golden_f32, float, ND_SAFETENSORS_F32)
READER(nd_golden_i8, int8_t, ND_SAFETENSORS_I8)
READER(nd_golden_i32, int32_t, ND_SAFETENSORS_I32)
READER(nd_golden_bf16, uint16_t, ND_SAFETENSORS_BF16)
READER(nd_golden_u8, uint8_t, ND_SAFETENSORS_U8)

static const json_t *look_up(const nd_golden *golden, const char *key, va_list more)
{
    const json_t *node = golden->record;
    cr_assert_not_null(node, "%s was opened without its record", golden->path);
    for (; key != NULL; key = va_arg(more, const char *)) {
        node = json_object_get(node, key);
        cr_assert_not_null(node, "the record beside %s has no %s there", golden->path, key);
    }
    return node;
}

double nd_golden_number(const nd_golden *golden, const char *key, ...)
{
    va_list more;
    va_start(more, key);
    const json_t *node = look_up(golden, key, more);
    va_end(more);
    cr_assert(json_is_number(node), "%s in the record beside %s leads to no number", key,
              golden->path);
    return json_number_value(node);
}

void nd_golden_numbers(const nd_golden *golden, double *out, int64_t count, const char *key, ...)
{
    va_list more;
    va_start(more, key);
    const json_t *node = look_up(golden, key, more);
    va_end(more);
    cr_assert_eq((int64_t)json_array_size(node), count,
                 "%s in the record beside %s is no array of %lld", key, golden->path,
                 (long long)count);
    for (int64_t i = 0; i < count; i++) {
        out[i] = json_number_value(json_array_get(node, (size_t)i));
    }
}
