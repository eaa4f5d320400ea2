// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/weights.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/text/tokenizer.h"

nd_status nd_hf_text_write(const char *folder, const char *name, char *text)
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
    ND_TRY(nd_byte_tokenizer_text(true, &text));
    ND_TRY(nd_hf_text_write(folder, "tokenizer.json", text));
    json_t *config = json_pack("{s:s, s:b, s:[s, s]}", "tokenizer_class", "PreTrainedTokenizerFast",
                               "clean_up_tokenization_spaces", 0, "model_input_names", "input_ids",
                               "attention_mask");
    const nd_status status =
        nd_hf_text_write(folder, "tokenizer_config.json", nd_json_text(config, JSON_INDENT(2)));
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

nd_status nd_hf_side_files_bytes(const char *folder, bool tokenizer, uint64_t *bytes)
{
    uint64_t sum = 0;
    for (int i = 0; i < FILE_COUNT; i++) {
        char *path = NULL;
        struct stat st;
        nd_fs_kind kind = ND_FS_ABSENT;
        if (files[i].tokenizer && !tokenizer) {
            continue;
        }
        ND_TRY(nd_fs_format(&path, "%s/%s", folder, files[i].name));
        nd_status status = nd_fs_look(path, &kind, &st);
        free(path);
        ND_TRY(status);
        sum += kind == ND_FS_FILE ? (uint64_t)st.st_size : 0;
    }
    *bytes = sum;
    return ND_OK;
}

/* The path without links; NULL: it leads nowhere. Owned by the caller. */
static nd_status real_path(const char *path, char **out)
{
    *out = realpath(path, NULL);
    return *out || nd_fs_blame(errno, ND_ERR_DATA) != ND_ERR_IO
               ? ND_OK
               : nd_fail(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(errno));
}

/* Whether the folder, or any below it, holds what the path leads to. */
static nd_status leads_into(const char *path, const char *folder, bool *out)
{
    char *file = NULL, *real = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(real_path(path, &file));
    ND_TRY_OUT(real_path(folder, &real));
    const size_t length = real ? strlen(real) : 0;
    *out = file && real && strncmp(file, real, length) == 0 && file[length] == '/';
out:
    free(real);
    free(file);
    return status;
}

/*
 * The files of the local Hugging Face cache are links from snapshots/COMMIT into blobs/. A link to
 * anywhere else would put a file of this user, whatever it is, into a model that is meant for
 * others. Names the reason in the error record.
 */
static nd_status check_link(const char *folder, const char *path)
{
    char *real = NULL, *blobs = NULL;
    nd_fs_kind kind;
    bool inside = true;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_look_at_link(path, &kind, NULL));
    ND_TRY_OUT(kind == ND_FS_LINK ? leads_into(path, folder, &inside) : ND_OK);
    if (inside) {
        goto out;
    }
    ND_TRY_OUT(real_path(folder, &real));
    ND_TRY_OUT(nd_fs_format(&blobs, "%s/../../blobs", real ? real : ""));
    ND_TRY_OUT(nd_fs_look_at_link(blobs, &kind, NULL));
    ND_TRY_OUT(kind == ND_FS_FOLDER ? leads_into(path, blobs, &inside) : ND_OK);
    if (!inside) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" is a link that leads out of its folder; put the file itself there",
                         path);
    }
out:
    free(blobs);
    free(real);
    return status;
}

/* The copy may be read by no more users than the original. A file that is wrong, or was before
 * (`status`), is named: it is no reason to lose a trained model. */
static nd_status copy_file(nd_status status, const char *source, const char *to, const char *name)
{
    char *target = NULL, *bytes = NULL;
    size_t size = 0;
    mode_t mode = 0;
    status = status == ND_OK
                 ? nd_fs_read_mode(source, max_file_bytes, ND_ERR_DATA, &bytes, &size, &mode)
                 : status;
    if (status == ND_ERR_DATA) {
        nd_log_warning("a file is not copied into the saved model: %s", nd_error_last()->message);
        nd_error_clear();
        return ND_OK;
    }
    status = status == ND_OK ? nd_fs_format(&target, "%s/%s", to, name) : status;
    status = status == ND_OK ? nd_fs_write_atomic_as(target, mode & 0666, bytes, size) : status;
    free(bytes);
    free(target);
    return status;
}

static nd_status copy_named(const char *from, const char *to, const char *name)
{
    char *source = NULL;
    bool there = true;
    ND_TRY(nd_fs_format(&source, "%s/%s", from, name));
    nd_status status = nd_fs_exists(source, &there);
    if (status != ND_OK || there) {
        status = status == ND_OK ? check_link(from, source) : status;
        status = copy_file(status, source, to, name);
    }
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
    char *folder = NULL;
    ND_TRY(nd_fs_parent(path, &folder));
    nd_status status = copy_file(ND_OK, path, to, files[0].name);
    for (int i = 1; i < FILE_COUNT && strcmp(name, files[0].name) == 0 && status == ND_OK; i++) {
        status = files[i].tokenizer ? copy_named(folder, to, files[i].name) : ND_OK;
    }
    free(folder);
    return status;
}
