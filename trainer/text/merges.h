// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_MERGES_H
#define ND_TEXT_MERGES_H
/*
 * The merges of a BPE model: what a pair of pieces makes. Filled when a file is read, then
 * constant.
 *
 * Most pairs are not merged, and the table is larger than a CPU's cache. Two others are smaller: a
 * bit for the hash of each pair, and what pairs of 256 ids make, mostly those of single characters.
 * A caller with several pairs to look up asks for all, then fetches for all, then reads the
 * answers: each step fetches into the CPU's cache what the next one reads.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

enum { ND_MERGES_FIRST_IDS = 256, ND_MERGES_RANK_MAX = 1 << 22, ND_MERGE_NONE = INT32_MAX };

typedef struct nd_merge {
    int32_t left, right;
    int32_t rank; /* lower is merged earlier */
    int32_t id;   /* the piece they make */
} nd_merge;

/* The piece that a pair of pieces makes, and the rank of the merge. */
typedef struct nd_merged {
    int32_t rank; /* ND_MERGE_NONE: the pair is not merged */
    int32_t id;
} nd_merged;

typedef struct nd_merges {
    bool any;
    nd_merge *table; /* [slots]; left -1: an empty slot */
    uint32_t slots;  /* a power of two */
    uint64_t *bits;  /* [words], a power of two */
    uint32_t words;
    nd_merged *first_pairs; /* [ND_MERGES_FIRST_IDS squared]: of the ids from first_id on */
    int32_t first_id;
} nd_merges;

/* Room for this number of merges, at most ND_MERGES_RANK_MAX. */
nd_status nd_merges_init(nd_merges *merges, size_t count);
void nd_merges_fini(nd_merges *merges);
/* The first of the ids whose pairs are looked up most; called before any merge is added. */
void nd_merges_set_first(nd_merges *merges, int32_t id);
/* A pair that was there takes the later rank. */
void nd_merges_add(nd_merges *merges, nd_merge merge);

/* A pair that is looked up. */
typedef struct nd_pair {
    int32_t left, right;
    int32_t first; /* its place in first_pairs, or -1 */
    bool unlikely; /* its bit is not set */
    uint64_t hash;
} nd_pair;

static inline uint64_t nd_merges_hash(int32_t left, int32_t right)
{
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return key * 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio: the high bits depend on all */
}

static inline uint32_t nd_merges_bit(const nd_merges *merges, uint64_t hash)
{
    return (uint32_t)(hash >> 32) & (merges->words * 64 - 1);
}

static inline uint32_t nd_merges_slot(const nd_merges *merges, uint64_t hash)
{
    return (uint32_t)(hash >> 32) & (merges->slots - 1);
}

static inline nd_pair nd_merges_ask(const nd_merges *merges, int32_t left, int32_t right)
{
    const uint32_t a = (uint32_t)left - (uint32_t)merges->first_id;
    const uint32_t b = (uint32_t)right - (uint32_t)merges->first_id;
    nd_pair pair = {.left = left, .right = right, .first = -1};
    if ((a | b) < ND_MERGES_FIRST_IDS) {
        pair.first = (int32_t)(a * ND_MERGES_FIRST_IDS + b);
        __builtin_prefetch(&merges->first_pairs[pair.first]);
    } else {
        pair.hash = nd_merges_hash(left, right);
        __builtin_prefetch(&merges->bits[nd_merges_bit(merges, pair.hash) / 64]);
    }
    return pair;
}

static inline void nd_merges_fetch(const nd_merges *merges, nd_pair *pair)
{
    if (pair->first < 0) {
        const uint32_t bit = nd_merges_bit(merges, pair->hash);
        pair->unlikely = !(merges->bits[bit / 64] >> (bit % 64) & 1);
        if (!pair->unlikely) {
            __builtin_prefetch(&merges->table[nd_merges_slot(merges, pair->hash)]);
        }
    }
}

static inline nd_merged nd_merges_answer(const nd_merges *merges, const nd_pair *pair)
{
    const nd_merged none = {.rank = ND_MERGE_NONE, .id = -1};
    if (pair->first >= 0 || pair->unlikely) {
        return pair->unlikely ? none : merges->first_pairs[pair->first];
    }
    uint32_t slot = nd_merges_slot(merges, pair->hash);
    while (merges->table[slot].left >= 0 &&
           (merges->table[slot].left != pair->left || merges->table[slot].right != pair->right)) {
        slot = (slot + 1) & (merges->slots - 1);
    }
    const nd_merge *merge = &merges->table[slot];
    return merge->left >= 0 ? (nd_merged){merge->rank, merge->id} : none;
}

/* One pair alone. */
static inline nd_merged nd_merges_find(const nd_merges *merges, int32_t left, int32_t right)
{
    nd_pair pair = nd_merges_ask(merges, left, right);
    nd_merges_fetch(merges, &pair);
    return nd_merges_answer(merges, &pair);
}

/*
 * The merges of several short words at once. Each word is merged as if it were alone: the pair with
 * the lowest rank goes first, the leftmost among equals. But the words take turns, so that the
 * tables of merges, which are larger than a CPU's cache, are read ahead for all of them.
 */
enum { ND_SHORT_WORD = 32 }; /* characters at most */

/* A merged pair keeps its left place and loses its right one. */
typedef struct nd_short_word {
    int32_t ids[ND_SHORT_WORD];   /* by place; when all is merged, the first `count` */
    int32_t pairs[ND_SHORT_WORD]; /* rank and place of the pair that begins at a place, or none */
    int32_t made[ND_SHORT_WORD];  /* the piece that the pair makes */
    uint32_t places;              /* a bit for each place that is left */
    int count;                    /* ids */
} nd_short_word;

/* Merges the ids of each word in place. */
void nd_short_words_merge(const nd_merges *merges, nd_short_word *words, int count);

#endif
