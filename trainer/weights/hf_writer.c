// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/weights/safetensors.h"
#include "trainer/weights/weights.h"

enum { CONVERT_ELEMENTS = 64 * 1024, SMALL_FILES_BYTES = 1 << 20 };

/*
 * Bytes of a file that may wait for the disk. If the disk is slower than the ranks that send, each
 * piece takes a little longer, within the deadline of its exchange. Without this limit one sync at
 * the end would take so long that the other ranks give up.
 */
static const int64_t max_unsynced_bytes = 256 << 20;

typedef struct weight_file {
    char *path;
    int fd; /* -1: not open */
    int64_t unsynced;
    nd_safetensors_list list;
} weight_file;

/* A tensor and its file; sorted by name. */
typedef struct tensor_entry {
    const nd_safetensors_tensor *tensor; /* borrowed from the file's list */
    weight_file *file;
    int64_t left; /* elements that have not arrived yet */
} tensor_entry;

struct nd_hf_writer {
    char *folder;    /* its final path */
    char *temporary; /* its path until commit, in the same parent folder */
    nd_hf_writer_options options;
    weight_file *files; /* owned */
    int64_t file_count;
    tensor_entry *entries; /* owned */
    int64_t entry_count;
    uint64_t tensor_bytes;
    nd_bf16 *converted; /* (CONVERT_ELEMENTS) */
    nd_error lacks;     /* why a file beside the weights could not be read, or all zero */
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const tensor_entry *)a)->tensor->name, ((const tensor_entry *)b)->tensor->name);
}

/* Opening. */

/* Assigns tensors to files in the order of the parameters; one that does not fit begins a new
 * file. */
static nd_status split_files(nd_hf_writer *writer, const nd_layout *layout)
{
    const int count = layout->param_count;
    uint64_t room = (uint64_t)writer->options.max_file_bytes, used = 0;
    ND_TRY(ND_ALLOC(count, &writer->files));
    weight_file *file = NULL;
    for (int i = 0; i < count; i++) {
        const nd_param *p = &layout->params[i];
        const uint64_t bytes =
            nd_dtype_size(writer->options.dtype) * (uint64_t)(p->file_rows * p->cols);
        if (p->file_row > 0) { /* the parameter before it has the tensor */
            continue;
        }
        if (!file || used + bytes > room) {
            file = &writer->files[writer->file_count++];
            file->fd = -1;
            used = 0;
            ND_TRY(ND_ALLOC(count - i, &file->list.tensors));
        }
        used += bytes;
        writer->tensor_bytes += bytes;
        nd_safetensors_tensor *t = &file->list.tensors[file->list.count++];
        t->dtype =
            writer->options.dtype == ND_DTYPE_BF16 ? ND_SAFETENSORS_BF16 : ND_SAFETENSORS_F32;
        t->axes = p->axes;
        t->shape[0] = p->file_rows;
        t->shape[1] = p->cols;
        ND_TRY(nd_fs_format(&t->name, "%s", p->file_name));
    }
    return ND_OK;
}

/* Creates the file at its full size, so that a full disk is found before the first tensor is
 * written. */
static nd_status create_file(nd_hf_writer *writer, weight_file *file)
{
    char *head = NULL;
    size_t head_bytes = 0;
    ND_TRY(nd_safetensors_layout(file->list.tensors, file->list.count, &head, &head_bytes));
    nd_status status = ND_OK;
    uint64_t size = file->list.tensors[file->list.count - 1].end;
    file->fd = nd_fs_create(file->path, 0666);
    if (file->fd < 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", file->path, strerror(errno));
        goto out;
    }
    int code = fallocate(file->fd, 0, 0, (off_t)size) == 0 ? 0 : errno;
    if (code == EOPNOTSUPP ||
        code == ENOSYS) { /* a file system that cannot reserve space can still extend the file */
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
        weight_file *file = &writer->files[f];
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
        weight_file *file = &writer->files[f];
        for (int64_t t = 0; t < file->list.count; t++) {
            writer->entries[writer->entry_count++] =
                (tensor_entry){.tensor = &file->list.tensors[t],
                               .file = file,
                               .left = nd_safetensors_tensor_count(&file->list.tensors[t])};
        }
    }
    qsort(writer->entries, (size_t)writer->entry_count, sizeof *writer->entries, by_name);
    for (int64_t i = 1; i < writer->entry_count; i++) {
        ND_ASSERT(by_name(&writer->entries[i - 1], &writer->entries[i]) != 0);
    }
    return ND_OK;
}

/* Finds whether a path is free: nothing is there, or (takes_empty) an empty folder, not a link. */
static nd_status is_free(const char *path, bool takes_empty, bool *out)
{
    nd_fs_kind kind;
    nd_fs_names names;
    ND_TRY(nd_fs_look_at_link(path, &kind, NULL));
    *out = kind == ND_FS_ABSENT;
    if (takes_empty && kind == ND_FS_FOLDER) {
        ND_TRY(nd_fs_list(path, &names));
        *out = names.count == 0;
        nd_fs_names_fini(&names);
    }
    return ND_OK;
}

static nd_status make_temporary(nd_hf_writer *writer)
{
    nd_status status = ND_OK;
    char *parent = NULL, *name = NULL;
    const char *folder = writer->folder;
    const uint64_t bytes = writer->tensor_bytes + SMALL_FILES_BYTES;
    if (writer->options.inside) {
        ND_TRY(nd_fs_check_space(folder, bytes, "the exported model"));
        return nd_fs_format(&writer->temporary, "%s", folder);
    }
    ND_TRY_OUT(nd_fs_parent(folder, &parent));
    bool free_name = false;
    ND_TRY_OUT(is_free(folder, writer->options.takes_empty, &free_name));
    if (!free_name) {
        status =
            nd_fail(ND_ERR_CANTCREATE,
                    "\"%s\" exists already and is not overwritten; choose another folder, or move "
                    "it away",
                    folder);
        goto out;
    }
    ND_TRY_OUT(nd_fs_check_space(parent, bytes, "the trained model"));
    ND_TRY_OUT(nd_fs_temporary(folder, &name));
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

nd_status nd_hf_writer_open(const char *folder, const nd_hf_writer_options *options,
                            nd_hf_writer **out)
{
    nd_layout *layout = NULL;
    ND_ASSERT(options->dtype == ND_DTYPE_F32 || options->dtype == ND_DTYPE_BF16);
    nd_status status = ND_OK;
    nd_hf_writer *writer = NULL;
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/') { /* to its name that of a temporary is added */
        length--;
    }
    ND_TRY_OUT(ND_ALLOC(1, &writer));
    writer->options = *options;
    if (writer->options.max_file_bytes <= 0) {
        writer->options.max_file_bytes = (int64_t)ND_HF_FILE_BYTES;
    }
    ND_TRY_OUT(nd_fs_format(&writer->folder, "%.*s", (int)length, folder));
    ND_TRY_OUT(ND_ALLOC(CONVERT_ELEMENTS, &writer->converted));
    ND_TRY_OUT(nd_layout_create(&(nd_layout_options){.shape = &writer->options.shape}, &layout));
    ND_TRY_OUT(split_files(writer, layout));
    ND_TRY_OUT(make_temporary(writer));
    ND_TRY_OUT(create_files(writer));
    ND_TRY_OUT(collect_entries(writer, layout->param_count));
    *out = writer;
    writer = NULL;
out:
    nd_layout_destroy(layout);
    nd_hf_writer_abort(writer);
    return status;
}

void nd_hf_writer_abort(nd_hf_writer *writer)
{
    if (!writer) {
        return;
    }
    if (writer->temporary && !writer->options.inside) {
        nd_fs_remove_tree(writer->temporary);
    }
    for (int64_t f = 0; f < writer->file_count; f++) {
        weight_file *file = &writer->files[f];
        if (file->fd >= 0) {
            close(file->fd);
        }
        nd_safetensors_list_fini(&file->list);
        free(file->path);
    }
    free(writer->entries);
    free(writer->files);
    free(writer->converted);
    free(writer->temporary);
    free(writer->folder);
    free(writer);
}

/* Values. */

static nd_status write_bf16(nd_hf_writer *writer, const weight_file *file, int64_t at,
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
    const nd_safetensors_tensor wanted = {.name = (char *)name};
    const tensor_entry key = {.tensor = &wanted};
    tensor_entry *e =
        bsearch(&key, writer->entries, (size_t)writer->entry_count, sizeof key, by_name);
    ND_ASSERT(e && begin >= 0 && count >= 0 &&
              begin <= nd_safetensors_tensor_count(e->tensor) - count);
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
        nd_fs_beat();
    }
    e->left -= count;
    ND_ASSERT(e->left >= 0); /* else an element was written twice, and another may be missing */
    return ND_OK;
}

/* Committing. */

static nd_status check_written(const nd_hf_writer *writer)
{
    for (int64_t i = 0; i < writer->entry_count; i++) {
        const tensor_entry *e = &writer->entries[i];
        if (e->left != 0) {
            return nd_fail(ND_ERR_INTERNAL,
                           "%lld of %lld elements of tensor \"%s\" were never written to \"%s\"",
                           (long long)e->left, (long long)nd_safetensors_tensor_count(e->tensor),
                           e->tensor->name, writer->folder);
        }
    }
    return ND_OK;
}

static nd_status write_index(const nd_hf_writer *writer)
{
    json_t *map = json_object();
    for (int64_t i = 0; i < writer->entry_count; i++) {
        const tensor_entry *e = &writer->entries[i];
        nd_json_set(&map, e->tensor->name, json_string(strrchr(e->file->path, '/') + 1));
    }
    json_t *root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                             (json_int_t)writer->tensor_bytes, "weight_map", map);
    return nd_json_write(writer->temporary, "model.safetensors.index.json", root, JSON_INDENT(2));
}

static nd_status finish_files(nd_hf_writer *writer)
{
    for (int64_t f = 0; f < writer->file_count; f++) {
        int fd = writer->files[f].fd;
        writer->files[f].fd = -1;
        ND_TRY(nd_fs_sync_close(fd, writer->files[f].path));
    }
    ND_TRY(writer->file_count > 1 ? write_index(writer) : ND_OK);
    ND_TRY(nd_hf_files_write(writer->temporary, &writer->options, &writer->lacks));
    if (writer->lacks.status != ND_OK) {
        nd_log_warning("the model in %s lacks a file: %s", writer->folder, writer->lacks.message);
    }
    return nd_fs_sync_folder(writer->temporary);
}

static nd_status publish(const nd_hf_writer *writer)
{
    int code = nd_fs_rename_new(writer->temporary, writer->folder);
    if (code == EEXIST && writer->options.takes_empty && rmdir(writer->folder) == 0) {
        code = nd_fs_rename_new(writer->temporary, writer->folder);
    }
    if (code != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "cannot rename \"%s\" to \"%s\": %s", writer->temporary,
                       writer->folder, strerror(code));
    }
    return ND_OK;
}

nd_status nd_hf_writer_commit(nd_hf_writer *writer)
{
    nd_status status = ND_OK;
    ND_TRY_OUT(check_written(writer));
    ND_TRY_OUT(finish_files(writer));
    if (!writer->options.inside) {
        ND_TRY_OUT(publish(writer));
        ND_TRY_OUT(nd_fs_sync_parent(writer->folder));
        status = writer->lacks.status;
        if (status != ND_OK) {
            nd_error_restore(&writer->lacks);
        }
    }
out:
    nd_hf_writer_abort(writer); /* after a rename there is no temporary folder to remove */
    return status;
}
