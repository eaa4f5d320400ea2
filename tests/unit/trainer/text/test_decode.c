// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"

enum { IDS_MAX = 4096 };

/* What a test has opened last; the next one closes it. */
static nd_tokenizer *tokenizer;
static nd_decoder *decoder;

static void use(const char *family, bool skip_special)
{
    nd_decoder_destroy(decoder);
    nd_tokenizer_close(tokenizer);
    tokenizer = text_open(family);
    assert_ok(nd_decoder_create(tokenizer, skip_special, &decoder));
}

static void assert_text(const char *family, const json_t *list, const json_t *expected,
                        size_t piece)
{
    int32_t ids[IDS_MAX];
    size_t size, count = text_ids(list, ids, IDS_MAX);
    const char *text = text_decode(decoder, ids, count, piece, &size);
    cr_assert_eq(size, json_string_length(expected),
                 "%s: \"%s\" has %zu bytes, not those of \"%s\"", family, text, size,
                 json_string_value(expected));
    cr_assert_arr_eq(text, json_string_value(expected), size, "%s: \"%s\" is not \"%s\"", family,
                     text, json_string_value(expected));
}

/* In pieces of every length, which must not matter. */
static void assert_texts(const char *family, const char *key, bool skip_special)
{
    use(family, skip_special);
    json_t *cases = text_cases(family);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *one = json_array_get(cases, i), *ids = json_object_get(one, "parse");
        size_t count = json_array_size(ids);
        for (size_t piece = 1; piece <= count + 1; piece++) {
            assert_text(family, ids, json_object_get(one, key), piece);
        }
    }
    json_decref(cases);
}

Test(decode, texts_are_those_of_tokenizers_at_every_cut)
{
    for (const char *const *family = text_families; *family; family++) {
        assert_texts(*family, "decoded", false);
        assert_texts(*family, "skipped", true);
    }
}

/* Byte-level files lose nothing of a text whose added tokens take no white space. */
Test(decode, what_was_encoded_byte_by_byte_comes_back)
{
    static const char *const families[] = {"gpt2", "llama3", "qwen2", "digits"};
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        nd_encoder *encoder;
        const nd_encode_options options = {.special_in_text = ND_SPECIAL_TEXT};
        use(families[f], false);
        assert_ok(nd_encoder_create(tokenizer, &options, &encoder));
        for (uint32_t seed = 1; seed <= 200; seed++) {
            char text[64];
            uint32_t state = seed * 2654435761u;
            for (size_t i = 0; i < sizeof text; i++) {
                state = state * 1664525u + 1013904223u;
                text[i] = seed % 2 ? (char)(state >> 25) : " \n'sa1\t-"[state >> 29];
            }
            const int32_t *ids;
            size_t count, size;
            assert_ok(nd_encode(encoder, text, sizeof text, &ids, &count));
            const char *back = text_decode(decoder, ids, count, 1 + seed % 5, &size);
            cr_assert_eq(size, sizeof text);
            cr_assert_arr_eq(back, text, size);
        }
        nd_encoder_destroy(encoder);
    }
}

/* Pushes a byte a token, of which no text comes yet. */
static void push_bytes(const char *bytes)
{
    for (; *bytes; bytes++) {
        char name[8];
        const char *text;
        size_t size;
        int32_t id = nd_tokenizer_find(
            tokenizer, name, (size_t)snprintf(name, sizeof name, "<0x%02X>", *bytes & 0xff));
        assert_ok(nd_decoder_push(decoder, &id, 1, &text, &size));
        cr_assert_eq(size, 0);
    }
}

/* The text that was held back is this one. */
static void assert_end(const char *expected)
{
    const char *text;
    size_t size;
    assert_ok(nd_decoder_end(decoder, &text, &size));
    cr_assert_eq(size, strlen(expected));
    cr_assert_arr_eq(text, expected, size);
}

/* The same as tokenizers' ByteFallback: a run of bytes that is not UTF-8 as a whole becomes one
 * replacement character for each byte. */
Test(decode, bytes_that_are_no_character_are_replaced_one_by_one)
{
    use("llama2", false);
    push_bytes("\xe4\xbd");
    assert_end("\xef\xbf\xbd\xef\xbf\xbd");
}

/* An emoji of four bytes, a byte a token. */
Test(decode, a_character_is_held_back_until_it_is_whole)
{
    use("llama2", false);
    push_bytes("\xf0\x9f\x98\x80");
    assert_end("\xf0\x9f\x98\x80");
    assert_end("");
}

Test(decode, an_id_without_a_token_is_refused)
{
    const char *text;
    size_t size;
    use("gpt2", false);
    const int32_t ids[] = {-1, nd_tokenizer_vocab_size(tokenizer)};
    for (int i = 0; i < 2; i++) {
        assert_fails(nd_decoder_push(decoder, &ids[i], 1, &text, &size), ND_ERR_DATA, "has the id");
    }
    json_t *file = text_file("metaspace");
    cr_assert_eq(json_object_del(file, "decoder"), 0);
    nd_tokenizer_close(tokenizer);
    assert_ok(text_parse(file, &tokenizer));
    json_decref(file);
    nd_decoder_destroy(decoder);
    assert_fails(nd_decoder_create(tokenizer, false, &decoder), ND_ERR_DATA, "has no decoder");
}
