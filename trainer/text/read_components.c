// SPDX-License-Identifier: Apache-2.0
/* Components around the model: normalizer, pre-tokenizer, decoder and post-processor. */
#include "trainer/text/read.h"

#include "trainer/text/unicode.h"

/* The key "type" of a component, or "". */
static const char *type_of(const json_t *node)
{
    const char *type = json_string_value(json_object_get(node, "type"));
    return type ? type : "";
}

static bool is_type(const json_t *node, const char *type)
{
    return strcmp(type_of(node), type) == 0;
}

/* Missing or null. */
static bool is_absent(const json_t *node)
{
    return !node || json_is_null(node);
}

/* `what`: the component, or what it has, behind the name of the file. */
static nd_status refuse(const nd_tokenizer *t, const char *what)
{
    return nd_fail(ND_ERR_DATA, "\"%s\"%s is not supported", t->name, what);
}

static nd_status fail_type(const nd_tokenizer *t, const char *part, const json_t *node,
                           const char *known)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the %s \"%s\" is not supported; supported are %s", t->name,
                   part, type_of(node), known);
}

static nd_status fail_key(const nd_tokenizer *t, const json_t *node, const char *key,
                          const char *wanted)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\": the key \"%s\" of \"%s\" is not %s, which is not supported", t->name,
                   key, type_of(node), wanted);
}

nd_status nd_text_read_bool(const nd_tokenizer *tokenizer, const json_t *node, const char *key,
                            bool fallback, bool *out)
{
    const json_t *value = json_object_get(node, key);
    *out = is_absent(value) ? fallback : json_is_true(value);
    return is_absent(value) || json_is_boolean(value)
               ? ND_OK
               : fail_key(tokenizer, node, key, "true or false");
}

nd_status nd_text_fail_damaged(const nd_tokenizer *t, const char *key, const char *wanted)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the key \"%s\" is not %s; the file is damaged", t->name,
                   key, wanted);
}

nd_status nd_text_add_piece(nd_tokenizer *t, int32_t id, const char *text, size_t size, bool model)
{
    const nd_status status = nd_vocab_add(&t->vocab, id, text, size, model);
    return status == ND_ERR_DATA
               ? nd_fail_context(status, "reading the vocabulary of \"%s\"", t->name)
               : status;
}

int32_t nd_text_id(const json_t *value)
{
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    return id >= 0 && id < ND_VOCAB_IDS_MAX ? (int32_t)id : -1;
}

/* Bytes of what a step puts into a text, and how much longer all steps may make one: real files
 * put 3 bytes for one. */
enum { STRING_BYTES_MAX = 256, GROWTH_MAX = 256 };

/* Rewrites. */

static nd_status copy_string(const nd_tokenizer *t, const json_t *node, const char *key,
                             const json_t *value, char **out, size_t *size)
{
    if (!json_is_string(value) || json_string_length(value) > STRING_BYTES_MAX) {
        return fail_key(t, node, key, "a short string");
    }
    *size = json_string_length(value);
    ND_TRY(ND_ALLOC(*size + 1, out));
    memcpy(*out, json_string_value(value), *size);
    return ND_OK;
}

/* Returns how many times longer these steps make a text at most, but for what is put before it. */
static size_t growth_of(const nd_rewrite *steps, int count)
{
    size_t growth = 1;
    for (int i = 0; i < count && growth <= GROWTH_MAX; i++) {
        if (steps[i].from && steps[i].to_size > steps[i].from_size) {
            growth *= (steps[i].to_size + steps[i].from_size - 1) / steps[i].from_size;
        }
    }
    return growth;
}

/* Replace{pattern: {String}, content}, Prepend{prepend}, or NFC. */
static nd_status read_rewrite(nd_tokenizer *t, const json_t *node, nd_rewrite *steps, int *count)
{
    const bool replace = is_type(node, "Replace");
    if (*count == ND_TEXT_STEPS_MAX) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has more than %d rewriting steps; that is not supported", t->name,
                       ND_TEXT_STEPS_MAX);
    }
    nd_rewrite *step = &steps[(*count)++];
    *step = (nd_rewrite){.compose = is_type(node, "NFC")};
    if (step->compose) {
        return ND_OK;
    }
    if (replace) {
        const json_t *pattern = json_object_get(node, "pattern");
        if (json_object_get(pattern, "Regex")) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\": \"Replace\" with a regular expression is not "
                           "supported; only strings are",
                           t->name);
        }
        ND_TRY(copy_string(t, node, "pattern", json_object_get(pattern, "String"), &step->from,
                           &step->from_size));
        if (step->from_size == 0) {
            return fail_key(t, node, "pattern", "a string with a character");
        }
    }
    const char *key = replace ? "content" : "prepend";
    ND_TRY(copy_string(t, node, key, json_object_get(node, key), &step->to, &step->to_size));
    return growth_of(steps, *count) <= GROWTH_MAX
               ? ND_OK
               : fail_key(t, node, key, "a string that keeps texts short");
}

static nd_status read_normalizer(nd_tokenizer *tokenizer, const json_t *node)
{
    if (is_type(node, "Prepend") || is_type(node, "Replace") || is_type(node, "NFC")) {
        return read_rewrite(tokenizer, node, tokenizer->rewrites, &tokenizer->rewrite_count);
    }
    return fail_type(tokenizer, "normalizer", node, "NFC, Prepend, Replace and Sequence");
}

/* Pre-tokenizer. */

#define CONTRACTIONS       "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define CONTRACTIONS_SHORT "'(?i:[sdmt]|ll|ve|re)"
#define BLANKS             "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Spellings of the patterns that have a scanner in split.c; all of one scanner match alike. */
static const struct {
    const char *pattern;
    nd_splitter splitter;
} patterns[] = {
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     ND_SPLIT_GPT2},
    {CONTRACTIONS
     "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" BLANKS,
     ND_SPLIT_LLAMA3},
    {CONTRACTIONS_SHORT
     "|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     ND_SPLIT_LLAMA3},
    {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" BLANKS,
     ND_SPLIT_QWEN2},
};

const char *nd_text_pattern(nd_splitter splitter)
{
    size_t i = 0;
    while (patterns[i].splitter != splitter) {
        i++;
    }
    return patterns[i].pattern;
}

static nd_status add_splitter(nd_tokenizer *t, nd_splitter splitter)
{
    if (t->splitter_count == ND_TEXT_STEPS_MAX) {
        return nd_fail(ND_ERR_DATA, "\"%s\" splits text more than %d times; that is not supported",
                       t->name, ND_TEXT_STEPS_MAX);
    }
    t->splitters[t->splitter_count++] = splitter;
    return ND_OK;
}

/* A pattern without a scanner. Only a scanner's pattern is known to match everything, so that
 * nothing is removed. */
static nd_status add_regex(nd_tokenizer *t, const json_t *regex, bool removes)
{
    nd_regex *made;
    if (removes) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": \"Split\" with the behavior \"Removed\" and the pattern %.200s is not "
            "supported; supported is \"Isolated\"",
            t->name, json_string_value(regex));
    }
    /* Each encoder compiles its own; this one shows that it can be done. */
    const char *pattern = json_string_value(regex);
    const size_t size = json_string_length(regex);
    ND_TRY(nd_regex_create(pattern, size, t->name, ND_REGEX_SECONDS, &made));
    nd_regex_destroy(made);
    ND_TRY(add_splitter(t, ND_SPLIT_REGEX));
    return nd_bytes_add(&t->regexes[t->splitter_count - 1], pattern, size);
}

/* Returns whether the last rewrite leaves no such string in any text: Gemma's tokenizer splits at
 * blanks that its normalizer has replaced by marks. */
static bool is_rewritten(const nd_tokenizer *t, const json_t *string)
{
    const nd_rewrite *last = t->rewrite_count > 0 ? &t->rewrites[t->rewrite_count - 1] : NULL;
    return json_is_string(string) && last && last->from &&
           strcmp(json_string_value(string), last->from) == 0 && last->from_size == 1 &&
           !strchr(last->to, last->from[0]);
}

/* Only Isolated: each match is a word and so is what stands between. */
static nd_status read_split(nd_tokenizer *t, const json_t *node)
{
    const json_t *pattern = json_object_get(node, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex");
    const char *behavior = json_string_value(json_object_get(node, "behavior"));
    bool invert;
    ND_TRY(nd_text_read_bool(t, node, "invert", false, &invert));
    if (is_rewritten(t, json_object_get(pattern, "String")) && !invert) {
        return ND_OK; /* it matches nothing */
    }
    if (!json_is_string(regex) || !behavior) {
        return refuse(t, ": \"Split\" without a regular expression or a behavior");
    }
    bool isolated = strcmp(behavior, "Isolated") == 0;
    bool inverted = invert && strcmp(behavior, "Removed") == 0;
    if (!isolated && !inverted) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": \"Split\" with the behavior \"%s\" is not supported; "
                       "supported is \"Isolated\"",
                       t->name, behavior);
    }
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        if (strcmp(json_string_value(regex), patterns[i].pattern) == 0) {
            return add_splitter(t, patterns[i].splitter);
        }
    }
    return add_regex(t, regex, inverted);
}

static nd_status read_byte_level(nd_tokenizer *t, const json_t *node)
{
    bool use_regex;
    ND_TRY(nd_text_read_bool(t, node, "use_regex", true, &use_regex));
    ND_TRY(nd_text_read_bool(t, node, "add_prefix_space", true, &t->prefix_blank));
    if (t->metaspace != ND_METASPACE_NONE) {
        return refuse(t, " has both \"Metaspace\" and \"ByteLevel\"; that");
    }
    if (t->prefix_blank && t->splitter_count > 0) {
        return refuse(t, ": \"ByteLevel\" with add_prefix_space behind another pre-tokenizer");
    }
    t->byte_level = true;
    return use_regex ? add_splitter(t, ND_SPLIT_GPT2) : ND_OK;
}

/* Reads a "Metaspace" of a pre-tokenizer or a decoder. */
static nd_status read_metaspace(const nd_tokenizer *t, const json_t *node, nd_metaspace *scheme)
{
    static const char *const names[] = {
        [ND_METASPACE_NEVER] = "never",
        [ND_METASPACE_FIRST] = "first",
        [ND_METASPACE_ALWAYS] = "always",
    };
    const char *mark = json_string_value(json_object_get(node, "replacement"));
    const json_t *name = json_object_get(node, "prepend_scheme");
    bool prefix;
    ND_TRY(nd_text_read_bool(t, node, "add_prefix_space", true, &prefix));
    if (!mark || strcmp(mark, ND_TEXT_MARK) != 0) {
        return refuse(t, ": \"Metaspace\" with another replacement than U+2581");
    }
    *scheme = is_absent(name) ? ND_METASPACE_ALWAYS : ND_METASPACE_NONE;
    for (int i = ND_METASPACE_NEVER; json_is_string(name) && i <= ND_METASPACE_ALWAYS; i++) {
        if (strcmp(json_string_value(name), names[i]) == 0) {
            *scheme = (nd_metaspace)i;
        }
    }
    if (*scheme == ND_METASPACE_NONE) {
        return fail_key(t, node, "prepend_scheme", "first, always or never");
    }
    return prefix || *scheme == ND_METASPACE_NEVER
               ? ND_OK
               : fail_key(t, node, "add_prefix_space", "in keeping with prepend_scheme");
}

static nd_status read_pre_tokenizer(nd_tokenizer *tokenizer, const json_t *node)
{
    if (tokenizer->byte_level) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the pre-tokenizer \"%s\" behind \"ByteLevel\" is not "
                       "supported",
                       tokenizer->name, type_of(node));
    }
    if (is_type(node, "Split")) {
        return read_split(tokenizer, node);
    }
    if (is_type(node, "ByteLevel")) {
        return read_byte_level(tokenizer, node);
    }
    bool given; /* a setting of the component */
    if (is_type(node, "Digits")) {
        ND_TRY(nd_text_read_bool(tokenizer, node, "individual_digits", false, &given));
        return add_splitter(tokenizer, given ? ND_SPLIT_EACH_DIGIT : ND_SPLIT_DIGITS);
    }
    if (is_type(node, "Metaspace")) {
        if (tokenizer->metaspace != ND_METASPACE_NONE || tokenizer->splitter_count > 0) {
            return refuse(tokenizer, ": \"Metaspace\" behind another pre-tokenizer");
        }
        ND_TRY(nd_text_read_bool(tokenizer, node, "split", true, &given));
        ND_TRY(read_metaspace(tokenizer, node, &tokenizer->metaspace));
        return given ? add_splitter(tokenizer, ND_SPLIT_MARKS) : ND_OK;
    }
    return fail_type(tokenizer, "pre-tokenizer", node,
                     "ByteLevel, Digits, Metaspace, Split and Sequence");
}

/* Decoder. */

/* The steps of a Sequence in the only order that is understood. */
enum { STEP_REPLACE, STEP_BYTES, STEP_FUSE, STEP_STRIP };

static nd_status read_strip(nd_tokenizer *t, const json_t *node)
{
    const json_t *content = json_object_get(node, "content");
    const json_t *start = json_object_get(node, "start"), *stop = json_object_get(node, "stop");
    const char *text = json_string_value(content);
    size_t size = json_string_length(content);
    if (size == 0 || size > sizeof t->strip ||
        nd_utf8_next((const uint8_t *)text, size) != (int)size || !json_is_integer(start) ||
        json_integer_value(start) < 0) {
        return fail_key(t, node, "content", "a character, or \"start\" not a number");
    }
    if (!json_is_integer(stop) || json_integer_value(stop) != 0) {
        return refuse(t, ": \"Strip\" at the end of a text");
    }
    memcpy(t->strip, text, size);
    t->strip_size = size;
    t->strip_count = json_integer_value(start);
    return ND_OK;
}

static nd_status read_decoder_step(nd_tokenizer *t, const json_t *node, int *last)
{
    static const char *const names[] = {[STEP_REPLACE] = "Replace",
                                        [STEP_BYTES] = "ByteFallback",
                                        [STEP_FUSE] = "Fuse",
                                        [STEP_STRIP] = "Strip"};
    int step = STEP_REPLACE;
    while (step <= STEP_STRIP && !is_type(node, names[step])) {
        step++;
    }
    if (step > STEP_STRIP) {
        return fail_type(t, "decoder", node,
                         "ByteLevel, Metaspace, and a Sequence of Replace, ByteFallback, Fuse and "
                         "Strip");
    }
    if (step < *last || (step == *last && step != STEP_REPLACE) ||
        (step == STEP_STRIP && *last != STEP_FUSE)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the decoder \"%s\" at this place of a Sequence is not "
                       "supported; the order is Replace, ByteFallback, Fuse, Strip",
                       t->name, type_of(node));
    }
    *last = step;
    if (step == STEP_REPLACE) {
        return read_rewrite(t, node, t->replaces, &t->replace_count);
    }
    t->byte_fallback |= step == STEP_BYTES;
    return step == STEP_STRIP ? read_strip(t, node) : ND_OK;
}

static nd_status read_decoder(nd_tokenizer *tokenizer, const json_t *node)
{
    if (is_type(node, "ByteLevel")) {
        tokenizer->decoder = ND_DECODER_BYTE_LEVEL;
        return ND_OK;
    }
    if (is_type(node, "Metaspace")) {
        nd_metaspace scheme;
        ND_TRY(read_metaspace(tokenizer, node, &scheme));
        tokenizer->decoder = ND_DECODER_METASPACE;
        tokenizer->decoder_has_metaspace_prefix = scheme != ND_METASPACE_NEVER;
        return ND_OK;
    }
    int last = STEP_REPLACE;
    tokenizer->decoder = ND_DECODER_SEQUENCE;
    if (!is_type(node, "Sequence")) {
        return read_decoder_step(tokenizer, node, &last);
    }
    const json_t *list = json_object_get(node, "decoders");
    if (!json_is_array(list)) {
        return fail_key(tokenizer, node, "decoders", "a list");
    }
    const json_t *only = json_array_size(list) == 1 ? json_array_get(list, 0) : NULL;
    if (only && !is_type(only, "Sequence")) {
        return is_absent(only) ? ND_OK : read_decoder(tokenizer, only);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        ND_TRY(read_decoder_step(tokenizer, json_array_get(list, i), &last));
    }
    return ND_OK;
}

/* Post-processor. */

static nd_status fail_template(const nd_tokenizer *t)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\": \"TemplateProcessing\" is not a list of special tokens "
                   "around one sequence A, with ids of the vocabulary; the file is damaged",
                   t->name);
}

static nd_status read_template_token(const nd_tokenizer *t, const json_t *tokens,
                                     const json_t *item, nd_ids *ids)
{
    const json_t *name = json_object_get(json_object_get(item, "SpecialToken"), "id");
    const json_t *list =
        json_is_string(name)
            ? json_object_get(json_object_get(tokens, json_string_value(name)), "ids")
            : NULL;
    if (!json_is_array(list)) {
        return fail_template(t);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const int32_t id = nd_text_id(json_array_get(list, i));
        if (!nd_vocab_piece(&t->vocab, id)) {
            return fail_template(t);
        }
        ND_TRY(nd_ids_add(ids, &id, 1));
    }
    return ND_OK;
}

/* Fills what stands before and behind the sequence. */
static nd_status read_template(const nd_tokenizer *t, const json_t *node, nd_ids ids[2])
{
    const json_t *single = json_object_get(node, "single");
    int sequences = 0;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const char *which =
            json_string_value(json_object_get(json_object_get(item, "Sequence"), "id"));
        if (which && strcmp(which, "A") == 0 && sequences == 0) {
            sequences++;
        } else {
            ND_TRY(read_template_token(t, json_object_get(node, "special_tokens"), item,
                                       &ids[sequences]));
        }
    }
    return sequences == 1 ? ND_OK : fail_template(t);
}

/* A later template goes around what an earlier one has made. */
static nd_status add_template(nd_tokenizer *t, nd_ids ids[2])
{
    ND_TRY(nd_ids_add(&ids[0], t->before, (size_t)t->before_count));
    if (ids[0].count > ND_TEXT_AFFIX_MAX ||
        ids[1].count + (size_t)t->behind_count > ND_TEXT_AFFIX_MAX) {
        return nd_fail(ND_ERR_DATA, "\"%s\" adds more than %d ids to a text; that is not supported",
                       t->name, ND_TEXT_AFFIX_MAX);
    }
    t->before_count = (int)ids[0].count;
    for (size_t i = 0; i < ids[0].count; i++) {
        t->before[i] = ids[0].data[i];
    }
    for (size_t i = 0; i < ids[1].count; i++) {
        t->behind[t->behind_count++] = ids[1].data[i];
    }
    return ND_OK;
}

static nd_status read_post_processor(nd_tokenizer *tokenizer, const json_t *node)
{
    if (is_type(node, "ByteLevel")) { /* it changes offsets, no ids */
        return ND_OK;
    }
    if (!is_type(node, "TemplateProcessing")) {
        return fail_type(tokenizer, "post-processor", node,
                         "ByteLevel, TemplateProcessing and Sequence");
    }
    nd_ids ids[2] = {{0}};
    nd_status status = read_template(tokenizer, node, ids);
    if (status == ND_OK) {
        status = add_template(tokenizer, ids);
    }
    free(ids[0].data);
    free(ids[1].data);
    return status;
}

typedef struct component {
    const char *key;
    const char *list; /* of the components in a Sequence; NULL: the reader knows it */
    nd_status (*read)(nd_tokenizer *tokenizer, const json_t *node);
} component;

static nd_status read_node(nd_tokenizer *t, const component *c, const json_t *node)
{
    const json_t *list = c->list ? json_object_get(node, c->list) : NULL;
    if (is_absent(node) || !c->list || !is_type(node, "Sequence")) {
        return is_absent(node) ? ND_OK : c->read(t, node);
    }
    if (!json_is_array(list)) {
        return fail_key(t, node, c->list, "a list");
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        ND_TRY(read_node(t, c, json_array_get(list, i)));
    }
    return ND_OK;
}

nd_status nd_text_read_component(nd_tokenizer *tokenizer, const json_t *root, const char *key)
{
    static const component components[] = {
        {"normalizer", "normalizers", read_normalizer},
        {"pre_tokenizer", "pretokenizers", read_pre_tokenizer},
        {"decoder", NULL, read_decoder},
        {"post_processor", "processors", read_post_processor},
    };
    int i = 0;
    while (strcmp(components[i].key, key) != 0) {
        i++;
    }
    return read_node(tokenizer, &components[i], json_object_get(root, key));
}
