// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_VOCAB_H
#define ND_TEXT_VOCAB_H
/*
 * The pieces of a BPE model and their ids. Filled when a file is read, then constant.
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

/* Room for this number of pieces, and no more. */
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

#endif
