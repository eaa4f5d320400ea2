// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/vocab.h"

#include "runtime/base/hash.h"
#include "trainer/text/buffer.h"
#include "trainer/text/unicode.h"

enum {
    SLOTS_MIN = 16,
    SLOTS_PER_WORD = 8, /* of merges, so that most pairs that are not merged have no bit */
    FIRST_PAIRS = ND_MERGES_FIRST_IDS * ND_MERGES_FIRST_IDS
};

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

nd_status nd_vocab_init(nd_vocab *vocab, size_t pieces, bool byte_level)
{
    *vocab = (nd_vocab){.byte_level = byte_level, .slots = SLOTS_MIN};
    while (vocab->slots < 2 * pieces) {
        vocab->slots *= 2;
    }
    ND_TRY(ND_PAGES_MAP((size_t)vocab->slots, &vocab->by_text));
    ND_TRY(ND_PAGES_MAP((size_t)vocab->slots, &vocab->by_bytes));
    return nd_bytes_add(&vocab->arena, "", 1); /* so that no piece lies at 0 */
}

void nd_vocab_fini(nd_vocab *vocab)
{
    free(vocab->pieces);
    free(vocab->arena.data);
    ND_PAGES_UNMAP(vocab->by_text, vocab->slots);
    ND_PAGES_UNMAP(vocab->by_bytes, vocab->slots);
    *vocab = (nd_vocab){0};
}

static uint32_t tag_of(uint64_t hash)
{
    return (uint32_t)(hash >> 32);
}

/* The slot of a table that has the key, or the empty one where it belongs. */
static nd_vocab_slot *find_slot(const nd_vocab *vocab, nd_vocab_slot *table, const void *key,
                                size_t size, uint64_t hash)
{
    for (uint32_t i = (uint32_t)hash & (vocab->slots - 1);; i = (i + 1) & (vocab->slots - 1)) {
        nd_vocab_slot *slot = &table[i];
        if (slot->at == 0 || (slot->tag == tag_of(hash) && slot->size == size &&
                              memcmp(vocab->arena.data + slot->at, key, size) == 0)) {
            return slot;
        }
    }
}

static int32_t find_id(const nd_vocab *vocab, nd_vocab_slot *table, const void *key, size_t size,
                       uint64_t hash)
{
    const nd_vocab_slot *slot = find_slot(vocab, table, key, size, hash);
    return slot->at ? slot->id : -1;
}

static void set_slot(const nd_vocab *vocab, nd_vocab_slot *table, uint32_t at, uint32_t size,
                     int32_t id)
{
    const uint8_t *key = vocab->arena.data + at;
    const uint64_t hash = nd_hash_64(key, size);
    *find_slot(vocab, table, key, size, hash) = (nd_vocab_slot){tag_of(hash), size, at, id};
}

int32_t nd_vocab_find(const nd_vocab *vocab, const void *text, size_t size)
{
    return find_id(vocab, vocab->by_text, text, size, nd_hash_64(text, size));
}

int32_t nd_vocab_find_bytes(const nd_vocab *vocab, const void *bytes, size_t size)
{
    return find_id(vocab, vocab->by_bytes, bytes, size, nd_hash_64(bytes, size));
}

uint64_t nd_vocab_ask_bytes(const nd_vocab *vocab, const void *bytes, size_t size)
{
    const uint64_t hash = nd_hash_64(bytes, size);
    __builtin_prefetch(&vocab->by_bytes[(uint32_t)hash & (vocab->slots - 1)]);
    return hash;
}

int32_t nd_vocab_answer_bytes(const nd_vocab *vocab, const void *bytes, size_t size, uint64_t asked)
{
    return find_id(vocab, vocab->by_bytes, bytes, size, asked);
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
        const nd_char c = nd_char_at(p);
        const int byte = byte_of_code(c.code);
        *mapped = byte >= 0;
        p += c.bytes;
        ND_TRY(nd_bytes_add(arena, &(uint8_t){(uint8_t)byte}, *mapped));
    }
    arena->count = *mapped ? arena->count : before;
    return ND_OK;
}

static nd_status reserve_id(nd_vocab *vocab, int32_t id)
{
    if (id < vocab->size) {
        return ND_OK;
    }
    ND_TRY(ND_ARRAY_RESERVE(&vocab->pieces, &vocab->pieces_room, (size_t)id + 1));
    memset(vocab->pieces + vocab->size, 0,
           ((size_t)id + 1 - (size_t)vocab->size) * sizeof(nd_token_piece));
    vocab->size = id + 1;
    return ND_OK;
}

nd_status nd_vocab_add(nd_vocab *vocab, int32_t id, const char *text, size_t size, bool model)
{
    ND_TRY(reserve_id(vocab, id));
    if (nd_vocab_find(vocab, text, size) >= 0 || vocab->pieces[id].text) {
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
    set_slot(vocab, vocab->by_text, piece.text, piece.text_size, id);
    if (model && mapped) {
        set_slot(vocab, vocab->by_bytes, piece.bytes, piece.bytes_size, id);
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

/* Merges. */

nd_status nd_merges_init(nd_merges *merges, size_t count, int32_t first)
{
    *merges = (nd_merges){.slots = SLOTS_MIN, .first_id = first};
    while (merges->slots < count + count / 3) { /* at least a quarter stays empty */
        merges->slots *= 2;
    }
    merges->words = merges->slots / SLOTS_PER_WORD;
    ND_TRY(ND_PAGES_MAP((size_t)merges->slots, &merges->table));
    ND_TRY(ND_PAGES_MAP((size_t)merges->words, &merges->bits));
    ND_TRY(ND_PAGES_MAP((size_t)FIRST_PAIRS, &merges->first_pairs));
    for (uint32_t i = 0; i < merges->slots; i++) {
        merges->table[i].left = -1;
    }
    for (int i = 0; i < FIRST_PAIRS; i++) {
        merges->first_pairs[i] = (nd_merged){.rank = ND_MERGE_NONE, .id = -1};
    }
    return ND_OK;
}

void nd_merges_fini(nd_merges *merges)
{
    ND_PAGES_UNMAP(merges->table, merges->slots);
    ND_PAGES_UNMAP(merges->bits, merges->words);
    ND_PAGES_UNMAP(merges->first_pairs, FIRST_PAIRS);
    *merges = (nd_merges){0};
}

void nd_merges_add(nd_merges *merges, nd_merge merge)
{
    const nd_pair pair = nd_merges_ask(merges, merge.left, merge.right);
    if (pair.first >= 0) {
        merges->first_pairs[pair.first] = (nd_merged){merge.rank, merge.id};
    } else {
        const uint32_t bit = nd_merges_bit(merges, pair.hash);
        *nd_merges_place(merges, &pair) = merge;
        merges->bits[bit / 64] |= UINT64_C(1) << (bit % 64);
    }
    merges->any = true;
}
