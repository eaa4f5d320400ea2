// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/added.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/text/read.h"
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

/* Returns whether a character of a word stands beside a match. */
static bool is_within_word(const nd_added_scan *scan, const nd_added_match *m)
{
    return (m->begin > 0 && nd_char_is_word(nd_char_before(scan->text + m->begin).code)) ||
           (m->end < scan->size && nd_char_is_word(nd_char_at(scan->text + m->end).code));
}

/* Bytes of a character if it is white space, else 0. */
static size_t space_bytes(nd_char c)
{
    return nd_char_class_of(c.code) == ND_CHAR_SPACE ? (size_t)c.bytes : 0;
}

/* The white space around a match that its token takes: character by character, where `n` begins as
 * whether it takes any. */
static void swallow(const nd_added_scan *scan, nd_added_match *match)
{
    for (size_t n = match->token->lstrip; n > 0 && match->begin > scan->taken; match->begin -= n) {
        n = space_bytes(nd_char_before(scan->text + match->begin));
    }
    for (size_t n = match->token->rstrip; n > 0 && match->end < scan->size; match->end += n) {
        n = space_bytes(nd_char_at(scan->text + match->end));
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
            (token->single_word && is_within_word(scan, match))) {
            continue;
        }
        swallow(scan, match);
        scan->taken = match->end;
        return true;
    }
    return false;
}

/* The added tokens, with the ids that `tokenizers` gives them. */

enum { ADDED_MAX = 1 << 16 };

/* The ids that were given. */
typedef struct given_ids {
    nd_bytes by_id; /* 1: it was; it is as long as the greatest id needs */
    int32_t greatest;
} given_ids;

static nd_status give_id(const nd_tokenizer *t, given_ids *given, int32_t id, const char *content)
{
    static const uint8_t zero;
    for (size_t n = given->by_id.count; n <= (size_t)id; n++) {
        ND_TRY(nd_bytes_add(&given->by_id, &zero, 1));
    }
    if (given->by_id.data[id]) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has the added token \"%.64s\" twice", t->name, content);
    }
    given->by_id.data[id] = 1;
    given->greatest = id > given->greatest ? id : given->greatest;
    return ND_OK;
}

static nd_status read_added_token(nd_tokenizer *t, const json_t *node, size_t pieces,
                                  given_ids *given)
{
    const json_t *content = json_object_get(node, "content");
    int32_t id = nd_text_id(json_object_get(node, "id"));
    nd_added *token = &t->added[t->added_count];
    if (!json_is_string(content) || json_string_length(content) == 0 || id < 0) {
        return nd_text_fail_damaged(t, "added_tokens",
                                    "a list of tokens with \"content\" and \"id\"");
    }
    /* The id that `tokenizers` gives: that of the piece, else the next one behind all others. */
    int32_t expected =
        nd_vocab_find(&t->vocab, json_string_value(content), json_string_length(content));
    if (expected < 0) {
        expected = given->greatest >= (int32_t)pieces ? given->greatest + 1 : (int32_t)pieces;
    }
    if (id != expected) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the added token \"%.64s\" has the id %d, but the package "
                       "tokenizers gives it %d; save the file anew with that package",
                       t->name, json_string_value(content), id, expected);
    }
    ND_TRY(nd_text_read_bool(t, node, "special", false, &token->special));
    ND_TRY(nd_text_read_bool(t, node, "single_word", false, &token->single_word));
    ND_TRY(nd_text_read_bool(t, node, "lstrip", false, &token->lstrip));
    ND_TRY(nd_text_read_bool(t, node, "rstrip", false, &token->rstrip));
    ND_TRY(nd_text_read_bool(t, node, "normalized", !token->special, &token->normalized));
    ND_TRY(give_id(t, given, id, json_string_value(content)));
    if (!nd_vocab_piece(&t->vocab, id)) {
        ND_TRY(nd_text_add_piece(t, id, json_string_value(content), json_string_length(content),
                                 false));
    } else if (nd_vocab_find(&t->vocab, json_string_value(content), json_string_length(content)) !=
               id) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the id %d of the added token \"%.64s\" belongs to "
                       "another piece",
                       t->name, id, json_string_value(content));
    }
    token->id = id;
    t->added_count++;
    return ND_OK;
}

/* The normalised patterns, one after another; their places are known when all are there. */
static nd_status add_pattern(nd_tokenizer *t, nd_added *token, nd_bytes buffers[2])
{
    const nd_token_piece *piece = nd_vocab_piece(&t->vocab, token->id);
    const uint8_t *pattern;
    ND_TRY(nd_text_rewrite(t->rewrites, t->rewrite_count, nd_vocab_text(&t->vocab, piece),
                           piece->text_size, buffers, &pattern, &token->size));
    if (token->size == 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": nothing is left of the added token \"%s\" when it is "
                       "normalised",
                       t->name, (const char *)nd_vocab_text(&t->vocab, piece));
    }
    ND_TRY(nd_bytes_add(&t->patterns, pattern, token->size));
    const bool same = token->size == piece->text_size &&
                      memcmp(pattern, nd_vocab_text(&t->vocab, piece), token->size) == 0;
    /* `tokenizers` decodes the token as its normalised text. */
    return same ? ND_OK : nd_vocab_rewrite(&t->vocab, token->id, pattern, token->size);
}

static nd_status add_patterns(nd_tokenizer *t)
{
    nd_bytes buffers[2] = {{0}};
    nd_status status = ND_OK;
    for (int i = 0; status == ND_OK && i < t->added_count; i++) {
        if (t->added[i].normalized) {
            status = add_pattern(t, &t->added[i], buffers);
        }
    }
    free(buffers[0].data);
    free(buffers[1].data);
    return status;
}

/* Sorts the tokens into those that are searched before and after normalisation. */
static nd_status make_sets(nd_tokenizer *t)
{
    nd_added *sorted;
    size_t at = 0;
    int raw = 0, normalized = 0;
    ND_TRY(add_patterns(t));
    ND_TRY(ND_ALLOC(t->added_count + 1, &sorted));
    for (int i = 0; i < t->added_count; i++) {
        nd_added *token = &t->added[i];
        const nd_token_piece *piece = nd_vocab_piece(&t->vocab, token->id);
        token->order = token->special ? i : t->added_count + i;
        if (token->normalized) {
            token->pattern = t->patterns.data + at;
            at += token->size;
            sorted[t->added_count - ++normalized] = *token;
        } else {
            token->pattern = nd_vocab_text(&t->vocab, piece);
            token->size = piece->text_size;
            sorted[raw++] = *token;
        }
    }
    nd_status status = nd_added_set_init(&t->raw, sorted, raw);
    status = status == ND_OK ? nd_added_set_init(&t->normalized, sorted + raw, normalized) : status;
    free(sorted);
    return status;
}

nd_status nd_text_read_added(nd_tokenizer *t, const json_t *list, size_t pieces)
{
    given_ids given = {.greatest = -1};
    nd_status status = ND_OK;
    if (json_array_size(list) > ADDED_MAX) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has %zu added tokens; at most %d are supported",
                       t->name, json_array_size(list), ADDED_MAX);
    }
    ND_TRY(ND_ALLOC(json_array_size(list) + 1, &t->added));
    for (size_t i = 0; status == ND_OK && i < json_array_size(list); i++) {
        status = read_added_token(t, json_array_get(list, i), pieces, &given);
    }
    free(given.by_id.data);
    ND_TRY(status);
    ND_TRY(ND_ALLOC((size_t)t->vocab.size + 1, &t->special));
    for (int i = 0; i < t->added_count; i++) {
        t->special[t->added[i].id] = t->added[i].special;
    }
    return make_sets(t);
}
