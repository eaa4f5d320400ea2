// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_VOCAB_H
#define ND_TEXT_VOCAB_H
/*
 * The pieces of a BPE model and their ids, and its merges. Filled when a file is read, then
 * constant.
 *
 * A piece has a text, as the file writes it, and bytes, what it stands for. They differ only in a
 * byte-level vocabulary, whose files write each byte as a printable character: 188 bytes as
 * themselves, the others as U+0100 to U+0143.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "trainer/text/buffer.h"

/* A greatest id far beyond every known vocabulary; it bounds the table of ids. */
enum { ND_VOCAB_IDS_MAX = 1 << 22 };

typedef struct nd_token_piece {
    uint32_t text, text_size; /* place in the arena; text 0: no piece has this id */
    uint32_t bytes, bytes_size;
    uint32_t shown, shown_size; /* what decoding begins with */
    bool rewritten;             /* an added token whose shown text is not its own */
} nd_token_piece;

/* The tag, half of a key's hash, tells most pieces apart without a look at their texts. */
typedef struct nd_vocab_slot {
    uint32_t tag, size, at; /* the key's place in the arena; 0: an empty slot */
    int32_t id;
} nd_vocab_slot;

typedef struct nd_vocab {
    bool byte_level;
    nd_token_piece *pieces; /* [size] */
    int32_t size;           /* greatest id + 1 */
    size_t pieces_room;
    nd_bytes arena;
    nd_vocab_slot *by_text;  /* [slots]: all pieces */
    nd_vocab_slot *by_bytes; /* [slots]: those that the model may produce */
    uint32_t slots;          /* a power of two */
} nd_vocab;

/* The character that stands for a byte in a byte-level file. */
uint32_t nd_byte_level_code(uint8_t byte);

/* Room for this number of pieces, and no more. To be finished after a failure too. */
nd_status nd_vocab_init(nd_vocab *vocab, size_t pieces, bool byte_level);
void nd_vocab_fini(nd_vocab *vocab);
/* A piece of the model, or else an added token, which only nd_vocab_find sees. Neither its id nor
 * its text may be there. */
nd_status nd_vocab_add(nd_vocab *vocab, int32_t id, const char *text, size_t size, bool model);
/* Decoding this added token begins with another text. `text` lies outside of the vocabulary. */
nd_status nd_vocab_rewrite(nd_vocab *vocab, int32_t id, const uint8_t *text, size_t size);
/* -1: there is none. */
int32_t nd_vocab_find(const nd_vocab *vocab, const void *text, size_t size);
int32_t nd_vocab_find_bytes(const nd_vocab *vocab, const void *bytes, size_t size);
/* Finds in two steps: the first fetches into the CPU's cache what the second reads. */
uint64_t nd_vocab_ask_bytes(const nd_vocab *vocab, const void *bytes, size_t size);
int32_t nd_vocab_answer_bytes(const nd_vocab *vocab, const void *bytes, size_t size,
                              uint64_t asked);

/* NULL when no piece has this id. */
const nd_token_piece *nd_vocab_piece(const nd_vocab *vocab, int32_t id);
static inline const uint8_t *nd_vocab_text(const nd_vocab *vocab, const nd_token_piece *piece)
{
    return vocab->arena.data + piece->text;
}
static inline const uint8_t *nd_vocab_shown(const nd_vocab *vocab, const nd_token_piece *piece)
{
    return vocab->arena.data + piece->shown;
}

/*
 * The merges of the model: what a pair of pieces makes.
 *
 * Most pairs are not merged, and the table is larger than a CPU's cache. Two others are smaller: a
 * bit for the hash of each pair, and what pairs of 256 ids make, mostly those of single characters.
 * A caller with several pairs to look up asks for all, then fetches for all, then reads the
 * answers: each step fetches into the CPU's cache what the next one reads.
 */

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

/* Room for this number of merges, at most ND_MERGES_RANK_MAX. `first`: the first of the ids whose
 * pairs are looked up most. To be finished after a failure too. */
nd_status nd_merges_init(nd_merges *merges, size_t count, int32_t first);
void nd_merges_fini(nd_merges *merges);
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

/* The slot of a pair that is not among the first ids, or the empty one where it belongs. */
static inline nd_merge *nd_merges_place(const nd_merges *merges, const nd_pair *pair)
{
    uint32_t slot = nd_merges_slot(merges, pair->hash);
    while (merges->table[slot].left >= 0 &&
           (merges->table[slot].left != pair->left || merges->table[slot].right != pair->right)) {
        slot = (slot + 1) & (merges->slots - 1);
    }
    return &merges->table[slot];
}

static inline nd_merged nd_merges_answer(const nd_merges *merges, const nd_pair *pair)
{
    const nd_merged none = {.rank = ND_MERGE_NONE, .id = -1};
    if (pair->first >= 0 || pair->unlikely) {
        return pair->unlikely ? none : merges->first_pairs[pair->first];
    }
    const nd_merge *merge = nd_merges_place(merges, pair);
    return merge->left >= 0 ? (nd_merged){merge->rank, merge->id} : none;
}

/* One pair alone. */
static inline nd_merged nd_merges_find(const nd_merges *merges, int32_t left, int32_t right)
{
    nd_pair pair = nd_merges_ask(merges, left, right);
    nd_merges_fetch(merges, &pair);
    return nd_merges_answer(merges, &pair);
}

#endif
