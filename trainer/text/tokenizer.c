// SPDX-License-Identifier: Apache-2.0
/* Opens a tokenizer.json, and answers what is asked about its tokens. */
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/text/read.h"
#include "trainer/text/unicode.h"

enum { FILE_BYTES_MAX = 1 << 28 };

static void note_ignored(const nd_tokenizer *t, const json_t *root)
{
    static const char *const keys[] = {"truncation", "padding"};
    for (int i = 0; i < 2; i++) {
        if (json_is_object(json_object_get(root, keys[i]))) {
            nd_log_info("\"%s\" has \"%s\", which is ignored: texts are encoded as they are",
                        t->name, keys[i]);
        }
    }
}

static nd_status read_root(nd_tokenizer *t, const json_t *root)
{
    const json_t *model = json_object_get(root, "model");
    const json_t *added = json_object_get(root, "added_tokens");
    const json_t *given = json_object_get(root, "version");
    const char *version = json_string_value(given);
    if (!json_is_object(model)) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has no \"model\"; it is no tokenizer.json", t->name);
    }
    if (given && !version) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has a version that is no string; supported is \"1.0\"",
                       t->name);
    }
    if (version && strcmp(version, "1.0") != 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has the version \"%s\"; supported is 1.0", t->name,
                       version);
    }
    if (added && !json_is_array(added)) {
        return nd_fail(ND_ERR_DATA, "\"added_tokens\" of \"%s\" is not a list", t->name);
    }
    note_ignored(t, root);
    ND_TRY(nd_text_read_normalizer(t, json_object_get(root, "normalizer")));
    ND_TRY(nd_text_read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer")));
    ND_TRY(nd_text_read_decoder(t, json_object_get(root, "decoder")));
    if (t->decoder != ND_DECODER_NONE && t->byte_level != (t->decoder == ND_DECODER_BYTE_LEVEL)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has \"ByteLevel\" in only one of pre_tokenizer and "
                       "decoder; that is not supported",
                       t->name);
    }
    ND_TRY(nd_text_read_model(t, model, json_array_size(added)));
    ND_TRY(nd_text_read_added(t, added, json_object_size(json_object_get(model, "vocab"))));
    return nd_text_read_post_processor(t, json_object_get(root, "post_processor"));
}

nd_status nd_tokenizer_parse(const char *json, size_t size, const char *name, nd_tokenizer **out)
{
    json_error_t error;
    nd_tokenizer *tokenizer;
    ND_TRY(ND_ALLOC(1, &tokenizer));
    json_t *root = NULL;
    nd_status status = nd_fs_format(&tokenizer->name, "%s", name);
    if (status == ND_OK) {
        root = json_loadb(json, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    }
    if (status == ND_OK && !root) {
        status =
            nd_json_no_memory(&error)
                ? nd_fail_memory("the tokenizer \"%s\"", name)
                : nd_fail(ND_ERR_DATA, "\"%s\" line %d, column %d: %s; it is no tokenizer.json",
                          name, error.line, error.column, error.text);
    }
    if (status == ND_OK) {
        status = read_root(tokenizer, root);
    }
    (void)nd_char_class_of(0); /* makes the classes of characters here, not within the first text */
    json_decref(root);
    if (status != ND_OK) {
        nd_tokenizer_close(tokenizer);
        return status;
    }
    *out = tokenizer;
    return ND_OK;
}

nd_status nd_tokenizer_open(const char *path, nd_tokenizer **out)
{
    char *json;
    size_t size;
    ND_TRY(nd_fs_read(path, FILE_BYTES_MAX, ND_ERR_DATA, &json, &size));
    nd_status status = nd_tokenizer_parse(json, size, path, out);
    free(json);
    return status;
}

static void free_rewrites(nd_rewrite *steps, int count)
{
    for (int i = 0; i < count; i++) {
        free(steps[i].from);
        free(steps[i].to);
    }
}

void nd_tokenizer_close(nd_tokenizer *tokenizer)
{
    if (!tokenizer) {
        return;
    }
    free_rewrites(tokenizer->rewrites, tokenizer->rewrite_count);
    free_rewrites(tokenizer->replaces, tokenizer->replace_count);
    for (int i = 0; i < tokenizer->splitter_count; i++) {
        free(tokenizer->regexes[i].data);
    }
    nd_vocab_fini(&tokenizer->vocab);
    nd_merges_fini(&tokenizer->merges);
    nd_added_set_fini(&tokenizer->raw);
    nd_added_set_fini(&tokenizer->normalized);
    free(tokenizer->added);
    free(tokenizer->special);
    free(tokenizer->patterns.data);
    free(tokenizer->name);
    free(tokenizer);
}

int32_t nd_tokenizer_vocab_size(const nd_tokenizer *tokenizer)
{
    return tokenizer->vocab.size;
}

int32_t nd_tokenizer_find(const nd_tokenizer *tokenizer, const char *token, size_t size)
{
    return nd_vocab_find(&tokenizer->vocab, token, size);
}

const char *nd_tokenizer_token(const nd_tokenizer *tokenizer, int32_t id, size_t *size)
{
    const nd_token_piece *piece = nd_vocab_piece(&tokenizer->vocab, id);
    *size = piece ? piece->text_size : 0;
    return piece ? (const char *)nd_vocab_text(&tokenizer->vocab, piece) : NULL;
}

bool nd_tokenizer_is_special(const nd_tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && id < tokenizer->vocab.size && tokenizer->special[id];
}

bool nd_tokenizer_begins_twice(const nd_tokenizer *tokenizer, const int32_t *ids, size_t count)
{
    const size_t n = (size_t)tokenizer->before_count;
    return n > 0 && count > n && ids[n] == ids[n - 1] && nd_tokenizer_is_special(tokenizer, ids[n]);
}
