// SPDX-License-Identifier: Apache-2.0
/*
 * A list of messages in all forms: what is taken has ids of the vocabulary, and spans that follow
 * one another within them. A prompt begins with the same ids.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/corpus/chat.h"

enum { VOCAB = 256, CLOSE = 3 };

/* For the life of the fuzzer. */
static nd_tokenizer *tokenizer;
static nd_encoder *encoder;

static void check_piece(const nd_corpus_piece *piece)
{
    int32_t at = 0;
    for (size_t i = 0; i < piece->ids.count; i++) {
        ND_ASSERT(piece->ids.data[i] >= 0 && piece->ids.data[i] < VOCAB);
    }
    ND_ASSERT(piece->spans.count % 2 == 0);
    for (size_t i = 0; i < piece->spans.count; i++) {
        ND_ASSERT(piece->spans.data[i] >= at);
        ND_ASSERT(i % 2 == 0 || piece->spans.data[i] > at);
        at = piece->spans.data[i];
    }
    ND_ASSERT((size_t)at <= piece->ids.count);
}

static void read_messages(const nd_chat_template *own, const uint8_t *data, size_t size,
                          bool prompt_goes_on)
{
    const nd_chat chat = {
        .rules = {.template = own, .bos = "b", .eos = "e"}, .tokenizer = tokenizer, .close = CLOSE};
    nd_corpus_piece piece = {0};
    nd_ids prompt = {0};
    nd_corpus_counts counts = {0};
    bool empty = false;
    const nd_status status =
        nd_chat_add(&chat, encoder, data, size, false, &piece, &counts, &empty);
    const nd_status other = nd_chat_prompt(&chat, encoder, (const char *)data, size, &prompt);
    ND_ASSERT(status == ND_OK || status == ND_ERR_DATA);
    ND_ASSERT(other == (empty ? ND_ERR_DATA : status));
    if (status == ND_OK) {
        check_piece(&piece);
        ND_ASSERT(empty == (piece.ids.count == 0));
    }
    if (other == ND_OK && prompt_goes_on) {
        const size_t count = piece.ids.count;
        ND_ASSERT(prompt.count > count);
        ND_ASSERT(memcmp(prompt.data, piece.ids.data, count * sizeof *prompt.data) == 0);
    }
    free(piece.ids.data);
    free(piece.ends.data);
    free(piece.spans.data);
    free(prompt.data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!tokenizer) {
        const nd_encode_options options = {.special_in_text = ND_SPECIAL_TEXT};
        ND_ASSERT(nd_byte_tokenizer_create(&tokenizer) == ND_OK);
        ND_ASSERT(nd_encoder_create(tokenizer, &options, &encoder) == ND_OK);
    }
    static const struct {
        int form;
        const char *system, *prefix;
        unsigned does;
    } cases[] = {{0, NULL, NULL, 0},
                 {1, NULL, NULL, 0},
                 {0, "", "Date: today\n\n", 0},
                 {1, "You are a fuzzer.", NULL, 0},
                 {1, NULL, NULL, ND_OWN_TOOLS | ND_THINKS}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nd_chat_template own = {"", &nd_chat_forms[cases[i].form], cases[i].system,
                                      cases[i].prefix, cases[i].does};
        read_messages(&own, data, size, true);
    }
    for (int form = 2; nd_chat_forms[form].begin; form++) {
        const nd_chat_template own = {.sha256 = "", .form = &nd_chat_forms[form]};
        read_messages(&own, data, size, false);
    }
    return 0;
}
