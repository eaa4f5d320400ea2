// SPDX-License-Identifier: Apache-2.0
/*
 * For check_chat.py: encodes lists of messages that come on the standard input.
 *
 *   chat_tool TOKENIZER NUMBER_OF_FORM BITS SYSTEM|- BOS EOS rows|prompt
 *
 * The form is one of chat_templates.def, and the next two are those of a row of it.
 * A record is a list of messages as JSON. For each comes a record of ids, and one of the pairs of
 * places between which ids do not count; with `prompt` the ids end where an assistant goes on. A
 * record is a number of bytes or of numbers, and these; numbers have 32 bits, little-endian.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/corpus/chat.h"

static void fail(const char *what)
{
    fprintf(stderr, "chat_tool: %s: %s\n", what, nd_error_last()->message);
    exit(1);
}

/* The next record, owned by the caller; NULL at the end. */
static char *read_record(size_t *size)
{
    uint32_t n;
    if (fread(&n, sizeof n, 1, stdin) != 1) {
        return NULL;
    }
    char *text = malloc((size_t)n + 1);
    if (!text || fread(text, 1, n, stdin) != n) {
        fail("a record is cut");
    }
    *size = n;
    return text;
}

static void write_record(const nd_ids *list)
{
    const uint32_t n = (uint32_t)list->count;
    if (fwrite(&n, sizeof n, 1, stdout) != 1 ||
        (n > 0 && fwrite(list->data, sizeof *list->data, n, stdout) != n)) {
        fail("the output cannot be written");
    }
}

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
    for (char *json; (json = read_record(&size)); free(json)) {
        bool empty;
        piece.ids.count = piece.spans.count = 0;
        nd_status status = nd_chat_add(&chat, encoder, (const uint8_t *)json, size,
                                       strcmp(argv[7], "prompt") == 0, &piece, &counts, &empty);
        if (status != ND_OK) {
            fail("encode");
        }
        write_record(&piece.ids);
        write_record(&piece.spans);
    }
    free(piece.ids.data);
    free(piece.spans.data);
    nd_encoder_destroy(encoder);
    nd_tokenizer_close(tokenizer);
    return 0;
}
