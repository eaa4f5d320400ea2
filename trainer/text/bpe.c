// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/bpe.h"

#include "runtime/base/hash.h"
#include "trainer/text/buffer.h"
#include "trainer/text/unicode.h"
#include "trainer/text/word_cache.h"

enum { SET_BYTES = ND_WORD_WAYS * sizeof(nd_word_short), HASH_BITS = 64 };

_Static_assert(SET_BYTES == 64, "a set of short words is a cache line");
_Static_assert(sizeof(nd_word_long) == 128, "a long word is two cache lines");

nd_word_short nd_word_no_set[ND_WORD_WAYS];

/* The greatest power of two that fits, at least 2, or 0. A shift by the bits of a hash, which a
 * single set would need, is not defined in C. */
static size_t slots_in(size_t bytes, size_t each)
{
    size_t slots = 2;
    while (2 * slots <= bytes / each) {
        slots *= 2;
    }
    return slots <= bytes / each ? slots : 0;
}

nd_status nd_word_cache_init(nd_word_cache *cache, size_t bytes)
{
    *cache = (nd_word_cache){.short_sets = slots_in(bytes / 2, SET_BYTES),
                             .long_slots = slots_in(bytes / 2, sizeof(nd_word_long))};
    if (cache->short_sets > 0) {
        cache->short_shift = HASH_BITS - __builtin_ctzll(cache->short_sets);
    }
    ND_TRY(ND_PAGES_MAP(ND_WORD_WAYS * cache->short_sets, &cache->shorts));
    return ND_PAGES_MAP(cache->long_slots, &cache->longs);
}

void nd_word_cache_fini(nd_word_cache *cache)
{
    ND_PAGES_UNMAP(cache->shorts, ND_WORD_WAYS * cache->short_sets);
    ND_PAGES_UNMAP(cache->longs, cache->long_slots);
    *cache = (nd_word_cache){0};
}

static nd_word_long *long_slot(const nd_word_cache *cache, const uint8_t *word, size_t size)
{
    return &cache->longs[nd_hash_64(word, size) & (cache->long_slots - 1)];
}

static bool is_long(const nd_word_cache *cache, nd_word_place place, size_t size)
{
    if (place.set != nd_word_no_set) {
        place.high |= ND_WORD_ELSEWHERE;
        return nd_word_slot_has(&place.set[0], place) || nd_word_slot_has(&place.set[1], place);
    }
    return cache->long_slots > 0 && size <= ND_WORD_LONG_BYTES;
}

const int32_t *nd_word_cache_find(const nd_word_cache *cache, nd_word_place place,
                                  const uint8_t *word, size_t size, size_t *count)
{
    if (!is_long(cache, place, size)) {
        return NULL;
    }
    const nd_word_long *slot = long_slot(cache, word, size);
    *count = slot->count;
    return slot->size == size && memcmp(slot->key, word, size) == 0 ? slot->ids : NULL;
}

/* The word that was there first goes. */
static nd_word_short *make_place(nd_word_short *set)
{
    set[1] = set[0];
    return set;
}

void nd_word_cache_put(nd_word_cache *cache, nd_word_place place, const uint8_t *word, size_t size,
                       const int32_t *ids, size_t count)
{
    if (place.set != nd_word_no_set && count <= ND_WORD_SHORT_IDS) {
        if (nd_word_cache_short(place)) {
            return;
        }
        nd_word_short *slot = make_place(place.set);
        *slot =
            (nd_word_short){place.low, place.high | (uint64_t)count << ND_WORD_COUNT_SHIFT, {0}};
        memcpy(slot->ids, ids, count * sizeof *ids);
        return;
    }
    if (cache->long_slots == 0 || size > ND_WORD_LONG_BYTES || count > ND_WORD_LONG_IDS) {
        return;
    }
    if (place.set != nd_word_no_set && !is_long(cache, place, size)) {
        *make_place(place.set) = (nd_word_short){place.low, place.high | ND_WORD_ELSEWHERE, {0}};
    }
    nd_word_long *slot = long_slot(cache, word, size);
    slot->size = (uint8_t)size;
    slot->count = (uint8_t)count;
    memcpy(slot->key, word, size);
    memcpy(slot->ids, ids, count * sizeof *ids);
}

/* Short words. */

enum { PLACE_BITS = 5, NO_PAIR = INT32_MAX };
enum { STEP = 8 }; /* the number of pairs is a multiple: vector instructions see all of them */

_Static_assert(ND_SHORT_WORD == 1 << PLACE_BITS && ND_MERGES_RANK_MAX <= NO_PAIR >> PLACE_BITS,
               "a rank and a place fit in 31 bits");

/* The words that may still have pairs, and what the last merge of each asks for. */
typedef struct turn {
    nd_short_word *word;
    int padded;    /* pairs, a multiple of STEP */
    int places[2]; /* where the pairs around the last merge begin; -1: there is none */
    nd_pair queries[2];
} turn;

static void set_pair(nd_short_word *w, int place, nd_merged merged)
{
    w->pairs[place] = merged.rank == ND_MERGE_NONE ? NO_PAIR : merged.rank << PLACE_BITS | place;
    w->made[place] = merged.id;
}

/* The place that is left behind `place`; ND_SHORT_WORD: none. */
static int place_behind(const nd_short_word *w, int place)
{
    const uint64_t later = (uint64_t)w->places >> place >> 1;
    return later ? place + 1 + __builtin_ctzll(later) : ND_SHORT_WORD;
}

static void begin_turn(const nd_merges *merges, nd_short_word *w, turn *t)
{
    const int n = w->count;
    *t = (turn){.word = w, .padded = (n + STEP - 1) / STEP * STEP};
    w->places = n > 0 ? UINT32_MAX >> (ND_SHORT_WORD - n) : 0;
    for (int i = 0; i + 1 < n; i++) {
        set_pair(w, i, nd_merges_find(merges, w->ids[i], w->ids[i + 1]));
    }
    for (int i = n > 0 ? n - 1 : 0; i < t->padded; i++) {
        w->pairs[i] = NO_PAIR;
    }
}

static void ask(const nd_merges *merges, turn *t, int query, int left, int right)
{
    const nd_short_word *w = t->word;
    t->places[query] = left;
    t->queries[query] = nd_merges_ask(merges, w->ids[left], w->ids[right]);
}

/* Merges the best pair and asks for the new ones to both sides; false: there is none. */
static bool merge_best(const nd_merges *merges, turn *t)
{
    nd_short_word *w = t->word;
    int32_t best = NO_PAIR; /* of the lowest rank, and of the lowest place among equals */
    for (int i = 0; i < t->padded; i++) {
        best = w->pairs[i] < best ? w->pairs[i] : best;
    }
    if (best == NO_PAIR) {
        return false;
    }
    const int place = best & (ND_SHORT_WORD - 1), gone = place_behind(w, place);
    const uint32_t before = w->places & ((UINT32_C(1) << place) - 1);
    w->ids[place] = w->made[place];
    w->places &= ~(UINT32_C(1) << gone);
    w->pairs[gone] = w->pairs[place] = NO_PAIR;
    const int behind = place_behind(w, place);
    t->places[0] = t->places[1] = -1;
    if (before) {
        ask(merges, t, 0, ND_SHORT_WORD - 1 - __builtin_clz(before), place);
    }
    if (behind < ND_SHORT_WORD) {
        ask(merges, t, 1, place, behind);
    }
    return true;
}

static void merge_some(const nd_merges *merges, turn *turns, int active)
{
    while (active > 0) {
        for (int i = 0; i < active;) {
            if (merge_best(merges, &turns[i])) {
                i++;
            } else {
                nd_short_word *w = turns[i].word;
                w->count = 0;
                for (uint32_t left = w->places; left; left &= left - 1) {
                    w->ids[w->count++] = w->ids[__builtin_ctz(left)];
                }
                turns[i] = turns[--active];
            }
        }
        for (int i = 0; i < 2 * active; i++) {
            turn *t = &turns[i / 2];
            if (t->places[i % 2] >= 0) {
                nd_merges_fetch(merges, &t->queries[i % 2]);
            }
        }
        for (int i = 0; i < 2 * active; i++) {
            turn *t = &turns[i / 2];
            if (t->places[i % 2] >= 0) {
                set_pair(t->word, t->places[i % 2], nd_merges_answer(merges, &t->queries[i % 2]));
            }
        }
    }
}

void nd_short_words_merge(const nd_merges *merges, nd_short_word *words, int count)
{
    enum { TURNS = 8 };
    turn turns[TURNS];
    for (int done = 0, n; done < count; done += n) {
        n = count - done < TURNS ? count - done : TURNS;
        for (int i = 0; i < n; i++) {
            begin_turn(merges, &words[done + i], &turns[i]);
        }
        merge_some(merges, turns, n);
    }
}

/* Words. */

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
            if (!state->dropped_at || p < state->dropped_at) {
                state->dropped_at = p;
            }
            continue;
        }
        if (pending && !bpe->fuse_unknown) {
            ND_TRY(add_unknown(state));
        }
        pending = true;
    }
    return pending ? add_unknown(state) : ND_OK;
}

/* Long words. */

static bool goes_first(const nd_bpe_pair *a, const nd_bpe_pair *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->place < b->place;
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

/* Returns the merge of the pair that begins at a place; its rank is ND_MERGE_NONE without one. */
static nd_merged merged_at(const nd_bpe_state *state, int32_t place)
{
    const nd_bpe_symbol *left = &state->symbols[place];
    return left->id < 0 || left->next < 0
               ? (nd_merged){.rank = ND_MERGE_NONE, .id = -1}
               : nd_merges_find(&state->tokenizer->merges, left->id, state->symbols[left->next].id);
}

/* Puts the pair that begins at a place on the heap, if it can be merged. */
static void push_pair(nd_bpe_state *state, int32_t place)
{
    const nd_merged merged = merged_at(state, place);
    const nd_bpe_pair pair = {.rank = merged.rank, .place = place, .id = merged.id};
    if (merged.rank == ND_MERGE_NONE) {
        return;
    }
    size_t at = state->heap_count++;
    while (at > 0 && goes_first(&pair, &state->heap[(at - 1) / 2])) {
        state->heap[at] = state->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    state->heap[at] = pair;
}

static nd_status merge_long(nd_bpe_state *state, int32_t *ids, size_t *count)
{
    ND_TRY(ND_ARRAY_RESERVE(&state->symbols, &state->symbols_room, *count));
    /* count - 1 pairs at first; each of at most count - 1 merges takes one and adds two. */
    ND_TRY(ND_ARRAY_RESERVE(&state->heap, &state->heap_room, 2 * *count));
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
        const nd_bpe_pair pair = heap_pop(state);
        if (merged_at(state, pair.place).id != pair.id) {
            continue; /* it is stale: one of its places has been merged since */
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

/* Words that follow one another, with their places in the cache. */
typedef struct batch {
    const uint8_t *text;
    const size_t *ends;
    size_t begin;
    int count;
    nd_word_place places[ND_BPE_WORDS];
} batch;

/* A word that is not among the short ones of the cache. */
typedef struct new_word {
    int index; /* in its batch */
    const uint8_t *bytes;
    size_t size;
    uint64_t asked;         /* of the vocabulary */
    const int32_t *ids;     /* NULL: not known yet */
    size_t count;           /* of the ids */
    size_t at;              /* where the ids are in the result */
    int32_t piece;          /* the id of a word that is a piece */
    nd_short_word *merging; /* NULL: it is not merged with others */
    bool keep;              /* in the cache */
} new_word;

static new_word new_word_of(const nd_bpe_state *state, const batch *b, int index)
{
    const size_t at = index > 0 ? b->ends[index - 1] : b->begin;
    new_word w = {.index = index, .bytes = b->text + at, .size = b->ends[index] - at};
    w.ids = nd_word_cache_find(&state->cache, b->places[index], w.bytes, w.size, &w.count);
    w.keep = !w.ids;
    if (!w.ids && state->tokenizer->bpe.ignore_merges) {
        w.asked = nd_vocab_ask_bytes(&state->tokenizer->vocab, w.bytes, w.size);
    }
    return w;
}

/* A word that is a piece needs no merges in some vocabularies. */
static void find_piece(const nd_bpe_state *state, new_word *w)
{
    if (w->ids || !state->tokenizer->bpe.ignore_merges) {
        return;
    }
    w->piece = nd_vocab_answer_bytes(&state->tokenizer->vocab, w->bytes, w->size, w->asked);
    if (w->piece >= 0) {
        w->ids = &w->piece;
        w->count = 1;
    }
}

/* The word's characters to state->word. Those that are dropped or unknown are counted each time
 * they are met, so that their word is not kept. */
static nd_status begin_new_word(nd_bpe_state *state, new_word *w)
{
    const int64_t odd = state->dropped + state->unknown;
    ND_TRY(begin_word(state, w->bytes, w->size));
    w->keep = state->dropped + state->unknown == odd;
    return ND_OK;
}

static nd_status add_new_word(nd_bpe_state *state, new_word *w, nd_ids *out)
{
    if (w->merging) {
        w->ids = w->merging->ids;
        w->count = (size_t)w->merging->count;
    }
    if (!w->ids) {
        ND_TRY(begin_new_word(state, w));
        w->ids = state->word.data;
        w->count = state->word.count;
        if (state->tokenizer->merges.any && w->count > 1) {
            ND_TRY(merge_long(state, state->word.data, &w->count));
        }
    }
    w->at = out->count;
    return nd_ids_add(out, w->ids, w->count);
}

/* Room for the ids of all further words of a batch, if they are found. */
static nd_status make_room(const batch *b, int from, nd_ids *out)
{
    return nd_ids_reserve(out, out->count + (size_t)(b->count - from) * ND_WORD_SHORT_IDS);
}

/* Appends the ids of words from `from` on as long as they are found, and before the word `end`;
 * returns the first whose ids are not there. */
static int add_found(const batch *b, int from, int end, nd_ids *out)
{
    int32_t *to = out->data + out->count;
    int i = from;
    for (; i < end; i++) {
        const nd_word_short *slot = nd_word_cache_short(b->places[i]);
        if (!slot) {
            break;
        }
        memcpy(to, slot->ids, sizeof slot->ids);
        to += nd_word_short_count(slot);
    }
    out->count = (size_t)(to - out->data);
    return i;
}

/* Appends the ids of words from `*from` on, the first of which is new. Several new words are looked
 * up and merged together; the cache changes only when all of these words have their ids. */
static nd_status add_new(nd_bpe_state *state, const batch *b, int *from, nd_ids *out)
{
    new_word words[ND_BPE_NEW_WORDS];
    int count = 0, merging = 0, end = *from;
    for (; end < b->count && count < ND_BPE_NEW_WORDS; end++) {
        if (!nd_word_cache_short(b->places[end])) {
            words[count++] = new_word_of(state, b, end);
        }
    }
    for (new_word *w = words; w < words + count; w++) {
        find_piece(state, w);
        if (!w->ids && w->size <= ND_SHORT_WORD) {
            ND_TRY(begin_new_word(state, w));
            w->merging = &state->merging[merging++];
            w->merging->count = (int)state->word.count;
            memcpy(w->merging->ids, state->word.data, state->word.count * sizeof *w->merging->ids);
        }
    }
    nd_short_words_merge(&state->tokenizer->merges, state->merging, merging);
    for (int i = 0; i < count; i++) {
        add_found(b, *from, words[i].index, out);
        *from = words[i].index + 1;
        ND_TRY(add_new_word(state, &words[i], out));
        ND_TRY(make_room(b, *from, out));
    }
    *from = add_found(b, *from, end, out);
    for (int i = 0; i < count; i++) {
        if (words[i].keep) {
            nd_word_cache_put(&state->cache, b->places[words[i].index], words[i].bytes,
                              words[i].size, out->data + words[i].at, words[i].count);
        }
    }
    return ND_OK;
}

nd_status nd_bpe_words(nd_bpe_state *state, const uint8_t *text, size_t size, size_t begin,
                       const size_t *ends, int count, nd_ids *out)
{
    batch b;
    size_t at = begin;
    b.text = text;
    b.ends = ends;
    b.begin = begin;
    b.count = count;
    for (int i = 0; i < count; i++) {
        b.places[i] = nd_word_cache_place(&state->cache, text + at, ends[i] - at, size - at);
        at = ends[i];
    }
    state->dropped_at = NULL;
    ND_TRY(make_room(&b, 0, out));
    for (int i = add_found(&b, 0, count, out); i < count; i = add_found(&b, i, count, out)) {
        ND_TRY(add_new(state, &b, &i, out));
    }
    return ND_OK;
}
