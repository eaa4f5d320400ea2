// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/weights.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fsio.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"

/* GPT-2's printable bytes stand for themselves (Latin-1); the other 68, in order, are U+0100,
 * U+0101, ... */
static bool is_printable(int byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static void put_utf8(int code_point, char text[3])
{
    if (code_point < 0x80) {
        text[0] = (char)code_point;
        text[1] = '\0';
    } else { /* below U+0800 */
        text[0] = (char)(0xc0 | code_point >> 6);
        text[1] = (char)(0x80 | (code_point & 0x3f));
        text[2] = '\0';
    }
}

static json_t *vocabulary(void)
{
    json_t *vocab = json_object();
    int other = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        char key[3];
        put_utf8(is_printable(byte) ? byte : other++, key);
        if (json_object_set_new(vocab, key, json_integer(byte)) != 0) {
            json_decref(vocab);
            return NULL;
        }
    }
    return vocab;
}

static json_t *byte_level(void)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 0, "use_regex", 0);
}

static json_t *tokenizer(void)
{
    json_t *model =
        json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}", "type", "BPE", "dropout",
                  "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0,
                  "byte_fallback", 0, "ignore_merges", 0, "vocab", vocabulary(), "merges");
    return json_pack("{s:s, s:n, s:n, s:[], s:n, s:o, s:n, s:o, s:o}", "version", "1.0",
                     "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                     byte_level(), "post_processor", "decoder", byte_level(), "model", model);
}

static json_t *tokenizer_config(void)
{
    return json_pack("{s:s, s:b, s:[s, s]}", "tokenizer_class", "PreTrainedTokenizerFast",
                     "clean_up_tokenization_spaces", 0, "model_input_names", "input_ids",
                     "attention_mask");
}

static nd_status write_json(const char *folder, const char *name, json_t *root)
{
    char *path = NULL;
    char *text = nd_json_text(root, JSON_INDENT(2));
    json_decref(root);
    nd_status status =
        text ? nd_fs_format(&path, "%s/%s", folder, name) : nd_fail_memory("%s", name);
    if (status == ND_OK) {
        status = nd_fs_write_atomic(path, text, strlen(text));
    }
    free(path);
    free(text);
    return status;
}

nd_status nd_hf_byte_tokenizer_text(char **out)
{
    json_t *root = tokenizer();
    *out = nd_json_text(root, 0);
    json_decref(root);
    return *out ? ND_OK : nd_fail_memory("tokenizer.json");
}

nd_status nd_hf_byte_tokenizer_write(const char *folder)
{
    ND_TRY(write_json(folder, "tokenizer.json", tokenizer()));
    return write_json(folder, "tokenizer_config.json", tokenizer_config());
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
