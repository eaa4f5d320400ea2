// SPDX-License-Identifier: Apache-2.0
/*
 * For check_chat.py: encodes lists of messages that come on the standard input.
 *
 *   chat_tool TOKENIZER NUMBER_OF_FORM BITS SYSTEM|- BOS EOS rows|prompt
 *
 * The form is one of chat_templates.def, and the next two are those of a row of it.
 * A record is a list of messages as JSON. For each comes a record of ids, and one of the pairs of
 * places between which ids do not count; with `prompt` the ids end where an assistant goes on.
 */
#include <string.h>

#include "tests/unit/trainer/text/records.h"
#include "trainer/corpus/chat.h"

int main(int argc, char **argv)
{
    const nd_encode_options options = {.special_in_text = ND_SPECIAL_PARSE};
    nd_corpus_piece piece = {0};
    nd_tokenizer *tokenizer;
    nd_encoder *encoder;
    nd_chat chat;
    size_t size;
    nd_corpus_counts counts = {0};
    if (argc != 8) {
        fprintf(stderr, "usage: chat_tool TOKENIZER NUMBER BITS SYSTEM|- BOS EOS rows|prompt\n");
        return 2;
    }
    const nd_chat_template own = {.sha256 = "",
                                  .form = &nd_chat_forms[atoi(argv[2])],
                                  .system = strcmp(argv[4], "-") == 0 ? NULL : argv[4],
                                  .does = (unsigned)atoi(argv[3])};
    nd_chat_rules rules = {.template = &own};
    snprintf(rules.bos, sizeof rules.bos, "%s", argv[5]);
    snprintf(rules.eos, sizeof rules.eos, "%s", argv[6]);
    if (nd_tokenizer_open(argv[1], &tokenizer) != ND_OK ||
        nd_chat_find(tokenizer, &rules, &chat) != ND_OK ||
        nd_encoder_create(tokenizer, &options, &encoder) != ND_OK) {
        fail("open");
    }
    for (char *json; (json = read_record(1, &size)); free(json)) {
        bool empty;
        piece.ids.count = piece.spans.count = 0;
        nd_status status = nd_chat_add(&chat, encoder, (const uint8_t *)json, size,
                                       strcmp(argv[7], "prompt") == 0, &piece, &counts, &empty);
        if (status != ND_OK) {
            fail("encode");
        }
        write_record(piece.ids.data, sizeof *piece.ids.data, piece.ids.count);
        write_record(piece.spans.data, sizeof *piece.spans.data, piece.spans.count);
    }
    free(piece.ids.data);
    free(piece.spans.data);
    nd_encoder_destroy(encoder);
    nd_tokenizer_close(tokenizer);
    return 0;
}
