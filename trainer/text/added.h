// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_ADDED_H
#define ND_TEXT_ADDED_H
/*
 * Added tokens, which are cut out of a text before the model sees it: where they match, by the
 * rules of `tokenizers`. From left to right the longest token that begins at a place is taken, and
 * the search goes on behind it, even when one of its own rules then rejects it.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_added {
    int32_t id;
    int order; /* of equal patterns the lower one counts */
    bool special, single_word, lstrip, rstrip, normalized;
    const uint8_t *pattern; /* what is searched: the content, normalised when `normalized` */
    size_t size;            /* bytes, >= 1 */
} nd_added;

/* Tokens that are searched together, sorted by pattern. */
typedef struct nd_added_set {
    nd_added *tokens;
    int count;
    int first[257]; /* tokens whose pattern begins with byte b: first[b] to first[b + 1] */
    int only;       /* the byte that all patterns begin with, or -1 */
} nd_added_set;

/* Takes a copy of the tokens, set->tokens, which the caller frees; patterns are borrowed. When
 * patterns are equal, the one with the lowest order stays. */
nd_status nd_added_set_init(nd_added_set *set, const nd_added *tokens, int count);

/* A search through one text. */
typedef struct nd_added_scan {
    const nd_added_set *set;
    const uint8_t *text;
    size_t size;
    bool skip_special; /* special tokens stay text */
    size_t at;         /* where the search goes on */
    size_t taken;      /* text before this belongs to earlier matches */
    int64_t special;   /* special tokens met */
} nd_added_scan;

typedef struct nd_added_match {
    const nd_added *token;
    size_t begin, end; /* with the white space that the token swallows */
} nd_added_match;

/* The next match; false when there is none. The text from scan->taken, as it was before the call,
 * to match.begin is free. */
bool nd_added_next(nd_added_scan *scan, nd_added_match *match);

#endif
