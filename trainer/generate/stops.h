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

#endif
