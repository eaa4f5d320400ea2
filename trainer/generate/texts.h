// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_TEXTS_H
#define ND_GENERATE_TEXTS_H
/*
 * The texts that generated ids become, and the stop texts that end them, wherever their characters
 * lie in the tokens. A stop text is not part of the result.
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

/* The text of one sequence of ids, which grows as they come. */
typedef struct nd_text_out {
    const nd_tokenizer *tokenizer; /* borrowed */
    nd_decoder *decoder;           /* NULL: there is no tokenizer, and no text */
    const nd_stops *stops;         /* borrowed */
    nd_bytes text;                 /* so far; owned */
    size_t given;                  /* its bytes that no stop text takes away any more */
    bool stopped;                  /* a stop text was found: nothing is added any more */
} nd_text_out;

/* Begins the text that follows a prompt: its first word keeps the blank before it, which a
 * tokenizer of Llama 2's form leaves out at the beginning of a text. */
nd_status nd_text_out_init(nd_text_out *out, const nd_tokenizer *tokenizer, const nd_stops *stops,
                           const nd_ids *prompt);
/* Adds a token; one that the tokenizer lacks has no text. */
nd_status nd_text_out_push(nd_text_out *out, int32_t id);
/* Adds text, whole characters. */
nd_status nd_text_out_add(nd_text_out *out, const char *text, size_t size);
/* No more tokens come; without a stop text, what was held back is given. */
nd_status nd_text_out_end(nd_text_out *out);
void nd_text_out_fini(nd_text_out *out); /* an all-zero one is legal */

#endif
