// SPDX-License-Identifier: Apache-2.0
/* Opens a tokenizer.json, and answers what is asked about its tokens. */
#include <stdio.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/text/read.h"
#include "trainer/text/unicode.h"

/* The BPE model: pieces and merges. */

/* Refuses keys that change ids and are not supported. */
static nd_status check_model(const nd_tokenizer *t, const json_t *model)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const json_t *type = json_object_get(model, "type");
    const json_t *dropout = json_object_get(model, "dropout");
    if (json_is_string(type) ? strcmp(json_string_value(type), "BPE") != 0
                             : !json_object_get(model, "merges")) {
        return nd_fail(ND_ERR_DATA, "\"%s\": the model \"%s\" is not supported; supported is BPE",
                       t->name, json_is_string(type) ? json_string_value(type) : "");
    }
    if (dropout && !json_is_null(dropout) &&
        !(json_is_number(dropout) && json_number_value(dropout) == 0.0)) {
        return nd_fail(ND_ERR_DATA, "\"%s\": a model with \"dropout\" is not supported", t->name);
    }
    for (size_t i = 0; i < sizeof affixes / sizeof affixes[0]; i++) {
        const json_t *affix = json_object_get(model, affixes[i]);
        if (affix && !json_is_null(affix) && json_string_length(affix) > 0) {
            return nd_fail(ND_ERR_DATA, "\"%s\": a model with \"%s\" is not supported", t->name,
                           affixes[i]);
        }
    }
    return ND_OK;
}

static nd_status read_pieces(nd_tokenizer *t, json_t *pieces)
{
    const char *text;
    size_t size;
    json_t *value;
    json_object_keylen_foreach(pieces, text, size, value)
    {
        int32_t id = nd_text_id(value);
        if (id < 0) {
            return nd_fail(ND_ERR_DATA, "\"%s\": the id of \"%.64s\" is not a number from 0 to %d",
                           t->name, text, ND_VOCAB_IDS_MAX - 1);
        }
        ND_TRY(nd_text_add_piece(t, id, text, size, true));
    }
    return ND_OK;
}

typedef struct merge_text {
    const char *left, *right;
    size_t left_size, right_size;
} merge_text;

/* "a b", or ["a", "b"]. */
static bool parse_merge(const json_t *node, merge_text *out)
{
    if (json_is_string(node)) {
        const char *text = json_string_value(node), *end = text + json_string_length(node);
        const char *blank = memchr(text, ' ', (size_t)(end - text));
        if (!blank || memchr(blank + 1, ' ', (size_t)(end - blank - 1))) {
            return false;
        }
        *out = (merge_text){text, blank + 1, (size_t)(blank - text), (size_t)(end - blank - 1)};
        return true;
    }
    const json_t *left = json_array_get(node, 0), *right = json_array_get(node, 1);
    *out = (merge_text){json_string_value(left), json_string_value(right), json_string_length(left),
                        json_string_length(right)};
    return json_array_size(node) == 2 && json_is_string(left) && json_is_string(right);
}

/* A piece like <0x0A> stands for a byte that its text does not show. */
static bool may_be_byte(const char *piece, size_t size)
{
    return size == sizeof "<0x00>" - 1 && memcmp(piece, "<0x", 3) == 0;
}

/* A merge joins the last character of its left piece to the first of its right one. Until all
 * merges are read, `apart` tells what is joined. */
static void note_join(nd_bpe *bpe, const merge_text *merge)
{
    if (merge->left_size == 0 || merge->right_size == 0) {
        return;
    }
    const uint8_t *end = (const uint8_t *)merge->left + merge->left_size, *last = end - 1;
    while (last > (const uint8_t *)merge->left && (*last & 0xc0) == 0x80) {
        last--;
    }
    bpe->apart[nd_text_class_at(last, (size_t)(end - last))]
              [nd_text_class_at((const uint8_t *)merge->right, merge->right_size)] = true;
    bpe->cuts &= !may_be_byte(merge->left, merge->left_size) &&
                 !may_be_byte(merge->right, merge->right_size);
}

/*
 * From what is joined to what is apart. A character without a piece must not be cut off: it may be
 * dropped, which brings its neighbours together, or wait to be written as unknown. But nothing
 * waits across a mark, nor joins it, where no merge does; and a splitter may begin a word at each
 * mark.
 */
static void find_apart(nd_tokenizer *t, bool all_bytes)
{
    nd_bpe *bpe = &t->bpe;
    const bool complete = bpe->fallback && all_bytes;
    bool known[ND_TEXT_CLASSES] = {0}, marks_begin = true;
    for (int c = 0; c < ND_TEXT_CLASS_MARK; c++) {
        known[c] = complete || nd_vocab_find_bytes(&t->vocab, &(uint8_t){(uint8_t)c}, 1) >= 0;
        marks_begin &= !bpe->apart[c][ND_TEXT_CLASS_MARK];
    }
    known[ND_TEXT_CLASS_MARK] = nd_vocab_find(&t->vocab, ND_TEXT_MARK, ND_TEXT_MARK_BYTES) >= 0;
    known[ND_TEXT_CLASS_OTHER] = complete;
    marks_begin &=
        !bpe->apart[ND_TEXT_CLASS_OTHER][ND_TEXT_CLASS_MARK] && known[ND_TEXT_CLASS_MARK];
    for (int left = 0; left < ND_TEXT_CLASSES; left++) {
        for (int right = 0; right < ND_TEXT_CLASSES; right++) {
            const bool mark = right == ND_TEXT_CLASS_MARK;
            bpe->apart[left][right] = (mark && t->splitter_count > 0) ||
                                      (!bpe->apart[left][right] &&
                                       ((known[left] && known[right]) || (mark && marks_begin)));
        }
    }
}

static nd_status read_merge(nd_tokenizer *t, const json_t *node, int32_t rank, nd_bytes *whole)
{
    merge_text parts;
    if (!parse_merge(node, &parts)) {
        return nd_fail(ND_ERR_DATA, "\"%s\": merge %d is not a pair of pieces; the file is damaged",
                       t->name, rank);
    }
    whole->count = 0;
    ND_TRY(nd_bytes_add(whole, parts.left, parts.left_size));
    ND_TRY(nd_bytes_add(whole, parts.right, parts.right_size));
    nd_merge merge = {.left = nd_vocab_find(&t->vocab, parts.left, parts.left_size),
                      .right = nd_vocab_find(&t->vocab, parts.right, parts.right_size),
                      .rank = rank,
                      .id = nd_vocab_find(&t->vocab, whole->data, whole->count)};
    if (merge.left < 0 || merge.right < 0 || merge.id < 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": merge %d, of \"%.*s\" and \"%.*s\", needs a piece that the "
                       "vocabulary lacks; the file is damaged",
                       t->name, rank, (int)(parts.left_size < 64 ? parts.left_size : 64),
                       parts.left, (int)(parts.right_size < 64 ? parts.right_size : 64),
                       parts.right);
    }
    note_join(&t->bpe, &parts);
    nd_merges_add(&t->merges, merge);
    return ND_OK;
}

static nd_status read_merges(nd_tokenizer *t, const json_t *merges)
{
    nd_bytes whole = {0};
    nd_status status = nd_bytes_add(&whole, "", 1); /* so that its place is never NULL */
    int32_t rank = 0;
    for (size_t i = 0; status == ND_OK && i < json_array_size(merges); i++) {
        const json_t *merge = json_array_get(merges, i);
        const char *text = json_string_value(merge);
        if (!text || strncmp(text, "#version", 8) != 0) { /* the first line of merges.txt */
            status = read_merge(t, merge, rank++, &whole);
        }
    }
    free(whole.data);
    return status;
}

/* The pieces of single bytes: characters of a byte-level file, else <0x00> to <0xFF>. *first: of
 * the ids that are merged most. */
static nd_status find_bytes(nd_tokenizer *t, bool *every, int32_t *first)
{
    bool all = true;
    *first = ND_VOCAB_IDS_MAX;
    for (int byte = 0; byte < 256; byte++) {
        char name[16];
        int size = snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        const int32_t id = nd_vocab_find_bytes(&t->vocab, &(uint8_t){(uint8_t)byte}, 1);
        t->bpe.first[byte] = id;
        t->bpe.bytes[byte] = t->byte_level ? id : nd_vocab_find(&t->vocab, name, (size_t)size);
        all &= t->bpe.bytes[byte] >= 0;
        *first = id >= 0 && id < *first ? id : *first;
    }
    if (t->byte_level && t->bpe.fallback && !all) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": byte_fallback in a byte-level vocabulary that lacks "
                       "bytes is not supported",
                       t->name);
    }
    const int32_t mark = nd_vocab_find(&t->vocab, ND_TEXT_MARK, ND_TEXT_MARK_BYTES);
    const bool beside = mark >= 0 && mark < *first && *first - mark < ND_MERGES_FIRST_IDS / 4;
    *first = beside ? mark : *first;
    *every = all;
    return ND_OK;
}

static nd_status read_unknown(nd_tokenizer *t, const json_t *name)
{
    t->bpe.unknown = -1;
    if (!name || json_is_null(name)) {
        return ND_OK;
    }
    if (json_is_string(name)) {
        t->bpe.unknown =
            nd_vocab_find(&t->vocab, json_string_value(name), json_string_length(name));
    }
    return t->bpe.unknown >= 0 ? ND_OK
                               : nd_text_fail_damaged(t, "unk_token", "a piece of the vocabulary");
}

/* `added`: the number of added tokens, for which the vocabulary gets room too. */
static nd_status read_model(nd_tokenizer *t, const json_t *model, size_t added)
{
    json_t *pieces = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges");
    nd_bpe *bpe = &t->bpe;
    ND_TRY(check_model(t, model));
    if (!json_is_object(pieces)) {
        return nd_text_fail_damaged(t, "vocab", "an object of pieces and ids");
    }
    if (!json_is_array(merges)) {
        return nd_text_fail_damaged(t, "merges", "a list");
    }
    ND_TRY(nd_text_read_bool(t, model, "ignore_merges", false, &bpe->ignore_merges));
    ND_TRY(nd_text_read_bool(t, model, "fuse_unk", false, &bpe->fuse_unknown));
    ND_TRY(nd_text_read_bool(t, model, "byte_fallback", false, &bpe->fallback));
    const size_t count = json_object_size(pieces) + added, pairs = json_array_size(merges);
    if (count > ND_VOCAB_IDS_MAX || pairs > ND_MERGES_RANK_MAX) {
        return nd_fail(ND_ERR_DATA, "%zu pieces and %zu merges are more than %d", count, pairs,
                       ND_VOCAB_IDS_MAX);
    }
    ND_TRY(nd_vocab_init(&t->vocab, count, t->byte_level));
    ND_TRY(read_pieces(t, pieces));
    ND_TRY(read_unknown(t, json_object_get(model, "unk_token")));
    bool all_bytes = false;
    int32_t first;
    ND_TRY(find_bytes(t, &all_bytes, &first));
    ND_TRY(nd_merges_init(&t->merges, pairs, first));
    bpe->cuts =
        !bpe->ignore_merges && !t->byte_level &&
        (t->splitter_count == 0 || (t->splitter_count == 1 && t->splitters[0] == ND_SPLIT_MARKS));
    ND_TRY(read_merges(t, merges));
    find_apart(t, all_bytes);
    return ND_OK;
}

enum { FILE_BYTES_MAX = 1 << 28 };

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
    static const char *const keys[] = {"truncation", "padding"};
    for (int i = 0; i < 2; i++) {
        if (json_is_object(json_object_get(root, keys[i]))) {
            nd_log_info("\"%s\" has \"%s\", which is ignored: texts are encoded as they are",
                        t->name, keys[i]);
        }
    }
    ND_TRY(nd_text_read_component(t, root, "normalizer"));
    ND_TRY(nd_text_read_component(t, root, "pre_tokenizer"));
    ND_TRY(nd_text_read_component(t, root, "decoder"));
    if (t->decoder != ND_DECODER_NONE && t->byte_level != (t->decoder == ND_DECODER_BYTE_LEVEL)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has \"ByteLevel\" in only one of pre_tokenizer and "
                       "decoder; that is not supported",
                       t->name);
    }
    ND_TRY(read_model(t, model, json_array_size(added)));
    ND_TRY(nd_text_read_added(t, added, json_object_size(json_object_get(model, "vocab"))));
    return nd_text_read_component(t, root, "post_processor");
}

nd_status nd_tokenizer_parse(const char *json, size_t size, const char *name, nd_tokenizer **out)
{
    json_error_t error;
    nd_tokenizer *tokenizer;
    json_t *root = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &tokenizer));
    ND_TRY_OUT(nd_fs_format(&tokenizer->name, "%s", name));
    root = json_loadb(json, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    ND_TRY_OUT(root                        ? ND_OK
               : nd_json_no_memory(&error) ? nd_fail_memory("the tokenizer \"%s\"", name)
                                           : nd_fail(ND_ERR_DATA,
                                                     "\"%s\" line %d, column %d: %s; it is no "
                                                     "tokenizer.json",
                                                     name, error.line, error.column, error.text));
    ND_TRY_OUT(read_root(tokenizer, root));
    (void)nd_char_class_of(0); /* makes the classes of characters here, not within the first text */
    tokenizer->cut = nd_text_find_cut(tokenizer);
    *out = tokenizer;
    tokenizer = NULL;
out:
    json_decref(root);
    nd_tokenizer_close(tokenizer);
    return status;
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

/* The tokenizer of models whose ids are bytes: byte-level BPE without merges. */

nd_status nd_byte_tokenizer_text(bool indented, char **out)
{
    json_t *vocab = json_object();
    for (int byte = 0; byte < 256; byte++) {
        char key[5] = "";
        nd_utf8_put((uint8_t *)key, nd_byte_level_code((uint8_t)byte));
        nd_json_set(&vocab, key, json_integer(byte));
    }
    json_t *level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                              "trim_offsets", 0, "use_regex", 0);
    json_t *model =
        json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}", "type", "BPE", "dropout",
                  "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0,
                  "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges");
    json_t *root = json_pack("{s:s, s:n, s:n, s:[], s:n, s:O, s:n, s:o, s:o}", "version", "1.0",
                             "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                             level, "post_processor", "decoder", level, "model", model);
    *out = nd_json_text(root, indented ? JSON_INDENT(2) : 0);
    json_decref(root);
    return *out ? ND_OK : nd_fail_memory("the tokenizer of bytes");
}

nd_status nd_byte_tokenizer_create(nd_tokenizer **out)
{
    char *text = NULL;
    ND_TRY(nd_byte_tokenizer_text(false, &text));
    nd_status status = nd_tokenizer_parse(text, strlen(text), "bytes", out);
    free(text);
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
    free(tokenizer->raw.tokens);
    free(tokenizer->normalized.tokens);
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
