// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_SUGGEST_H
#define ND_BASE_SUGGEST_H
/* The known name nearest to what a user typed: for "did you mean ..." in error sentences. No
 * allocation. */

/*
 * Edits (insert, delete, replace, swap of adjacent characters) from a to b; case and the difference
 * between '-' and '_' are free. Names longer than 63 characters are infinitely far (INT_MAX).
 */
int nd_suggest_distance(const char *a, const char *b);

/* Running search: start with nd_suggest_init, offer every name, read `best` (in the search itself;
 * NULL: nothing near enough). Of equally near names, one that begins the word, or begins with it,
 * comes before the first. */
typedef struct nd_suggest {
    const char *word;
    const char *best;
    int distance;  /* of best; starts one above the largest distance that still counts as near */
    char name[64]; /* the best one so far: names that are offered may be gone afterwards */
} nd_suggest;

void nd_suggest_init(nd_suggest *search, const char *word);
void nd_suggest_offer(nd_suggest *search, const char *name);

#endif
