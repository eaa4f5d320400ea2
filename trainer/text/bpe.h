// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_BPE_H
#define ND_TEXT_BPE_H
/*
 * Words to ids: looks a word up among those already merged, else merges it. A short word is merged
 * by looking for the best pair again and again, a long one with a heap: O(n log n) at worst. All
 * state is of one thread.
 */
#include "trainer/text/parts.h"

/* A place of a long word. */
typedef struct nd_bpe_symbol {
    int32_t id;             /* -1: joined to an earlier one */
    int32_t previous, next; /* -1: none */
} nd_bpe_symbol;

/* A pair that may be merged; the one with the lowest rank, then the lowest place, goes first. */
typedef struct nd_bpe_pair {
    int32_t rank, place, id;
} nd_bpe_pair;

enum { ND_BPE_KEY_MAX = 30, ND_BPE_VALUE_MAX = 8 };

/* A word and its ids: 64 bytes. */
typedef struct nd_bpe_cached {
    uint8_t size; /* 0: empty */
    uint8_t count;
    uint8_t key[ND_BPE_KEY_MAX];
    int32_t ids[ND_BPE_VALUE_MAX];
} nd_bpe_cached;

enum { ND_BPE_SHORT_BYTES = 15, ND_BPE_SHORT_IDS = 3 };

/* A word of at most 15 bytes with at most 3 ids: half a cache line. */
typedef struct nd_bpe_short {
    uint64_t key[2]; /* the bytes, zeros, and the size in the last byte; all 0: empty */
    int32_t ids[ND_BPE_SHORT_IDS];
    int32_t count;
} nd_bpe_short;

typedef struct nd_bpe_state {
    const nd_tokenizer *tokenizer;
    nd_bpe_short *shorts;
    size_t short_slots; /* a power of two, or 0 */
    nd_bpe_cached *cache;
    size_t cache_slots; /* a power of two, or 0 */
    nd_ids word;        /* the characters of the word at hand */
    nd_bpe_symbol *symbols;
    nd_bpe_pair *heap;
    size_t symbols_room, heap_room, heap_count;
    int64_t dropped, unknown; /* characters, and unknown tokens, of all words so far */
    size_t dropped_at;        /* place of the last dropped character in its word */
} nd_bpe_state;

nd_status nd_bpe_init(nd_bpe_state *state, const nd_tokenizer *tokenizer, size_t cache_bytes);
void nd_bpe_fini(nd_bpe_state *state);
/* Appends the ids of words that follow one another from `begin` on and end at ends[i], as long as
 * they are found among the short ones; returns how many were. `size`: of the whole text. *status
 * fails when memory runs out. */
int nd_bpe_find_words(nd_bpe_state *state, const uint8_t *text, size_t size, size_t begin,
                      const size_t *ends, int count, nd_ids *out, nd_status *status);
/* Appends the ids of one word of `size` > 0 bytes of valid UTF-8. */
nd_status nd_bpe_word(nd_bpe_state *state, const uint8_t *word, size_t size, nd_ids *out);

#endif
