// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/merges.h"

#include <stdbool.h>

#include "trainer/text/buffer.h"

enum {
    SLOTS_MIN = 16,
    SLOTS_PER_WORD = 8, /* so that most pairs that are not merged have no bit */
    FIRST_PAIRS = ND_MERGES_FIRST_IDS * ND_MERGES_FIRST_IDS
};

nd_status nd_merges_init(nd_merges *merges, size_t count)
{
    *merges = (nd_merges){.slots = SLOTS_MIN};
    while (merges->slots < count + count / 3) { /* at least a quarter stays empty */
        merges->slots *= 2;
    }
    merges->words = merges->slots / SLOTS_PER_WORD;
    nd_status status = ND_PAGES_MAP((size_t)merges->slots, &merges->table);
    if (status == ND_OK) {
        status = ND_PAGES_MAP((size_t)merges->words, &merges->bits);
    }
    if (status == ND_OK) {
        status = ND_PAGES_MAP((size_t)FIRST_PAIRS, &merges->first_pairs);
    }
    if (status != ND_OK) {
        nd_merges_fini(merges);
        return status;
    }
    for (uint32_t i = 0; i < merges->slots; i++) {
        merges->table[i].left = -1;
    }
    for (int i = 0; i < FIRST_PAIRS; i++) {
        merges->first_pairs[i].rank = ND_MERGE_NONE;
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

void nd_merges_set_first(nd_merges *merges, int32_t id)
{
    merges->first_id = id;
}

void nd_merges_add(nd_merges *merges, nd_merge merge)
{
    const nd_pair pair = nd_merges_ask(merges, merge.left, merge.right);
    if (pair.first >= 0) {
        merges->first_pairs[pair.first] = (nd_merged){merge.rank, merge.id};
    } else {
        const uint32_t bit = nd_merges_bit(merges, pair.hash);
        uint32_t slot = nd_merges_slot(merges, pair.hash);
        while (merges->table[slot].left >= 0 && (merges->table[slot].left != merge.left ||
                                                 merges->table[slot].right != merge.right)) {
            slot = (slot + 1) & (merges->slots - 1);
        }
        merges->table[slot] = merge;
        merges->bits[bit / 64] |= UINT64_C(1) << (bit % 64);
    }
    merges->any = true;
}

enum { PLACE_BITS = 5, NO_PAIR = INT32_MAX };
enum { STEP = 8 }; /* the number of pairs is a multiple: vector instructions see all of them */

_Static_assert(ND_SHORT_WORD == 1 << PLACE_BITS && ND_MERGES_RANK_MAX <= NO_PAIR >> PLACE_BITS,
               "a rank and a place fit in 31 bits");

/* The words that may still have pairs, and what the last merge of each asks for. */
typedef struct turn {
    nd_short_word *word;
    int padded;    /* pairs, a multiple of STEP */
    int places[2]; /* where the pairs around the last merge begin; -1: there is none */
    nd_pair queries[2];
} turn;

static void set_pair(nd_short_word *w, int place, nd_merged merged)
{
    w->pairs[place] = merged.rank == ND_MERGE_NONE ? NO_PAIR : merged.rank << PLACE_BITS | place;
    w->made[place] = merged.id;
}

/* The place that is left behind `place`; ND_SHORT_WORD: none. */
static int place_behind(const nd_short_word *w, int place)
{
    const uint64_t later = (uint64_t)w->places >> place >> 1;
    return later ? place + 1 + __builtin_ctzll(later) : ND_SHORT_WORD;
}

/* The pair of the lowest rank, and of the lowest place among equals, or NO_PAIR. */
static int32_t best_pair(const nd_short_word *w, int padded)
{
    int32_t best = NO_PAIR;
    for (int i = 0; i < padded; i++) {
        best = w->pairs[i] < best ? w->pairs[i] : best;
    }
    return best;
}

static void begin(const nd_merges *merges, nd_short_word *w, turn *t)
{
    const int n = w->count;
    *t = (turn){.word = w, .padded = (n + STEP - 1) / STEP * STEP};
    w->places = n > 0 ? UINT32_MAX >> (ND_SHORT_WORD - n) : 0;
    for (int i = 0; i + 1 < n; i++) {
        set_pair(w, i, nd_merges_find(merges, w->ids[i], w->ids[i + 1]));
    }
    for (int i = n > 0 ? n - 1 : 0; i < t->padded; i++) {
        w->pairs[i] = NO_PAIR;
    }
}

static void ask(const nd_merges *merges, turn *t, int query, int left, int right)
{
    const nd_short_word *w = t->word;
    t->places[query] = left;
    t->queries[query] = nd_merges_ask(merges, w->ids[left], w->ids[right]);
}

/* Merges the best pair and asks for the new ones to both sides; false: there is none. */
static bool merge_best(const nd_merges *merges, turn *t)
{
    nd_short_word *w = t->word;
    const int32_t best = best_pair(w, t->padded);
    if (best == NO_PAIR) {
        return false;
    }
    const int place = best & (ND_SHORT_WORD - 1), gone = place_behind(w, place);
    const uint32_t before = w->places & ((UINT32_C(1) << place) - 1);
    w->ids[place] = w->made[place];
    w->places &= ~(UINT32_C(1) << gone);
    w->pairs[gone] = w->pairs[place] = NO_PAIR;
    const int behind = place_behind(w, place);
    t->places[0] = t->places[1] = -1;
    if (before) {
        ask(merges, t, 0, ND_SHORT_WORD - 1 - __builtin_clz(before), place);
    }
    if (behind < ND_SHORT_WORD) {
        ask(merges, t, 1, place, behind);
    }
    return true;
}

static void merge_some(const nd_merges *merges, turn *turns, int active)
{
    while (active > 0) {
        for (int i = 0; i < active;) {
            if (merge_best(merges, &turns[i])) {
                i++;
            } else {
                nd_short_word *w = turns[i].word;
                w->count = 0;
                for (uint32_t left = w->places; left; left &= left - 1) {
                    w->ids[w->count++] = w->ids[__builtin_ctz(left)];
                }
                turns[i] = turns[--active];
            }
        }
        for (int i = 0; i < 2 * active; i++) {
            turn *t = &turns[i / 2];
            if (t->places[i % 2] >= 0) {
                nd_merges_fetch(merges, &t->queries[i % 2]);
            }
        }
        for (int i = 0; i < 2 * active; i++) {
            turn *t = &turns[i / 2];
            if (t->places[i % 2] >= 0) {
                set_pair(t->word, t->places[i % 2], nd_merges_answer(merges, &t->queries[i % 2]));
            }
        }
    }
}

void nd_short_words_merge(const nd_merges *merges, nd_short_word *words, int count)
{
    enum { TURNS = 8 };
    turn turns[TURNS];
    for (int done = 0, n; done < count; done += n) {
        n = count - done < TURNS ? count - done : TURNS;
        for (int i = 0; i < n; i++) {
            begin(merges, &words[done + i], &turns[i]);
        }
        merge_some(merges, turns, n);
    }
}
