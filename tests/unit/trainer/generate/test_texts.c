// SPDX-License-Identifier: Apache-2.0
/* What the ids that were generated become, after a prompt. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/generate/stops.h"

/* The text of the ids from `from` on, where those before are the prompt. */
static void text_is(const nd_tokenizer *tokenizer, const nd_ids *ids, size_t from,
                    const char *expected)
{
    const nd_stops none = {0};
    const nd_ids prompt = {.data = ids->data, .count = from};
    nd_text_out out;
    bool stop = false;
    cr_assert_eq(nd_text_out_init(&out, tokenizer, &none, &prompt), ND_OK);
    for (size_t i = from; i < ids->count; i++) {
        cr_assert_eq(nd_text_out_push(&out, ids->data[i], &stop), ND_OK);
    }
    cr_assert_eq(nd_text_out_end(&out), ND_OK);
    const size_t size = strlen(expected);
    cr_expect(out.text.count == size && (size == 0 || memcmp(out.text.data, expected, size) == 0),
              "after %zu ids: \"%.*s\", not \"%s\"", from, (int)out.text.count,
              (const char *)out.text.data, expected);
    nd_text_out_fini(&out);
}

/* The ids of `whole`, of which the first *prompt are those of `text`. */
static void ids_after(nd_encoder *encoder, const char *text, const char *whole, size_t *prompt,
                      nd_ids *ids)
{
    const int32_t *data;
    size_t count;
    cr_assert_eq(nd_encode(encoder, text, strlen(text), &data, prompt), ND_OK);
    cr_assert_eq(nd_encode(encoder, whole, strlen(whole), &data, &count), ND_OK);
    ids->count = 0;
    cr_assert_eq(nd_ids_add(ids, data, count), ND_OK);
    cr_assert_lt(*prompt, count);
}

/* A character without a piece is a run of byte tokens, which is held back: that of the prompt is
 * no part of what follows it. */
Test(texts, bytes_at_the_end_of_a_prompt_stay_there)
{
    nd_tokenizer *tokenizer = text_open("llama2");
    const nd_encode_options plain = {.special_in_text = ND_SPECIAL_TEXT};
    nd_encoder *encoder;
    nd_ids ids = {0};
    size_t prompt;
    cr_assert_eq(nd_encoder_create(tokenizer, &plain, &encoder), ND_OK);
    ids_after(encoder, "ab\xf0\x9f\x99\x82", "ab\xf0\x9f\x99\x82 cd\xf0\x9f\x99\x82", &prompt,
              &ids);
    text_is(tokenizer, &ids, prompt, " cd\xf0\x9f\x99\x82");
    text_is(tokenizer, &ids, ids.count, "");
    free(ids.data);
    nd_encoder_destroy(encoder);
    nd_tokenizer_close(tokenizer);
}

/* Llama 2's form begins a text with a blank that decoding leaves out, but only there. */
Test(texts, a_word_after_a_prompt_keeps_its_blank)
{
    static const char *const names[] = {"llama2", "llama2_first", "llama3"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        nd_tokenizer *tokenizer = text_open(names[n]);
        const nd_encode_options plain = {.special_in_text = ND_SPECIAL_TEXT};
        nd_encoder *encoder;
        size_t prompt;
        nd_ids ids = {0};
        cr_assert_eq(nd_encoder_create(tokenizer, &plain, &encoder), ND_OK);
        ids_after(encoder, "ab", "ab cd", &prompt, &ids);
        text_is(tokenizer, &ids, 0, "ab cd");
        text_is(tokenizer, &ids, prompt, " cd");
        text_is(tokenizer, &ids, ids.count, "");
        free(ids.data);
        nd_encoder_destroy(encoder);
        nd_tokenizer_close(tokenizer);
    }
}
