// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_WORD_CACHE_H
#define ND_TEXT_WORD_CACHE_H
/*
 * Words that were merged already, with their ids. A cache belongs to one thread and has a fixed
 * size, so a new word takes the place of an older one.
 *
 * Half of the memory is for short words, of at most 15 bytes and 4 ids: nearly all words of a
 * text. Each has a set of two slots that share a cache line, and its key is compared as two 64-bit
 * words, so that a word is found with one access to memory, which nd_word_cache_place begins ahead
 * of time. The other half is for longer words, of at most 94 bytes and 8 ids. A short word with
 * more than 4 ids lies there too; its short slot says so.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "runtime/base/status.h"

enum { ND_WORD_SHORT_BYTES = 15, ND_WORD_SHORT_IDS = 4 };
enum { ND_WORD_LONG_BYTES = 94, ND_WORD_LONG_IDS = 8 };
enum { ND_WORD_WAYS = 2, ND_WORD_SIZE_SHIFT = 56, ND_WORD_COUNT_SHIFT = 60 };

/* Bit 63 of a short slot's `high`: the ids lie with the long words. */
#define ND_WORD_ELSEWHERE (UINT64_C(1) << 63)
/* The bits that are equal when a slot has the ids of a key: all but the number of ids. */
#define ND_WORD_KEY_BITS (~(UINT64_C(7) << ND_WORD_COUNT_SHIFT))

typedef struct nd_word_short {
    uint64_t low;  /* the first 8 bytes of the word, then zeros */
    uint64_t high; /* 7 more bytes; the size in bits 56 to 59, the number of ids from bit 60 on */
    int32_t ids[ND_WORD_SHORT_IDS];
} nd_word_short;

typedef struct nd_word_long {
    uint8_t size; /* 0: empty */
    uint8_t count;
    uint8_t key[ND_WORD_LONG_BYTES];
    int32_t ids[ND_WORD_LONG_IDS];
} nd_word_long;

typedef struct nd_word_cache {
    nd_word_short *shorts;         /* [short_sets][ND_WORD_WAYS] */
    nd_word_long *longs;           /* [long_slots] */
    size_t short_sets, long_slots; /* powers of two, or 0 */
    int short_shift;               /* from a hash to its set */
} nd_word_cache;

/* The place of a word. */
typedef struct nd_word_place {
    uint64_t low, high; /* its key; the number of ids is 0 */
    nd_word_short *set; /* without a place for short words: one that is always empty */
} nd_word_place;

/* `bytes`: an upper limit; 0: nothing is kept. To be finished after a failure too. */
nd_status nd_word_cache_init(nd_word_cache *cache, size_t bytes);
void nd_word_cache_fini(nd_word_cache *cache);

extern nd_word_short nd_word_no_set[ND_WORD_WAYS]; /* never written */

/* The place of a word of `size` > 0 bytes, of which `left` >= size can be read. The place is
 * fetched into the CPU's cache meanwhile. */
static inline nd_word_place nd_word_cache_place(const nd_word_cache *cache, const uint8_t *word,
                                                size_t size, size_t left)
{
    static const uint8_t mask[32] = {255, 255, 255, 255, 255, 255, 255, 255,
                                     255, 255, 255, 255, 255, 255, 255, 255};
    uint64_t key[2] = {0}, keep[2];
    if (size > ND_WORD_SHORT_BYTES || cache->short_sets == 0) {
        return (nd_word_place){.high = ND_WORD_KEY_BITS, .set = nd_word_no_set};
    }
    if (left < sizeof key) {
        memcpy(key, word, size);
    } else {
        memcpy(key, word, sizeof key);
        memcpy(keep, mask + sizeof key - size, sizeof keep);
        key[0] &= keep[0];
        key[1] &= keep[1];
    }
    /* Odd multipliers: the high bits of each product depend on all bits of its key. */
    uint64_t hash = (key[0] * 0x9e3779b97f4a7c15u) ^ (key[1] * 0xd6e8feb86659fd93u);
    nd_word_short *set = &cache->shorts[ND_WORD_WAYS * (hash >> cache->short_shift)];
    __builtin_prefetch(set);
    return (nd_word_place){key[0], key[1] | (uint64_t)size << ND_WORD_SIZE_SHIFT, set};
}

static inline bool nd_word_slot_has(const nd_word_short *slot, nd_word_place place)
{
    return ((slot->low ^ place.low) | ((slot->high ^ place.high) & ND_WORD_KEY_BITS)) == 0;
}

/* The slot that has the ids of a short word, or NULL. */
static inline const nd_word_short *nd_word_cache_short(nd_word_place place)
{
    const nd_word_short *slot = place.set + !nd_word_slot_has(place.set, place);
    return nd_word_slot_has(slot, place) ? slot : NULL;
}

static inline size_t nd_word_short_count(const nd_word_short *slot)
{
    return (size_t)(slot->high >> ND_WORD_COUNT_SHIFT);
}

/* The ids of a word that nd_word_cache_short does not have; NULL when it is not kept. They stay
 * until the next nd_word_cache_put. */
const int32_t *nd_word_cache_find(const nd_word_cache *cache, nd_word_place place,
                                  const uint8_t *word, size_t size, size_t *count);
/* Keeps the ids of a word, if it is not too long. */
void nd_word_cache_put(nd_word_cache *cache, nd_word_place place, const uint8_t *word, size_t size,
                       const int32_t *ids, size_t count);

#endif
