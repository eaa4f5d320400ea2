// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/hf_writer_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fsio.h"

enum { CONVERT_ELEMENTS = 64 * 1024, SMALL_FILES_BYTES = 1 << 20 };

static const int64_t default_file_bytes = 5000000000;

/*
 * Bytes of a file that may wait for the disk. A disk that is slower than the ranks that send is
 * felt at each piece, under that exchange's deadline, and not all at once at the end, where the
 * others would give up on it.
 */
static const int64_t max_unsynced_bytes = 256 << 20;

static int by_name(const void *a, const void *b)
{
    return strcmp(((const nd_hf_entry *)a)->tensor->name, ((const nd_hf_entry *)b)->tensor->name);
}

static nd_hf_entry *find_entry(const nd_hf_writer *writer, const char *name)
{
    nd_st_tensor wanted = {.name = (char *)name};
    nd_hf_entry key = {.tensor = &wanted};
    return bsearch(&key, writer->entries, (size_t)writer->entry_count, sizeof key, by_name);
}

static uint64_t bytes_of(const nd_hf_writer *writer, const nd_hf_tensor *tensor)
{
    uint64_t n = nd_dtype_size(writer->options.dtype);
    for (int a = 0; a < tensor->axes; a++) {
        n *= (uint64_t)tensor->shape[a];
    }
    return n;
}

/* Opening. */

/* Tensors in the given order; a new file begins where the next tensor would not fit. */
static nd_status split_files(nd_hf_writer *writer, const nd_hf_tensor *tensors, int count)
{
    uint64_t room = (uint64_t)writer->options.max_file_bytes, used = 0;
    ND_TRY(ND_ALLOC(count, &writer->files));
    nd_hf_weight_file *file = NULL;
    for (int i = 0; i < count; i++) {
        uint64_t bytes = bytes_of(writer, &tensors[i]);
        if (!file || used + bytes > room) {
            file = &writer->files[writer->file_count++];
            file->fd = -1;
            used = 0;
            ND_TRY(ND_ALLOC(count - i, &file->list.tensors));
        }
        used += bytes;
        writer->tensor_bytes += bytes;
        nd_st_tensor *t = &file->list.tensors[file->list.count++];
        t->dtype = writer->options.dtype == ND_DTYPE_BF16 ? ND_ST_BF16 : ND_ST_F32;
        t->axes = tensors[i].axes;
        memcpy(t->shape, tensors[i].shape, (size_t)t->axes * sizeof *t->shape);
        ND_TRY(nd_fs_format(&t->name, "%s", tensors[i].name));
    }
    return ND_OK;
}

/* Creates the file at its full size, so that a full disk is found before the first tensor is
 * written. */
static nd_status create_file(nd_hf_writer *writer, nd_hf_weight_file *file)
{
    char *head = NULL;
    size_t head_bytes = 0;
    ND_TRY(nd_st_layout(file->list.tensors, file->list.count, &head, &head_bytes));
    nd_status status = ND_OK;
    uint64_t size = file->list.tensors[file->list.count - 1].end;
    file->fd = open(file->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file->fd < 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", file->path, strerror(errno));
        goto out;
    }
    int code = fallocate(file->fd, 0, 0, (off_t)size) == 0 ? 0 : errno;
    if (code == EOPNOTSUPP || code == ENOSYS) { /* cannot reserve, can still grow */
        code = ftruncate(file->fd, (off_t)size) == 0 ? 0 : errno;
    }
    if (code != 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "cannot reserve %llu bytes for \"%s\": %s",
                         (unsigned long long)size, file->path, strerror(code));
        goto out;
    }
    ND_TRY_OUT(nd_fs_pwrite(file->fd, file->path, head, head_bytes, 0));
out:
    free(head);
    return status;
}

static nd_status create_files(nd_hf_writer *writer)
{
    for (int64_t f = 0; f < writer->file_count; f++) {
        nd_hf_weight_file *file = &writer->files[f];
        if (writer->file_count == 1) {
            ND_TRY(nd_fs_format(&file->path, "%s/model.safetensors", writer->temporary));
        } else {
            ND_TRY(nd_fs_format(&file->path, "%s/model-%05lld-of-%05lld.safetensors",
                                writer->temporary, (long long)f + 1,
                                (long long)writer->file_count));
        }
        ND_TRY(create_file(writer, file));
    }
    return ND_OK;
}

static nd_status collect_entries(nd_hf_writer *writer, int count)
{
    ND_TRY(ND_ALLOC(count, &writer->entries));
    for (int64_t f = 0; f < writer->file_count; f++) {
        nd_hf_weight_file *file = &writer->files[f];
        for (int64_t t = 0; t < file->list.count; t++) {
            writer->entries[writer->entry_count++] =
                (nd_hf_entry){.tensor = &file->list.tensors[t], .file = file};
        }
    }
    qsort(writer->entries, (size_t)count, sizeof *writer->entries, by_name);
    for (int i = 1; i < count; i++) {
        ND_ASSERT(by_name(&writer->entries[i - 1], &writer->entries[i]) != 0);
    }
    return ND_OK;
}

static nd_status make_temporary(nd_hf_writer *writer)
{
    nd_status status = ND_OK;
    char *parent = NULL, *name = NULL;
    const char *folder = writer->folder;
    ND_TRY_OUT(nd_fs_parent(folder, &parent));
    if (nd_fs_exists(folder)) {
        status =
            nd_fail(ND_ERR_CANTCREATE,
                    "\"%s\" exists already and is not overwritten: choose another folder, or move "
                    "it away",
                    folder);
        goto out;
    }
    ND_TRY_OUT(
        nd_fs_check_space(parent, writer->tensor_bytes + SMALL_FILES_BYTES, "the trained model"));
    ND_TRY_OUT(nd_fs_format(&name, "%s.tmp-%d-%llx", folder, (int)getpid(),
                            (unsigned long long)nd_clock_ns()));
    if (mkdir(name, 0777) != 0) {
        status =
            nd_fail(ND_ERR_CANTCREATE,
                    "cannot make folder \"%s\": %s; the model is written beside its final place "
                    "and needs a writable parent folder",
                    name, strerror(errno));
        goto out;
    }
    writer->temporary = name;
    name = NULL;
out:
    free(name);
    free(parent);
    return status;
}

/* Without trailing slashes, since a name is made by appending to it. */
static nd_status copy_folder_name(const char *folder, char **out)
{
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/') {
        n--;
    }
    return nd_fs_format(out, "%.*s", (int)n, folder);
}

nd_status nd_hf_writer_open(const char *folder, const nd_hf_writer_options *options,
                            const nd_hf_tensor *tensors, int count, nd_hf_writer **out)
{
    ND_ASSERT(count > 0 && (options->dtype == ND_DTYPE_F32 || options->dtype == ND_DTYPE_BF16));
    nd_status status = ND_OK;
    nd_hf_writer *writer = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &writer));
    writer->options = *options;
    if (writer->options.max_file_bytes <= 0) {
        writer->options.max_file_bytes = default_file_bytes;
    }
    ND_TRY_OUT(copy_folder_name(folder, &writer->folder));
    ND_TRY_OUT(ND_ALLOC(CONVERT_ELEMENTS, &writer->converted));
    ND_TRY_OUT(split_files(writer, tensors, count));
    ND_TRY_OUT(make_temporary(writer));
    ND_TRY_OUT(create_files(writer));
    ND_TRY_OUT(collect_entries(writer, count));
    *out = writer;
    writer = NULL;
out:
    nd_hf_writer_abort(writer);
    return status;
}

static void destroy(nd_hf_writer *writer)
{
    for (int64_t f = 0; f < writer->file_count; f++) {
        nd_hf_weight_file *file = &writer->files[f];
        if (file->fd >= 0) {
            close(file->fd);
        }
        nd_st_list_fini(&file->list);
        free(file->path);
    }
    for (int64_t i = 0; i < writer->entry_count; i++) {
        nd_coverage_fini(&writer->entries[i].coverage);
    }
    free(writer->entries);
    free(writer->files);
    free(writer->converted);
    free(writer->temporary);
    free(writer->folder);
    free(writer);
}

void nd_hf_writer_abort(nd_hf_writer *writer)
{
    if (!writer) {
        return;
    }
    if (writer->temporary) {
        nd_fs_remove_flat_folder(writer->temporary);
    }
    destroy(writer);
}

/* Values. */

static nd_status write_bf16(nd_hf_writer *writer, const nd_hf_weight_file *file, int64_t at,
                            const float *values, int64_t count)
{
    for (int64_t done = 0; done < count;) {
        int64_t n = count - done < CONVERT_ELEMENTS ? count - done : CONVERT_ELEMENTS;
        for (int64_t i = 0; i < n; i++) {
            writer->converted[i] = nd_bf16_from_f32(values[done + i]);
        }
        ND_TRY(nd_fs_pwrite(file->fd, file->path, writer->converted, (size_t)n * 2, at + 2 * done));
        done += n;
    }
    return ND_OK;
}

nd_status nd_hf_writer_write(nd_hf_writer *writer, const char *name, int64_t begin, int64_t count,
                             const float *values)
{
    nd_hf_entry *e = find_entry(writer, name);
    ND_ASSERT(e && begin >= 0 && count >= 0 && begin <= nd_st_tensor_count(e->tensor) - count);
    if (writer->options.dtype == ND_DTYPE_BF16) {
        ND_TRY(write_bf16(writer, e->file, (int64_t)e->tensor->begin + 2 * begin, values, count));
    } else {
        ND_TRY(nd_fs_pwrite(e->file->fd, e->file->path, values, (size_t)count * 4,
                            (int64_t)e->tensor->begin + 4 * begin));
    }
    e->file->unsynced += count * (int64_t)nd_dtype_size(writer->options.dtype);
    if (e->file->unsynced >= max_unsynced_bytes) {
        e->file->unsynced = 0;
        if (fdatasync(e->file->fd) != 0) {
            return nd_fail(ND_ERR_CANTCREATE, "writing \"%s\" failed: %s", e->file->path,
                           strerror(errno));
        }
    }
    return nd_coverage_add(&e->coverage, begin, begin + count);
}
