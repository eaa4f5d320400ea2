// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/merges.h"

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
