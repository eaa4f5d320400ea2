// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_BPE_H
#define ND_TEXT_BPE_H
/*
 * Words to ids: looks a word up among those already merged (word_cache.h), else merges it. Short
 * words are merged several at once, a long one with a heap: O(n log n) at worst.
 * All state belongs to one thread.
 */
#include "trainer/text/parts.h"
#include "trainer/text/word_cache.h"

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

/* A place of a long word. */
typedef struct nd_bpe_symbol {
    int32_t id;             /* -1: joined to an earlier one */
    int32_t previous, next; /* -1: none */
} nd_bpe_symbol;

/* A pair that may be merged; the one with the lowest rank, then the lowest place, goes first. */
typedef struct nd_bpe_pair {
    int32_t rank, place, id;
} nd_bpe_pair;

enum { ND_BPE_WORDS = 64, ND_BPE_NEW_WORDS = 16 };

typedef struct nd_bpe_state {
    const nd_tokenizer *tokenizer;
    nd_word_cache cache;
    nd_ids word; /* the characters of the word at hand */
    nd_short_word merging[ND_BPE_NEW_WORDS];
    nd_bpe_symbol *symbols;
    nd_bpe_pair *heap;
    size_t symbols_room, heap_room, heap_count;
    int64_t dropped, unknown;  /* characters, and unknown tokens, of all words so far */
    const uint8_t *dropped_at; /* the first character that the last nd_bpe_words dropped, or NULL */
} nd_bpe_state;

nd_status nd_bpe_init(nd_bpe_state *state, const nd_tokenizer *tokenizer, size_t cache_bytes);
void nd_bpe_fini(nd_bpe_state *state);
/* Appends the ids of up to ND_BPE_WORDS words of valid UTF-8. They follow one another from `begin`
 * on and end at ends[i]; none is empty. `size`: of the whole text. */
nd_status nd_bpe_words(nd_bpe_state *state, const uint8_t *text, size_t size, size_t begin,
                       const size_t *ends, int count, nd_ids *out);

#endif
