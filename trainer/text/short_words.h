// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_SHORT_WORDS_H
#define ND_TEXT_SHORT_WORDS_H
/*
 * The merges of several short words at once. Each word is merged as if it were alone: the pair with
 * the lowest rank goes first, the leftmost among equals. But the words take turns, so that the
 * tables of merges, which are larger than a CPU's cache, are read ahead for all of them.
 */
#include "trainer/text/merges.h"

enum { ND_SHORT_WORD = 32 }; /* characters at most */

/* A merged pair keeps its left place and loses its right one. */
typedef struct nd_short_word {
    int32_t ids[ND_SHORT_WORD];   /* by place; when all is merged, the first `count` */
    int32_t pairs[ND_SHORT_WORD]; /* rank and place of the pair that begins at a place, or none */
    int32_t made[ND_SHORT_WORD];  /* the piece that the pair makes */
    uint32_t places;              /* a bit for each place that is left */
    int count;                    /* ids */
} nd_short_word;

/* Merges the ids of each word in place. */
void nd_short_words_merge(const nd_merges *merges, nd_short_word *words, int count);

#endif
