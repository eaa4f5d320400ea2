// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/golden_data.h"

#include <jansson.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/parity/golden_reader.h"

enum { SKETCH_SEED = 77 }; /* as draw.py has it */

/* The product of an F32 number and a draw is exact in F64, so the sum has one rounding whether or
 * not the two are fused. */
static void write_tensor(FILE *f, uint64_t seed, const json_t *entry, int64_t count)
{
    const double mean = json_number_value(json_object_get(entry, "mean")),
                 deviation = json_number_value(json_object_get(entry, "deviation"));
    const uint64_t stream = (uint64_t)json_integer_value(json_object_get(entry, "stream"));
    for (int64_t i = 0; i < count; i++) {
        const float value =
            (float)(mean + deviation * (double)nd_rng_normal(seed, stream, (uint64_t)i));
        cr_assert_eq(fwrite(&value, sizeof value, 1, f), 1);
    }
}

static void write_weights(const json_t *table, const char *path)
{
    json_t *tensors = json_object_get(table, "tensors"), *entry;
    const char *name;
    nd_safetensors_tensor *list = NULL;
    char *head = NULL;
    size_t head_bytes = 0;
    int64_t count = 0;
    assert_ok(ND_ALLOC(json_object_size(tensors), &list));
    json_object_foreach(tensors, name, entry)
    {
        const json_t *shape = json_object_get(entry, "shape");
        nd_safetensors_tensor *t = &list[count++];
        t->name = strdup(name);
        t->dtype = ND_SAFETENSORS_F32;
        t->axes = (int)json_array_size(shape);
        for (int a = 0; a < t->axes; a++) {
            t->shape[a] = json_integer_value(json_array_get(shape, (size_t)a));
        }
    }
    assert_ok(nd_safetensors_layout(list, count, &head, &head_bytes));
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fwrite(head, 1, head_bytes, f), head_bytes);
    for (int64_t i = 0; i < count; i++) {
        write_tensor(f, (uint64_t)json_integer_value(json_object_get(table, "seed")),
                     json_object_get(tensors, list[i].name), nd_safetensors_tensor_count(&list[i]));
        free(list[i].name);
    }
    cr_assert_eq(fclose(f), 0);
    free(list);
    free(head);
}

void golden_data_model(const char *name, tempdir *dir)
{
    char folder[PATH_MAX - 16], path[PATH_MAX];
    json_error_t error;
    nd_golden_folder(name, folder, sizeof folder);
    snprintf(path, sizeof path, "%s/config.json", folder);
    cr_assert_eq(symlink(path, tempdir_file(dir, "config.json")), 0);
    snprintf(path, sizeof path, "%s/weights.json", folder);
    json_t *table = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(table, "%s:%d: %s", path, error.line, error.text);
    write_weights(table, tempdir_file(dir, "model.safetensors"));
    json_decref(table);
}

void golden_data_sketch(double sums[GOLDEN_SKETCH], const nd_param *param, const float *values)
{
    for (int64_t i = 0; i < param->rows * param->cols; i++) {
        const uint64_t drawn = nd_rng_u64(SKETCH_SEED, 0, (uint64_t)nd_param_in_file(param, i));
        sums[(uint32_t)drawn % GOLDEN_SKETCH] += drawn >> 63 ? -values[i] : values[i];
    }
}
