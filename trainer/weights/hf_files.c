// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/hf_files.h"

#include <stdlib.h>
#include <sys/stat.h>

#include "runtime/base/fsio.h"
#include "runtime/base/log.h"

static const struct {
    const char *name;
    bool tokenizer;
} files[] = {
    {"tokenizer.json", true},
    {"tokenizer_config.json", true},
    {"special_tokens_map.json", true},
    {"tokenizer.model", true},
    {"vocab.json", true},
    {"merges.txt", true},
    {"added_tokens.json", true},
    {"chat_template.jinja", true},
    {"chat_template.json", true},
    {"generation_config.json", false},
};

enum { FILE_COUNT = sizeof files / sizeof *files };

static const size_t max_file_bytes = (size_t)1 << 30;

uint64_t nd_hf_side_files_bytes(const char *folder, bool tokenizer)
{
    uint64_t bytes = 0;
    for (int i = 0; i < FILE_COUNT; i++) {
        char *path = NULL;
        struct stat st;
        if (files[i].tokenizer && !tokenizer) {
            continue;
        }
        if (nd_fs_format(&path, "%s/%s", folder, files[i].name) == ND_OK && stat(path, &st) == 0) {
            bytes += (uint64_t)st.st_size;
        }
        free(path);
    }
    return bytes;
}

static nd_status copy_file(const char *from, const char *to)
{
    char *bytes = NULL;
    size_t size = 0;
    if (!nd_fs_exists(from)) {
        return ND_OK;
    }
    if (nd_fs_read(from, max_file_bytes, ND_ERR_DATA, &bytes, &size) != ND_OK) {
        nd_log_warning("not copied beside the saved model: %s", nd_error_last()->message);
        return ND_OK;
    }
    nd_status status = nd_fs_write_atomic(to, bytes, size);
    free(bytes);
    return status;
}

nd_status nd_hf_side_files_copy(const char *from, const char *to, bool tokenizer)
{
    for (int i = 0; i < FILE_COUNT; i++) {
        char *source = NULL, *target = NULL;
        if (files[i].tokenizer && !tokenizer) {
            continue;
        }
        nd_status status = nd_fs_format(&source, "%s/%s", from, files[i].name);
        status = status == ND_OK ? nd_fs_format(&target, "%s/%s", to, files[i].name) : status;
        status = status == ND_OK ? copy_file(source, target) : status;
        free(target);
        free(source);
        ND_TRY(status);
    }
    return ND_OK;
}
