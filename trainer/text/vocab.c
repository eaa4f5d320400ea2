// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/vocab.h"

#include <xxhash.h>

#include "trainer/text/unicode.h"

enum { SLOTS_MIN = 16 };

/* Bytes that a byte-level file writes as U+0100 and above: 0-32, 127-160, 173. */
enum { MOVED_BASE = 256, MOVED_LOW = 33, MOVED_HIGH = 67, MOVED_COUNT = 68, SOFT_HYPHEN = 173 };

uint32_t nd_byte_level_code(uint8_t byte)
{
    if (byte < MOVED_LOW) {
        return MOVED_BASE + byte;
    }
    if (byte >= 127 && byte <= 160) {
        return MOVED_BASE + MOVED_LOW + (byte - 127u);
    }
    return byte == SOFT_HYPHEN ? MOVED_BASE + MOVED_HIGH : byte;
}

/* The byte that a character stands for, or -1. */
static int byte_of_code(uint32_t code)
{
    if (code >= MOVED_BASE + MOVED_COUNT) {
        return -1;
    }
    if (code >= MOVED_BASE) {
        int n = (int)code - MOVED_BASE;
        return n < MOVED_LOW ? n : n < MOVED_HIGH ? n - MOVED_LOW + 127 : SOFT_HYPHEN;
    }
    return nd_byte_level_code((uint8_t)code) == code ? (int)code : -1;
}

static uint32_t slots_for(size_t count)
{
    uint32_t slots = SLOTS_MIN;
    while (slots < 2 * count) {
        slots *= 2;
    }
    return slots;
}

nd_status nd_vocab_init(nd_vocab *vocab, size_t pieces, size_t merges, bool byte_level)
{
    *vocab = (nd_vocab){.byte_level = byte_level};
    if (pieces > ND_VOCAB_IDS_MAX || merges > ND_VOCAB_IDS_MAX) {
        return nd_fail(ND_ERR_DATA, "%zu pieces and %zu merges are more than %d", pieces, merges,
                       ND_VOCAB_IDS_MAX);
    }
    vocab->slots = slots_for(pieces);
    vocab->merge_slots = slots_for(merges);
    nd_status status = ND_ALLOC(vocab->slots, &vocab->by_text);
    if (status == ND_OK) {
        status = ND_ALLOC(vocab->slots, &vocab->by_bytes);
    }
    if (status == ND_OK) {
        status = ND_ALLOC(vocab->merge_slots, &vocab->merges);
    }
    if (status == ND_OK) {
        const uint32_t bits = vocab->merge_slots * 8;
        vocab->merge_bit_mask = bits - 1;
        status = ND_ALLOC(bits / 64, &vocab->merge_bits);
    }
    if (status == ND_OK) {
        status = ND_ALLOC(ND_VOCAB_FIRST_IDS * ND_VOCAB_FIRST_IDS, &vocab->first_pairs);
    }
    if (status == ND_OK) {
        status = nd_bytes_add(&vocab->arena, "", 1); /* so that no piece lies at 0 */
    }
    if (status != ND_OK) {
        nd_vocab_fini(vocab);
        return status;
    }
    for (uint32_t i = 0; i < vocab->slots; i++) {
        vocab->by_text[i] = vocab->by_bytes[i] = -1;
    }
    for (uint32_t i = 0; i < vocab->merge_slots; i++) {
        vocab->merges[i].left = -1;
    }
    return ND_OK;
}

void nd_vocab_fini(nd_vocab *vocab)
{
    free(vocab->pieces);
    free(vocab->arena.data);
    free(vocab->by_text);
    free(vocab->by_bytes);
    free(vocab->merges);
    free(vocab->merge_bits);
    free(vocab->first_pairs);
    *vocab = (nd_vocab){0};
}

static bool is_same(const nd_vocab *vocab, uint32_t at, uint32_t bytes, const void *key,
                    size_t size)
{
    return bytes == size && memcmp(vocab->arena.data + at, key, size) == 0;
}

/* The slot that has the key, or the empty one where it belongs. */
static uint32_t text_slot(const nd_vocab *vocab, const void *text, size_t size)
{
    uint32_t slot = (uint32_t)XXH3_64bits(text, size) & (vocab->slots - 1);
    for (;; slot = (slot + 1) & (vocab->slots - 1)) {
        int32_t id = vocab->by_text[slot];
        if (id < 0 ||
            is_same(vocab, vocab->pieces[id].text, vocab->pieces[id].text_size, text, size)) {
            return slot;
        }
    }
}

static uint32_t bytes_slot(const nd_vocab *vocab, const void *bytes, size_t size)
{
    uint32_t slot = (uint32_t)XXH3_64bits(bytes, size) & (vocab->slots - 1);
    for (;; slot = (slot + 1) & (vocab->slots - 1)) {
        int32_t id = vocab->by_bytes[slot];
        if (id < 0 ||
            is_same(vocab, vocab->pieces[id].bytes, vocab->pieces[id].bytes_size, bytes, size)) {
            return slot;
        }
    }
}

int32_t nd_vocab_find(const nd_vocab *vocab, const void *text, size_t size)
{
    return vocab->by_text[text_slot(vocab, text, size)];
}

int32_t nd_vocab_find_bytes(const nd_vocab *vocab, const void *bytes, size_t size)
{
    return vocab->by_bytes[bytes_slot(vocab, bytes, size)];
}

const nd_token_piece *nd_vocab_piece(const nd_vocab *vocab, int32_t id)
{
    return id >= 0 && id < vocab->size && vocab->pieces[id].text ? &vocab->pieces[id] : NULL;
}

/* Appends the bytes that a byte-level text stands for; false when a character stands for none. */
static nd_status add_byte_level(nd_bytes *arena, const char *text, size_t size, bool *mapped)
{
    const size_t before = arena->count;
    const uint8_t *p = (const uint8_t *)text, *end = p + size;
    *mapped = true;
    while (p < end && *mapped) {
        nd_char c = nd_char_at(p);
        int byte = byte_of_code(c.code);
        uint8_t one = (uint8_t)byte;
        *mapped = byte >= 0;
        p += c.bytes;
        if (*mapped) {
            ND_TRY(nd_bytes_add(arena, &one, 1));
        }
    }
    if (!*mapped) {
        arena->count = before;
    }
    return ND_OK;
}

static nd_status reserve_id(nd_vocab *vocab, int32_t id)
{
    if (id < vocab->size) {
        return ND_OK;
    }
    void *place = vocab->pieces;
    nd_status status =
        nd_array_reserve(&place, &vocab->pieces_room, (size_t)id + 1, sizeof(nd_token_piece));
    vocab->pieces = place;
    if (status == ND_OK) {
        memset(vocab->pieces + vocab->size, 0,
               ((size_t)id + 1 - (size_t)vocab->size) * sizeof(nd_token_piece));
        vocab->size = id + 1;
    }
    return status;
}

nd_status nd_vocab_add(nd_vocab *vocab, int32_t id, const char *text, size_t size, bool model)
{
    ND_TRY(reserve_id(vocab, id));
    uint32_t slot = text_slot(vocab, text, size);
    if (vocab->by_text[slot] >= 0 || vocab->pieces[id].text) {
        return nd_fail(ND_ERR_DATA, "the piece \"%.*s\" or its id %d is there twice",
                       (int)(size < 64 ? size : 64), text, id);
    }
    nd_token_piece piece = {.text = (uint32_t)vocab->arena.count, .text_size = (uint32_t)size};
    ND_TRY(nd_bytes_add(&vocab->arena, text, size));
    ND_TRY(nd_bytes_add(&vocab->arena, "", 1));
    piece.bytes = piece.text;
    piece.bytes_size = piece.text_size;
    bool mapped = true;
    if (vocab->byte_level) {
        uint32_t at = (uint32_t)vocab->arena.count;
        ND_TRY(add_byte_level(&vocab->arena, text, size, &mapped));
        if (mapped) {
            piece.bytes = at;
            piece.bytes_size = (uint32_t)(vocab->arena.count - at);
        }
    }
    piece.shown = piece.bytes;
    piece.shown_size = piece.bytes_size;
    vocab->pieces[id] = piece;
    vocab->by_text[slot] = id;
    if (model && mapped) {
        slot = bytes_slot(vocab, vocab->arena.data + piece.bytes, piece.bytes_size);
        vocab->by_bytes[slot] = id;
    }
    return ND_OK;
}

nd_status nd_vocab_rewrite(nd_vocab *vocab, int32_t id, const uint8_t *text, size_t size)
{
    uint32_t at = (uint32_t)vocab->arena.count;
    bool mapped = false;
    if (vocab->byte_level) {
        ND_TRY(add_byte_level(&vocab->arena, (const char *)text, size, &mapped));
    }
    if (!mapped) {
        ND_TRY(nd_bytes_add(&vocab->arena, text, size));
    }
    nd_token_piece *piece = &vocab->pieces[id];
    piece->shown = at;
    piece->shown_size = (uint32_t)(vocab->arena.count - at);
    piece->rewritten = true;
    return ND_OK;
}

static uint64_t pair_hash(int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return key * 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio: the high bits depend on all */
}

static uint32_t merge_slot(const nd_vocab *vocab, uint64_t hash, int32_t left, int32_t right)
{
    uint32_t slot = (uint32_t)(hash >> 32) & (vocab->merge_slots - 1);
    while (vocab->merges[slot].left >= 0 &&
           (vocab->merges[slot].left != left || vocab->merges[slot].right != right)) {
        slot = (slot + 1) & (vocab->merge_slots - 1);
    }
    return slot;
}

static bool is_first_pair(int32_t left, int32_t right)
{
    return (uint32_t)(left | right) < ND_VOCAB_FIRST_IDS;
}

void nd_vocab_add_merge(nd_vocab *vocab, nd_merge merge)
{
    const uint64_t hash = pair_hash(merge.left, merge.right);
    const uint32_t bit = (uint32_t)(hash >> 32) & vocab->merge_bit_mask;
    const uint32_t slot = merge_slot(vocab, hash, merge.left, merge.right);
    vocab->merges[slot] = merge;
    vocab->has_merges = true;
    vocab->merge_bits[bit / 64] |= UINT64_C(1) << (bit % 64);
    if (is_first_pair(merge.left, merge.right)) {
        vocab->first_pairs[merge.left * ND_VOCAB_FIRST_IDS + merge.right] = (int32_t)slot + 1;
    }
}

const nd_merge *nd_vocab_merge(const nd_vocab *vocab, int32_t left, int32_t right)
{
    if (is_first_pair(left, right)) {
        int32_t slot = vocab->first_pairs[left * ND_VOCAB_FIRST_IDS + right];
        return slot > 0 ? &vocab->merges[slot - 1] : NULL;
    }
    const uint64_t hash = pair_hash(left, right);
    const uint32_t bit = (uint32_t)(hash >> 32) & vocab->merge_bit_mask;
    if (!(vocab->merge_bits[bit / 64] >> (bit % 64) & 1)) {
        return NULL;
    }
    const nd_merge *merge = &vocab->merges[merge_slot(vocab, hash, left, right)];
    return merge->left >= 0 ? merge : NULL;
}
