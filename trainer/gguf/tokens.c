// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"
#include "trainer/gguf/gguf.h"
#include "trainer/text/parts.h"

/* Kinds of tokens (llama_token_type). */
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };
enum { JSON_BYTES_MAX = 256 << 20 };

typedef struct source {
    const char *folder;
    const nd_shape *shape;
    nd_tokenizer *tokenizer;
    json_t *root;   /* tokenizer.json */
    json_t *config; /* tokenizer_config.json; NULL: there is none */
} source;

static nd_status open_source(source *s)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    bool there = false;
    json_error_t error;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/tokenizer.json", s->folder));
    ND_TRY_OUT(nd_fs_exists(path, &there));
    if (!there) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" has no tokenizer.json, and a GGUF file holds the tokenizer too; "
                         "copy the model's tokenizer.json there",
                         s->folder);
        goto out;
    }
    ND_TRY_OUT(nd_tokenizer_open(path, &s->tokenizer));
    ND_TRY_OUT(nd_fs_read(path, JSON_BYTES_MAX, ND_ERR_DATA, &text, &size));
    s->root = json_loadb(text, size, JSON_ALLOW_NUL, &error);
    if (!s->root) { /* it was read before */
        status =
            nd_json_no_memory(&error)
                ? nd_fail_memory("reading \"%s\"", path)
                : nd_fail(ND_ERR_DATA, "\"%s\" line %d, column %d: %s; it has changed meanwhile",
                          path, error.line, error.column, error.text);
        goto out;
    }
    ND_TRY_OUT(nd_tokenizer_config_read(s->folder, &s->config));
    if (nd_tokenizer_vocab_size(s->tokenizer) > s->shape->vocab) {
        status = nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" has %d ids, and the model has %lld",
                         s->folder, (int)nd_tokenizer_vocab_size(s->tokenizer),
                         (long long)s->shape->vocab);
    }
out:
    free(text);
    free(path);
    return status;
}

static void close_source(source *s)
{
    nd_tokenizer_close(s->tokenizer);
    json_decref(s->root);
    json_decref(s->config);
}

/* llama.cpp's names for the ways to cut a text into words. NULL: it has none for this tokenizer. */
static const char *find_splitting(const nd_tokenizer *t)
{
    const nd_splitter first = t->splitters[0];
    bool known = t->byte_level && !t->prefix_blank && t->metaspace == ND_METASPACE_NONE;
    for (int i = 0; i < t->rewrite_count; i++) {
        known &= t->rewrites[i].compose;
    }
    if (!known) {
        return NULL;
    }
    if (!t->merges.any) {
        return "gpt-2"; /* bytes, however they are cut */
    }
    if (t->bpe.ignore_merges != (t->splitter_count == 1 && first == ND_SPLIT_LLAMA3)) {
        return NULL; /* llama.cpp ignores them with Llama 3's form alone */
    }
    if (t->splitter_count == 2 && first == ND_SPLIT_EACH_DIGIT &&
        t->splitters[1] == ND_SPLIT_GPT2) {
        return "smollm";
    }
    return t->splitter_count != 1     ? NULL
           : first == ND_SPLIT_GPT2   ? "gpt-2"
           : first == ND_SPLIT_LLAMA3 ? "llama-bpe"
           : first == ND_SPLIT_QWEN2  ? "qwen2"
                                      : NULL;
}

static bool is(const char *text, const char *wanted)
{
    return text && strcmp(text, wanted) == 0;
}

/* Llama 2's form puts a mark in place of each blank, and bytes in place of a character without a
 * piece. *prefix: it puts a mark before the text too. */
static bool is_sentencepiece(const nd_tokenizer *t, bool *prefix)
{
    const nd_rewrite *last = &t->rewrites[t->rewrite_count > 0 ? t->rewrite_count - 1 : 0];
    const bool marks = is(last->from, " ") && is(last->to, ND_TEXT_MARK);
    const bool prepends = t->rewrite_count == 2 && !t->rewrites[0].compose &&
                          !t->rewrites[0].from && is(t->rewrites[0].to, ND_TEXT_MARK);
    const bool rewrites =
        t->metaspace == ND_METASPACE_NONE && marks && (t->rewrite_count == 1 || prepends);
    const bool metaspace = t->metaspace != ND_METASPACE_NONE && t->rewrite_count == 0;
    *prefix = prepends || t->metaspace == ND_METASPACE_FIRST || t->metaspace == ND_METASPACE_ALWAYS;
    return !t->byte_level && t->bpe.fallback && t->splitter_count == 0 && (rewrites || metaspace);
}

static int kind_of(const nd_tokenizer *t, int32_t id, const char *text)
{
    int kind = NORMAL;
    for (int i = 0; i < t->added_count; i++) {
        if (t->added[i].id == id) {
            kind = t->added[i].special ? CONTROL : USER_DEFINED;
        }
    }
    unsigned byte;
    if (id == t->bpe.unknown) {
        kind = UNKNOWN;
    } else if (!t->byte_level && strlen(text) == 6 && sscanf(text, "<0x%2X>", &byte) == 1) {
        kind = BYTE;
    }
    return kind;
}

static void add_vocabulary(nd_gguf_head *head, const source *s)
{
    const nd_tokenizer *t = s->tokenizer;
    const int32_t count = (int32_t)s->shape->vocab;
    nd_gguf_array(head, "tokenizer.ggml.tokens", ND_GGUF_TEXTS, (uint64_t)count);
    for (int32_t id = 0; id < count; id++) {
        size_t size = 0;
        char unused[32];
        const char *text = nd_tokenizer_token(t, id, &size);
        if (!text) {
            size = (size_t)snprintf(unused, sizeof unused, "[PAD%d]", (int)id);
            text = unused;
        }
        nd_gguf_add_text(head, text, size);
    }
    nd_gguf_array(head, "tokenizer.ggml.token_type", ND_GGUF_I32S, (uint64_t)count);
    for (int32_t id = 0; id < count; id++) {
        size_t size = 0;
        const char *text = nd_tokenizer_token(t, id, &size);
        const int32_t kind = text ? kind_of(t, id, text) : UNUSED;
        nd_gguf_add_number(head, &kind);
    }
}

/* A merge of the file: "left right", or a list of both. */
static nd_status add_merge(nd_gguf_head *head, const json_t *merge)
{
    if (json_is_string(merge)) {
        nd_gguf_add_text(head, json_string_value(merge), json_string_length(merge));
        return ND_OK;
    }
    const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
    const size_t size = json_string_length(left) + 1 + json_string_length(right);
    char *text = NULL;
    ND_TRY(nd_fs_format(&text, "%s %s", json_string_value(left), json_string_value(right)));
    nd_gguf_add_text(head, text, size);
    free(text);
    return ND_OK;
}

static nd_status add_merges(nd_gguf_head *head, const source *s)
{
    const json_t *merges = json_object_get(json_object_get(s->root, "model"), "merges");
    nd_gguf_array(head, "tokenizer.ggml.merges", ND_GGUF_TEXTS, json_array_size(merges));
    for (size_t i = 0; i < json_array_size(merges); i++) {
        ND_TRY(add_merge(head, json_array_get(merges, i)));
    }
    return ND_OK;
}

static bool is_added(const nd_tokenizer *t, int32_t id)
{
    for (int i = 0; i < t->added_count; i++) {
        if (t->added[i].id == id) {
            return true;
        }
    }
    return false;
}

/*
 * llama.cpp has no merges in this form: it joins two pieces whenever a piece has the text of both,
 * and the pair of the highest score first. So a piece has minus the rank of the first merge that
 * makes it, each pair of pieces that could make it must be a merge, and the merges of a piece must
 * follow one another.
 */
static nd_status score_piece(const source *s, int32_t id, float *score)
{
    const nd_tokenizer *t = s->tokenizer;
    size_t size = 0;
    const char *text = nd_tokenizer_token(t, id, &size);
    int32_t first = ND_MERGE_NONE, last = -1, count = 0;
    for (size_t cut = 1; cut < size && !is_added(t, id); cut++) {
        const int32_t left = nd_tokenizer_find(t, text, cut);
        const int32_t right = left < 0 ? -1 : nd_tokenizer_find(t, text + cut, size - cut);
        if (right < 0 || is_added(t, left) || is_added(t, right)) {
            continue;
        }
        const nd_merged merged = nd_merges_find(&t->merges, left, right);
        if (merged.rank == ND_MERGE_NONE) {
            return nd_fail(ND_ERR_DATA,
                           "the tokenizer of \"%s\" does not merge \"%.*s\" and \"%.*s\", whose "
                           "texts together are a piece; llama.cpp would, so the ids would differ",
                           s->folder, (int)cut, text, (int)(size - cut), text + cut);
        }
        first = merged.rank < first ? merged.rank : first;
        last = merged.rank > last ? merged.rank : last;
        count++;
    }
    *score = count > 0 ? -1 - (float)first : 0;
    return count == 0 || last - first + 1 == count
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "the tokenizer of \"%s\" has merges of other pieces between those that "
                         "make \"%.*s\"; llama.cpp ranks pieces, so the ids would differ",
                         s->folder, (int)size, text);
}

static nd_status add_scores(nd_gguf_head *head, const source *s)
{
    nd_gguf_array(head, "tokenizer.ggml.scores", ND_GGUF_F32S, (uint64_t)s->shape->vocab);
    for (int32_t id = 0; id < s->shape->vocab; id++) {
        float score = 0;
        ND_TRY(score_piece(s, id, &score));
        nd_gguf_add_number(head, &score);
    }
    return ND_OK;
}

static void add_id(nd_gguf_head *head, const char *key, int64_t id)
{
    if (id >= 0) {
        nd_gguf_u32(head, key, (uint32_t)id);
    }
}

/* The id of a token that tokenizer_config.json names; -1: none. */
static int32_t named_token(const source *s, const char *key)
{
    const char *name = nd_tokenizer_config_token(s->config, key);
    return name ? nd_tokenizer_find(s->tokenizer, name, strlen(name)) : -1;
}

/* What the tokenizer adds to texts counts, whatever config.json says. */
static nd_status add_special(nd_gguf_head *head, const source *s)
{
    const nd_tokenizer *t = s->tokenizer;
    const int32_t end_of_turn = named_token(s, "eos_token");
    int64_t end = t->behind_count > 0 ? t->behind[0] : s->shape->eos_id;
    end = end < 0 ? end_of_turn : end;
    if (t->before_count > 1 || t->behind_count > 1) {
        return nd_fail(ND_ERR_DATA,
                       "the tokenizer of \"%s\" adds several tokens before or behind a text; a "
                       "GGUF file can name one",
                       s->folder);
    }
    if (end < 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" names no end of text, and llama.cpp would take another token for "
                       "it; write eos_token_id in config.json",
                       s->folder);
    }
    add_id(head, "tokenizer.ggml.bos_token_id",
           t->before_count > 0 ? t->before[0] : s->shape->bos_id);
    add_id(head, "tokenizer.ggml.eos_token_id", end);
    add_id(head, "tokenizer.ggml.unknown_token_id", t->bpe.unknown);
    add_id(head, "tokenizer.ggml.padding_token_id", named_token(s, "pad_token"));
    if (end_of_turn != end) {
        add_id(head, "tokenizer.ggml.eot_token_id", end_of_turn);
    }
    nd_gguf_flag(head, "tokenizer.ggml.add_bos_token", t->before_count > 0);
    nd_gguf_flag(head, "tokenizer.ggml.add_eos_token", t->behind_count > 0);
    return ND_OK;
}

static nd_status add_chat_template(nd_gguf_head *head, const source *s)
{
    char *text = NULL;
    ND_TRY(nd_chat_template_read(s->folder, &text));
    if (text) {
        nd_gguf_text(head, "tokenizer.chat_template", text, strlen(text));
    }
    free(text);
    return ND_OK;
}

/* Tells what llama.cpp does otherwise. */
static void warn_of_differences(const source *s)
{
    const nd_tokenizer *t = s->tokenizer;
    int count = 0;
    for (int i = 0; i < t->added_count; i++) {
        count += t->added[i].single_word || t->added[i].lstrip || t->added[i].rstrip;
    }
    if (count > 0) {
        nd_log_warning("%d added tokens have single_word, lstrip or rstrip, which a GGUF file "
                       "cannot say: llama.cpp finds them anywhere, and takes no white space with "
                       "them",
                       count);
    }
    if (t->metaspace == ND_METASPACE_FIRST) {
        nd_log_warning("the tokenizer puts a blank before a text only where none is; llama.cpp "
                       "puts one before each, so texts that begin with a blank get other ids");
    }
}

static nd_status add_model(nd_gguf_head *head, const source *s)
{
    const nd_tokenizer *t = s->tokenizer;
    bool prefix = false;
    const char *splitting = find_splitting(t);
    if (splitting) {
        nd_gguf_text(head, "tokenizer.ggml.model", "gpt2", 4);
        nd_gguf_text(head, "tokenizer.ggml.pre", splitting, strlen(splitting));
        add_vocabulary(head, s);
        return add_merges(head, s);
    }
    if (is_sentencepiece(t, &prefix)) {
        nd_gguf_text(head, "tokenizer.ggml.model", "llama", 5);
        nd_gguf_text(head, "tokenizer.ggml.pre", "default", 7);
        nd_gguf_flag(head, "tokenizer.ggml.add_space_prefix", prefix);
        add_vocabulary(head, s);
        return add_scores(head, s);
    }
    return nd_fail(ND_ERR_DATA,
                   "the tokenizer of \"%s\" rewrites texts or cuts them into words in a way that "
                   "llama.cpp has no name for; the forms of GPT-2, Llama 2, Llama 3, Qwen 2 and "
                   "SmolLM are known",
                   s->folder);
}

nd_status nd_gguf_add_tokens(nd_gguf_head *head, const char *folder, const nd_shape *shape)
{
    source s = {.folder = folder, .shape = shape};
    nd_status status = ND_OK;
    ND_TRY_OUT(open_source(&s));
    warn_of_differences(&s);
    ND_TRY_OUT(add_model(head, &s));
    ND_TRY_OUT(add_special(head, &s));
    status = add_chat_template(head, &s);
out:
    close_source(&s);
    return status;
}
