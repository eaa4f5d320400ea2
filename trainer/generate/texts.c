// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/texts.h"

#include "trainer/text/unicode.h"

nd_status nd_stops_add(nd_stops *stops, const char *text)
{
    if (!text[0]) {
        return nd_fail(ND_ERR_CONFIG, "--stop is empty; give the text that ends a result");
    }
    if (nd_utf8_valid((const uint8_t *)text, strlen(text)) != strlen(text)) {
        return nd_fail(ND_ERR_CONFIG, "--stop is not UTF-8, so no text can contain it");
    }
    if (stops->count == ND_STOPS_MAX) {
        return nd_fail(ND_ERR_CONFIG, "there are more than %d of --stop", ND_STOPS_MAX);
    }
    stops->texts[stops->count++] = text;
    return ND_OK;
}

/* Bytes of the longest stop text (`whole`), or else of the longest beginning of one, that the first
 * `end` bytes end with; 0: of none. */
static size_t stop_before(const nd_text_out *out, size_t end, bool whole)
{
    size_t longest = 0;
    for (int i = 0; i < out->stops->count; i++) {
        const char *stop = out->stops->texts[i];
        const size_t most = strlen(stop) - !whole, least = whole ? most : 1;
        for (size_t n = most; n >= least && n > longest; n--) {
            if (n <= end && memcmp(out->text.data + end - n, stop, n) == 0) {
                longest = n;
            }
        }
    }
    return longest;
}

nd_status nd_text_out_add(nd_text_out *out, const char *text, size_t size)
{
    nd_bytes *all = &out->text;
    const size_t before = all->count;
    if (out->stopped) {
        return ND_OK;
    }
    ND_TRY(nd_bytes_add(all, text, size));
    for (size_t end = before + 1; end <= all->count && !out->stopped; end++) {
        const size_t stop = stop_before(out, end, true);
        if (stop > 0) {
            out->stopped = true;
            all->count = end - stop;
        }
    }
    out->given = all->count - (out->stopped ? 0 : stop_before(out, all->count, false));
    return ND_OK;
}

/* The text of an id, NULL with size 0 when the tokenizer lacks it. */
static nd_status decode(nd_text_out *out, int32_t id, const char **text, size_t *size)
{
    const bool known = nd_tokenizer_token(out->tokenizer, id, size);
    *text = NULL;
    *size = 0;
    return known ? nd_decoder_push(out->decoder, &id, 1, text, size) : ND_OK;
}

nd_status nd_text_out_init(nd_text_out *out, const nd_tokenizer *tokenizer, const nd_stops *stops,
                           const nd_ids *prompt)
{
    const char *text;
    size_t size;
    *out = (nd_text_out){.tokenizer = tokenizer, .stops = stops};
    if (!tokenizer) {
        return ND_OK;
    }
    ND_TRY(nd_decoder_create(tokenizer, true, &out->decoder));
    for (size_t i = 0; i < prompt->count; i++) {
        ND_TRY(decode(out, prompt->data[i], &text, &size));
    }
    return nd_decoder_end_run(out->decoder, &text, &size); /* it is the prompt's */
}

nd_status nd_text_out_push(nd_text_out *out, int32_t id)
{
    const char *text;
    size_t size;
    if (!out->decoder) {
        return ND_OK;
    }
    ND_TRY(decode(out, id, &text, &size));
    return nd_text_out_add(out, text, size);
}

nd_status nd_text_out_end(nd_text_out *out)
{
    const char *text;
    size_t size;
    if (out->decoder) {
        ND_TRY(nd_decoder_end(out->decoder, &text, &size));
        ND_TRY(nd_text_out_add(out, text, size));
    }
    out->given = out->text.count;
    return ND_OK;
}

void nd_text_out_fini(nd_text_out *out)
{
    nd_decoder_destroy(out->decoder);
    free(out->text.data);
    *out = (nd_text_out){0};
}
