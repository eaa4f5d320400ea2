// SPDX-License-Identifier: Apache-2.0
/* Ids to text, piece by piece. Bytes that are no UTF-8 become U+FFFD, as in `tokenizers`. */
#include "runtime/base/text.h"
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

#define REPLACEMENT "\xef\xbf\xbd"
enum { REPLACEMENT_BYTES = 3, BYTE_TOKEN_BYTES = 6 /* <0x41> */ };

nd_status nd_text_repair(const uint8_t *text, size_t size, bool whole, nd_bytes *out, size_t *used,
                         int64_t *replaced)
{
    for (*used = 0; *used < size;) {
        const size_t n = nd_utf8_valid(text + *used, size - *used);
        ND_TRY(nd_bytes_add(out, text + *used, n));
        *used += n;
        const int bad = *used < size ? nd_utf8_next(text + *used, size - *used) : 0;
        if (*used == size || (bad == 0 && !whole)) {
            break;
        }
        *used = bad < 0 ? *used + (size_t)-bad : size;
        ND_TRY(nd_bytes_add(out, REPLACEMENT, REPLACEMENT_BYTES));
        ++*replaced;
    }
    return ND_OK;
}

struct nd_decoder {
    const nd_tokenizer *tokenizer;
    bool skip_special;
    bool begun;         /* a token was decoded since the beginning */
    int64_t strip_left; /* characters that may still be taken off the front */
    nd_bytes held;      /* byte-level: a cut character; else a run of byte tokens */
    nd_bytes rewrites[2];
    nd_bytes out;
};

static void begin_text(nd_decoder *decoder)
{
    decoder->begun = false;
    decoder->strip_left = decoder->tokenizer->strip_count;
    decoder->held.count = 0;
}

nd_status nd_decoder_create(const nd_tokenizer *tokenizer, bool skip_special, nd_decoder **out)
{
    if (tokenizer->decoder == ND_DECODER_NONE) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has no decoder; its ids cannot become text",
                       tokenizer->name);
    }
    nd_decoder *decoder;
    ND_TRY(ND_ALLOC(1, &decoder));
    decoder->tokenizer = tokenizer;
    decoder->skip_special = skip_special;
    begin_text(decoder);
    *out = decoder;
    return ND_OK;
}

void nd_decoder_destroy(nd_decoder *decoder)
{
    if (!decoder) {
        return;
    }
    free(decoder->held.data);
    free(decoder->rewrites[0].data);
    free(decoder->rewrites[1].data);
    free(decoder->out.data);
    free(decoder);
}

/* Byte-level. */

/* Gives the whole characters of what is held, and at the end also one that is cut. */
static nd_status give_characters(nd_decoder *decoder, bool end)
{
    nd_bytes *held = &decoder->held;
    int64_t replaced = 0;
    size_t used;
    ND_TRY(nd_text_repair(held->data, held->count, end, &decoder->out, &used, &replaced));
    held->count -= used;
    if (held->count > 0) {
        memmove(held->data, held->data + used, held->count);
    }
    return ND_OK;
}

/* Metaspace. */

/* A mark is a blank; the first token loses its marks when encoding puts one there. */
static nd_status give_marked(nd_decoder *decoder, const uint8_t *text, size_t size)
{
    const bool drop = !decoder->begun && decoder->tokenizer->decoder_has_metaspace_prefix;
    while (size > 0) {
        const uint8_t *mark = memmem(text, size, ND_TEXT_MARK, ND_TEXT_MARK_BYTES);
        size_t before = mark ? (size_t)(mark - text) : size;
        ND_TRY(nd_bytes_add(&decoder->out, text, before));
        if (!mark) {
            break;
        }
        ND_TRY(nd_bytes_add(&decoder->out, " ", drop ? 0 : 1));
        text = mark + ND_TEXT_MARK_BYTES;
        size -= before + ND_TEXT_MARK_BYTES;
    }
    return ND_OK;
}

/* Sequence. */

static nd_status give_stripped(nd_decoder *decoder, const uint8_t *text, size_t size)
{
    const nd_tokenizer *t = decoder->tokenizer;
    while (decoder->strip_left > 0 && size > 0) {
        if (size < t->strip_size || memcmp(text, t->strip, t->strip_size) != 0) {
            decoder->strip_left = 0;
            break;
        }
        decoder->strip_left--;
        text += t->strip_size;
        size -= t->strip_size;
    }
    return nd_bytes_add(&decoder->out, text, size);
}

/* A run of byte tokens has ended: it is UTF-8 as a whole, or each of its bytes is replaced. */
static nd_status give_run(nd_decoder *decoder)
{
    nd_bytes *held = &decoder->held;
    const size_t count = held->count;
    if (count == 0) {
        return ND_OK;
    }
    held->count = 0;
    if (nd_utf8_valid(held->data, count) == count) {
        return give_stripped(decoder, held->data, count);
    }
    for (size_t i = 0; i < count; i++) {
        ND_TRY(give_stripped(decoder, (const uint8_t *)REPLACEMENT, REPLACEMENT_BYTES));
    }
    return ND_OK;
}

/* A token that is written <0x41> is a byte. */
static nd_status give_sequence(nd_decoder *decoder, const uint8_t *text, size_t size)
{
    const nd_tokenizer *t = decoder->tokenizer;
    ND_TRY(nd_text_rewrite(t->replaces, t->replace_count, text, size, decoder->rewrites, &text,
                           &size));
    if (t->byte_fallback && size == BYTE_TOKEN_BYTES && memcmp(text, "<0x", 3) == 0 &&
        text[5] == '>') {
        const int high = nd_hex_digit(text[3]), low = nd_hex_digit(text[4]);
        if (high >= 0 && low >= 0) {
            return nd_bytes_add(&decoder->held, &(uint8_t){(uint8_t)(16 * high + low)}, 1);
        }
    }
    ND_TRY(give_run(decoder));
    return give_stripped(decoder, text, size);
}

/* All kinds. */

static nd_status give_piece(nd_decoder *decoder, const nd_token_piece *piece)
{
    const nd_vocab *vocab = &decoder->tokenizer->vocab;
    const uint8_t *text = nd_vocab_shown(vocab, piece);
    const size_t size = piece->shown_size;
    switch (decoder->tokenizer->decoder) {
    case ND_DECODER_BYTE_LEVEL:
        return nd_bytes_add(&decoder->held, text, size);
    case ND_DECODER_METASPACE:
        return give_marked(decoder, text, size);
    case ND_DECODER_SEQUENCE:
        return give_sequence(decoder, text, size);
    case ND_DECODER_NONE:
        break;
    }
    return nd_fail(ND_ERR_INTERNAL, "a decoder of no kind");
}

nd_status nd_decoder_push(nd_decoder *decoder, const int32_t *ids, size_t count, const char **text,
                          size_t *size)
{
    const nd_tokenizer *t = decoder->tokenizer;
    for (size_t i = 0; i < count; i++) {
        if (!nd_vocab_piece(&t->vocab, ids[i])) {
            return nd_fail(ND_ERR_DATA, "no token of \"%s\" has the id %d", t->name, ids[i]);
        }
    }
    decoder->out.count = 0;
    for (size_t i = 0; i < count; i++) {
        const nd_token_piece *piece = nd_vocab_piece(&t->vocab, ids[i]);
        /* `tokenizers` compares the normalised text with the list of special tokens. */
        if (decoder->skip_special && t->special[ids[i]] && !piece->rewritten) {
            continue;
        }
        ND_TRY(give_piece(decoder, piece));
        decoder->begun = true;
    }
    if (t->decoder == ND_DECODER_BYTE_LEVEL) {
        ND_TRY(give_characters(decoder, false));
    }
    *size = decoder->out.count;
    *text = *size > 0 ? (const char *)decoder->out.data : "";
    return ND_OK;
}

static nd_status give_held(nd_decoder *decoder, bool end, const char **text, size_t *size)
{
    decoder->out.count = 0;
    ND_TRY(decoder->tokenizer->decoder == ND_DECODER_BYTE_LEVEL ? give_characters(decoder, end)
                                                                : give_run(decoder));
    *size = decoder->out.count;
    *text = *size > 0 ? (const char *)decoder->out.data : "";
    return ND_OK;
}

nd_status nd_decoder_end_run(nd_decoder *decoder, const char **text, size_t *size)
{
    return give_held(decoder, false, text, size);
}

nd_status nd_decoder_end(nd_decoder *decoder, const char **text, size_t *size)
{
    ND_TRY(give_held(decoder, true, text, size));
    begin_text(decoder);
    return ND_OK;
}
