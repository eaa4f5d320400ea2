// SPDX-License-Identifier: Apache-2.0
/*
 * JSON lines for `ndtrain generate` and `ndtrain eval --requests`, the same bytes for both:
 * whatever is taken has ids of the vocabulary, and fits.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/generate/choices.h"
#include "trainer/generate/requests.h"

enum { VOCAB = 256, TOKENS_MAX = 40 };

static nd_encoder *make_encoder(bool special)
{
    const nd_encode_options options = {
        .special_in_text = special ? ND_SPECIAL_PARSE : ND_SPECIAL_TEXT, .post_process = special};
    nd_tokenizer *tokenizer; /* for the life of the fuzzer */
    nd_encoder *encoder;
    ND_ASSERT(nd_byte_tokenizer_create(&tokenizer) == ND_OK);
    ND_ASSERT(nd_encoder_create(tokenizer, &options, &encoder) == ND_OK);
    return encoder;
}

static void check_ids(const nd_ids *ids, int64_t most)
{
    ND_ASSERT(ids->count >= 1 && (int64_t)ids->count <= most);
    for (size_t i = 0; i < ids->count; i++) {
        ND_ASSERT(ids->data[i] >= 0 && ids->data[i] < VOCAB);
    }
}

static void read_requests(nd_encoder *prompts, nd_encoder *messages, const char *text, size_t size)
{
    const nd_request_rules rules = {.prompts = prompts,
                                    .messages = messages,
                                    .vocab = VOCAB,
                                    .begin = -1,
                                    .max_new = 5,
                                    .max_tokens = TOKENS_MAX,
                                    .limit = "the limit"};
    nd_requests requests = {0};
    nd_status status = nd_requests_add_rows(&requests, &rules, "input", text, size);
    ND_ASSERT(status == ND_OK || status == ND_ERR_DATA);
    for (size_t i = 0; i < requests.count; i++) {
        const nd_request *q = &requests.list[i];
        check_ids(&q->ids, TOKENS_MAX - 1);
        ND_ASSERT(q->max_new >= 1 && (int64_t)q->ids.count + q->max_new <= requests.longest);
        ND_ASSERT(requests.longest <= TOKENS_MAX);
    }
    nd_requests_fini(&requests);
}

static void read_questions(nd_encoder *encoder, const char *text, size_t size)
{
    const nd_choice_rules rules = {
        .encoder = encoder, .vocab = VOCAB, .max_tokens = TOKENS_MAX, .prefix = 1};
    nd_questions questions = {0};
    nd_status status = nd_questions_read(&questions, &rules, "input", text, size);
    ND_ASSERT(status == ND_OK || status == ND_ERR_DATA);
    for (size_t i = 0; i < questions.count; i++) {
        const nd_question *q = &questions.list[i];
        ND_ASSERT(q->gold >= 0 && q->gold < q->count);
        for (int64_t k = 0; k < q->count; k++) {
            check_ids(&q->choices[k].ids, TOKENS_MAX);
            ND_ASSERT(q->choices[k].from >= 1 &&
                      q->choices[k].from < (int64_t)q->choices[k].ids.count);
        }
    }
    nd_questions_fini(&questions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static nd_encoder *prompts, *messages;
    if (!prompts) {
        prompts = make_encoder(true);
        messages = make_encoder(false);
    }
    read_requests(prompts, messages, (const char *)data, size);
    read_questions(messages, (const char *)data, size);
    return 0;
}
