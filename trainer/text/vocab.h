// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_VOCAB_H
#define ND_TEXT_VOCAB_H
/*
 * Pieces with their ids, and the merges of a BPE model. Filled when a file is read, then constant.
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
enum { ND_VOCAB_IDS_MAX = 1 << 22, ND_VOCAB_FIRST_IDS = 256 };
enum { ND_MERGE_NONE = INT32_MAX };

typedef struct nd_token_piece {
    uint32_t text, text_size; /* place in the arena; text 0: no piece has this id */
    uint32_t bytes, bytes_size;
    uint32_t shown, shown_size; /* what decoding begins with */
    bool rewritten;             /* an added token whose shown text is not its own */
} nd_token_piece;

typedef struct nd_merge {
    int32_t left, right;
    int32_t rank; /* lower is merged earlier */
    int32_t id;   /* the piece they make */
} nd_merge;

/* What a pair of pieces makes. */
typedef struct nd_merged {
    int32_t rank; /* ND_MERGE_NONE: the pair is not merged */
    int32_t id;
} nd_merged;

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
    nd_merge *merges;        /* [merge_slots]; left -1: an empty slot */
    uint32_t merge_slots;    /* a power of two */
    bool has_merges;
    /* Most pairs are not merged, and the table is larger than a CPU's cache. These are smaller: a
     * bit for the hash of each pair, and what pairs of the ids from first_id on make, mostly
     * those of single characters. */
    uint64_t *merge_bits; /* [merge_words], a power of two */
    uint32_t merge_words;
    nd_merged *first_pairs; /* [ND_VOCAB_FIRST_IDS squared] */
    int32_t first_id;
} nd_vocab;

/* Room for these numbers of pieces and merges, and no more. */
nd_status nd_vocab_init(nd_vocab *vocab, size_t pieces, size_t merges, bool byte_level);
void nd_vocab_fini(nd_vocab *vocab);
/* A piece of the model, or else an added token, which only nd_vocab_find sees. Neither its id nor
 * its text may be there. */
nd_status nd_vocab_add(nd_vocab *vocab, int32_t id, const char *text, size_t size, bool model);
/* Decoding this added token begins with another text. `text` lies outside of the vocabulary. */
nd_status nd_vocab_rewrite(nd_vocab *vocab, int32_t id, const uint8_t *text, size_t size);
/* The first of the ids whose pairs are looked up most; called before any merge is added. */
void nd_vocab_set_first(nd_vocab *vocab, int32_t id);
/* A pair that was there takes the later rank. */
void nd_vocab_add_merge(nd_vocab *vocab, nd_merge merge);

/* -1: there is none. */
int32_t nd_vocab_find(const nd_vocab *vocab, const void *text, size_t size);
int32_t nd_vocab_find_bytes(const nd_vocab *vocab, const void *bytes, size_t size);
nd_merged nd_vocab_merge(const nd_vocab *vocab, int32_t left, int32_t right);

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

/* The character that stands for a byte in a byte-level file. */
uint32_t nd_byte_level_code(uint8_t byte);

#endif
