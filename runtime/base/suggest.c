// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/suggest.h"

#include <ctype.h>
#include <limits.h>
#include <string.h>

#include "runtime/base/math.h"

enum { LONGEST = 63 };

static int fold(char c)
{
    return c == '_' ? '-' : tolower((unsigned char)c);
}

/* Optimal string alignment: three rows of the usual table. */
int nd_suggest_distance(const char *a, const char *b)
{
    int rows[3][LONGEST + 1];
    size_t na = strlen(a), nb = strlen(b);
    if (na > LONGEST || nb > LONGEST) {
        return INT_MAX;
    }
    int *before = rows[0], *last = rows[1], *row = rows[2];
    for (size_t j = 0; j <= nb; j++) {
        last[j] = (int)j;
    }
    for (size_t i = 1; i <= na; i++) {
        row[0] = (int)i;
        for (size_t j = 1; j <= nb; j++) {
            int same = fold(a[i - 1]) == fold(b[j - 1]);
            row[j] = (int)nd_min(nd_min(last[j], row[j - 1]) + 1, last[j - 1] + !same);
            if (i > 1 && j > 1 && fold(a[i - 1]) == fold(b[j - 2]) &&
                fold(a[i - 2]) == fold(b[j - 1]) && before[j - 2] + 1 < row[j]) {
                row[j] = before[j - 2] + 1;
            }
        }
        int *free_row = before;
        before = last;
        last = row;
        row = free_row;
    }
    return last[nb];
}

void nd_suggest_init(nd_suggest *search, const char *word)
{
    /* A third of the word may be wrong: "stepz" -> "steps"; "foo" suggests nothing far-fetched. */
    *search = (nd_suggest){.word = word, .distance = (int)(strnlen(word, LONGEST) / 3) + 1};
}

/* 1 when the longer word begins with the shorter one. */
static int one_begins_other(const char *a, const char *b)
{
    while (*a && fold(*a) == fold(*b)) {
        a++;
        b++;
    }
    return !*a || !*b;
}

void nd_suggest_offer(nd_suggest *search, const char *name)
{
    int distance = nd_suggest_distance(search->word, name);
    if (distance < search->distance ||
        (search->best && distance == search->distance && one_begins_other(search->word, name) &&
         !one_begins_other(search->word, search->best))) {
        search->distance = distance;
        search->best = memcpy(search->name, name, strlen(name) + 1); /* at most LONGEST + 1 */
    }
}
