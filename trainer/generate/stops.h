// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_STOPS_H
#define ND_GENERATE_STOPS_H
/*
 * Texts that end a generated text, wherever their characters lie in its tokens. A stop text is not
 * part of the result.
 *
 * Text is held back while it may be the beginning of a stop text, so that nothing is shown that is
 * then taken away. When there are several stop texts, the one that is complete first counts; the
 * longest of them when they are complete at the same character. So the result does not depend on
 * how the text is cut into calls.
 */
#include <stdbool.h>
#include <stddef.h>

#include "trainer/text/buffer.h"
#include "trainer/text/tokenizer.h"

enum { ND_STOPS_MAX = 16 };

typedef struct nd_stops {
    const char *texts[ND_STOPS_MAX]; /* borrowed, UTF-8, not empty */
    int count;
} nd_stops;

/* ND_ERR_CONFIG: there are too many, or it is empty, or no UTF-8. */
nd_status nd_stops_add(nd_stops *stops, const char *text);

/* All zero is a new one. */
typedef struct nd_stop_filter {
    nd_bytes held; /* and what the last call gave; owned */
    size_t given;  /* of `held`, by the last call */
    bool stopped;  /* a stop text was found: nothing is given any more */
} nd_stop_filter;

/* Adds text, whole characters. *out, of *size bytes, is lent until the next call. */
nd_status nd_stop_filter_push(nd_stop_filter *filter, const nd_stops *stops, const char *text,
                              size_t size, const char **out, size_t *out_size);
/* The text has ended without a stop text: gives what is held back. */
void nd_stop_filter_end(nd_stop_filter *filter, const char **out, size_t *out_size);
void nd_stop_filter_fini(nd_stop_filter *filter);

/* What one sequence of ids becomes, as they come. */
typedef struct nd_text_out {
    const nd_tokenizer *tokenizer; /* borrowed */
    nd_decoder *decoder;           /* NULL: there is no tokenizer, and no text */
    nd_stop_filter filter;
    nd_bytes text;         /* so far */
    const nd_stops *stops; /* borrowed */
} nd_text_out;

/* What follows the prompt: a first word keeps the blank before it, which a tokenizer of Llama 2's
 * form leaves out at the beginning of a text. */
nd_status nd_text_out_init(nd_text_out *out, const nd_tokenizer *tokenizer, const nd_stops *stops,
                           const nd_ids *prompt);
/* Adds a token; one that the tokenizer lacks has no text. *stop is set when a stop text is
 * complete. */
nd_status nd_text_out_push(nd_text_out *out, int32_t id, bool *stop);
/* No more tokens come; without a stop text, what was held back is added. */
nd_status nd_text_out_end(nd_text_out *out);
void nd_text_out_fini(nd_text_out *out); /* an all-zero one is legal */

#endif
