// SPDX-License-Identifier: Apache-2.0
/* What the ids that were generated become, after a prompt. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/commands/generate.h"

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

/* Llama 2's form begins a text with a blank that decoding leaves out, but only there. */
Test(texts, a_word_after_a_prompt_keeps_its_blank)
{
    static const char *const names[] = {"llama2", "llama2_first", "llama3"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        nd_tokenizer *tokenizer = text_open(names[n]);
        const nd_encode_options plain = {.special_in_text = ND_SPECIAL_TEXT};
        nd_encoder *encoder;
        const int32_t *data;
        size_t count;
        cr_assert_eq(nd_encoder_create(tokenizer, &plain, &encoder), ND_OK);
        cr_assert_eq(nd_encode(encoder, "ab", 2, &data, &count), ND_OK);
        const size_t prompt = count;
        cr_assert_eq(nd_encode(encoder, "ab cd", 5, &data, &count), ND_OK);
        nd_ids ids = {0};
        cr_assert_eq(nd_ids_add(&ids, data, count), ND_OK);
        cr_assert_lt(prompt, count);
        text_is(tokenizer, &ids, 0, "ab cd");
        text_is(tokenizer, &ids, prompt, " cd");
        text_is(tokenizer, &ids, count, "");
        free(ids.data);
        nd_encoder_destroy(encoder);
        nd_tokenizer_close(tokenizer);
    }
}
