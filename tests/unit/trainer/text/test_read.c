// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"

/* A change to the file of a family, and the sentence that must follow. */
typedef struct bad_file {
    const char *family;
    const char *path;  /* keys with '/' between them; the last one is set */
    const char *value; /* as JSON; NULL: the key is removed */
    const char *words;
} bad_file;

/* A text eight times, eight and nine members of a list, and components. */
#define RUN8(x)   x x x x x x x x
#define LIST8(x)  x ", " x ", " x ", " x ", " x ", " x ", " x ", " x
#define LIST9(x)  LIST8(x) ", " x
#define TYPE(of)  "{\"type\": \"" of "\"}"
#define CHAIN(of) "{\"type\": \"Sequence\", \"" of "\": ["
#define REPLACE(kind, what, by)                                                                    \
    "{\"type\": \"Replace\", \"pattern\": {\"" kind "\": \"" what "\"}, \"content\": \"" by "\"}"
#define LONGER(by) REPLACE("String", "a", by)
#define MARKS      "{\"type\": \"Metaspace\", \"replacement\": \"\u2581\"}"
#define IDS64      LIST8(LIST8("1"))
#define IDS65      IDS64 ", 1"
#define BEHIND(ids)                                                                                \
    "{\"type\": \"TemplateProcessing\", \"single\": [{\"Sequence\": {\"id\": \"A\"}}, "            \
    "{\"SpecialToken\": {\"id\": \"x\"}}], \"special_tokens\": {\"x\": {\"ids\": [" ids "]}}}"

static const bad_file bad_files[] = {
    {"gpt2", "version", "\"2.0\"", "version \"2.0\""},
    {"gpt2", "version", "1.0", "a version that is no string"},
    {"gpt2", "version", "null", "a version that is no string"},
    {"gpt2", "added_tokens", "{}", "\"added_tokens\" of \"tokenizer.json\" is not a list"},
    {"gpt2", "added_tokens", "null", "is not a list"},
    {"gpt2", "model", NULL, "has no \"model\""},
    {"gpt2", "model/type", "\"Unigram\"", "the model \"Unigram\" is not supported"},
    {"gpt2", "model/dropout", "0.1", "\"dropout\" is not supported"},
    {"gpt2", "model/end_of_word_suffix", "\"</w>\"", "\"end_of_word_suffix\" is not supported"},
    {"gpt2", "model/continuing_subword_prefix", "\"##\"", "\"continuing_subword_prefix\""},
    {"gpt2", "model/vocab", NULL, "\"vocab\" is not an object"},
    {"gpt2", "model/merges", "{}", "\"merges\" is not a list"},
    {"gpt2", "model/unk_token", "\"nowhere\"", "\"unk_token\" is not a piece"},
    {"gpt2", "model/ignore_merges", "1", "\"ignore_merges\" of \"BPE\" is not true or false"},
    {"gpt2", "model/vocab/x", "-1", "the id of \"x\""},
    {"gpt2", "model/vocab/x", "4194304", "the id of \"x\""},
    {"gpt2", "model/vocab/x", "1.5", "the id of \"x\""},
    {"gpt2", "model/vocab/new", "5", "twice"},
    {"gpt2", "model/merges/0", "[\"a\", \"nowhere\"]", "merge 0, of \"a\" and \"nowhere\""},
    {"gpt2", "model/merges/0", "\"a b c\"", "merge 0 is not a pair"},
    {"gpt2", "model/merges/0", "[\"a\"]", "merge 0 is not a pair"},
    {"gpt2", "normalizer", TYPE("NFKC"), "the normalizer \"NFKC\" is not supported"},
    {"gpt2", "normalizer", CHAIN("normalizers") TYPE("Strip") "]}",
     "the normalizer \"Strip\" is not supported"},
    {"gpt2", "normalizer", REPLACE("Regex", "a", ""), "regular expression"},
    {"gpt2", "normalizer", REPLACE("String", "", ""), "\"pattern\" of \"Replace\""},
    {"gpt2", "normalizer", CHAIN("normalizers") LIST9(TYPE("NFC")) "]}",
     "more than 8 rewriting steps"},
    {"gpt2", "normalizer", LONGER(RUN8(RUN8("1234")) "5"),
     "\"content\" of \"Replace\" is not a short"},
    {"gpt2", "normalizer",
     CHAIN("normalizers") LONGER("12345678901234567") ", " LONGER("1234567890123456") "]}",
     "a string that keeps texts short"},
    {"gpt2", "normalizer", REPLACE("String", "tool", ""),
     "nothing is left of the added token \"tool\""},
    {"gpt2", "normalizer", "[]", "the normalizer \"\" is not supported"},
    {"gpt2", "pre_tokenizer", TYPE("Whitespace"), "pre-tokenizer \"Whitespace\""},
    {"gpt2", "pre_tokenizer", NULL, "in only one of"},
    {"llama3", "pre_tokenizer/pretokenizers/0/behavior", "\"MergedWithNext\"",
     "\"MergedWithNext\""},
    {"llama3", "pre_tokenizer/pretokenizers/0/pattern/Regex", "\"x\\\\p{Klingon}\"",
     "the pattern x\\p{Klingon} of \"Split\" is not supported: invalid character property"},
    {"llama3", "pre_tokenizer/pretokenizers/0",
     "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"x+\"}, \"behavior\": \"Removed\", "
     "\"invert\": true}",
     "the behavior \"Removed\" and the pattern x+"},
    {"llama3", "pre_tokenizer/pretokenizers/0/pattern", "{\"String\": \" \"}",
     "without a regular expression"},
    {"llama3", "pre_tokenizer/pretokenizers/1/add_prefix_space", "true", "add_prefix_space"},
    {"gpt2", "pre_tokenizer", CHAIN("pretokenizers") TYPE("ByteLevel") ", " TYPE("Digits") "]}",
     "the pre-tokenizer \"Digits\" behind \"ByteLevel\""},
    {"llama2", "pre_tokenizer", CHAIN("pretokenizers") LIST9(TYPE("Digits")) "]}",
     "splits text more than 8 times"},
    {"llama2", "pre_tokenizer", CHAIN("pretokenizers") MARKS ", " TYPE("ByteLevel") "]}",
     "both \"Metaspace\" and \"ByteLevel\""},
    {"llama2", "pre_tokenizer", CHAIN("pretokenizers") TYPE("Digits") ", " MARKS "]}",
     "\"Metaspace\" behind another"},
    {"metaspace", "decoder", CHAIN("decoders") MARKS ", " TYPE("Fuse") "]}",
     "the decoder \"Metaspace\" is not supported"},
    {"llama2", "decoder/decoders", "{}", "\"decoders\" of \"Sequence\" is not a list"},
    {"gpt2", "decoder", TYPE("WordPiece"), "decoder \"WordPiece\" is not supported"},
    {"llama2", "decoder/decoders/0/type", "\"Fuse\"", "at this place"},
    {"llama2", "decoder/decoders/1/type", "\"Fuse\"", "at this place"},
    {"llama2", "decoder/decoders/2/type", "\"Strip\"", "at this place"},
    {"llama2", "decoder/decoders/3/start", "-1", "\"start\" not a number"},
    {"llama2", "decoder/decoders/3/stop", "1", "at the end of a text"},
    {"llama2_first", "pre_tokenizer/replacement", "\"_\"", "another replacement"},
    {"llama2_first", "pre_tokenizer/prepend_scheme", "\"last\"", "\"prepend_scheme\""},
    {"llama2_first", "pre_tokenizer/add_prefix_space", "false", "\"add_prefix_space\""},
    {"llama3", "post_processor", TYPE("BertProcessing"), "\"BertProcessing\""},
    {"llama2", "post_processor/special_tokens/<s>/ids", "[4000000]", "\"TemplateProcessing\""},
    {"llama2", "post_processor/special_tokens/<s>", NULL, "\"TemplateProcessing\""},
    {"llama2", "post_processor/special_tokens/<s>/ids", "[" IDS65 "]", "adds more than 64 ids"},
    {"llama2", "post_processor", BEHIND(IDS65), "adds more than 64 ids"},
    {"llama2", "post_processor/single", "[]", "\"TemplateProcessing\""},
    {"llama2", "post_processor/single/1/Sequence/id", "\"B\"", "\"TemplateProcessing\""},
    {"gpt2", "added_tokens/0/id", "4000", "has the id 4000, but the package tokenizers gives it"},
    {"gpt2", "added_tokens/0/content", "\"\"", "\"added_tokens\""},
    {"llama2", "added_tokens/1", "{\"id\": 0, \"content\": \"<unk>\"}", "token \"<unk>\" twice"},
    {"gpt2", "model/vocab/!", "420", "the id 420 of the added token"},
    {"gpt2", "added_tokens/1/content", "\"<|eot|>\"", "<|eot|>"},
    {"gpt2", "added_tokens/0/lstrip", "\"yes\"", "\"lstrip\""},
};

/* Sets or removes the value at a path. */
static void change(json_t *node, const char *path, const char *value)
{
    char key[64];
    const char *slash = strchr(path, '/');
    size_t size = slash ? (size_t)(slash - path) : strlen(path);
    json_t *made = value ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    cr_assert_lt(size, sizeof key);
    memcpy(key, path, size);
    key[size] = '\0';
    if (slash) {
        json_t *below = json_is_array(node) ? json_array_get(node, (size_t)atoi(key))
                                            : json_object_get(node, key);
        cr_assert_not_null(below, "no \"%s\"", key);
        json_decref(made);
        change(below, slash + 1, value);
    } else if (json_is_array(node)) {
        cr_assert_eq(json_array_set_new(node, (size_t)atoi(key), made), 0);
    } else {
        cr_assert_eq(made ? json_object_set_new(node, key, made) : json_object_del(node, key), 0);
    }
}

Test(read, what_is_not_supported_is_refused_by_name)
{
    for (size_t i = 0; i < sizeof bad_files / sizeof bad_files[0]; i++) {
        const bad_file *bad = &bad_files[i];
        json_t *file = text_file(bad->family);
        nd_tokenizer *tokenizer = NULL;
        change(file, bad->path, bad->value);
        assert_fails(text_parse(file, &tokenizer), ND_ERR_DATA, bad->words);
        json_decref(file);
    }
}

Test(read, what_is_no_json_is_refused_with_its_line)
{
    nd_tokenizer *tokenizer;
    assert_fails(nd_tokenizer_parse("{\n,", 3, "x.json", &tokenizer), ND_ERR_DATA,
                 "\"x.json\" line 2");
    assert_fails(nd_tokenizer_parse("{\"a\": 1, \"a\": 2}", 16, "x.json", &tokenizer), ND_ERR_DATA,
                 "duplicate");
    assert_fails(nd_tokenizer_parse("", 0, "x.json", &tokenizer), ND_ERR_DATA, "\"x.json\"");
    assert_fails(nd_tokenizer_open("/nowhere/tokenizer.json", &tokenizer), ND_ERR_DATA,
                 "/nowhere/tokenizer.json");
}

/* Each pair as one string, as older files write it, behind the first line of merges.txt. */
static void join_merges(json_t *merges)
{
    json_array_insert_new(merges, 0, json_string("#version: 0.2"));
    for (size_t i = 1; i < json_array_size(merges); i++) {
        const json_t *pair = json_array_get(merges, i);
        json_array_set_new(merges, i,
                           json_sprintf("%s %s", json_string_value(json_array_get(pair, 0)),
                                        json_string_value(json_array_get(pair, 1))));
    }
}

/* These spellings have one meaning. */
Test(read, other_spellings_mean_the_same)
{
    static const bad_file same[] = {
        {"llama3", "pre_tokenizer/pretokenizers/0/behavior", "\"Isolated\"", ""},
        {"llama3", "pre_tokenizer/pretokenizers/0/pattern/Regex",
         "\"'(?i:[sdmt]|ll|ve|re)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?+\\\\p{L}+|\\\\p{N}{1,3}|"
         " ?[^\\\\s\\\\p{L}\\\\p{N}]++[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]|\\\\s+(?!\\\\S)|\\\\s+\"",
         ""},
        {"llama3", "truncation", "{\"max_length\": 4}", ""},
        /* As Gemma has it: no blank is left to split at. */
        {"llama2", "pre_tokenizer",
         "{\"type\": \"Split\", \"pattern\": {\"String\": \" \"}, \"behavior\": "
         "\"MergedWithPrevious\", \"invert\": false}",
         ""},
        {"llama3", "model/type", NULL, ""},
        {"llama3", "version", NULL, ""},
        {"gpt2", "model/dropout", "0.0", ""},
        {"gpt2", "decoder", CHAIN("decoders") TYPE("ByteLevel") "]}", ""},
        {"gpt2", "model/continuing_subword_prefix", "\"\"", ""}, /* as GPT-2's own file has it */
        {"llama3", NULL, NULL, ""},                              /* merges as strings */
        /* As many steps, bytes, times longer, and ids around a text as there may be: the replaced
         * text is in no case, and ids are added to none. */
        {"gpt2", "normalizer",
         CHAIN("normalizers") LIST8(REPLACE("String", RUN8(RUN8("12")), RUN8(RUN8("1234")))) "]}",
         ""},
        {"llama2", "post_processor/special_tokens/<s>/ids", "[" IDS64 "]", ""},
        {"llama2", "post_processor", BEHIND(IDS64), ""},
    };
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        json_t *file = text_file(same[i].family), *cases = text_cases(same[i].family);
        if (same[i].path) {
            change(file, same[i].path, same[i].value);
        } else {
            join_merges(json_object_get(json_object_get(file, "model"), "merges"));
        }
        nd_tokenizer *tokenizer;
        nd_encoder *encoder;
        const nd_encode_options options = {.special_in_text = ND_SPECIAL_PARSE};
        assert_ok(text_parse(file, &tokenizer));
        assert_ok(nd_encoder_create(tokenizer, &options, &encoder));
        for (size_t c = 0; c < json_array_size(cases); c++) {
            const json_t *one = json_array_get(cases, c);
            text_assert_ids(same[i].family, encoder, json_object_get(one, "text"),
                            json_object_get(one, "parse"));
        }
        nd_encoder_destroy(encoder);
        nd_tokenizer_close(tokenizer);
        json_decref(file);
        json_decref(cases);
    }
}

Test(read, tokens_are_found_by_name_and_by_id)
{
    nd_tokenizer *tokenizer = text_open("llama3");
    size_t size;
    int32_t id = nd_tokenizer_find(tokenizer, "<|eot|>", 7);
    cr_assert_geq(id, 256);
    cr_assert_lt(id, nd_tokenizer_vocab_size(tokenizer));
    cr_assert_str_eq(nd_tokenizer_token(tokenizer, id, &size), "<|eot|>");
    cr_assert_eq(size, 7);
    cr_assert(nd_tokenizer_is_special(tokenizer, id));
    id = nd_tokenizer_find(tokenizer, "<think>", 7);
    cr_assert_geq(id, 256);
    cr_assert_not(nd_tokenizer_is_special(tokenizer, id));
    cr_assert_eq(nd_tokenizer_find(tokenizer, "nowhere", 7), -1);
    cr_assert_null(nd_tokenizer_token(tokenizer, nd_tokenizer_vocab_size(tokenizer), &size));
    cr_assert_null(nd_tokenizer_token(tokenizer, -1, &size));
    nd_tokenizer_close(tokenizer);
}
