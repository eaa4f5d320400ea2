// SPDX-License-Identifier: Apache-2.0
/* The text that generated ids become, after a prompt and up to a stop text. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/generate/texts.h"

/* The text of the ids from `from` on, where those before are the prompt. */
static void text_is(const nd_tokenizer *tokenizer, const nd_ids *ids, size_t from,
                    const char *expected)
{
    const nd_stops none = {0};
    const nd_ids prompt = {.data = ids->data, .count = from};
    nd_text_out out;
    cr_assert_eq(nd_text_out_init(&out, tokenizer, &none, &prompt), ND_OK);
    for (size_t i = from; i < ids->count; i++) {
        cr_assert_eq(nd_text_out_push(&out, ids->data[i]), ND_OK);
    }
    cr_assert_eq(nd_text_out_end(&out), ND_OK);
    const size_t size = strlen(expected);
    cr_expect(out.text.count == size && (size == 0 || memcmp(out.text.data, expected, size) == 0),
              "after %zu ids: \"%.*s\", not \"%s\"", from, (int)out.text.count,
              (const char *)out.text.data, expected);
    nd_text_out_fini(&out);
}

/* The ids of `whole`, of which the first *prompt are those of `text`. */
static void ids_after(const nd_tokenizer *tokenizer, const char *text, const char *whole,
                      size_t *prompt, nd_ids *ids)
{
    const nd_encode_options plain = {.special_in_text = ND_SPECIAL_TEXT};
    nd_encoder *encoder;
    const int32_t *data;
    size_t count;
    cr_assert_eq(nd_encoder_create(tokenizer, &plain, &encoder), ND_OK);
    cr_assert_eq(nd_encode(encoder, text, strlen(text), &data, prompt), ND_OK);
    cr_assert_eq(nd_encode(encoder, whole, strlen(whole), &data, &count), ND_OK);
    ids->count = 0;
    cr_assert_eq(nd_ids_add(ids, data, count), ND_OK);
    cr_assert_lt(*prompt, count);
    nd_encoder_destroy(encoder);
}

/* A character without a piece is a run of byte tokens, which is held back: that of the prompt is
 * no part of what follows it. */
Test(texts, bytes_at_the_end_of_a_prompt_stay_there)
{
    nd_tokenizer *tokenizer = text_open("llama2");
    nd_ids ids = {0};
    size_t prompt;
    ids_after(tokenizer, "ab\xf0\x9f\x99\x82", "ab\xf0\x9f\x99\x82 cd\xf0\x9f\x99\x82", &prompt,
              &ids);
    text_is(tokenizer, &ids, prompt, " cd\xf0\x9f\x99\x82");
    text_is(tokenizer, &ids, ids.count, "");
    free(ids.data);
    nd_tokenizer_close(tokenizer);
}

/* Llama 2's form begins a text with a blank that decoding leaves out, but only there. An id that
 * only the model has is no text. */
Test(texts, a_word_after_a_prompt_keeps_its_blank)
{
    static const char *const names[] = {"llama2", "llama2_first", "llama3"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        nd_tokenizer *tokenizer = text_open(names[n]);
        size_t prompt;
        nd_ids ids = {0};
        ids_after(tokenizer, "ab", "ab cd", &prompt, &ids);
        const int32_t unknown = nd_tokenizer_vocab_size(tokenizer);
        cr_assert_eq(nd_ids_add(&ids, &unknown, 1), ND_OK);
        text_is(tokenizer, &ids, 0, "ab cd");
        text_is(tokenizer, &ids, prompt, " cd");
        text_is(tokenizer, &ids, ids.count, "");
        free(ids.data);
        nd_tokenizer_close(tokenizer);
    }
}

typedef struct stop_case {
    const char *stops[4];
    const char *text, *expected;
    bool stopped;
} stop_case;

static const stop_case cases[] = {
    {{NULL}, "plain text", "plain text", false},
    {{"END"}, "a text END more", "a text ", true},
    {{"END"}, "a text EN", "a text EN", false},
    {{"END"}, "ENDING", "", true},
    {{"END"}, "EENDX", "E", true},
    {{"aab"}, "aaaab", "aa", true},
    {{"abab"}, "ababab", "", true},
    {{"\n\n"}, "one\ntwo\n\nthree", "one\ntwo", true},
    {{"abcd", "bc"}, "xabcd", "xa", true},    /* bc is complete first */
    {{"bc", "abc"}, "xabcd", "x", true},      /* at the same place the longer one */
    {{"<|x|>", "|y|"}, "a<|y|>", "a<", true}, /* the beginning of one holds the other */
    {{"\xc3\xa9t"}, "\xc3\xa9\xc3\xa9t\xc3\xa9", "\xc3\xa9", true}, /* é */
    {{"\xf0\x9f\x98\x80"}, "\xf0\x9f\x98\x81\xf0\x9f\x98\x80", "\xf0\x9f\x98\x81", true},
};

/* The stops of a case, and nothing yet of its text. */
static void open_stops(const char *const list[4], nd_stops *stops, nd_text_out *out)
{
    *stops = (nd_stops){0};
    for (int i = 0; i < 4 && list[i]; i++) {
        cr_assert_eq(nd_stops_add(stops, list[i]), ND_OK);
    }
    cr_assert_eq(nd_text_out_init(out, NULL, stops, NULL), ND_OK);
}

Test(stops, the_result_does_not_depend_on_the_pieces)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const stop_case *c = &cases[i];
        const size_t length = strlen(c->text), expected = strlen(c->expected);
        for (size_t piece = 1; piece <= length; piece++) {
            nd_stops stops;
            nd_text_out out;
            open_stops(c->stops, &stops, &out);
            for (size_t at = 0; at < length; at += piece) {
                const size_t n = length - at < piece ? length - at : piece;
                cr_assert_eq(nd_text_out_add(&out, c->text + at, n), ND_OK);
                cr_expect(out.given <= expected &&
                              memcmp(out.text.data, c->expected, out.given) == 0,
                          "case %zu, pieces of %zu: %zu bytes are given", i, piece, out.given);
            }
            cr_assert_eq(nd_text_out_end(&out), ND_OK);
            cr_expect_eq(out.given, expected, "case %zu, pieces of %zu", i, piece);
            cr_expect_eq(out.stopped, c->stopped, "case %zu, pieces of %zu", i, piece);
            nd_text_out_fini(&out);
        }
    }
}

Test(stops, only_what_may_begin_a_stop_is_held_back)
{
    static const char *const list[4] = {"END"};
    static const struct {
        const char *piece;
        size_t given; /* with it */
    } pieces[] = {{"one EN", 4}, {"T ", 8}, {"E", 8}};
    nd_stops stops;
    nd_text_out out;
    open_stops(list, &stops, &out);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        cr_assert_eq(nd_text_out_add(&out, pieces[i].piece, strlen(pieces[i].piece)), ND_OK);
        cr_expect_eq(out.given, pieces[i].given, "piece %zu: %zu", i, out.given);
    }
    cr_assert_eq(nd_text_out_end(&out), ND_OK);
    cr_expect(out.given == 9 && memcmp(out.text.data, "one ENT E", 9) == 0);
    nd_text_out_fini(&out);
}

Test(stops, bad_ones_are_refused)
{
    nd_stops stops = {0};
    cr_expect_eq(nd_stops_add(&stops, ""), ND_ERR_CONFIG);
    cr_expect_eq(nd_stops_add(&stops, "\xff"), ND_ERR_CONFIG);
    for (int i = 0; i < ND_STOPS_MAX; i++) {
        cr_assert_eq(nd_stops_add(&stops, "x"), ND_OK);
    }
    cr_expect_eq(nd_stops_add(&stops, "x"), ND_ERR_CONFIG);
}
