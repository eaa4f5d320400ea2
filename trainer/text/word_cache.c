// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/word_cache.h"

#include <xxhash.h>

#include "trainer/text/buffer.h"

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
    nd_status status = ND_PAGES_MAP(ND_WORD_WAYS * cache->short_sets, &cache->shorts);
    if (status == ND_OK) {
        status = ND_PAGES_MAP(cache->long_slots, &cache->longs);
    }
    if (status != ND_OK) {
        nd_word_cache_fini(cache);
    }
    return status;
}

void nd_word_cache_fini(nd_word_cache *cache)
{
    ND_PAGES_UNMAP(cache->shorts, ND_WORD_WAYS * cache->short_sets);
    ND_PAGES_UNMAP(cache->longs, cache->long_slots);
    *cache = (nd_word_cache){0};
}

static nd_word_long *long_slot(const nd_word_cache *cache, const uint8_t *word, size_t size)
{
    return &cache->longs[XXH3_64bits(word, size) & (cache->long_slots - 1)];
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
static nd_word_short *make_room(nd_word_short *set)
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
        nd_word_short *slot = make_room(place.set);
        *slot =
            (nd_word_short){place.low, place.high | (uint64_t)count << ND_WORD_COUNT_SHIFT, {0}};
        memcpy(slot->ids, ids, count * sizeof *ids);
        return;
    }
    if (cache->long_slots == 0 || size > ND_WORD_LONG_BYTES || count > ND_WORD_LONG_IDS) {
        return;
    }
    if (place.set != nd_word_no_set && !is_long(cache, place, size)) {
        *make_room(place.set) = (nd_word_short){place.low, place.high | ND_WORD_ELSEWHERE, {0}};
    }
    nd_word_long *slot = long_slot(cache, word, size);
    slot->size = (uint8_t)size;
    slot->count = (uint8_t)count;
    memcpy(slot->key, word, size);
    memcpy(slot->ids, ids, count * sizeof *ids);
}
