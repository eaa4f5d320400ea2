// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/added.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/text/unicode.h"

static int compare_patterns(const nd_added *a, const nd_added *b)
{
    int order = memcmp(a->pattern, b->pattern, a->size < b->size ? a->size : b->size);
    return order ? order : (a->size > b->size) - (a->size < b->size);
}

/* Bytewise, a pattern before those that continue it; equal ones in the order of the file. */
static int compare_tokens(const void *left, const void *right)
{
    const nd_added *a = left, *b = right;
    int order = compare_patterns(a, b);
    return order ? order : (a->order > b->order) - (a->order < b->order);
}

nd_status nd_added_set_init(nd_added_set *set, const nd_added *tokens, int count)
{
    *set = (nd_added_set){0};
    if (count == 0) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(count, &set->tokens));
    memcpy(set->tokens, tokens, (size_t)count * sizeof *tokens);
    qsort(set->tokens, (size_t)count, sizeof *tokens, compare_tokens);
    for (int i = 0; i < count; i++) {
        int last = set->count - 1;
        if (last < 0 || compare_patterns(&set->tokens[last], &set->tokens[i]) != 0) {
            set->tokens[set->count++] = set->tokens[i];
        }
    }
    for (int byte = 0, at = 0; byte <= 256; byte++) {
        while (at < set->count && set->tokens[at].pattern[0] < byte) {
            at++;
        }
        set->first[byte] = at;
    }
    const uint8_t first = set->tokens[0].pattern[0];
    set->only = first == set->tokens[set->count - 1].pattern[0] ? first : -1;
    return ND_OK;
}

void nd_added_set_fini(nd_added_set *set)
{
    free(set->tokens);
    *set = (nd_added_set){0};
}

/* The first of tokens [low, high), all longer than `depth`, whose byte `depth` is >= `byte`. */
static int narrow(const nd_added_set *set, int low, int high, size_t depth, int byte)
{
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (set->tokens[middle].pattern[depth] < byte) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The longest token that begins at these `size` > 0 bytes, or NULL. */
static const nd_added *longest_at(const nd_added_set *set, const uint8_t *p, size_t size)
{
    const nd_added *best = NULL;
    int low = set->first[p[0]], high = set->first[p[0] + 1];
    for (size_t depth = 1; low < high; depth++) { /* their first `depth` bytes are those of p */
        if (set->tokens[low].size == depth) {
            best = &set->tokens[low++];
        }
        if (depth == size) {
            break;
        }
        high = narrow(set, low, high, depth, p[depth] + 1);
        low = narrow(set, low, high, depth, p[depth]);
    }
    return best;
}

static bool is_single_word(const nd_added_scan *scan, size_t begin, size_t end)
{
    bool before = begin > 0 && nd_char_is_word(nd_char_before(scan->text + begin).code);
    bool behind = end < scan->size && nd_char_is_word(nd_char_at(scan->text + end).code);
    return !before && !behind;
}

static bool is_space(uint32_t code)
{
    return nd_char_class_of(code) == ND_CHAR_SPACE;
}

/* The white space around a match that its token takes. */
static void swallow(const nd_added_scan *scan, nd_added_match *match)
{
    if (match->token->lstrip) {
        while (match->begin > scan->taken) {
            nd_char c = nd_char_before(scan->text + match->begin);
            if (!is_space(c.code)) {
                break;
            }
            match->begin -= (size_t)c.bytes;
        }
    }
    if (match->token->rstrip) {
        while (match->end < scan->size) {
            nd_char c = nd_char_at(scan->text + match->end);
            if (!is_space(c.code)) {
                break;
            }
            match->end += (size_t)c.bytes;
        }
    }
}

/* The next place from scan->at on where a pattern may begin; the size when there is none. */
static size_t next_place(const nd_added_scan *scan)
{
    const nd_added_set *set = scan->set;
    size_t at = scan->at;
    if (set->only >= 0) {
        const uint8_t *p = memchr(scan->text + at, set->only, scan->size - at);
        return p ? (size_t)(p - scan->text) : scan->size;
    }
    while (at < scan->size && set->first[scan->text[at]] == set->first[scan->text[at] + 1]) {
        at++;
    }
    return at;
}

bool nd_added_next(nd_added_scan *scan, nd_added_match *match)
{
    const nd_added_set *set = scan->set;
    if (set->count == 0) {
        return false;
    }
    while ((scan->at = next_place(scan)) < scan->size) {
        const uint8_t *p = scan->text + scan->at;
        const nd_added *token = longest_at(set, p, scan->size - scan->at);
        if (!token) {
            scan->at++;
            continue;
        }
        *match = (nd_added_match){.token = token, .begin = scan->at, .end = scan->at + token->size};
        scan->at = match->end;
        scan->special += token->special;
        if ((token->special && scan->skip_special) ||
            (token->single_word && !is_single_word(scan, match->begin, match->end))) {
            continue;
        }
        swallow(scan, match);
        scan->taken = match->end;
        return true;
    }
    return false;
}
