// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include "trainer/generate/stops.h"

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

/* Text of the decoder through the stop texts. */
static nd_status add_text(nd_text_out *out, const char *text, size_t size)
{
    const char *given;
    size_t given_size;
    ND_TRY(nd_stop_filter_push(&out->filter, out->stops, text, size, &given, &given_size));
    return nd_bytes_add(&out->text, given, given_size);
}

nd_status nd_text_out_push(nd_text_out *out, int32_t id, bool *stop)
{
    const char *text;
    size_t size;
    if (!out->decoder) {
        return ND_OK;
    }
    ND_TRY(decode(out, id, &text, &size));
    ND_TRY(add_text(out, text, size));
    *stop = out->filter.stopped;
    return ND_OK;
}

nd_status nd_text_out_end(nd_text_out *out)
{
    const char *text;
    size_t size;
    if (!out->decoder) {
        return ND_OK;
    }
    ND_TRY(nd_decoder_end(out->decoder, &text, &size));
    ND_TRY(add_text(out, text, size)); /* nothing, when a stop text was found */
    if (out->filter.stopped) {
        return ND_OK;
    }
    nd_stop_filter_end(&out->filter, &text, &size);
    return nd_bytes_add(&out->text, text, size);
}

void nd_text_out_fini(nd_text_out *out)
{
    nd_decoder_destroy(out->decoder);
    nd_stop_filter_fini(&out->filter);
    free(out->text.data);
    *out = (nd_text_out){0};
}
