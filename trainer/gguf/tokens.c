// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"
#include "trainer/gguf/gguf.h"
#include "trainer/text/parts.h"

/* Kinds of tokens (llama_token_type). */
enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };

typedef struct source {
    const char *folder;
    const nd_shape *shape;
    nd_tokenizer *tokenizer;
    json_t *config; /* tokenizer_config.json; NULL: there is none */
} source;

static nd_status open_source(source *s)
{
    char *path = NULL;
    bool there = false;
    ND_TRY(nd_fs_has(s->folder, "tokenizer.json", &there));
    if (!there) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has no tokenizer.json, and a GGUF file holds the tokenizer too; "
                       "copy the model's tokenizer.json there",
                       s->folder);
    }
    ND_TRY(nd_fs_format(&path, "%s/tokenizer.json", s->folder));
    const nd_status status = nd_tokenizer_open(path, &s->tokenizer);
    free(path);
    ND_TRY(status);
    if (nd_tokenizer_vocab_size(s->tokenizer) > s->shape->vocab) {
        return nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" has %d ids, and the model has %lld",
                       s->folder, (int)nd_tokenizer_vocab_size(s->tokenizer),
                       (long long)s->shape->vocab);
    }
    return nd_tokenizer_config_read(s->folder, &s->config);
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

static int32_t kind_of(const nd_tokenizer *t, int32_t id)
{
    int32_t kind = nd_tokenizer_token(t, id, &(size_t){0}) ? NORMAL : UNUSED;
    for (int i = 0; i < t->added_count; i++) {
        if (t->added[i].id == id) {
            kind = t->added[i].special ? CONTROL : USER_DEFINED;
        }
    }
    return kind;
}

static void add_vocabulary(nd_gguf *g, const source *s)
{
    const int32_t count = (int32_t)s->shape->vocab;
    nd_gguf_array(g, "tokenizer.ggml.tokens", ND_GGUF_KIND_TEXT, (size_t)count);
    for (int32_t id = 0; id < count; id++) {
        char unused[32];
        size_t size;
        const char *text = nd_tokenizer_token(s->tokenizer, id, &size);
        const int n = snprintf(unused, sizeof unused, "[PAD%d]", (int)id);
        nd_gguf_put_text(g, text ? text : unused, text ? size : (size_t)n);
    }
    nd_gguf_array(g, "tokenizer.ggml.token_type", ND_GGUF_KIND_I32, (size_t)count);
    for (int32_t id = 0; id < count; id++) {
        nd_gguf_put(g, (uint64_t)kind_of(s->tokenizer, id), 4);
    }
}

static int by_rank(const void *a, const void *b)
{
    return ((const nd_merge *)a)->rank - ((const nd_merge *)b)->rank;
}

static nd_status add_merges(nd_gguf *g, const nd_tokenizer *t)
{
    const nd_merges *m = &t->merges;
    const int32_t pairs = m->any ? ND_MERGES_FIRST_IDS * ND_MERGES_FIRST_IDS : 0;
    nd_merge *list = NULL;
    size_t count = 0;
    ND_TRY(ND_ALLOC(m->slots + (size_t)pairs, &list));
    for (int32_t i = 0; i < pairs; i++) {
        const int32_t left = m->first_id + i / ND_MERGES_FIRST_IDS;
        const int32_t right = m->first_id + i % ND_MERGES_FIRST_IDS;
        list[count] = (nd_merge){left, right, m->first_pairs[i].rank, m->first_pairs[i].id};
        count += list[count].rank != ND_MERGE_NONE;
    }
    for (uint32_t i = 0; i < m->slots; i++) {
        list[count] = m->table[i];
        count += list[count].left >= 0;
    }
    qsort(list, count, sizeof *list, by_rank);
    nd_gguf_array(g, "tokenizer.ggml.merges", ND_GGUF_KIND_TEXT, count);
    for (size_t i = 0; i < count; i++) {
        size_t left, right;
        const char *first = nd_tokenizer_token(t, list[i].left, &left);
        const char *second = nd_tokenizer_token(t, list[i].right, &right);
        nd_gguf_put(g, left + 1 + right, 8);
        fprintf(g->out, "%s %s", first, second);
    }
    free(list);
    return ND_OK;
}

static void add_id(nd_gguf *g, const char *key, int64_t id)
{
    if (id >= 0) {
        nd_gguf_u32(g, key, (uint32_t)id);
    }
}

/* The id of a token that tokenizer_config.json names; -1: none. */
static int32_t named_token(const source *s, const char *key)
{
    const char *name = nd_tokenizer_config_token(s->config, key);
    return name ? nd_tokenizer_find(s->tokenizer, name, strlen(name)) : -1;
}

/* What the tokenizer adds to texts counts, whatever config.json says. */
static nd_status add_special(nd_gguf *g, const source *s)
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
    add_id(g, "tokenizer.ggml.bos_token_id", t->before_count > 0 ? t->before[0] : s->shape->bos_id);
    add_id(g, "tokenizer.ggml.eos_token_id", end);
    add_id(g, "tokenizer.ggml.padding_token_id", named_token(s, "pad_token"));
    add_id(g, "tokenizer.ggml.eot_token_id", end_of_turn);
    nd_gguf_flag(g, "tokenizer.ggml.add_bos_token", t->before_count > 0);
    nd_gguf_flag(g, "tokenizer.ggml.add_eos_token", t->behind_count > 0);
    return ND_OK;
}

static nd_status add_chat_template(nd_gguf *g, const source *s)
{
    char *text = NULL;
    ND_TRY(nd_chat_template_read(s->folder, &text));
    if (text) {
        nd_gguf_text(g, "tokenizer.chat_template", text);
    }
    free(text);
    return ND_OK;
}

static void warn_of_added(const nd_tokenizer *t)
{
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
}

static nd_status add_all(nd_gguf *g, const source *s)
{
    const char *splitting = find_splitting(s->tokenizer);
    if (!splitting) {
        return nd_fail(ND_ERR_DATA,
                       "the tokenizer of \"%s\" is none of the forms of GPT-2, Llama 3, Qwen 2 and "
                       "SmolLM, which are written; convert_hf_to_gguf.py of llama.cpp reads this "
                       "folder",
                       s->folder);
    }
    warn_of_added(s->tokenizer);
    nd_gguf_text(g, "tokenizer.ggml.model", "gpt2");
    nd_gguf_text(g, "tokenizer.ggml.pre", splitting);
    add_vocabulary(g, s);
    ND_TRY(add_merges(g, s->tokenizer));
    ND_TRY(add_special(g, s));
    return add_chat_template(g, s);
}

nd_status nd_gguf_add_tokens(nd_gguf *file, const char *folder, const nd_shape *shape)
{
    source s = {.folder = folder, .shape = shape};
    nd_status status = open_source(&s);
    status = status == ND_OK ? add_all(file, &s) : status;
    nd_tokenizer_close(s.tokenizer);
    json_decref(s.config);
    return status;
}
