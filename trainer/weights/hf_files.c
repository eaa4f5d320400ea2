// SPDX-License-Identifier: Apache-2.0
/* The files of a model folder beside its weights. */
#include "trainer/weights/weights.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"
#include "trainer/text/tokenizer.h"

/* The tokenizer, the chat template and generation_config.json, which stay as they are when a model
 * is trained further. */
static const struct {
    const char *name;
    bool tokenizer;
} side_files[] = {
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

enum { FILE_COUNT = sizeof side_files / sizeof *side_files };

static const size_t max_file_bytes = (size_t)1 << 30;

nd_status nd_hf_side_files_bytes(const char *folder, uint64_t *bytes)
{
    *bytes = 0;
    for (int i = 0; i < FILE_COUNT; i++) {
        char path[PATH_MAX];
        struct stat st;
        nd_fs_kind kind = ND_FS_ABSENT;
        ND_TRY(nd_fs_path(path, "%s/%s", folder, side_files[i].name));
        ND_TRY(nd_fs_look(path, &kind, &st));
        *bytes += kind == ND_FS_FILE ? (uint64_t)st.st_size : 0;
    }
    return ND_OK;
}

/* The path without links; "": it leads nowhere. */
static nd_status real_path(const char *path, char out[PATH_MAX])
{
    if (!realpath(path, out)) {
        *out = '\0';
        return nd_fs_blame(errno, ND_ERR_DATA) != ND_ERR_IO
                   ? ND_OK
                   : nd_fail(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(errno));
    }
    return ND_OK;
}

/* Finds whether the path leads to something in the folder or in any folder below it. */
static nd_status leads_into(const char *path, const char *folder, bool *out)
{
    char file[PATH_MAX], real[PATH_MAX];
    ND_TRY(real_path(path, file));
    ND_TRY(real_path(folder, real));
    const size_t length = strlen(real);
    *out = *file && length > 0 && strncmp(file, real, length) == 0 && file[length] == '/';
    return ND_OK;
}

/*
 * The files of the local Hugging Face cache are links from snapshots/COMMIT into blobs/. A link to
 * anywhere else would put a file of this user, whatever it is, into a model that is meant for
 * others. Names the reason in the error record.
 */
static nd_status check_link(const char *folder, const char *path)
{
    char real[PATH_MAX], blobs[PATH_MAX];
    nd_fs_kind kind;
    bool inside = true;
    ND_TRY(nd_fs_look_at_link(path, &kind, NULL));
    ND_TRY(kind == ND_FS_LINK ? leads_into(path, folder, &inside) : ND_OK);
    if (inside) {
        return ND_OK;
    }
    ND_TRY(real_path(folder, real));
    ND_TRY(nd_fs_path(blobs, "%s/../../blobs", real));
    ND_TRY(nd_fs_look_at_link(blobs, &kind, NULL));
    ND_TRY(kind == ND_FS_FOLDER ? leads_into(path, blobs, &inside) : ND_OK);
    return inside ? ND_OK
                  : nd_fail(ND_ERR_DATA,
                            "\"%s\" is a link that leads out of its folder; put the file itself "
                            "there",
                            path);
}

/* The copy may be read by no more users than the original. A file that is wrong, or was before
 * (`status`), is named: it is no reason to lose a trained model. */
static nd_status copy_file(nd_status status, const char *source, const char *to, const char *name)
{
    char target[PATH_MAX], *bytes = NULL;
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
    status = status == ND_OK ? nd_fs_path(target, "%s/%s", to, name) : status;
    status = status == ND_OK ? nd_fs_write_atomic_as(target, mode & 0666, bytes, size) : status;
    free(bytes);
    return status;
}

static nd_status copy_named(const char *from, const char *to, const char *name)
{
    char source[PATH_MAX];
    bool there = true;
    ND_TRY(nd_fs_path(source, "%s/%s", from, name));
    nd_status status = nd_fs_exists(source, &there);
    status = status == ND_OK && there ? check_link(from, source) : status;
    return status != ND_OK || there ? copy_file(status, source, to, name) : ND_OK;
}

/* This file as tokenizer.json, and the tokenizer's other files of its folder when that is its
 * name. */
static nd_status copy_tokenizer(const char *path, const char *to)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *folder = NULL;
    ND_TRY(nd_fs_parent(path, &folder));
    nd_status status = copy_file(ND_OK, path, to, side_files[0].name);
    for (int i = 1; i < FILE_COUNT && strcmp(name, side_files[0].name) == 0 && status == ND_OK;
         i++) {
        status = side_files[i].tokenizer ? copy_named(folder, to, side_files[i].name) : ND_OK;
    }
    free(folder);
    return status;
}

/* tokenizer.json and tokenizer_config.json for a model whose ids are bytes, as transformers'
 * AutoTokenizer reads them: byte-level BPE without merges, whose vocabulary maps the character that
 * stands for byte b to id b. */
static nd_status write_byte_tokenizer(const char *folder)
{
    char path[PATH_MAX], *text = NULL;
    ND_TRY(nd_fs_path(path, "%s/tokenizer.json", folder));
    ND_TRY(nd_byte_tokenizer_text(true, &text));
    const nd_status status = nd_fs_write_atomic(path, text, strlen(text));
    free(text);
    ND_TRY(status);
    return nd_json_write(folder, "tokenizer_config.json",
                         json_pack("{s:s, s:b, s:[s, s]}", "tokenizer_class",
                                   "PreTrainedTokenizerFast", "clean_up_tokenization_spaces", 0,
                                   "model_input_names", "input_ids", "attention_mask"),
                         JSON_INDENT(2));
}

/* The token that ends a turn; -1: none. It is no reason to lose a model. */
static int32_t find_end_of_turn(const char *folder, const nd_hf_writer_options *o)
{
    nd_tokenizer *tokenizer = NULL;
    nd_chat chat;
    nd_chat_rules rules;
    char path[PATH_MAX];
    const bool found = nd_fs_path(path, "%s/tokenizer.json", folder) == ND_OK &&
                       nd_tokenizer_open(path, &tokenizer) == ND_OK &&
                       nd_chat_rules_find(path, o->chat, &rules) == ND_OK &&
                       nd_chat_find(tokenizer, &rules, &chat) == ND_OK;
    nd_error_clear();
    nd_tokenizer_close(tokenizer);
    return found && chat.close < o->shape.vocab ? chat.close : -1;
}

/* A model that has learned to end its turns is asked by generation_config.json to end there. A file
 * that is no JSON stays as it is. */
static nd_status name_end_of_turn(const char *folder, const nd_hf_writer_options *o)
{
    static const char name[] = "generation_config.json";
    const int32_t end = o->chat == ND_CHOOSE_CHAT_NONE ? -1 : find_end_of_turn(folder, o);
    json_t *root = NULL, *ends, *old, *one;
    bool named = false;
    size_t i;
    nd_status status = end < 0 ? ND_OK : nd_json_read(folder, name, 0, &root);
    if (status == ND_ERR_DATA) {
        nd_error_clear();
        return ND_OK;
    }
    if (end < 0 || status != ND_OK) {
        return status;
    }
    root = root ? root : json_object();
    old = json_object_get(root, "eos_token_id");
    ends = json_is_array(old) ? json_incref(old) : json_array();
    if (json_is_integer(old)) {
        nd_json_append(&ends, json_incref(old));
    } else if ((!old || json_is_null(old)) && o->shape.eos_id >= 0) {
        nd_json_append(&ends, json_integer(o->shape.eos_id));
    }
    for (i = 0; (!old || json_is_null(old)) && i < (size_t)o->shape.more_end_count; i++) {
        nd_json_append(&ends, json_integer(o->shape.more_ends[i]));
    }
    json_array_foreach(ends, i, one)
    {
        named = named || json_integer_value(one) == end;
    }
    if (json_is_object(root) && !named) {
        nd_json_append(&ends, json_integer(end));
        nd_json_set(&root, "eos_token_id", json_incref(ends));
        status = nd_json_write(folder, name, json_incref(root), JSON_INDENT(2));
    }
    json_decref(ends);
    json_decref(root);
    return status;
}

/* SHA256SUMS, in the format of the program sha256sum. */

enum { LIST_BYTES_MAX = 4 << 20, HEX = 64 };

static const char list_name[] = "SHA256SUMS";

/* Adds the line of one file; what is not a regular file is left out. */
static nd_status add_line(FILE *out, const char *folder, const char *name)
{
    char path[PATH_MAX], hex[HEX + 1];
    nd_fs_kind kind;
    ND_TRY(nd_fs_path(path, "%s/%s", folder, name));
    ND_TRY(nd_fs_look(path, &kind, NULL));
    if (kind == ND_FS_FILE) {
        ND_TRY(nd_sha256_file(path, hex));
        fprintf(out, "%s  %s\n", hex, name);
    }
    return ND_OK;
}

/* The list of all files in the folder. */
static nd_status write_checksums(const char *folder)
{
    char *text = NULL, path[PATH_MAX];
    size_t size = 0;
    nd_fs_names names;
    ND_TRY(nd_fs_path(path, "%s/%s", folder, list_name));
    ND_TRY(nd_fs_list(folder, &names));
    FILE *out = open_memstream(&text, &size);
    nd_status status = out ? ND_OK : nd_fail_memory("SHA256SUMS");
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        const char *name = names.list[i];
        const bool listed = name[0] != '.' && strcmp(name, list_name) != 0;
        status = listed ? add_line(out, folder, name) : ND_OK;
    }
    if (out && fclose(out) != 0 && status == ND_OK) {
        status = nd_fail_memory("SHA256SUMS");
    }
    status = status == ND_OK ? nd_fs_write_atomic(path, text, size) : status;
    nd_fs_names_fini(&names);
    free(text);
    return status;
}

nd_status nd_hf_files_write(const char *folder, const nd_hf_writer_options *o, nd_error *lacks)
{
    char config[PATH_MAX];
    nd_shape shape = o->shape;
    if (shape.eos_id < 0 && o->tokenizer) { /* else what is generated would not end */
        shape.eos_id = nd_corpus_model_end(NULL, o->tokenizer, shape.vocab);
    }
    ND_TRY(nd_fs_path(config, "%s/config.json", folder));
    ND_TRY(nd_shape_write(&shape, o->dtype == ND_DTYPE_BF16 ? "bfloat16" : "float32", config));
    ND_TRY(o->byte_tokenizer ? write_byte_tokenizer(folder) : ND_OK);
    nd_status status = o->tokenizer ? copy_tokenizer(o->tokenizer, folder) : ND_OK;
    /* Those of a model that was trained further. A file that cannot be copied whatever is tried,
     * such as a link out of its folder, gets a warning. */
    const bool own = o->byte_tokenizer || o->tokenizer;
    for (int i = 0; o->source && status == ND_OK && i < FILE_COUNT; i++) {
        status = side_files[i].tokenizer && own ? ND_OK
                                                : copy_named(o->source, folder, side_files[i].name);
    }
    status = status == ND_OK ? name_end_of_turn(folder, o) : status;
    if (status == ND_ERR_IO) {
        *lacks = *nd_error_last();
        nd_error_clear();
        status = ND_OK;
    }
    ND_TRY(status);
    return write_checksums(folder);
}

/* "<hex>  <name>", or "<hex> *<name>"; the name must lie in the folder. */
static bool split_line(char *line, const char **hex, const char **name)
{
    *hex = line;
    *name = line + HEX + 2;
    if (strlen(line) <= HEX + 2 || strspn(line, "0123456789abcdefABCDEF") != HEX ||
        line[HEX] != ' ' || (line[HEX + 1] != ' ' && line[HEX + 1] != '*') || strchr(*name, '/') ||
        strcmp(*name, "..") == 0) {
        return false;
    }
    line[HEX] = '\0';
    return true;
}

static nd_status verify_file(const char *folder, const char *name, const char *wanted)
{
    char path[PATH_MAX], hex[HEX + 1];
    bool there = false;
    ND_TRY(nd_fs_path(path, "%s/%s", folder, name));
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is missing, but SHA256SUMS of its folder lists it; copy the whole "
                       "folder again, or set model.verify: false (--model-verify false)",
                       path);
    }
    ND_TRY(nd_sha256_file(path, hex));
    return strcasecmp(hex, wanted) == 0
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\" is not the file that SHA256SUMS of its folder lists: it was "
                         "damaged or changed after it was saved; copy it again, or, if the change "
                         "is wanted, remove SHA256SUMS or set model.verify: false (--model-verify "
                         "false)",
                         path);
}

static nd_status verify_list(const char *folder, const char *path, char *text, int *files)
{
    char *rest = text;
    int64_t number = 0;
    for (char *line; (line = strsep(&rest, "\n"));) {
        const char *hex, *name;
        number++;
        if (!*line) {
            continue;
        }
        if (!split_line(line, &hex, &name)) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\" line %lld is not a SHA-256 and the name of a file of the "
                           "folder; make it again with sha256sum, or set model.verify: false",
                           path, (long long)number);
        }
        ND_TRY(verify_file(folder, name, hex));
        (*files)++;
    }
    return ND_OK;
}

nd_status nd_checksums_verify(const char *folder, int *files)
{
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    bool there = false;
    *files = 0;
    ND_TRY(nd_fs_path(path, "%s/%s", folder, list_name));
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_read(path, LIST_BYTES_MAX, ND_ERR_DATA, &text, &size));
    const nd_status status = verify_list(folder, path, text, files);
    free(text);
    return status;
}
