// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/bpe.h"

#include "trainer/text/unicode.h"

enum { SHORT_WORD = 32 }; /* characters; longer words are merged with the heap */

nd_status nd_bpe_init(nd_bpe_state *state, const nd_tokenizer *tokenizer, size_t cache_bytes)
{
    *state = (nd_bpe_state){.tokenizer = tokenizer};
    return nd_word_cache_init(&state->cache, cache_bytes);
}

void nd_bpe_fini(nd_bpe_state *state)
{
    nd_word_cache_fini(&state->cache);
    free(state->word.data);
    free(state->symbols);
    free(state->heap);
    *state = (nd_bpe_state){0};
}

/* Characters. */

static nd_status add_unknown(nd_bpe_state *state)
{
    state->unknown++;
    return nd_ids_add(&state->word, &state->tokenizer->bpe.unknown, 1);
}

/* The ids of a character's bytes, when all of them have one. */
static nd_status add_fallback(nd_bpe_state *state, const uint8_t *p, size_t size, bool *done)
{
    const nd_bpe *bpe = &state->tokenizer->bpe;
    int32_t ids[4];
    *done = false;
    for (size_t i = 0; i < size; i++) {
        ids[i] = bpe->bytes[p[i]];
        if (ids[i] < 0) {
            return ND_OK;
        }
    }
    *done = true;
    return nd_ids_add(&state->word, ids, size);
}

/*
 * The word as the ids of its characters, or of its bytes in a byte-level vocabulary. `tokenizers`
 * writes a pending unknown token before the next character that has a piece, and leaves it pending
 * behind bytes that stand for a character; so do we.
 */
static nd_status begin_word(nd_bpe_state *state, const uint8_t *word, size_t size)
{
    const nd_tokenizer *tokenizer = state->tokenizer;
    const nd_bpe *bpe = &tokenizer->bpe;
    bool pending = false;
    state->word.count = 0;
    ND_TRY(nd_ids_reserve(&state->word, size));
    for (size_t at = 0, n; at < size; at += n) {
        const uint8_t *p = word + at;
        n = tokenizer->byte_level ? 1 : (size_t)nd_char_at(p).bytes;
        int32_t id = tokenizer->byte_level || *p < 0x80
                         ? bpe->first[*p]
                         : nd_vocab_find_bytes(&tokenizer->vocab, p, n);
        if (id >= 0) {
            if (pending) {
                ND_TRY(add_unknown(state));
            }
            pending = false;
            state->word.data[state->word.count++] = id; /* at most one for each byte */
            continue;
        }
        bool done = false;
        if (bpe->fallback && !tokenizer->byte_level) {
            ND_TRY(add_fallback(state, p, n, &done));
        }
        if (done) {
            continue;
        }
        if (bpe->unknown < 0) {
            state->dropped++;
            state->dropped_at = state->dropped_at ? state->dropped_at : p;
            continue;
        }
        if (pending && !bpe->fuse_unknown) {
            ND_TRY(add_unknown(state));
        }
        pending = true;
    }
    return pending ? add_unknown(state) : ND_OK;
}

/* Short words. */

enum { PLACE_BITS = 5, NO_PAIR = INT32_MAX };

_Static_assert(SHORT_WORD == 1 << PLACE_BITS && ND_VOCAB_IDS_MAX <= NO_PAIR >> PLACE_BITS,
               "a rank and a place fit in 31 bits");

/* A short word while it is merged. A merged pair keeps its left place and loses its right one. */
typedef struct short_word {
    const nd_vocab *vocab;
    int32_t *ids;
    uint32_t places;           /* a bit for each place that is left */
    int32_t pairs[SHORT_WORD]; /* rank and place of the pair that begins at a place, or NO_PAIR */
    int32_t made[SHORT_WORD];  /* the piece that the pair makes */
} short_word;

/* Looks up the pair of two places, of which the right one may be missing (SHORT_WORD or more). */
static void find_pair(short_word *w, int left, int right)
{
    nd_merged merged = {.rank = ND_MERGE_NONE};
    if (right < SHORT_WORD) {
        merged = nd_vocab_merge(w->vocab, w->ids[left], w->ids[right]);
    }
    w->pairs[left] = merged.rank == ND_MERGE_NONE ? NO_PAIR : merged.rank << PLACE_BITS | left;
    w->made[left] = merged.id;
}

/* The place that is left behind `place`; SHORT_WORD: none. */
static int place_behind(const short_word *w, int place)
{
    const uint64_t later = (uint64_t)w->places >> place >> 1;
    return later ? place + 1 + __builtin_ctzll(later) : SHORT_WORD;
}

/* The pair of the lowest rank, and of the lowest place among equals, or NO_PAIR. */
static int32_t best_pair(const short_word *w, int padded)
{
    int32_t best = NO_PAIR;
    for (int i = 0; i < padded; i++) {
        best = w->pairs[i] < best ? w->pairs[i] : best;
    }
    return best;
}

/* Merges in place; returns how many ids are left. */
static size_t merge_short(const nd_vocab *vocab, int32_t *ids, size_t count)
{
    enum { STEP = 8 }; /* the number of pairs is a multiple: vector instructions see all of them */
    const int n = (int)count, padded = (n + STEP - 1) / STEP * STEP;
    short_word w = {.vocab = vocab, .ids = ids, .places = UINT32_MAX >> (SHORT_WORD - n)};
    for (int i = 0; i + 1 < n; i++) {
        find_pair(&w, i, i + 1);
    }
    for (int i = n - 1; i < padded; i++) {
        w.pairs[i] = NO_PAIR;
    }
    for (int32_t best; (best = best_pair(&w, padded)) != NO_PAIR;) {
        const int place = best & (SHORT_WORD - 1), gone = place_behind(&w, place);
        const uint32_t before = w.places & ((UINT32_C(1) << place) - 1);
        ids[place] = w.made[place];
        w.places &= ~(UINT32_C(1) << gone);
        w.pairs[gone] = NO_PAIR;
        find_pair(&w, place, place_behind(&w, place));
        if (before) {
            find_pair(&w, SHORT_WORD - 1 - __builtin_clz(before), place);
        }
    }
    count = 0;
    for (uint32_t left = w.places; left; left &= left - 1) {
        ids[count++] = ids[__builtin_ctz(left)];
    }
    return count;
}

/* Long words. */

static bool goes_first(const nd_bpe_pair *a, const nd_bpe_pair *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->place < b->place;
}

static void heap_push(nd_bpe_state *state, nd_bpe_pair pair)
{
    size_t at = state->heap_count++;
    while (at > 0 && goes_first(&pair, &state->heap[(at - 1) / 2])) {
        state->heap[at] = state->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    state->heap[at] = pair;
}

static nd_bpe_pair heap_pop(nd_bpe_state *state)
{
    nd_bpe_pair *heap = state->heap, top = heap[0], last = heap[--state->heap_count];
    size_t at = 0;
    for (size_t child = 1; child < state->heap_count; child = 2 * at + 1) {
        if (child + 1 < state->heap_count && goes_first(&heap[child + 1], &heap[child])) {
            child++;
        }
        if (!goes_first(&heap[child], &last)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

/* Puts the pair that begins at a place on the heap, if it can be merged. */
static void push_pair(nd_bpe_state *state, int32_t place)
{
    const nd_bpe_symbol *left = &state->symbols[place];
    if (left->next < 0) {
        return;
    }
    const nd_merged merged =
        nd_vocab_merge(&state->tokenizer->vocab, left->id, state->symbols[left->next].id);
    if (merged.rank != ND_MERGE_NONE) {
        heap_push(state, (nd_bpe_pair){.rank = merged.rank, .place = place, .id = merged.id});
    }
}

/* A pair on the heap is stale when one of its places has been merged since. */
static bool is_current(const nd_bpe_state *state, const nd_bpe_pair *pair)
{
    const nd_bpe_symbol *left = &state->symbols[pair->place];
    if (left->id < 0 || left->next < 0) {
        return false;
    }
    const nd_merged merged =
        nd_vocab_merge(&state->tokenizer->vocab, left->id, state->symbols[left->next].id);
    return merged.rank != ND_MERGE_NONE && merged.id == pair->id;
}

static nd_status reserve_long(nd_bpe_state *state, size_t count)
{
    void *place = state->symbols;
    nd_status status =
        nd_array_reserve(&place, &state->symbols_room, count, sizeof *state->symbols);
    state->symbols = place;
    ND_TRY(status);
    /* count - 1 pairs at first; each of at most count - 1 merges takes one and adds two. */
    place = state->heap;
    status = nd_array_reserve(&place, &state->heap_room, 2 * count, sizeof *state->heap);
    state->heap = place;
    return status;
}

static nd_status merge_long(nd_bpe_state *state, int32_t *ids, size_t *count)
{
    ND_TRY(reserve_long(state, *count));
    nd_bpe_symbol *symbols = state->symbols;
    const int32_t last = (int32_t)*count - 1;
    state->heap_count = 0;
    for (int32_t i = 0; i <= last; i++) {
        symbols[i] =
            (nd_bpe_symbol){.id = ids[i], .previous = i - 1, .next = i < last ? i + 1 : -1};
    }
    for (int32_t i = 0; i < last; i++) {
        push_pair(state, i);
    }
    while (state->heap_count > 0) {
        nd_bpe_pair pair = heap_pop(state);
        if (!is_current(state, &pair)) {
            continue;
        }
        nd_bpe_symbol *left = &symbols[pair.place], *right = &symbols[left->next];
        left->id = pair.id;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0) {
            symbols[left->next].previous = pair.place;
        }
        if (left->previous >= 0) {
            push_pair(state, left->previous);
        }
        push_pair(state, pair.place);
    }
    *count = 0;
    for (int32_t i = 0; i >= 0; i = symbols[i].next) {
        ids[(*count)++] = symbols[i].id;
    }
    return ND_OK;
}

/* Words. */

/* A word that is not in the cache. */
static nd_status merge_word(nd_bpe_state *state, nd_word_place place, const uint8_t *word,
                            size_t size, nd_ids *out)
{
    const nd_vocab *vocab = &state->tokenizer->vocab;
    if (state->tokenizer->bpe.ignore_merges) {
        const int32_t id = nd_vocab_find_bytes(vocab, word, size);
        if (id >= 0) {
            nd_word_cache_put(&state->cache, place, word, size, &id, 1);
            return nd_ids_add(out, &id, 1);
        }
    }
    const int64_t odd = state->dropped + state->unknown;
    ND_TRY(begin_word(state, word, size));
    int32_t *ids = state->word.data;
    size_t count = state->word.count;
    if (vocab->has_merges && count > SHORT_WORD) {
        ND_TRY(merge_long(state, ids, &count));
    } else if (vocab->has_merges && count > 1) {
        count = merge_short(vocab, ids, count);
    }
    /* Dropped and unknown characters are counted each time they are met. */
    if (state->dropped + state->unknown == odd) {
        nd_word_cache_put(&state->cache, place, word, size, ids, count);
    }
    return nd_ids_add(out, ids, count);
}

/* A word that is not among the short ones of the cache. */
static nd_status add_word(nd_bpe_state *state, nd_word_place place, const uint8_t *word,
                          size_t size, nd_ids *out)
{
    size_t count;
    const int32_t *ids = nd_word_cache_find(&state->cache, place, word, size, &count);
    return ids ? nd_ids_add(out, ids, count) : merge_word(state, place, word, size, out);
}

nd_status nd_bpe_words(nd_bpe_state *state, const uint8_t *text, size_t size, size_t begin,
                       const size_t *ends, int count, nd_ids *out)
{
    nd_word_place places[ND_BPE_WORDS];
    size_t at = begin;
    state->dropped_at = NULL;
    for (int i = 0; i < count; i++) {
        places[i] = nd_word_cache_place(&state->cache, text + at, ends[i] - at, size - at);
        at = ends[i];
    }
    ND_TRY(nd_ids_reserve(out, out->count + (size_t)count * ND_WORD_SHORT_IDS));
    int32_t *to = out->data + out->count;
    for (int i = 0; i < count; i++) {
        const nd_word_short *slot = nd_word_cache_short(places[i]);
        if (slot) {
            memcpy(to, slot->ids, sizeof slot->ids);
            to += nd_word_short_count(slot);
            continue;
        }
        at = i > 0 ? ends[i - 1] : begin;
        out->count = (size_t)(to - out->data);
        ND_TRY(add_word(state, places[i], text + at, ends[i] - at, out));
        ND_TRY(nd_ids_reserve(out, out->count + (size_t)(count - i) * ND_WORD_SHORT_IDS));
        to = out->data + out->count;
    }
    out->count = (size_t)(to - out->data);
    return ND_OK;
}
