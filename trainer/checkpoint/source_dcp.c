// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "trainer/checkpoint/source_files.h"

/* Opening. */

static nd_status list_files(nd_source *source)
{
    nd_fs_names names;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_list(source->folder, &names));
    ND_TRY_OUT(ND_ALLOC(names.count + 1, &source->files));
    for (int i = 0; i < names.count; i++) {
        const char *name = names.list[i];
        if (nd_ends_with(name, ".safetensors") && nd_name_is_plain(name)) {
            snprintf(source->files[source->file_count++].name, sizeof source->files->name, "%s",
                     name);
        }
    }
    if (source->file_count == 0) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" holds no safetensors files", source->folder);
    }
out:
    nd_fs_names_fini(&names);
    return status;
}

static nd_status read_heads(nd_source *source)
{
    for (int64_t i = 0; i < source->file_count; i++) {
        nd_source_file *file = &source->files[i];
        char *path = NULL;
        int fd = -1;
        ND_TRY(nd_source_open_plain(source->folder, file->name, 0, &fd, &file->bytes));
        nd_status status = nd_fs_format(&path, "%s/%s", source->folder, file->name);
        if (status == ND_OK) {
            status = nd_dcp_read_head(fd, path, &source->lists[i]);
        }
        free(path);
        close(fd);
        ND_TRY(status);
        source->entry_count += source->lists[i].count;
    }
    return ND_OK;
}

static int by_name_and_row(const void *a, const void *b)
{
    const nd_dcp_entry *x = ((const nd_source_entry *)a)->entry,
                       *y = ((const nd_source_entry *)b)->entry;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : x->rect.row < y->rect.row ? -1 : x->rect.row > y->rect.row;
}

static nd_status make_index(nd_source *source)
{
    int64_t n = 0;
    ND_TRY(ND_ALLOC(source->entry_count, &source->entries));
    for (int64_t i = 0; i < source->file_count; i++) {
        for (int64_t e = 0; e < source->lists[i].count; e++) {
            source->entries[n++] =
                (nd_source_entry){&source->lists[i].entries[e], &source->files[i]};
        }
    }
    qsort(source->entries, (size_t)n, sizeof *source->entries, by_name_and_row);
    return ND_OK;
}

/* A rectangle is compared with those that begin above its end. torch would not notice. */
static nd_status check_overlap(const nd_source *source)
{
    for (int64_t i = 0; i < source->entry_count; i++) {
        const nd_dcp_entry *a = source->entries[i].entry;
        for (int64_t j = i + 1; j < source->entry_count; j++) {
            const nd_dcp_entry *b = source->entries[j].entry;
            nd_rect shared;
            if (strcmp(a->name, b->name) != 0 || b->rect.row >= a->rect.row + a->rect.rows) {
                break;
            }
            if (a->rect.axes != b->rect.axes || nd_rect_intersect(&a->rect, &b->rect, &shared)) {
                return nd_fail(ND_ERR_DATA,
                               "\"%s\": tensor \"%.200s\" is stored twice in part, in \"%s\" and "
                               "\"%s\"",
                               source->folder, a->name, source->entries[i].file->name,
                               source->entries[j].file->name);
            }
        }
    }
    return ND_OK;
}

nd_status nd_source_open_dcp(const char *folder, const nd_shape *shape, nd_source **out)
{
    nd_source *source = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_source_create(folder, NULL, &source));
    source->head_dim = shape->head_dim;
    ND_TRY_OUT(list_files(source));
    ND_TRY_OUT(ND_ALLOC(source->file_count, &source->lists));
    ND_TRY_OUT(read_heads(source));
    ND_TRY_OUT(make_index(source));
    ND_TRY_OUT(check_overlap(source));
    *out = source;
    source = NULL;
out:
    nd_source_close(source);
    return status;
}

/* Names. */

/* The first entry of this name; source->entry_count: there is none. */
static int64_t find_entry(const nd_source *source, const char *name)
{
    int64_t low = 0, high = source->entry_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(source->entries[middle].entry->name, name) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < source->entry_count && strcmp(source->entries[low].entry->name, name) == 0
               ? low
               : source->entry_count;
}

/* Under which name the folder has the parameter's state. */
static bool find_name(const nd_source *source, const nd_param *param, nd_state_kind array,
                      int64_t *first, bool *titan)
{
    char own[ND_STATE_NAME_MAX], other[ND_STATE_NAME_MAX], name[ND_STATE_NAME_MAX];
    snprintf(own, sizeof own, "model.%.120s", param->name);
    nd_torchtitan_name(other, param->name);
    const char *const names[] = {param->name, own, other};
    for (int i = 0; i < 3; i++) {
        *first = names[i][0] ? find_entry(source, nd_state_name(name, array, names[i]))
                             : source->entry_count;
        *titan = i == 2;
        if (*first < source->entry_count) {
            return true;
        }
    }
    return false;
}

bool nd_source_has(const nd_source *source, const nd_param *param, nd_state_kind array)
{
    int64_t first = 0;
    bool titan = false;
    return find_name(source, param, array, &first, &titan);
}

/* Values. */

static nd_status check_entries(const nd_source *source, int64_t first, const nd_param *param)
{
    const char *name = source->entries[first].entry->name;
    int64_t rows = 0, cols = 0;
    for (int64_t i = first;
         i < source->entry_count && strcmp(source->entries[i].entry->name, name) == 0; i++) {
        const nd_dcp_entry *e = source->entries[i].entry;
        if (e->dtype != ND_SAFETENSORS_F32 && e->dtype != ND_SAFETENSORS_BF16 &&
            e->dtype != ND_SAFETENSORS_F16) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": tensor \"%.200s\" is %s; F32, BF16 and F16 are read",
                           source->folder, name, nd_safetensors_dtype_name(e->dtype));
        }
        if (e->rect.axes != param->axes) {
            return nd_fail(ND_ERR_DATA, "\"%s\": tensor \"%.200s\" has %d axes; the model's has %d",
                           source->folder, name, e->rect.axes, param->axes);
        }
        rows = e->rect.row + e->rect.rows > rows ? e->rect.row + e->rect.rows : rows;
        cols = e->rect.col + e->rect.cols > cols ? e->rect.col + e->rect.cols : cols;
    }
    return rows == param->rows && cols == param->cols
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\": tensor \"%.200s\" is %lld x %lld; the model's is %lld x %lld",
                         source->folder, name, (long long)rows, (long long)cols,
                         (long long)param->rows, (long long)param->cols);
}

static nd_status add_rect(nd_source *source, int64_t first, const nd_rect *rect, float *to)
{
    const char *name = source->entries[first].entry->name;
    int64_t found = 0;
    for (int64_t i = first;
         i < source->entry_count && strcmp(source->entries[i].entry->name, name) == 0; i++) {
        ND_TRY(nd_source_plan_read(source->entries[i].file, source->entries[i].entry, rect, to,
                                   &found));
    }
    return found == nd_rect_elements(rect)
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\" holds %lld of %lld elements that are needed of tensor \"%.200s\": "
                         "a file is missing",
                         source->folder, (long long)found, (long long)nd_rect_elements(rect), name);
}

/*
 * torchtitan keeps Meta's order, in which the two numbers that RoPE rotates together are adjacent
 * rows of a head; Hugging Face's has all first ones before all second ones.
 */
static nd_status add_interleaved(nd_source *source, int64_t first, const nd_rect *rect, float *to)
{
    int64_t half = source->head_dim / 2;
    for (int64_t row = rect->row; row < rect->row + rect->rows; row++) {
        int64_t head = row / source->head_dim, in_head = row % source->head_dim;
        nd_rect one = *rect;
        one.row = head * source->head_dim + 2 * (in_head % half) + in_head / half;
        one.rows = 1;
        ND_TRY(add_rect(source, first, &one, to + (row - rect->row) * rect->cols));
    }
    return ND_OK;
}

/* find_name of an array that is there with the parameter's extents. */
static nd_status find_checked(const nd_source *source, const nd_param *param, nd_state_kind array,
                              int64_t *first, bool *titan)
{
    char name[ND_STATE_NAME_MAX];
    if (!find_name(source, param, array, first, titan)) {
        return nd_fail(ND_ERR_DATA, "\"%s\" holds no tensor \"%s\"", source->folder,
                       nd_state_name(name, array, param->name));
    }
    return check_entries(source, *first, param);
}

nd_status nd_source_check_weights(const nd_source *source, const nd_param *param)
{
    int64_t first = 0;
    bool titan = false;
    return find_checked(source, param, ND_STATE_MASTER, &first, &titan);
}

nd_status nd_source_add_dcp(nd_source *source, const nd_param *param, nd_state_kind array,
                            const nd_rect *rect, float *to)
{
    int64_t first = 0;
    bool titan = false;
    ND_TRY(find_checked(source, param, array, &first, &titan));
    bool rotated = param->id == ND_PARAM_Q || param->id == ND_PARAM_K;
    return titan && rotated ? add_interleaved(source, first, rect, to)
                            : add_rect(source, first, rect, to);
}

nd_status nd_source_read_updates(nd_source *source, int64_t *updates)
{
    static const char prefix[] = "optimizer.state.", suffix[] = ".step";
    const nd_rect scalar = {.axes = 0, .rows = 1, .cols = 1};
    *updates = -1;
    for (int64_t i = 0; i < source->entry_count; i++) {
        const nd_dcp_entry *e = source->entries[i].entry;
        size_t length = strlen(e->name);
        if (strncmp(e->name, prefix, sizeof prefix - 1) != 0 || length < sizeof suffix ||
            strcmp(e->name + length - (sizeof suffix - 1), suffix) != 0 || e->rect.axes != 0 ||
            e->dtype != ND_SAFETENSORS_F32) {
            continue;
        }
        float value = 0.0f;
        int64_t found = 0;
        ND_TRY(nd_source_plan_read(source->entries[i].file, e, &scalar, &value, &found));
        ND_TRY(nd_source_run_file(source, source->entries[i].file));
        if (!(value >= 0.0f && value <= 0x1p24f) || value != floorf(value)) {
            return nd_fail(ND_ERR_DATA, "\"%s\": \"%.200s\" is %g, which is no number of updates",
                           source->folder, e->name, (double)value);
        }
        *updates = (int64_t)value;
        return ND_OK;
    }
    return ND_OK;
}
