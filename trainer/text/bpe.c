// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/bpe.h"

#include <xxhash.h>

#include "trainer/text/unicode.h"

enum { SHORT_WORD = 32 }; /* characters; longer words are merged with the heap */

/* The greatest power of two of slots that fits, or 0. */
static size_t slots_in(size_t bytes, size_t each)
{
    size_t slots = bytes >= each;
    while (slots > 0 && 2 * slots <= bytes / each) {
        slots *= 2;
    }
    return slots;
}

nd_status nd_bpe_init(nd_bpe_state *state, const nd_tokenizer *tokenizer, size_t cache_bytes)
{
    *state = (nd_bpe_state){.tokenizer = tokenizer};
    state->cache_slots = slots_in(cache_bytes / 2, sizeof(nd_bpe_cached));
    state->short_slots = slots_in(cache_bytes / 2, sizeof(nd_bpe_short));
    ND_TRY(state->cache_slots > 0 ? ND_ALLOC(state->cache_slots, &state->cache) : ND_OK);
    return state->short_slots > 0 ? ND_ALLOC(state->short_slots, &state->shorts) : ND_OK;
}

void nd_bpe_fini(nd_bpe_state *state)
{
    free(state->cache);
    free(state->shorts);
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
    for (size_t at = 0, n; at < size; at += n) {
        const uint8_t *p = word + at;
        n = tokenizer->byte_level ? 1 : (size_t)nd_char_at(p).bytes;
        int32_t id =
            tokenizer->byte_level ? bpe->bytes[*p] : nd_vocab_find_bytes(&tokenizer->vocab, p, n);
        if (id >= 0) {
            if (pending) {
                ND_TRY(add_unknown(state));
            }
            pending = false;
            ND_TRY(nd_ids_add(&state->word, &id, 1));
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
            state->dropped_at = at;
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

static int32_t rank_of(const nd_vocab *vocab, const int32_t *pair, int32_t *id)
{
    const nd_merge *merge = nd_vocab_merge(vocab, pair[0], pair[1]);
    *id = merge ? merge->id : -1;
    return merge ? merge->rank : INT32_MAX;
}

/* Merges in place; returns how many ids are left. */
static size_t merge_short(const nd_vocab *vocab, int32_t *ids, size_t count)
{
    int32_t ranks[SHORT_WORD] = {0}, made[SHORT_WORD] = {0}; /* of the pair at each place */
    for (size_t i = 0; i + 1 < count; i++) {
        ranks[i] = rank_of(vocab, &ids[i], &made[i]);
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            best = ranks[i] < ranks[best] ? i : best;
        }
        if (ranks[best] == INT32_MAX) {
            break;
        }
        ids[best] = made[best];
        count--;
        for (size_t i = best + 1; i < count; i++) {
            ids[i] = ids[i + 1];
        }
        for (size_t i = best + 1; i + 1 < count; i++) {
            ranks[i] = ranks[i + 1];
            made[i] = made[i + 1];
        }
        if (best > 0) {
            ranks[best - 1] = rank_of(vocab, &ids[best - 1], &made[best - 1]);
        }
        if (best + 1 < count) {
            ranks[best] = rank_of(vocab, &ids[best], &made[best]);
        }
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
    const nd_merge *merge =
        nd_vocab_merge(&state->tokenizer->vocab, left->id, state->symbols[left->next].id);
    if (merge) {
        heap_push(state, (nd_bpe_pair){.rank = merge->rank, .place = place, .id = merge->id});
    }
}

/* A pair on the heap is stale when one of its places has been merged since. */
static bool is_current(const nd_bpe_state *state, const nd_bpe_pair *pair)
{
    const nd_bpe_symbol *left = &state->symbols[pair->place];
    if (left->id < 0 || left->next < 0) {
        return false;
    }
    const nd_merge *merge =
        nd_vocab_merge(&state->tokenizer->vocab, left->id, state->symbols[left->next].id);
    return merge && merge->id == pair->id;
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

/* The cache of short words. */

typedef struct short_key {
    uint64_t low, high;
} short_key;

/* A word of 1 to 15 bytes; `left` bytes can be read. */
static short_key key_of(const uint8_t *word, size_t size, size_t left)
{
    short_key key = {0};
    if (left < 16) {
        memcpy(&key, word, size);
    } else {
        memcpy(&key, word, 16);
        /* Bytes are in little-endian order: those behind the word are the high ones. */
        key.low &= size >= 8 ? UINT64_MAX : (UINT64_C(1) << (8 * size)) - 1;
        key.high &= size <= 8 ? 0 : (UINT64_C(1) << (8 * (size - 8))) - 1;
    }
    key.high |= (uint64_t)size << 56;
    return key;
}

static nd_bpe_short *short_slot(const nd_bpe_state *state, short_key key)
{
    uint64_t hash = (key.low ^ (key.high << 29 | key.high >> 35)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93u;
    return &state->shorts[hash >> 32 & (state->short_slots - 1)];
}

static void short_fill(nd_bpe_state *state, const uint8_t *word, size_t size, const int32_t *ids,
                       size_t count)
{
    if (state->short_slots == 0 || size > ND_BPE_SHORT_BYTES || count > ND_BPE_SHORT_IDS) {
        return;
    }
    short_key key = key_of(word, size, size);
    nd_bpe_short *slot = short_slot(state, key);
    *slot = (nd_bpe_short){.key = {key.low, key.high}, .count = (int32_t)count};
    memcpy(slot->ids, ids, count * sizeof *ids);
}

enum { BATCH = 64 };

int nd_bpe_find_words(nd_bpe_state *state, const uint8_t *text, size_t size, size_t begin,
                      const size_t *ends, int count, nd_ids *out, nd_status *status)
{
    short_key keys[BATCH];
    const nd_bpe_short *slots[BATCH];
    void *place = out->data;
    count = count < BATCH ? count : BATCH;
    *status = nd_array_reserve(&place, &out->room, out->count + 4 * BATCH, sizeof *out->data);
    out->data = place;
    if (*status != ND_OK || state->short_slots == 0) {
        return 0;
    }
    for (int i = 0; i < count; i++) {
        size_t n = ends[i] - begin;
        if (n > ND_BPE_SHORT_BYTES) {
            count = i;
            break;
        }
        keys[i] = key_of(text + begin, n, size - begin);
        slots[i] = short_slot(state, keys[i]);
        __builtin_prefetch(slots[i]);
        begin = ends[i];
    }
    int32_t *to = out->data + out->count;
    int i = 0;
    for (; i < count && slots[i]->key[0] == keys[i].low && slots[i]->key[1] == keys[i].high; i++) {
        memcpy(to, slots[i]->ids, sizeof slots[i]->ids);
        to += slots[i]->count;
    }
    out->count = (size_t)(to - out->data);
    return i;
}

/* Words. */

static nd_bpe_cached *cache_slot(const nd_bpe_state *state, const uint8_t *word, size_t size)
{
    if (size > ND_BPE_KEY_MAX || state->cache_slots == 0) {
        return NULL;
    }
    return &state->cache[XXH3_64bits(word, size) & (state->cache_slots - 1)];
}

static void cache_fill(nd_bpe_cached *slot, const uint8_t *word, size_t size, const int32_t *ids,
                       size_t count)
{
    if (count > ND_BPE_VALUE_MAX) {
        return;
    }
    slot->size = (uint8_t)size;
    slot->count = (uint8_t)count;
    memcpy(slot->key, word, size);
    memcpy(slot->ids, ids, count * sizeof *ids);
}

nd_status nd_bpe_word(nd_bpe_state *state, const uint8_t *word, size_t size, nd_ids *out)
{
    const nd_vocab *vocab = &state->tokenizer->vocab;
    nd_bpe_cached *slot = cache_slot(state, word, size);
    if (slot && slot->size == size && memcmp(slot->key, word, size) == 0) {
        short_fill(state, word, size, slot->ids, slot->count);
        return nd_ids_add(out, slot->ids, slot->count);
    }
    if (state->tokenizer->bpe.ignore_merges) {
        int32_t id = nd_vocab_find_bytes(vocab, word, size);
        if (id >= 0) {
            if (slot) {
                cache_fill(slot, word, size, &id, 1);
            }
            short_fill(state, word, size, &id, 1);
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
    if (slot && state->dropped + state->unknown == odd) {
        cache_fill(slot, word, size, ids, count);
    }
    if (state->dropped + state->unknown == odd) {
        short_fill(state, word, size, ids, count);
    }
    return nd_ids_add(out, ids, count);
}
