// SPDX-License-Identifier: Apache-2.0
/* The files of a model folder that the keys of a GGUF file stand for. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "trainer/weights/gguf.h"

json_t *nd_gguf_get(const nd_gguf *g, const char *key)
{
    const char *family = json_string_value(json_object_get(g->keys, "general.architecture"));
    char name[160];
    snprintf(name, sizeof name, "%.60s%s", *key == '.' && family ? family : "", key);
    return json_object_get(g->keys, name);
}

static const char *text_of(const nd_gguf *g, const char *key)
{
    return json_string_value(nd_gguf_get(g, key));
}

/* config.json and generation_config.json. */

/* A real number as the decimal one of up to 6 digits that has this value as F32, if there is one;
 * any other value as it is. */
static json_t *shorten(json_t *value)
{
    char text[32];
    snprintf(text, sizeof text, "%.6g", json_real_value(value));
    const double decimal = strtod(text, NULL);
    return json_is_real(value) && (float)decimal == (float)json_real_value(value)
               ? json_real(decimal)
               : json_incref(value);
}

/* llama.cpp keeps the factors of Llama 3, not the numbers that they follow from: 1, 4, the greatest
 * factor, and a length. NULL: they follow from others. */
static json_t *find_llama3(const nd_gguf *g, const nd_safetensors_tensor *t, double theta)
{
    static const int64_t lengths[] = {8192, 4096, 2048, 16384, 32768, 1024, 512, 256, 128, 64};
    float given[ND_ROPE_LONG_PAIRS];
    const int64_t pairs = t->shape[0];
    nd_rope_config rope = {
        .type = ND_ROPE_LLAMA3, .theta = theta, .low_freq_factor = 1, .high_freq_factor = 4};
    if (t->number != ND_GGUF_FP32 || t->axes != 1 || pairs > ND_ROPE_LONG_PAIRS) {
        return NULL;
    }
    memcpy(given, g->map.data + t->begin, (size_t)pairs * sizeof *given);
    for (int64_t i = 0; i < pairs; i++) {
        rope.factor = fmax(rope.factor, (double)given[i]);
    }
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        int64_t same = 0;
        rope.original_max_positions = lengths[k];
        for (int64_t i = 0; i < pairs; i++) {
            const float own = nd_gguf_factor(&rope, 2 * pairs, i);
            same += fabsf(given[i] - own) < 1e-3f * own;
        }
        if (same == pairs) {
            return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor",
                             rope.factor, "low_freq_factor", 1.0, "high_freq_factor", 4.0,
                             "original_max_position_embeddings", (json_int_t)lengths[k]);
        }
    }
    return NULL;
}

/* The key rope_scaling of config.json; NULL: none. */
static nd_status find_scaling(const nd_gguf *g, json_t **out)
{
    const nd_safetensors_tensor *factors = nd_safetensors_list_find(&g->list, ND_GGUF_FACTORS);
    const char *kind = text_of(g, ".rope.scaling.type");
    const json_t *said = nd_gguf_get(g, ".rope.scaling.factor"),
                 *base = nd_gguf_get(g, ".rope.freq_base");
    const double factor = json_number_value(said ? said : nd_gguf_get(g, ".rope.scale_linear"));
    kind = kind ? kind : "linear";
    if (strcmp(kind, "none") != 0 && strcmp(kind, "linear") != 0) {
        return nd_gguf_refuse(g, "its RoPE is scaled by %.60s; none and linear are read", kind);
    }
    if (json_integer_value(nd_gguf_get(g, ".attention.sliding_window")) > 0) {
        return nd_gguf_refuse(
            g, "its attention has a sliding window, which is not read from GGUF files");
    }
    const bool linear = strcmp(kind, "linear") == 0 && factor != 0 && factor != 1;
    if (factors) {
        *out = linear ? NULL : find_llama3(g, factors, base ? json_number_value(base) : 10000);
        return *out ? ND_OK
                    : nd_gguf_refuse(g, "the factors of its RoPE (" ND_GGUF_FACTORS
                                        ") are not those of Llama 3.1 to 3.3");
    }
    *out = linear ? json_pack("{s:s, s:f}", "rope_type", "linear", "factor", factor) : NULL;
    return ND_OK;
}

static json_t *has(const nd_gguf *g, const char *tensor)
{
    return json_boolean(nd_safetensors_list_find(&g->list, tensor));
}

static nd_status make_config(const nd_gguf *g, json_t **config, json_t **generation)
{
    const char *name = text_of(g, "general.architecture");
    const nd_safetensors_tensor *table = nd_safetensors_list_find(&g->list, "token_embd.weight");
    nd_family family = 0;
    json_t *scaling = NULL;
    while (family < ND_FAMILY_COUNT && !(name && nd_gguf_has_family(family) &&
                                         strcmp(nd_families[family].model_type, name) == 0)) {
        family++;
    }
    if (json_integer_value(nd_gguf_get(g, "split.count")) > 1) {
        return nd_gguf_refuse(
            g, "it is one of several files; join them with llama-gguf-split --merge");
    }
    if (family == ND_FAMILY_COUNT) {
        return nd_gguf_refuse(g, "its architecture is %.60s; llama, qwen2 and qwen3 are read",
                              name ? name : "not named");
    }
    if (!table || table->axes != 2) {
        return nd_gguf_refuse(g, "it has no token_embd.weight");
    }
    ND_TRY(find_scaling(g, &scaling));
    *config = json_pack("{s:s, s:[s], s:s, s:s, s:I, s:o*}", "model_type", name, "architectures",
                        nd_families[family].architecture, "torch_dtype", "float32", "hidden_act",
                        "silu", "vocab_size", (json_int_t)table->shape[0], "rope_scaling", scaling);
    *generation = json_object();
    for (int i = 0; i < ND_GGUF_KEYS; i++) {
        const nd_gguf_key *k = &nd_gguf_keys[i];
        json_t *value = nd_gguf_get(g, k->key);
        const bool token = strncmp(k->key, "tokenizer", 9) == 0;
        if (k->needed && !value) {
            return nd_gguf_refuse(g, "it has no %s%s", name, k->key);
        }
        if (k->config && (value || token)) {
            nd_json_set(config, k->config, value ? shorten(value) : json_null());
        }
        if (token && value) {
            nd_json_set(generation, k->config, json_incref(value));
        }
    }
    nd_json_set(config, "tie_word_embeddings",
                json_boolean(!nd_safetensors_list_find(&g->list, "output.weight")));
    if (family != ND_FAMILY_QWEN2) {
        nd_json_set(config, "attention_bias", has(g, "blk.0.attn_q.bias"));
    }
    if (family == ND_FAMILY_LLAMA) {
        nd_json_set(config, "mlp_bias", has(g, "blk.0.ffn_up.bias"));
    }
    return ND_OK;
}

/* The tokenizer. */

/* Tokens with their kinds. */
typedef struct tokens {
    const nd_gguf *gguf;
    const json_t *texts, *kinds;
    size_t count, last; /* last: of the normal ones */
    bool bytes;         /* byte-level, else of Llama 2's form */
} tokens;

static int kind_of(const tokens *t, size_t id)
{
    return (int)json_integer_value(json_array_get(t->kinds, id));
}

static bool is_added(const tokens *t, size_t id)
{
    return kind_of(t, id) >= ND_GGUF_UNKNOWN && kind_of(t, id) <= ND_GGUF_USER_DEFINED;
}

/* The text of the token whose id a key names, lent; NULL: none. */
static json_t *named(const tokens *t, const char *name)
{
    char key[64];
    snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", name);
    const json_t *id = nd_gguf_get(t->gguf, key);
    return id ? json_array_get(t->texts, (size_t)json_integer_value(id)) : NULL;
}

static nd_status read_tokens(const nd_gguf *g, tokens *t)
{
    const char *kind = text_of(g, "tokenizer.ggml.model");
    *t = (tokens){.gguf = g,
                  .texts = nd_gguf_get(g, "tokenizer.ggml.tokens"),
                  .kinds = nd_gguf_get(g, "tokenizer.ggml.token_type"),
                  .bytes = kind && strcmp(kind, "gpt2") == 0};
    t->count = json_array_size(t->texts);
    if (!t->bytes && !(kind && strcmp(kind, "llama") == 0)) {
        return nd_gguf_refuse(g, "its tokenizer is of the kind %.60s; gpt2 and llama are read",
                              kind ? kind : "that it does not name");
    }
    static const char *const special[] = {"bos", "eos", "eot", "unknown", "padding"};
    bool good = t->count > 0 && json_array_size(t->kinds) == t->count;
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) {
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", special[i]);
        good = good && (!nd_gguf_get(g, key) || named(t, special[i]));
    }
    for (size_t i = 0; i < t->count && good; i++) {
        good = json_is_string(json_array_get(t->texts, i));
        t->last = kind_of(t, i) == ND_GGUF_NORMAL ? i : t->last;
    }
    if (!good) {
        return nd_gguf_refuse(g,
                              "it has no tokenizer.ggml.tokens that are texts, or not as many of "
                              "tokenizer.ggml.token_type");
    }
    return json_is_true(nd_gguf_get(g, "tokenizer.ggml.add_eos_token"))
               ? nd_gguf_refuse(g, "its tokenizer adds an end of text to every text, which is not "
                                   "read from GGUF files")
               : ND_OK;
}

static json_t *byte_level(bool splits)
{
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 1, "use_regex", splits);
}

/* How a byte-level tokenizer cuts texts. */
static nd_status set_words(const tokens *t, json_t **root, bool *ignores_merges)
{
    const char *name = text_of(t->gguf, "tokenizer.ggml.pre");
    json_t *before = NULL;
    int i = 0;
    if (!name || strcmp(name, "default") == 0) {
        return nd_gguf_refuse(t->gguf, "it does not say how its tokenizer cuts texts "
                                       "(tokenizer.ggml.pre); convert the model anew");
    }
    while (i < ND_GGUF_SPLITTINGS && strcmp(nd_gguf_splittings[i].name, name) != 0) {
        i++;
    }
    if (i == ND_GGUF_SPLITTINGS) {
        return nd_gguf_refuse(
            t->gguf,
            "its tokenizer cuts texts as %.60s does; gpt-2, smollm, llama-bpe and "
            "qwen2 are read",
            name);
    }
    const nd_splitter first = nd_gguf_splittings[i].splitters[0];
    const bool digits = first == ND_SPLIT_EACH_DIGIT, plain = first == ND_SPLIT_GPT2;
    if (digits) {
        before = json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", 1);
    } else if (!plain) {
        before = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex",
                           nd_text_pattern(first), "behavior", "Isolated", "invert", 0);
    }
    *ignores_merges = nd_gguf_splittings[i].ignores_merges;
    nd_json_set(root, "pre_tokenizer",
                plain ? byte_level(true)
                      : json_pack("{s:s, s:[o, o]}", "type", "Sequence", "pretokenizers", before,
                                  byte_level(digits)));
    nd_json_set(root, "decoder", byte_level(true));
    return ND_OK;
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
    if (json_is_false(nd_gguf_get(t->gguf, "tokenizer.ggml.add_space_prefix"))) {
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
    const json_t *given = nd_gguf_get(t->gguf, "tokenizer.ggml.scores");
    json_t *scores = json_object(), *score;
    piece *pieces = NULL;
    const char *text;
    size_t count = 0;
    nd_status status = ND_OK;
    for (size_t i = 0; i < t->count; i++) {
        json_t *own = json_array_get(given, i);
        if (kind_of(t, i) == ND_GGUF_NORMAL) {
            nd_json_set(&scores, json_string_value(json_array_get(t->texts, i)), json_incref(own));
        }
    }
    if (!scores) {
        return nd_gguf_refuse(t->gguf, "it has no tokenizer.ggml.scores, or too few of them");
    }
    *merges = json_array();
    ND_TRY_OUT(ND_ALLOC(json_object_size(scores) + 1, &pieces));
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
    json_t *begin = named(t, "bos"), *id = nd_gguf_get(t->gguf, "tokenizer.ggml.bos_token_id");
    const json_t *asked = nd_gguf_get(t->gguf, "tokenizer.ggml.add_bos_token");
    if (!begin || !(asked ? json_is_true(asked) : unasked)) {
        return json_null();
    }
    json_t *token = json_pack("{s:{s:O, s:i}}", "SpecialToken", "id", begin, "type_id", 0);
    json_t *one = json_pack("{s:{s:s, s:i}}", "Sequence", "id", "A", "type_id", 0);
    json_t *two = json_pack("{s:{s:s, s:i}}", "Sequence", "id", "B", "type_id", 1);
    return json_pack("{s:s, s:[O, O], s:[O, o, o, o], s:{s:{s:O, s:[O], s:[O]}}}", "type",
                     "TemplateProcessing", "single", token, one, "pair", token, one, token, two,
                     "special_tokens", json_string_value(begin), "id", begin, "ids", id, "tokens",
                     begin);
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
            nd_json_append(added, json_pack("{s:I, s:O, s:b, s:b, s:b, s:b, s:b}", "id",
                                            (json_int_t)i, "content", text, "single_word", 0,
                                            "lstrip", 0, "rstrip", 0, "normalized", 0, "special",
                                            kind_of(t, i) != ND_GGUF_USER_DEFINED));
        }
        if (kind_of(t, i) != ND_GGUF_UNUSED && (!t->bytes || !is_added(t, i) || i < t->last)) {
            nd_json_set(vocabulary, json_string_value(text), json_integer((json_int_t)i));
        }
    }
}

static nd_status make_tokenizer(const nd_gguf *g, json_t **root, json_t **config)
{
    json_t *merges = NULL, *added = NULL, *vocabulary = NULL;
    bool ignores_merges = false;
    tokens t;
    *root = json_pack("{s:s}", "version", "1.0");
    ND_TRY(read_tokens(g, &t));
    if (t.bytes) {
        ND_TRY(set_words(&t, root, &ignores_merges));
        merges = json_incref(nd_gguf_get(g, "tokenizer.ggml.merges"));
        ND_TRY(merges ? ND_OK : nd_gguf_refuse(g, "it has no tokenizer.ggml.merges"));
    } else {
        set_marks(&t, root);
        ND_TRY(make_merges(&t, &merges));
    }
    set_tokens(&t, &added, &vocabulary);
    nd_json_set(root, "added_tokens", added);
    nd_json_set(root, "post_processor", begin_of(&t, !t.bytes || ignores_merges));
    nd_json_set(root, "model",
                json_pack("{s:s, s:O*, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "unk_token",
                          t.bytes ? NULL : named(&t, "unknown"), "fuse_unk", !t.bytes,
                          "byte_fallback", !t.bytes, "ignore_merges", ignores_merges, "vocab",
                          vocabulary, "merges", merges));
    *config = json_pack(
        "{s:s, s:b, s:O*, s:O*, s:O*, s:O*}", "tokenizer_class", "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces", 0, "bos_token", named(&t, "bos"), "eos_token",
        named(&t, nd_gguf_get(g, "tokenizer.ggml.eot_token_id") ? "eot" : "eos"), "pad_token",
        named(&t, "padding"), "chat_template", nd_gguf_get(g, "tokenizer.chat_template"));
    return ND_OK;
}

nd_status nd_gguf_make_files(nd_gguf *g)
{
    json_t *config = NULL, *generation = NULL, *tokenizer = NULL, *special = NULL;
    nd_status status = make_config(g, &config, &generation);
    status = status == ND_OK ? make_tokenizer(g, &tokenizer, &special) : status;
    nd_json_set(&g->files, "config.json", config);
    nd_json_set(&g->files, "generation_config.json", generation);
    nd_json_set(&g->files, "tokenizer.json", tokenizer);
    nd_json_set(&g->files, "tokenizer_config.json", special);
    return status != ND_OK || g->files ? status : nd_fail_memory("the head of \"%s\"", g->path);
}
