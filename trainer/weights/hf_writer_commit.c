// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "trainer/weights/byte_tokenizer.h"
#include "trainer/weights/hf_files.h"
#include "trainer/weights/hf_writer_internal.h"

static nd_status check_coverage(const nd_hf_writer *writer)
{
    for (int64_t i = 0; i < writer->entry_count; i++) {
        const nd_hf_entry *e = &writer->entries[i];
        int64_t count = nd_st_tensor_count(e->tensor);
        int64_t gap = nd_coverage_first_gap(&e->coverage, count);
        if (gap < count) {
            return nd_fail(ND_ERR_INTERNAL,
                           "element %lld of %lld of tensor \"%s\" was never written to \"%s\"",
                           (long long)gap, (long long)count, e->tensor->name, writer->folder);
        }
    }
    return ND_OK;
}

static const char *base_name(const char *path)
{
    return strrchr(path, '/') + 1;
}

static json_t *index_json(const nd_hf_writer *writer)
{
    json_t *map = json_object();
    for (int64_t i = 0; i < writer->entry_count; i++) {
        const nd_hf_entry *e = &writer->entries[i];
        json_object_set_new(map, e->tensor->name, json_string(base_name(e->file->path)));
    }
    return json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)writer->tensor_bytes,
                     "weight_map", map);
}

static nd_status write_index(const nd_hf_writer *writer)
{
    char *path = NULL;
    json_t *root = index_json(writer);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    nd_status status =
        text ? nd_fs_format(&path, "%s/model.safetensors.index.json", writer->temporary)
             : nd_fail(ND_ERR_INTERNAL, "out of host memory for the index of the model");
    if (status == ND_OK) {
        status = nd_fs_write_atomic(path, text, strlen(text));
    }
    free(path);
    free(text);
    return status;
}

static nd_status write_config(const nd_hf_writer *writer)
{
    char *path = NULL;
    ND_TRY(nd_fs_format(&path, "%s/config.json", writer->temporary));
    const char *dtype = writer->options.dtype == ND_DTYPE_BF16 ? "bfloat16" : "float32";
    nd_status status = nd_llama_shape_write(&writer->options.shape, dtype, path);
    int fd = status == ND_OK ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        status = nd_fs_sync_close(fd, path);
    }
    free(path);
    return status;
}

static nd_status finish_files(nd_hf_writer *writer)
{
    for (int64_t f = 0; f < writer->file_count; f++) {
        int fd = writer->files[f].fd;
        writer->files[f].fd = -1;
        ND_TRY(nd_fs_sync_close(fd, writer->files[f].path));
    }
    if (writer->file_count > 1) {
        ND_TRY(write_index(writer));
    }
    ND_TRY(write_config(writer));
    if (writer->options.byte_tokenizer) {
        ND_TRY(nd_byte_tokenizer_write(writer->temporary));
    }
    if (writer->options.source) {
        ND_TRY(nd_hf_side_files_copy(writer->options.source, writer->temporary,
                                     !writer->options.byte_tokenizer));
    }
    return nd_fs_sync_folder(writer->temporary);
}

static nd_status publish(const nd_hf_writer *writer)
{
    int code = renameat2(AT_FDCWD, writer->temporary, AT_FDCWD, writer->folder, RENAME_NOREPLACE)
                   ? errno
                   : 0;
    if (code == EINVAL || code == ENOSYS) { /* a file system without NOREPLACE */
        code = rename(writer->temporary, writer->folder) ? errno : 0;
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
    char *parent = NULL;
    ND_TRY_OUT(nd_fs_parent(writer->folder, &parent));
    ND_TRY_OUT(check_coverage(writer));
    ND_TRY_OUT(finish_files(writer));
    ND_TRY_OUT(publish(writer));
    ND_TRY_OUT(nd_fs_sync_folder(parent));
out:
    free(parent);
    nd_hf_writer_abort(writer); /* after a rename there is no temporary folder to remove */
    return status;
}
