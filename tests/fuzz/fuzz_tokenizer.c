// SPDX-License-Identifier: Apache-2.0
/*
 * tokenizer.json: what the reader accepts encodes and decodes some text, unless its pattern is too
 * slow for it. Ids lie in the vocabulary, the cache changes nothing, and cutting the ids into calls
 * does not change the text.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/text/tokenizer.h"

static const char text[] =
    "It's  a test, 1234 times\r\n <s><|eot|> \xc3\xa9\xe4\xbd\xa0\xff"
    "\xf0\x9f\x98\x80 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \xe2\x96\x81";

/* Owned by the caller. */
static char *decode(const nd_tokenizer *tokenizer, const int32_t *ids, size_t count, size_t piece,
                    size_t *size)
{
    nd_decoder *decoder;
    char *all = NULL;
    const char *part;
    size_t n;
    *size = 0;
    if (nd_decoder_create(tokenizer, false, &decoder) != ND_OK) {
        return NULL;
    }
    for (size_t i = 0; i < count + piece; i += piece) {
        nd_status status = i < count
                               ? nd_decoder_push(decoder, ids + i,
                                                 count - i < piece ? count - i : piece, &part, &n)
                               : nd_decoder_end(decoder, &part, &n);
        ND_ASSERT(status == ND_OK);
        all = realloc(all, *size + n + 1);
        ND_ASSERT(all);
        memcpy(all + *size, part, n);
        *size += n;
    }
    nd_decoder_destroy(decoder);
    return all;
}

static void check_decoding(const nd_tokenizer *tokenizer, const int32_t *ids, size_t count)
{
    size_t whole_size, cut_size;
    char *whole = decode(tokenizer, ids, count, count + 1, &whole_size);
    char *cut = decode(tokenizer, ids, count, 1, &cut_size);
    ND_ASSERT(!whole == !cut && whole_size == cut_size);
    ND_ASSERT(!whole || memcmp(whole, cut, cut_size) == 0);
    free(whole);
    free(cut);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_tokenizer *tokenizer;
    if (nd_tokenizer_parse((const char *)data, size, "input", &tokenizer) != ND_OK) {
        return 0;
    }
    const nd_encode_options plain = {
        .post_process = true, .special_in_text = ND_SPECIAL_PARSE, .drop_unknown = true};
    nd_encode_options cached = plain;
    cached.cache_bytes = 4096;
    nd_encoder *first, *second;
    const int32_t *ids, *again;
    size_t count, count_again;
    ND_ASSERT(nd_encoder_create(tokenizer, &plain, &first) == ND_OK);
    ND_ASSERT(nd_encoder_create(tokenizer, &cached, &second) == ND_OK);
    nd_status status = nd_encode(first, text, sizeof text - 1, &ids, &count);
    ND_ASSERT(status == ND_OK || status == ND_ERR_DATA); /* its pattern is too slow */
    count = status == ND_OK ? count : 0;
    for (int i = 0; i < 2; i++) {
        ND_ASSERT(nd_encode(second, text, sizeof text - 1, &again, &count_again) == status);
        ND_ASSERT(status != ND_OK || count == count_again);
        ND_ASSERT(count == 0 || memcmp(ids, again, count * sizeof *ids) == 0);
    }
    for (size_t i = 0; i < count; i++) {
        ND_ASSERT(ids[i] >= 0 && ids[i] < nd_tokenizer_vocab_size(tokenizer));
    }
    check_decoding(tokenizer, ids, count);
    nd_encoder_destroy(first);
    nd_encoder_destroy(second);
    nd_tokenizer_close(tokenizer);
    return 0;
}
