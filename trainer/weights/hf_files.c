// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/weights.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fsio.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/text/tokenizer.h"

static json_t *tokenizer_config(void)
{
    return json_pack("{s:s, s:b, s:[s, s]}", "tokenizer_class", "PreTrainedTokenizerFast",
                     "clean_up_tokenization_spaces", 0, "model_input_names", "input_ids",
                     "attention_mask");
}

/* The text is freed. */
static nd_status write_text(const char *folder, const char *name, char *text)
{
    char *path = NULL;
    nd_status status =
        text ? nd_fs_format(&path, "%s/%s", folder, name) : nd_fail_memory("%s", name);
    if (status == ND_OK) {
        status = nd_fs_write_atomic(path, text, strlen(text));
    }
    free(path);
    free(text);
    return status;
}

nd_status nd_hf_byte_tokenizer_write(const char *folder)
{
    char *text = NULL;
    json_t *config = tokenizer_config();
    nd_status status = nd_byte_tokenizer_text(true, &text);
    status = status == ND_OK ? write_text(folder, "tokenizer.json", text) : status;
    if (status == ND_OK) {
        status = write_text(folder, "tokenizer_config.json", nd_json_text(config, JSON_INDENT(2)));
    }
    json_decref(config);
    return status;
}

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
        nd_log_warning("a file is not copied into the saved model: %s", nd_error_last()->message);
        return ND_OK;
    }
    nd_status status = nd_fs_write_atomic(to, bytes, size);
    free(bytes);
    return status;
}

static nd_status copy_named(const char *from, const char *to, const char *name)
{
    char *source = NULL, *target = NULL;
    nd_status status = nd_fs_format(&source, "%s/%s", from, name);
    status = status == ND_OK ? nd_fs_format(&target, "%s/%s", to, name) : status;
    status = status == ND_OK ? copy_file(source, target) : status;
    free(target);
    free(source);
    return status;
}

nd_status nd_hf_side_files_copy(const char *from, const char *to, bool tokenizer)
{
    for (int i = 0; i < FILE_COUNT; i++) {
        if (!files[i].tokenizer || tokenizer) {
            ND_TRY(copy_named(from, to, files[i].name));
        }
    }
    return ND_OK;
}

nd_status nd_hf_tokenizer_copy(const char *path, const char *to)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *bytes = NULL, *target = NULL, *folder = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_read(path, max_file_bytes, ND_ERR_DATA, &bytes, &size));
    ND_TRY_OUT(nd_fs_format(&target, "%s/tokenizer.json", to));
    ND_TRY_OUT(nd_fs_write_atomic(target, bytes, size));
    ND_TRY_OUT(nd_fs_parent(path, &folder));
    for (int i = 1; i < FILE_COUNT && strcmp(name, files[0].name) == 0; i++) {
        if (files[i].tokenizer) {
            ND_TRY_OUT(copy_named(folder, to, files[i].name));
        }
    }
out:
    free(folder);
    free(target);
    free(bytes);
    return status;
}
