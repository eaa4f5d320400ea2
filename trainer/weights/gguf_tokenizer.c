// SPDX-License-Identifier: Apache-2.0
/* The tokenizer of a GGUF file, and the files of a model folder that it stands for. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/corpus/chat.h"
#include "trainer/text/parts.h"
#include "trainer/weights/gguf.h"

/* Kinds of tokens (llama_token_type). */
enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED };

/* llama.cpp's names for the ways to cut a text into words (tokenizer.ggml.pre). */
enum { SPLITTINGS = 4 };
static const struct {
    const char *name;
    int count;
    nd_splitter splitters[2];
    bool ignores_merges;
} splittings[SPLITTINGS] = {
    {"gpt-2", 1, {ND_SPLIT_GPT2}, false}, /* also of bytes without merges */
    {"llama-bpe", 1, {ND_SPLIT_LLAMA3}, true},
    {"qwen2", 1, {ND_SPLIT_QWEN2}, false},
    {"smollm", 2, {ND_SPLIT_EACH_DIGIT, ND_SPLIT_GPT2}, false},
};

/* Reading. */

/* Tokens with their kinds. */
typedef struct tokens {
    const nd_gguf_head *head;
    const json_t *texts, *kinds, *scores;
    json_t *merges;
    size_t count, last; /* last: of the normal ones */
    bool bytes;         /* byte-level, else of Llama 2's form */
    int splitting;
} tokens;

static int kind_of(const tokens *t, size_t id)
{
    return (int)json_integer_value(json_array_get(t->kinds, id));
}

static bool is_added(const tokens *t, size_t id)
{
    return kind_of(t, id) >= UNKNOWN && kind_of(t, id) <= USER_DEFINED;
}

/* The id that a key names; NULL: none. */
static json_t *id_of(const tokens *t, const char *name)
{
    char key[64];
    snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", name);
    return nd_gguf_get(t->head, key);
}

/* Its text, lent. */
static json_t *named(const tokens *t, const char *name)
{
    const json_t *id = id_of(t, name);
    return id ? json_array_get(t->texts, (size_t)json_integer_value(id)) : NULL;
}

static nd_status read_tokens(const nd_gguf_head *h, tokens *t)
{
    static const char *const special[] = {"bos", "eos", "eot", "unknown", "padding"};
    const char *kind = nd_gguf_text(h, "tokenizer.ggml.model");
    *t = (tokens){.head = h,
                  .texts = nd_gguf_get(h, "tokenizer.ggml.tokens"),
                  .kinds = nd_gguf_get(h, "tokenizer.ggml.token_type"),
                  .scores = nd_gguf_get(h, "tokenizer.ggml.scores"),
                  .merges = nd_gguf_get(h, "tokenizer.ggml.merges"),
                  .bytes = kind && strcmp(kind, "gpt2") == 0};
    t->count = json_array_size(t->texts);
    if (!t->bytes && !(kind && strcmp(kind, "llama") == 0)) {
        return nd_gguf_refuse(h, "its tokenizer is of the kind %.60s; gpt2 and llama are read",
                              kind ? kind : "that it does not name");
    }
    bool good = t->count > 0 && json_array_size(t->kinds) == t->count;
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) {
        good = good && (!id_of(t, special[i]) || named(t, special[i]));
    }
    for (size_t i = 0; i < t->count && good; i++) {
        good = json_is_string(json_array_get(t->texts, i));
        t->last = kind_of(t, i) == NORMAL ? i : t->last;
    }
    if (!good) {
        return nd_gguf_refuse(h,
                              "it has no tokenizer.ggml.tokens that are texts, or not as many of "
                              "tokenizer.ggml.token_type");
    }
    const char *lacks = t->bytes ? (t->merges ? NULL : "tokenizer.ggml.merges")
                        : json_array_size(t->scores) > t->last
                            ? NULL
                            : "tokenizer.ggml.scores, or too few of them";
    return lacks ? nd_gguf_refuse(h, "it has no %s", lacks)
           : json_is_true(nd_gguf_get(h, "tokenizer.ggml.add_eos_token"))
               ? nd_gguf_refuse(h, "its tokenizer adds an end of text to every text, which is not "
                                   "read from GGUF files")
               : ND_OK;
}

/* Finds how a byte-level tokenizer cuts texts. */
static nd_status find_splitting(tokens *t)
{
    const char *name = nd_gguf_text(t->head, "tokenizer.ggml.pre");
    if (!name || strcmp(name, "default") == 0) {
        return nd_gguf_refuse(t->head, "it does not say how its tokenizer cuts texts "
                                       "(tokenizer.ggml.pre); convert the model anew");
    }
    while (t->splitting < SPLITTINGS && strcmp(splittings[t->splitting].name, name) != 0) {
        t->splitting++;
    }
    return t->splitting < SPLITTINGS
               ? ND_OK
               : nd_gguf_refuse(t->head,
                                "its tokenizer cuts texts as %.60s does; gpt-2, smollm, llama-bpe "
                                "and qwen2 are read",
                                name);
}

static json_t *byte_level(bool splits)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 1, "use_regex", splits);
}

static void set_words(const tokens *t, json_t **root)
{
    const nd_splitter first = splittings[t->splitting].splitters[0];
    const bool digits = first == ND_SPLIT_EACH_DIGIT, plain = first == ND_SPLIT_GPT2;
    json_t *before =
        plain    ? NULL
        : digits ? json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", 1)
                 : json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex",
                             nd_text_pattern(first), "behavior", "Isolated", "invert", 0);
    nd_json_set(root, "pre_tokenizer",
                plain ? byte_level(true)
                      : json_pack("{s:s, s:[o, o]}", "type", "Sequence", "pretokenizers", before,
                                  byte_level(digits)));
    nd_json_set(root, "decoder", byte_level(true));
}

/* Llama 2's form: a mark stands for a blank, and with a prefix for one before the text. */
static void set_marks(const tokens *t, json_t **root)
{
    static const char normalizer[] =
        "{\"type\": \"Sequence\", \"normalizers\": ["
        "{\"type\": \"Prepend\", \"prepend\": \"\u2581\"},"
        " {\"type\": \"Replace\", \"pattern\": {\"String\": \" \"}, \"content\": \"\u2581\"}]}";
    static const char decoder[] =
        "{\"type\": \"Sequence\", \"decoders\": ["
        "{\"type\": \"Replace\", \"pattern\": {\"String\": \"\u2581\"}, \"content\": \" \"},"
        " {\"type\": \"ByteFallback\"}, {\"type\": \"Fuse\"},"
        " {\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}]}";
    json_t *before = json_loads(normalizer, 0, NULL), *behind = json_loads(decoder, 0, NULL);
    if (json_is_false(nd_gguf_get(t->head, "tokenizer.ggml.add_space_prefix"))) {
        (void)json_array_remove(json_object_get(before, "normalizers"), 0);
        (void)json_array_remove(json_object_get(behind, "decoders"), 3);
    }
    nd_json_set(root, "normalizer", before);
    nd_json_set(root, "decoder", behind);
}

/* A piece, and what orders its merges. */
typedef struct piece {
    const char *text;
    double score;
    size_t place;
} piece;

static int by_score(const void *a, const void *b)
{
    const piece *const x = a, *const y = b;
    return x->score != y->score ? (x->score < y->score ? 1 : -1)
                                : (x->place > y->place) - (x->place < y->place);
}

/* Every pair of pieces that makes a piece, those of the highest score first. A cut lies between two
 * characters. */
static nd_status make_merges(const tokens *t, json_t **merges)
{
    enum { PIECE_MAX = 512 };
    json_t *scores = json_object(), *score;
    piece *pieces = NULL;
    const char *text;
    size_t count = 0;
    nd_status status = ND_OK;
    for (size_t i = 0; i < t->count; i++) {
        if (kind_of(t, i) == NORMAL) {
            nd_json_set(&scores, json_string_value(json_array_get(t->texts, i)),
                        json_incref(json_array_get(t->scores, i)));
        }
    }
    ND_TRY_OUT(scores ? ND_ALLOC(json_object_size(scores) + 1, &pieces)
                      : nd_fail_memory("the merges of \"%s\"", t->head->path));
    *merges = json_array();
    json_object_foreach(scores, text, score)
    {
        pieces[count] = (piece){text, json_number_value(score), count};
        count++;
    }
    qsort(pieces, count, sizeof *pieces, by_score);
    for (size_t i = 0; i < count; i++) {
        const char *whole = pieces[i].text;
        for (size_t cut = 1; whole[0] && whole[cut] && cut < PIECE_MAX; cut++) {
            char left[PIECE_MAX];
            snprintf(left, sizeof left, "%.*s", (int)cut, whole);
            if ((whole[cut] & 0xc0) != 0x80 && json_object_get(scores, left) &&
                json_object_get(scores, whole + cut)) {
                nd_json_append(merges, json_pack("[s, s]", left, whole + cut));
            }
        }
    }
out:
    free(pieces);
    json_decref(scores);
    return status;
}

/* The beginning of text, which the file asks for or llama.cpp adds unasked. */
static json_t *begin_of(const tokens *t, bool unasked)
{
    json_t *begin = named(t, "bos");
    const json_t *asked = nd_gguf_get(t->head, "tokenizer.ggml.add_bos_token");
    if (!begin || !(asked ? json_is_true(asked) : unasked)) {
        return json_null();
    }
    json_t *token = json_pack("{s:{s:O, s:i}}", "SpecialToken", "id", begin, "type_id", 0);
    json_t *one = json_pack("{s:{s:s, s:i}}", "Sequence", "id", "A", "type_id", 0);
    json_t *two = json_pack("{s:{s:s, s:i}}", "Sequence", "id", "B", "type_id", 1);
    return json_pack("{s:s, s:[O, O], s:[O, o, o, o], s:{s:{s:O, s:[O], s:[O]}}}", "type",
                     "TemplateProcessing", "single", token, one, "pair", token, one, token, two,
                     "special_tokens", json_string_value(begin), "id", begin, "ids",
                     id_of(t, "bos"), "tokens", begin);
}

/* Added tokens, and the ids of pieces: tokenizers gives added tokens the ids behind the pieces, so
 * those before the last piece are pieces too. */
static void set_tokens(const tokens *t, json_t **added, json_t **vocabulary)
{
    *added = json_array();
    *vocabulary = json_object();
    for (size_t i = 0; i < t->count; i++) {
        json_t *text = json_array_get(t->texts, i);
        if (is_added(t, i)) {
            nd_json_append(added,
                           json_pack("{s:I, s:O, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)i,
                                     "content", text, "single_word", 0, "lstrip", 0, "rstrip", 0,
                                     "normalized", 0, "special", kind_of(t, i) != USER_DEFINED));
        }
        if (kind_of(t, i) != UNUSED && (!t->bytes || !is_added(t, i) || i < t->last)) {
            nd_json_set(vocabulary, json_string_value(text), json_integer((json_int_t)i));
        }
    }
}

nd_status nd_gguf_read_tokenizer(nd_gguf_head *h)
{
    json_t *added = NULL, *vocabulary = NULL, *merges = NULL;
    tokens t;
    ND_TRY(read_tokens(h, &t));
    ND_TRY(t.bytes ? find_splitting(&t) : make_merges(&t, &merges));
    const bool ignores_merges = t.bytes && splittings[t.splitting].ignores_merges;
    json_t *root = json_pack("{s:s}", "version", "1.0");
    if (t.bytes) {
        set_words(&t, &root);
        merges = json_incref(t.merges);
    } else {
        set_marks(&t, &root);
    }
    set_tokens(&t, &added, &vocabulary);
    nd_json_set(&root, "added_tokens", added);
    nd_json_set(&root, "post_processor", begin_of(&t, !t.bytes || ignores_merges));
    nd_json_set(&root, "model",
                json_pack("{s:s, s:O*, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "unk_token",
                          t.bytes ? NULL : named(&t, "unknown"), "fuse_unk", !t.bytes,
                          "byte_fallback", !t.bytes, "ignore_merges", ignores_merges, "vocab",
                          vocabulary, "merges", merges));
    nd_json_set(&h->files, "tokenizer.json", root);
    nd_json_set(&h->files, "tokenizer_config.json",
                json_pack("{s:s, s:b, s:O*, s:O*, s:O*, s:O*}", "tokenizer_class",
                          "PreTrainedTokenizerFast", "clean_up_tokenization_spaces", 0, "bos_token",
                          named(&t, "bos"), "eos_token",
                          named(&t, id_of(&t, "eot") ? "eot" : "eos"), "pad_token",
                          named(&t, "padding"), "chat_template",
                          nd_gguf_get(h, "tokenizer.chat_template")));
    return ND_OK;
}

/* Writing. */

/* llama.cpp's name for the way to cut a text into words. NULL: it has none for this tokenizer. */
static const char *name_splitting(const nd_tokenizer *t)
{
    bool known = t->byte_level && !t->prefix_blank && t->metaspace == ND_METASPACE_NONE;
    for (int i = 0; i < t->rewrite_count; i++) {
        known &= t->rewrites[i].compose;
    }
    for (int i = 0; i < t->added_count; i++) {
        known &= !t->added[i].single_word && !t->added[i].lstrip && !t->added[i].rstrip;
    }
    for (int i = 0; known && i < SPLITTINGS; i++) {
        if (!t->merges.any ||
            (t->splitter_count == splittings[i].count &&
             t->bpe.ignore_merges == splittings[i].ignores_merges &&
             memcmp(t->splitters, splittings[i].splitters, sizeof splittings[i].splitters) == 0)) {
            return splittings[i].name;
        }
    }
    return NULL;
}

/* A tokenizer and the files beside it. */
typedef struct source {
    nd_tokenizer *tokenizer;
    json_t *root;   /* tokenizer.json; NULL: ids are bytes */
    json_t *config; /* tokenizer_config.json; NULL: there is none */
    char *template; /* of chats; NULL: there is none */
} source;

/* The id of a token that tokenizer_config.json names; -1: none. */
static int32_t find_named(const source *s, const char *key)
{
    const char *name = nd_tokenizer_config_token(s->config, key);
    return name ? nd_tokenizer_find(s->tokenizer, name, strlen(name)) : -1;
}

/* Also sets the ids of the shape that the file names. */
static nd_status check_source(const source *from, const char *name, nd_shape *s)
{
    const nd_tokenizer *t = from->tokenizer;
    if (nd_tokenizer_vocab_size(t) > s->vocab) {
        return nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" has %d ids, and the model has %lld",
                       name, (int)nd_tokenizer_vocab_size(t), (long long)s->vocab);
    }
    /* The tokens that the tokenizer adds to texts count, whatever config.json says. */
    s->bos_id = t->before_count > 0 ? t->before[0] : s->bos_id;
    s->eos_id = t->behind_count > 0 ? t->behind[0]
                : s->eos_id >= 0    ? s->eos_id
                                    : find_named(from, "eos_token");
    const char *why =
        !name_splitting(t)
            ? "is none of the forms of GPT-2, Llama 3, Qwen 2 and SmolLM, which are written, or "
              "has added tokens with single_word, lstrip or rstrip; convert_hf_to_gguf.py of "
              "llama.cpp reads its folder"
        : t->before_count > 1 || t->behind_count > 1
            ? "adds several tokens before or behind a text; a GGUF file can name one"
        : s->eos_id < 0 ? "names no end of text, and llama.cpp would take another token for it; "
                          "write eos_token_id in config.json (for bytes one that no text holds, "
                          "such as 0), and remove SHA256SUMS, which lists that file as it was"
                        : NULL;
    return why ? nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" %s", name, why) : ND_OK;
}

static int kind_of_token(const nd_tokenizer *t, int32_t id)
{
    for (int i = 0; i < t->added_count; i++) {
        if (t->added[i].id == id) {
            return t->added[i].special ? CONTROL : USER_DEFINED;
        }
    }
    return nd_tokenizer_token(t, id, &(size_t){0}) ? NORMAL : UNUSED;
}

static void make_keys(const nd_gguf_options *options, const source *from, const nd_shape *s,
                      json_t *keys[2])
{
    const nd_tokenizer *t = from->tokenizer;
    const int32_t pad = find_named(from, "pad_token"), turn = find_named(from, "eos_token");
    json_t *texts = json_array(), *kinds = json_array(), *merges = json_array(), *one;
    size_t i, size;
    for (int32_t id = 0; id < s->vocab; id++) {
        const char *text = nd_tokenizer_token(t, id, &size);
        nd_json_append(&texts, text ? json_stringn(text, size) : json_sprintf("[PAD%d]", (int)id));
        nd_json_append(&kinds, json_integer(kind_of_token(t, id)));
    }
    json_array_foreach(json_object_get(json_object_get(from->root, "model"), "merges"), i, one)
    { /* "a b" or ["a", "b"] */
        const char *left = json_string_value(json_array_get(one, 0));
        const char *right = json_string_value(json_array_get(one, 1));
        nd_json_append(&merges,
                       left && right ? json_sprintf("%s %s", left, right) : json_incref(one));
    }
    keys[1] = json_object();
    keys[0] = json_pack("{s:s, s:o, s:i, s:i, s:s, s:s, s:s*, s:b, s:b, s:o, s:o, s:o}",
                        "general.architecture", nd_families[s->family].model_type, "general.name",
                        nd_json_string(options->name), "general.quantization_version", 2,
                        "general.file_type", nd_gguf_types[options->type].file_type,
                        "tokenizer.ggml.model", "gpt2", "tokenizer.ggml.pre", name_splitting(t),
                        "tokenizer.chat_template", from->template, "tokenizer.ggml.add_bos_token",
                        t->before_count > 0, "tokenizer.ggml.add_eos_token", t->behind_count > 0,
                        "tokenizer.ggml.tokens", texts, "tokenizer.ggml.token_type", kinds,
                        "tokenizer.ggml.merges", merges);
    if (pad >= 0) {
        nd_json_set(&keys[1], "tokenizer.ggml.padding_token_id", json_integer(pad));
    }
    if (turn >= 0) {
        nd_json_set(&keys[1], "tokenizer.ggml.eot_token_id", json_integer(turn));
    }
}

nd_status nd_gguf_make_keys(const nd_gguf_options *options, nd_shape *shape, json_t *keys[2])
{
    const char *path = options->tokenizer, *slash = path ? strrchr(path, '/') : NULL;
    source from = {0};
    char *folder = NULL;
    nd_status status =
        path ? nd_tokenizer_open(path, &from.tokenizer) : nd_byte_tokenizer_create(&from.tokenizer);
    ND_TRY_OUT(status);
    if (path) {
        ND_TRY_OUT(nd_fs_parent(path, &folder));
        ND_TRY_OUT(nd_json_read(folder, slash ? slash + 1 : path, 0, &from.root));
        ND_TRY_OUT(nd_tokenizer_config_read(folder, &from.config));
        ND_TRY_OUT(nd_chat_template_read(folder, &from.template));
    }
    ND_TRY_OUT(check_source(&from, options->name, shape));
    make_keys(options, &from, shape, keys);
out:
    json_decref(from.root);
    json_decref(from.config);
    nd_tokenizer_close(from.tokenizer);
    free(from.template);
    free(folder);
    return status;
}
