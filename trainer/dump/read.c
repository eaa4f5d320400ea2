// SPDX-License-Identifier: Apache-2.0
/* Reads the files of all ranks of a step, and puts the parts of a tensor together. */
#include <fnmatch.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "trainer/dump/dump.h"
#include "trainer/weights/safetensors.h"

static const char rank_file[] = "rank-*.safetensors";

typedef struct dump_file {
    char *path;
    int fd; /* -1: not open */
    nd_safetensors_list list;
} dump_file;

/* A rank's part of a tensor. */
typedef struct part {
    nd_dump_tensor of;
    const dump_file *file;
    const nd_safetensors_tensor *stored;
    json_t *note; /* owned */
} part;

struct nd_dump_files {
    dump_file *files; /* [file_count] */
    int file_count;
    part *parts; /* [part_count], in the order of the computation */
    int64_t part_count;
    nd_dump_tensor *tensors; /* [tensor_count], likewise */
    int64_t tensor_count;
};

nd_status nd_dump_is(const char *folder, bool *out)
{
    nd_fs_names names = {0};
    ND_TRY(nd_fs_list(folder, &names));
    nd_status status = ND_OK;
    int steps = 0;
    *out = false;
    for (int i = 0; i < names.count; i++) {
        *out |= fnmatch(rank_file, names.list[i], 0) == 0;
        steps += fnmatch("step-[0-9]*", names.list[i], 0) == 0;
    }
    if (steps > 0 && steps == names.count) {
        status =
            nd_fail(ND_ERR_DATA, "\"%s\" holds the dumps of steps; give one of them, such as %s/%s",
                    folder, folder, names.list[0]);
    }
    nd_fs_names_fini(&names);
    return status;
}

void nd_dump_close(nd_dump_files *f)
{
    for (int i = 0; f && i < f->file_count; i++) {
        if (f->files[i].fd >= 0) {
            close(f->files[i].fd);
        }
        free(f->files[i].path);
        nd_safetensors_list_fini(&f->files[i].list);
    }
    for (int64_t i = 0; f && i < f->part_count; i++) {
        json_decref(f->parts[i].note);
    }
    if (f) {
        free(f->files);
        free(f->parts);
        free(f->tensors);
        free(f);
    }
}

/* How many rows the ranges have; -1: they are no ranges of the tensor's rows. */
static int64_t rows_of(const json_t *ranges, int64_t most)
{
    int64_t rows = 0;
    for (size_t i = 0; i < json_array_size(ranges); i++) {
        json_int_t begin = 0, end = 0;
        json_t *range = json_array_get(ranges, i);
        if (json_unpack(range, "[I,I!]", &begin, &end) != 0 || begin < 0 || end < begin ||
            end > most) {
            return -1;
        }
        rows += end - begin;
    }
    return rows;
}

/* The note of a part must fit its data. */
static nd_status read_note(const dump_file *file, part *p)
{
    const char *text = nd_safetensors_list_metadata(&file->list, p->stored->name);
    json_int_t order = 0, rows = -1, cols = -1, left = 0, right = 0, begin = 0, end = 0;
    const json_t *ranges = NULL;
    p->note = text ? json_loads(text, 0, NULL) : NULL;
    const bool read =
        p->note && json_unpack(p->note, "{s:I, s:[I,I], s:o, s:[I,I], s?:[I,I]}", "order", &order,
                               "shape", &rows, &cols, "rows", &ranges, "columns", &left, &right,
                               "elements", &begin, &end) == 0;
    const bool fits = read && rows > 0 && cols > 0 && rows < INT64_C(1) << 31 &&
                      cols < INT64_C(1) << 31 && left >= 0 && right >= left && right <= cols &&
                      begin >= 0 && end >= begin;
    const int64_t block = fits ? rows_of(ranges, rows) * (right - left) : -1;
    p->file = file;
    p->of = (nd_dump_tensor){p->stored->name, order, rows, cols, 0};
    if (block < 0 || end > block ||
        nd_safetensors_tensor_count(p->stored) != (end > 0 ? end - begin : block) ||
        (p->stored->dtype != ND_SAFETENSORS_F32 && p->stored->dtype != ND_SAFETENSORS_BF16)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": it does not say where %.100s belongs; it is no dump of "
                       "tensors, or damaged",
                       file->path, p->stored->name);
    }
    return ND_OK;
}

static nd_status open_file(nd_dump_files *f, const char *folder, const char *name)
{
    dump_file *file = &f->files[f->file_count++];
    file->fd = -1;
    ND_TRY(nd_fs_format(&file->path, "%s/%s", folder, name));
    ND_TRY(nd_fs_open_own(file->path, ND_ERR_DATA, &file->fd, NULL));
    ND_TRY(nd_safetensors_read_header(file->fd, file->path, &file->list));
    f->part_count += file->list.count;
    return ND_OK;
}

static int by_order(const void *a, const void *b)
{
    const nd_dump_tensor *x = &((const part *)a)->of, *y = &((const part *)b)->of;
    return x->order != y->order ? (x->order > y->order) - (x->order < y->order)
                                : strcmp(x->name, y->name);
}

static nd_status list_parts(nd_dump_files *f)
{
    part *p = NULL;
    ND_TRY(ND_ALLOC(f->part_count, &f->parts));
    ND_TRY(ND_ALLOC(f->part_count, &f->tensors));
    p = f->parts;
    for (int i = 0; i < f->file_count; i++) {
        for (int64_t t = 0; t < f->files[i].list.count; t++, p++) {
            p->stored = &f->files[i].list.tensors[t];
            ND_TRY(read_note(&f->files[i], p));
        }
    }
    qsort(f->parts, (size_t)f->part_count, sizeof *f->parts, by_order);
    for (int64_t i = 0; i < f->part_count; i++) {
        const nd_dump_tensor *of = &f->parts[i].of;
        const nd_dump_tensor *last = f->tensor_count > 0 ? &f->tensors[f->tensor_count - 1] : NULL;
        if (!last || strcmp(of->name, last->name) != 0) {
            f->tensors[f->tensor_count] = *of;
            f->tensors[f->tensor_count++].part = i;
        } else if (of->rows != last->rows || of->cols != last->cols) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": %.100s has another shape than in other files; the "
                           "files are of different runs",
                           f->parts[i].file->path, of->name);
        }
    }
    return ND_OK;
}

nd_status nd_dump_open(const char *folder, nd_dump_files **out)
{
    nd_fs_names names = {0};
    nd_dump_files *f = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &f));
    ND_TRY_OUT(nd_fs_list(folder, &names));
    ND_TRY_OUT(ND_ALLOC(names.count + 1, &f->files));
    for (int i = 0; i < names.count; i++) {
        if (fnmatch(rank_file, names.list[i], 0) == 0) {
            ND_TRY_OUT(open_file(f, folder, names.list[i]));
        }
    }
    ND_TRY_OUT(list_parts(f));
    *out = f;
out:
    nd_fs_names_fini(&names);
    if (status != ND_OK) {
        nd_dump_close(f);
    }
    return status;
}

const nd_dump_tensor *nd_dump_tensors(const nd_dump_files *f, int64_t *count)
{
    *count = f->tensor_count;
    return f->tensors;
}

/* Puts the elements [first, first + count) of a part's block into their places. */
static void put(const part *p, int64_t first, int64_t count, const float *from, float *values,
                bool *there)
{
    const json_t *ranges = json_object_get(p->note, "rows"),
                 *columns = json_object_get(p->note, "columns");
    const int64_t left = json_integer_value(json_array_get(columns, 0)),
                  width = json_integer_value(json_array_get(columns, 1)) - left;
    int64_t before = 0; /* elements of the block */
    for (size_t i = 0; i < json_array_size(ranges); i++) {
        const json_t *range = json_array_get(ranges, i);
        const int64_t end = json_integer_value(json_array_get(range, 1));
        for (int64_t row = json_integer_value(json_array_get(range, 0)); row < end; row++) {
            const int64_t from_here = before > first ? before : first,
                          to = before + width < first + count ? before + width : first + count;
            for (int64_t k = from_here; k < to; k++) {
                const int64_t at = row * p->of.cols + left + k - before;
                values[at] = from[k - first];
                there[at] = true;
            }
            before += width;
        }
    }
}

static nd_status read_part(const part *p, float *values, bool *there)
{
    const json_t *elements = json_object_get(p->note, "elements");
    const int64_t count = nd_safetensors_tensor_count(p->stored);
    const size_t size = p->stored->dtype == ND_SAFETENSORS_BF16 ? 2 : 4;
    float *from = NULL;
    ND_TRY(ND_ALLOC(count, &from));
    nd_status status = nd_fs_pread(p->file->fd, p->file->path, from, (size_t)count * size,
                                   (int64_t)p->stored->begin);
    for (int64_t i = count; size == 2 && i-- > 0;) {
        nd_bf16 code;
        memcpy(&code, (const char *)from + 2 * i, 2);
        from[i] = nd_bf16_to_f32(code);
    }
    if (status == ND_OK) {
        put(p, json_integer_value(json_array_get(elements, 0)), count, from, values, there);
    }
    free(from);
    return status;
}

nd_status nd_dump_read(const nd_dump_files *f, const nd_dump_tensor *tensor, float *values,
                       bool *there)
{
    memset(there, 0, (size_t)(tensor->rows * tensor->cols) * sizeof *there);
    for (int64_t i = tensor->part;
         i < f->part_count && strcmp(f->parts[i].of.name, tensor->name) == 0; i++) {
        ND_TRY(read_part(&f->parts[i], values, there));
    }
    return ND_OK;
}
