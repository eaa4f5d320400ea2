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
    const char *name;   /* of the tensor */
    int64_t order;      /* of the computation */
    int64_t rows, cols; /* of the whole tensor, of all ranks */
    const dump_file *file;
    const nd_safetensors_tensor *stored;
    json_t *note; /* owned */
} part;

typedef struct dump {
    dump_file *files; /* [file_count] */
    int file_count;
    part *parts; /* [part_count], in the order of the computation: those of a tensor are adjacent */
    int64_t part_count;
} dump;

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

static void close_dump(dump *d)
{
    for (int i = 0; i < d->file_count; i++) {
        if (d->files[i].fd >= 0) {
            close(d->files[i].fd);
        }
        free(d->files[i].path);
        nd_safetensors_list_fini(&d->files[i].list);
    }
    for (int64_t i = 0; d->parts && i < d->part_count; i++) {
        json_decref(d->parts[i].note);
    }
    free(d->files);
    free(d->parts);
}

/* The number of rows in the ranges; -1: they are no ranges of the tensor's rows. */
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
    json_int_t order = 0, rows = -1, cols = -1, left = 0, right = 0, begin = 0, end = 0;
    const json_t *ranges = NULL;
    p->note = p->stored->note ? json_loads(p->stored->note, 0, NULL) : NULL;
    const bool read =
        p->note && json_unpack(p->note, "{s:I, s:[I,I], s:o, s:[I,I], s?:[I,I]}", "order", &order,
                               "shape", &rows, &cols, "rows", &ranges, "columns", &left, &right,
                               "elements", &begin, &end) == 0;
    const bool fits = read && rows > 0 && cols > 0 && rows < INT64_C(1) << 31 &&
                      cols < INT64_C(1) << 31 && left >= 0 && right >= left && right <= cols &&
                      begin >= 0 && end >= begin;
    const int64_t block = fits ? rows_of(ranges, rows) * (right - left) : -1;
    *p = (part){p->stored->name, order, rows, cols, file, p->stored, p->note};
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

static int by_order(const void *a, const void *b)
{
    const part *x = a, *y = b;
    return x->order != y->order ? (x->order > y->order) - (x->order < y->order)
                                : strcmp(x->name, y->name);
}

static nd_status list_parts(dump *d)
{
    ND_TRY(ND_ALLOC(d->part_count, &d->parts));
    part *p = d->parts;
    for (int i = 0; i < d->file_count; i++) {
        for (int64_t t = 0; t < d->files[i].list.count; t++, p++) {
            p->stored = &d->files[i].list.tensors[t];
            ND_TRY(read_note(&d->files[i], p));
        }
    }
    qsort(d->parts, (size_t)d->part_count, sizeof *d->parts, by_order);
    for (int64_t i = 1; i < d->part_count; i++) {
        const part *last = &d->parts[i - 1];
        p = &d->parts[i];
        if (strcmp(p->name, last->name) == 0 && (p->rows != last->rows || p->cols != last->cols)) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": %.100s has another shape than in other files; the "
                           "files are of different runs",
                           p->file->path, p->name);
        }
    }
    return ND_OK;
}

static nd_status open_dump(const char *folder, dump *d)
{
    nd_fs_names names = {0};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_list(folder, &names));
    ND_TRY_OUT(ND_ALLOC(names.count + 1, &d->files));
    for (int i = 0; i < names.count; i++) {
        if (fnmatch(rank_file, names.list[i], 0) == 0) {
            dump_file *file = &d->files[d->file_count++];
            file->fd = -1;
            ND_TRY_OUT(nd_fs_format(&file->path, "%s/%s", folder, names.list[i]));
            ND_TRY_OUT(nd_fs_open_own(file->path, ND_ERR_DATA, &file->fd, NULL));
            ND_TRY_OUT(nd_safetensors_read_header(file->fd, file->path, &file->list));
            d->part_count += file->list.count;
        }
    }
    status = list_parts(d);
out:
    nd_fs_names_fini(&names);
    return status;
}

/* The first part of the tensor behind that of part i. */
static int64_t next_tensor(const dump *d, int64_t i)
{
    const char *name = d->parts[i].name;
    while (i < d->part_count && strcmp(d->parts[i].name, name) == 0) {
        i++;
    }
    return i;
}

/* Puts the elements [first, first + count) of a part's block into their places. */
static void put_part(const part *p, int64_t first, int64_t count, const float *from, float *values,
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
                const int64_t at = row * p->cols + left + k - before;
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
    float *from = NULL;
    ND_TRY(ND_ALLOC(count, &from));
    nd_status status = nd_safetensors_read(p->file->fd, p->file->path, p->stored, 0, count, from);
    if (status == ND_OK) {
        put_part(p, json_integer_value(json_array_get(elements, 0)), count, from, values, there);
    }
    free(from);
    return status;
}

/* Puts the parts of all ranks together, and keeps the elements that both dumps have. first: the
 * parts of each dump where the tensor begins. */
static nd_status visit_both(const dump dumps[2], const int64_t first[2], nd_dump_pair pair,
                            nd_status (*visit)(void *context, const nd_dump_pair *pair),
                            void *context)
{
    const int64_t all = dumps[0].parts[first[0]].rows * dumps[0].parts[first[0]].cols;
    bool *there[2] = {0}; /* (rows x cols): some rank has the element */
    nd_status status = ND_OK;
    pair.alike = true;
    for (int s = 0; s < 2; s++) {
        ND_TRY_OUT(ND_ALLOC(all, &pair.values[s]));
        ND_TRY_OUT(ND_ALLOC(all, &there[s]));
        for (int64_t i = first[s]; i < next_tensor(&dumps[s], first[s]); i++) {
            ND_TRY_OUT(read_part(&dumps[s].parts[i], pair.values[s], there[s]));
        }
    }
    for (int64_t i = 0; i < all; i++) {
        if (there[0][i] && there[1][i]) {
            pair.values[0][pair.count] = pair.values[0][i];
            pair.values[1][pair.count++] = pair.values[1][i];
        }
        pair.alike &= there[0][i] == there[1][i]; /* else a rank's file is missing */
    }
    status = visit(context, &pair);
out:
    for (int s = 0; s < 2; s++) {
        free(pair.values[s]);
        free(there[s]);
    }
    return status;
}

nd_status nd_dump_each_pair(const char *const folders[2],
                            nd_status (*visit)(void *context, const nd_dump_pair *pair),
                            void *context)
{
    dump dumps[2] = {0};
    nd_status status = ND_OK;
    ND_TRY_OUT(open_dump(folders[0], &dumps[0]));
    ND_TRY_OUT(open_dump(folders[1], &dumps[1]));
    for (int s = 0; s < 2; s++) {
        const dump *own = &dumps[s], *other = &dumps[!s];
        for (int64_t i = 0; i < own->part_count; i = next_tensor(own, i)) {
            const part *p = &own->parts[i];
            int64_t first[] = {i, 0};
            while (first[1] < other->part_count &&
                   strcmp(other->parts[first[1]].name, p->name) != 0) {
                first[1]++;
            }
            const part *q = first[1] < other->part_count ? &other->parts[first[1]] : NULL;
            const nd_dump_pair pair = {.name = p->name, .in = {s == 0 || q, s == 1 || q}};
            if (s == 0 && q && q->rows == p->rows && q->cols == p->cols) {
                ND_TRY_OUT(visit_both(dumps, first, pair, visit, context));
            } else if (s == 0 || !q) {
                ND_TRY_OUT(visit(context, &pair));
            }
        }
    }
out:
    close_dump(&dumps[0]);
    close_dump(&dumps[1]);
    return status;
}
