// SPDX-License-Identifier: Apache-2.0
/*
 * For check_tokenizers.py and scripts/goldens/proofs.py: encodes or decodes what comes on the
 * standard input.
 *
 *   text_tool TOKENIZER parse|text|post     records of a text -> records of ids
 *   text_tool TOKENIZER decode|skip         records of ids -> records of a text
 *   text_tool PATTERN words                 records of a text -> records of the ends of its words
 *   text_tool ALPHABET:CHUNK texts          nothing -> the records of proof_chunk
 */
#include <string.h>

#include "runtime/base/fs.h"
#include "tests/unit/trainer/text/proof_texts.h"
#include "tests/unit/trainer/text/records.h"
#include "trainer/text/buffer.h"
#include "trainer/text/regex.h"
#include "trainer/text/tokenizer.h"

static void encode_all(const nd_tokenizer *tokenizer, const char *mode)
{
    const nd_encode_options options = {
        .special_in_text = strcmp(mode, "text") == 0 ? ND_SPECIAL_TEXT : ND_SPECIAL_PARSE,
        .post_process = strcmp(mode, "post") == 0,
        .drop_unknown = true,
        .cache_bytes = ND_ENCODE_CACHE_BYTES};
    nd_encoder *encoder;
    size_t size, count;
    const int32_t *ids;
    if (nd_encoder_create(tokenizer, &options, &encoder) != ND_OK) {
        fail("encoder");
    }
    for (char *text; (text = read_record(1, &size)); free(text)) {
        if (nd_encode(encoder, text, size, &ids, &count) != ND_OK) {
            fail("encode");
        }
        write_record(ids, sizeof *ids, count);
    }
    nd_encoder_destroy(encoder);
}

static void decode_all(const nd_tokenizer *tokenizer, const char *mode)
{
    nd_decoder *decoder;
    if (nd_decoder_create(tokenizer, strcmp(mode, "skip") == 0, &decoder) != ND_OK) {
        fail("decoder");
    }
    size_t count;
    for (int32_t *ids; (ids = read_record(sizeof *ids, &count)); free(ids)) {
        nd_bytes whole = {0};
        const char *text;
        size_t size;
        if (nd_decoder_push(decoder, ids, count, &text, &size) != ND_OK ||
            nd_bytes_add(&whole, text, size) != ND_OK ||
            nd_decoder_end(decoder, &text, &size) != ND_OK ||
            nd_bytes_add(&whole, text, size) != ND_OK) {
            fail("decode");
        }
        write_record(whole.data, 1, whole.count);
        free(whole.data);
    }
    nd_decoder_destroy(decoder);
}

static void find_words(nd_regex *regex)
{
    nd_ids ends = {0};
    size_t size;
    for (char *text; (text = read_record(1, &size)); free(text)) {
        int count = 1;
        ends.count = 0;
        if (nd_regex_begin(regex, (const uint8_t *)text, size) != ND_OK) {
            fail("begin");
        }
        while (count > 0) {
            size_t some[64];
            count = nd_regex_words(regex, some, 64);
            for (int i = 0; i < count; i++) {
                const int32_t end = (int32_t)some[i];
                if (nd_ids_add(&ends, &end, 1) != ND_OK) {
                    fail("memory");
                }
            }
        }
        write_record(ends.data, sizeof *ends.data, ends.count);
    }
    free(ends.data);
}

static int split_all(const char *path)
{
    char *pattern;
    size_t size;
    nd_regex *regex = NULL;
    if (nd_fs_read(path, 1 << 20, ND_ERR_DATA, &pattern, &size) != ND_OK ||
        nd_regex_create(pattern, size, path, ND_REGEX_SECONDS, &regex) != ND_OK) {
        fail("pattern");
    }
    find_words(regex);
    nd_regex_destroy(regex);
    free(pattern);
    return 0;
}

static int write_chunk(const char *name)
{
    char *end;
    const long alphabet = strtol(name, &end, 10), chunk = strtol(end + (*end == ':'), NULL, 10);
    nd_bytes records = {0};
    proof_chunk((int)alphabet, (int)chunk, &records);
    write_all(records.data, 1, records.count);
    free(records.data);
    return 0;
}

/* A byte for each code point: whether only some of the compared packages know it. */
static int write_newer(void)
{
    for (uint32_t p = 0; p < 0x110000; p++) {
        putchar(proof_is_newer(p));
    }
    return 0;
}

int main(int argc, char **argv)
{
    nd_tokenizer *tokenizer;
    if (argc != 3) {
        fprintf(stderr, "usage: text_tool TOKENIZER parse|text|post|decode|skip, PATTERN words, "
                        "ALPHABET:CHUNK texts, or - newer\n");
        return 2;
    }
    if (strcmp(argv[2], "texts") == 0) {
        return write_chunk(argv[1]);
    }
    if (strcmp(argv[2], "newer") == 0) {
        return write_newer();
    }
    if (strcmp(argv[2], "words") == 0) {
        return split_all(argv[1]);
    }
    if (nd_tokenizer_open(argv[1], &tokenizer) != ND_OK) {
        fail("open");
    }
    bool decodes = strcmp(argv[2], "decode") == 0 || strcmp(argv[2], "skip") == 0;
    (decodes ? decode_all : encode_all)(tokenizer, argv[2]);
    nd_tokenizer_close(tokenizer);
    return 0;
}
