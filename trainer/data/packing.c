// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks of whole rows.
 *
 * Pieces, which are rows or parts of a row that is longer than a block, are laid one after another;
 * one that does not fit into what is left of a block begins the next. So their order decides how
 * much is left: next comes the longest piece that still fits ("first fit decreasing"), and among
 * pieces of one length the first of the file. If the order of the file needs fewer blocks, it is
 * taken. Both follow from the lengths alone.
 */
#include <stdlib.h>

#include "runtime/base/math.h"
#include "runtime/base/rng.h"
#include "trainer/data/formats.h"

typedef struct packing {
    const nd_dataset *dataset;
    void (*take)(struct packing *p, const nd_piece *piece); /* of each piece in the file's order */
    int64_t rows, long_rows;                                /* that were walked over */
    int64_t most;                                           /* tokens of a block */
    /* What the first walk found, for which there is room: the file may change behind it. */
    int64_t most_pieces, most_blocks;
    bool changed;
    /* What is laid. */
    int64_t pieces, blocks, room, full, kept; /* full: blocks without room */
    int64_t *firsts, *begins;                 /* as in nd_documents; NULL: only counted */
    /* By length, 0 to `most`: how many pieces are not laid yet; where they end in `sorted`; a
     * shorter length, with none left in between; owned. */
    int64_t *left, *ends, *shorter;
    int64_t *sorted; /* the first token of each piece, by length and then by place; owned */
} packing;

/* Of the tokens of a row how many blocks hold, from the first one: none of a row that is left out,
 * and not one that would be alone and so have no label. */
static int64_t kept_of(const nd_dataset *dataset, int64_t count)
{
    const int64_t most = dataset->sequence + 1;
    return dataset->documents->drops && count > most ? 0 : count - (count % most == 1);
}

static nd_status walk_pieces(void *context)
{
    packing *p = context;
    p->rows = p->long_rows = 0;
    for (uint64_t i = 0; i < p->dataset->documents->borders; i++) {
        nd_piece piece;
        ND_TRY(nd_border_row(p->dataset, i, &piece));
        int64_t left = kept_of(p->dataset, piece.count);
        p->rows += left > 0;
        p->long_rows += piece.count > p->most;
        for (; left > 0; left -= p->most, piece.first += p->most) {
            piece.count = nd_min(left, p->most);
            p->take(p, &piece);
        }
    }
    return ND_OK;
}

static nd_status each_piece(packing *p, void (*take)(packing *p, const nd_piece *piece))
{
    p->take = take;
    return nd_fs_map_guard(&p->dataset->map, p->dataset->path, walk_pieces, p);
}

static void lay(packing *p, const nd_piece *piece)
{
    if (piece->count > p->room) {
        if (p->begins) {
            p->begins[p->blocks] = p->pieces;
        }
        p->blocks++;
        p->room = p->most;
    }
    if (p->firsts) {
        p->firsts[p->pieces] = piece->first;
    }
    p->pieces++;
    p->room -= piece->count;
    p->full += p->room == 0;
    p->kept += piece->count;
}

static void count(packing *p, const nd_piece *piece)
{
    p->left[piece->count]++;
    lay(p, piece);
}

static void sort(packing *p, const nd_piece *piece)
{
    const int64_t at = p->ends[piece->count]++;
    if (at < p->most_pieces) {
        p->sorted[at] = piece->first;
    }
}

static void lay_again(packing *p, const nd_piece *piece)
{
    p->changed |= p->pieces == p->most_pieces || p->blocks > p->most_blocks;
    if (!p->changed) {
        lay(p, piece);
    }
}

static nd_status fail_changed(const nd_dataset *dataset)
{
    return nd_fail(ND_ERR_DATA,
                   "the boundaries of \"%s\" changed since it was opened; leave the files alone "
                   "during a run",
                   dataset->path);
}

static void begin_laying(packing *p)
{
    p->pieces = p->blocks = p->room = p->full = p->kept = 0;
}

/* The length of the longest pieces that are left and fit; 0: there are none. */
static int64_t longest(packing *p, int64_t room)
{
    while (room > 0 && p->left[room] == 0) {
        const int64_t below = p->shorter[room];
        p->shorter[room] = p->left[below] > 0 ? below : p->shorter[below];
        room = below;
    }
    return room;
}

/* False, and something is left, if that takes more blocks than `most_blocks`. */
static bool lay_longest_first(packing *p, int64_t most_blocks)
{
    while (p->pieces < p->most_pieces && p->blocks <= most_blocks) {
        const int64_t fits = longest(p, p->room);
        const int64_t length = fits > 0 ? fits : longest(p, p->most);
        lay(p, &(nd_piece){.first = p->sorted[p->ends[length] - p->left[length]], .count = length});
        p->left[length]--;
    }
    return p->blocks <= most_blocks;
}

static nd_status fail_empty(const packing *p)
{
    const nd_dataset *dataset = p->dataset;
    return nd_fail(ND_ERR_DATA, "no row of \"%s\" has 2 to %lld tokens%s", dataset->path,
                   (long long)dataset->sequence + 1,
                   p->long_rows > 0
                       ? ", and data.long_rows is drop; raise train.sequence_length, or set "
                         "data.long_rows: cut"
                       : "; a row needs an input and the label after it");
}

/* Once all pieces are counted, in the order of the file. */
static nd_status make_lists(packing *p, nd_documents *d)
{
    const int64_t pieces = p->pieces, blocks = p->blocks;
    p->most_pieces = pieces;
    p->most_blocks = blocks;
    ND_TRY(ND_ALLOC(pieces, &p->sorted));
    ND_TRY(ND_ALLOC(pieces, &d->firsts));
    ND_TRY(ND_ALLOC(blocks + 1, &d->begins));
    p->firsts = d->firsts;
    p->begins = d->begins;
    for (int64_t length = 1; length <= p->most; length++) {
        p->shorter[length] = length - 1;
        p->ends[length] = p->ends[length - 1] + p->left[length - 1];
    }
    ND_TRY(each_piece(p, sort));
    for (int64_t length = 1, end = 0; length <= p->most; length++) {
        end += p->left[length];
        p->changed |= p->ends[length] != end;
    }
    begin_laying(p);
    if (!p->changed && !lay_longest_first(p, blocks)) {
        begin_laying(p);
        ND_TRY(each_piece(p, lay_again));
        p->changed |= p->pieces != pieces || p->blocks != blocks;
    }
    if (p->changed) {
        return fail_changed(p->dataset);
    }
    d->begins[p->blocks] = p->pieces;
    return ND_OK;
}

nd_status nd_rows_pack(nd_dataset *dataset, bool drop)
{
    nd_documents *d = dataset->documents;
    packing p = {.dataset = dataset, .most = dataset->sequence + 1};
    nd_status status = ND_OK;
    d->drops = drop;
    ND_TRY_OUT(ND_ALLOC(p.most + 1, &p.left));
    ND_TRY_OUT(ND_ALLOC(p.most + 1, &p.ends));
    ND_TRY_OUT(ND_ALLOC(p.most + 1, &p.shorter));
    ND_TRY_OUT(each_piece(&p, count));
    ND_TRY_OUT(p.blocks > 0 ? make_lists(&p, d) : fail_empty(&p));
    dataset->blocks = p.blocks;
    d->rows = p.rows;
    d->long_rows = p.long_rows;
    d->kept = p.kept;
    d->inputs = p.kept - p.full;
out:
    free(p.left);
    free(p.ends);
    free(p.shorter);
    free(p.sorted);
    return status;
}

/* Blocks are numbered in a drawn order: of a validation that reads a part of them, the first ones
 * are not those of the longest rows. */
static nd_status next_of_rows(const nd_dataset *dataset, int64_t index, nd_piece *piece)
{
    const nd_documents *d = dataset->documents;
    const uint64_t block =
        nd_rng_permute(0, UINT64_MAX, (uint64_t)dataset->blocks, (uint64_t)index);
    const int64_t i = d->begins[block] + piece->number++;
    int64_t end;
    piece->count = 0;
    if (i >= d->begins[block + 1]) {
        return ND_OK;
    }
    piece->first = d->firsts[i];
    ND_TRY(nd_border_after(dataset, piece->first, &end));
    piece->count = nd_min(end - piece->first, dataset->sequence + 1 - piece->place);
    return piece->count > 1 ? ND_OK : fail_changed(dataset);
}

nd_status nd_block_next(const nd_dataset *dataset, int64_t index, nd_piece *piece)
{
    const int64_t length = dataset->sequence + 1;
    piece->place += piece->count;
    if (dataset->documents && dataset->documents->firsts) {
        return next_of_rows(dataset, index, piece);
    }
    piece->first = index * length;
    piece->count = piece->number++ > 0 ? 0 : nd_min(dataset->tokens - piece->first, length);
    return ND_OK;
}

/* Adds the tokens of the span that blocks hold. *row: the first one that may have some. */
static nd_status count_kept(const nd_dataset *dataset, const nd_token_span *s, uint64_t *row,
                            int64_t *sum)
{
    const int64_t begin = (int64_t)s->begin, end = (int64_t)s->end;
    for (; *row < dataset->documents->borders; ++*row) {
        nd_piece r;
        ND_TRY(nd_border_row(dataset, *row, &r));
        const int64_t kept = r.first + kept_of(dataset, r.count);
        *sum += nd_max(nd_min(end, kept) - nd_max(begin, r.first), 0);
        if (r.first + r.count >= end) {
            break;
        }
    }
    return ND_OK;
}

nd_status nd_rows_ignored(const nd_dataset *dataset, int64_t *tokens)
{
    const nd_documents *d = dataset->documents;
    const bool all = !d || !d->firsts || d->kept == dataset->tokens;
    int64_t sum = 0;
    uint64_t row = 0;
    for (uint64_t i = 0; i < dataset->spans; i++) {
        nd_token_span s;
        ND_TRY(nd_span_at(dataset, i, &s));
        sum += all ? (int64_t)(s.end - s.begin) : 0;
        ND_TRY(all ? ND_OK : count_kept(dataset, &s, &row, &sum));
    }
    *tokens = sum;
    return ND_OK;
}
