// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"

enum { IDS_MAX = 4096 };

/* The tokenizer and the decoder that `use` opened last; its next call closes them. */
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

/* The text is that of tokenizers' ByteFallback: a run of bytes that is not UTF-8 as a whole becomes
 * one replacement character for each byte, and an emoji of four bytes, a byte a token, is one. */
Test(decode, bytes_are_held_back_until_their_run_ends)
{
    use("llama2", false);
    push_bytes("\xe4\xbd");
    assert_end("\xef\xbf\xbd\xef\xbf\xbd");
    push_bytes("\xf0\x9f\x98\x80");
    assert_end("\xf0\x9f\x98\x80");
    assert_end("");
}

/* As a prompt does: half a character waits on, and the next token is not the first of a text. */
Test(decode, the_end_of_a_run_is_not_that_of_a_text)
{
    static const char *const halves[] = {"\u00c3",
                                         "\u00a9"}; /* a byte-level file's bytes of U+E9 */
    const char *text;
    size_t size;
    int32_t id;
    use("gpt2", false);
    id = nd_tokenizer_find(tokenizer, halves[0], 2);
    assert_ok(nd_decoder_push(decoder, &id, 1, &text, &size));
    assert_end("\ufffd");
    for (int i = 0; i < 2; i++) {
        id = nd_tokenizer_find(tokenizer, halves[i], 2);
        assert_ok(nd_decoder_push(decoder, &id, 1, &text, &size));
        cr_expect(i == 0 ? size == 0 : size == 2 && memcmp(text, "\u00e9", 2) == 0);
        assert_ok(nd_decoder_end_run(decoder, &text, &size));
        cr_expect_eq(size, 0);
    }
    use("llama2", false);
    push_bytes("\xe4");
    assert_ok(nd_decoder_end_run(decoder, &text, &size));
    cr_expect_eq(size, 3);
    id = nd_tokenizer_find(tokenizer, "\u2581", 3);
    assert_ok(nd_decoder_push(decoder, &id, 1, &text, &size));
    cr_expect(size == 1 && *text == ' ');
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
