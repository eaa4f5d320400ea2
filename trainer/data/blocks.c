// SPDX-License-Identifier: Apache-2.0
/*
 * Separate documents: which data have them, where they begin in a block, and blocks of whole rows.
 *
 * A cache and an index list borders, which are the numbers of tokens before the end of each
 * document; an id that ends a document shows others in a block itself.
 *
 * Blocks of whole rows. Pieces, which are rows or parts of a row that is longer than a block, are
 * laid one after another; one that does not fit into what is left of a block begins the next. So
 * their order decides how much is left: next comes the longest piece that still fits ("first fit
 * decreasing"), and among pieces of one length the first of the file. If the order of the file
 * needs fewer blocks, it is taken. Both follow from the lengths alone.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/rng.h"
#include "trainer/data/dataset.h"

/* Bytes of a file within which an id that ends documents must occur. */
enum { SEARCH_BYTES = 64 << 20 };

/* Ranges of tokens that the data list, in order: their rows, and spans that do not count in the
 * loss. ND_ERR_DATA: borders lie behind the last token. */

typedef struct range {
    uint64_t begin, end;
} range;

/* A mask was checked when it was opened. */
static nd_status read_numbers(const nd_dataset *dataset, const uint8_t *p, size_t bytes, void *out)
{
    const nd_token_cache *cache = dataset->cache;
    ND_TRY(cache ? nd_token_cache_check(cache, (uint64_t)(p - cache->map.data), bytes) : ND_OK);
    memcpy(out, p, bytes);
    return ND_OK;
}

static nd_status span_at(const nd_dataset *dataset, uint64_t index, range *out)
{
    return read_numbers(dataset, dataset->span_pairs + index * sizeof *out, sizeof *out, out);
}

static nd_status border_at(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    const nd_index *idx = &dataset->index;
    const uint8_t *p = dataset->cache ? dataset->cache->view.ends : idx->documents;
    ND_TRY(read_numbers(dataset, p + 8 * index, 8, token));
    if (!dataset->cache && *token < idx->sequences) { /* an index counts sequences */
        ND_TRY(read_numbers(dataset, idx->pointers + 8 * *token, 8, token));
        *token /= idx->type.width;
    } else if (!dataset->cache) {
        *token = (uint64_t)dataset->tokens;
    }
    return *token <= (uint64_t)dataset->tokens
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\": document boundary %llu is token %llu, but there are %lld: the "
                         "boundaries are damaged or belong to another file",
                         dataset->path, (unsigned long long)index, (unsigned long long)*token,
                         (long long)dataset->tokens);
}

/* From the border before, or the beginning, to border `index`. */
static nd_status row_at(const nd_dataset *dataset, uint64_t index, range *out)
{
    out->begin = 0;
    ND_TRY(index > 0 ? border_at(dataset, index - 1, &out->begin) : ND_OK);
    ND_TRY(border_at(dataset, index, &out->end));
    out->end = out->end < out->begin ? out->begin : out->end;
    return ND_OK;
}

/* The first of `count` ranges that ends behind a token; `count`: none does. */
static nd_status find_range(const nd_dataset *dataset, uint64_t count, uint64_t token,
                            nd_status (*at)(const nd_dataset *, uint64_t, range *), uint64_t *out)
{
    uint64_t low = 0, high = count;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        range r;
        ND_TRY(at(dataset, middle, &r));
        if (r.end <= token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *out = low;
    return ND_OK;
}

/* The first border behind a token, or the end. */
static nd_status border_after(const nd_dataset *dataset, int64_t token, int64_t *out)
{
    const uint64_t borders = dataset->documents->borders;
    uint64_t index, at = (uint64_t)dataset->tokens;
    ND_TRY(find_range(dataset, borders, (uint64_t)token, row_at, &index));
    ND_TRY(index < borders ? border_at(dataset, index, &at) : ND_OK);
    *out = (int64_t)at;
    return ND_OK;
}

/* Marks of a block. */

/* Tokens that stand together both in the file and in a block. */
typedef struct block_piece {
    int64_t first, count; /* tokens of the dataset; 2 to S + 1 */
    int64_t place;        /* of the first one in the block */
    int64_t number;       /* pieces of the block up to this one */
} block_piece;

static nd_status mark_spans(const nd_dataset *dataset, const block_piece *piece, int32_t *labels)
{
    const uint64_t first = (uint64_t)piece->first, end = first + (uint64_t)piece->count;
    uint64_t i;
    range s;
    ND_TRY(find_range(dataset, dataset->spans, first + 1, span_at, &i));
    for (; i < dataset->spans; i++) {
        ND_TRY(span_at(dataset, i, &s));
        if (s.begin >= end) {
            break;
        }
        for (uint64_t t = s.begin > first ? s.begin : first + 1; t < s.end && t < end; t++) {
            labels[piece->place + (int64_t)(t - first) - 1] = ND_LABEL_IGNORED;
        }
    }
    return ND_OK;
}

/* A document begins at this place of the block, or the block ends there. */
static void mark_document(const nd_block *block, int64_t sequence, int64_t place)
{
    if (place > 0) { /* no label is the first token of another document */
        block->labels[place - 1] = ND_LABEL_IGNORED;
    }
    if (block->first_keys && place < sequence) {
        block->first_keys[place] = (int32_t)place;
    }
}

/* Ignores labels of a piece that was read: those that lie in spans, and the first tokens of other
 * documents; and marks these among the first keys, which are wanted unless they are NULL. */
static nd_status mark_piece(const nd_dataset *dataset, const block_piece *piece,
                            const nd_block *block)
{
    const nd_documents *d = dataset->documents;
    const int64_t S = dataset->sequence, end = piece->place + piece->count;
    ND_TRY(mark_spans(dataset, piece, block->labels));
    if (!d) {
        return ND_OK;
    }
    for (int64_t i = piece->place; d->end_of_text >= 0 && i + 1 < end; i++) {
        if (block->inputs[i] == d->end_of_text) {
            mark_document(block, S, i + 1);
        }
    }
    int64_t place = piece->place;
    for (int64_t at = piece->first; place < end; place = piece->place + at - piece->first) {
        mark_document(block, S, place);
        ND_TRY(border_after(dataset, at, &at));
    }
    return ND_OK;
}

/* Blocks of whole rows. */

typedef struct packing {
    const nd_dataset *dataset;
    int64_t most; /* tokens of a block */
    /* Pieces in the order of the file: there is room for as many as there can be, unless the file
     * changes meanwhile. */
    int64_t pieces, room;
    int64_t *firsts; /* (room): the first token of each */
    int32_t *counts; /* (room): its tokens; owned */
    /* By length, 0 to `most`: how many pieces are not laid yet; where they end in `sorted`;
     * owned. */
    int64_t *left, *ends;
    int64_t *sorted; /* (pieces): their first tokens, by length and then by place; owned */
} packing;

/* The number of tokens of a row that blocks hold, from its first one on: none of a row that is left
 * out, and not a last one that would be alone and so have no label. */
static int64_t kept_of(const nd_dataset *dataset, const range *row)
{
    const int64_t most = dataset->sequence + 1, count = (int64_t)(row->end - row->begin);
    return dataset->documents->drops && count > most ? 0 : count - (count % most == 1);
}

static nd_status fail_changed(const nd_dataset *dataset)
{
    return nd_fail(ND_ERR_DATA,
                   "the boundaries of \"%s\" changed since it was opened; leave the files alone "
                   "during a run",
                   dataset->path);
}

static nd_status list_pieces(void *context)
{
    packing *p = context;
    nd_documents *d = p->dataset->documents;
    for (uint64_t i = 0; i < d->borders; i++) {
        range row;
        ND_TRY(row_at(p->dataset, i, &row));
        int64_t left = kept_of(p->dataset, &row);
        d->rows += left > 0;
        d->long_rows += (int64_t)(row.end - row.begin) > p->most;
        d->kept += left;
        for (int64_t first = (int64_t)row.begin; left > 0; left -= p->most, first += p->most) {
            if (p->pieces == p->room) {
                return fail_changed(p->dataset);
            }
            p->firsts[p->pieces] = first;
            p->counts[p->pieces++] = (int32_t)nd_min(left, p->most);
        }
    }
    return ND_OK;
}

static void sort_pieces(const packing *p)
{
    for (int64_t i = 0; i < p->pieces; i++) {
        p->left[p->counts[i]]++;
    }
    for (int64_t length = 1; length <= p->most; length++) {
        p->ends[length] = p->ends[length - 1] + p->left[length - 1];
    }
    for (int64_t i = 0; i < p->pieces; i++) {
        p->sorted[p->ends[p->counts[i]]++] = p->firsts[i];
    }
}

/* Lays all pieces, the longest first or in the order of the file, and returns how many blocks they
 * take. `d` has room for the blocks, and has the pieces in the order of the file; NULL: blocks are
 * only counted. */
static int64_t lay_pieces(const packing *p, bool longest_first, nd_documents *d)
{
    int64_t blocks = 0, room = 0, last = 0;
    int64_t low = 1, top = p->most; /* shorter and longer pieces are laid */
    for (int64_t length = 1; length <= p->most; length++) {
        p->left[length] = p->ends[length] - p->ends[length - 1];
    }
    for (int64_t i = 0; i < p->pieces; i++) {
        int64_t count = p->counts[i];
        if (longest_first) {
            while (low < top && p->left[low] == 0) {
                low++;
            }
            count = nd_min(last, room); /* longer ones that fit were gone before this one */
            while (count >= low && p->left[count] == 0) {
                count--;
            }
            while (count < low && p->left[top] == 0) {
                top--;
            }
            last = count = count >= low ? count : top;
            const int64_t next = p->ends[count] - p->left[count]--;
            if (d) {
                d->firsts[i] = p->sorted[next];
            }
        }
        if (count > room) {
            if (d) {
                d->begins[blocks] = i;
            }
            blocks++;
            room = p->most;
        }
        room -= count;
        if (d) {
            d->inputs += count - (room == 0); /* the last token of a full block is only a label */
        }
    }
    return blocks;
}

/* Makes blocks of whole rows, once documents are separate and their borders known. Takes 8 bytes
 * for each row, and while it works 12 more; time grows with their number, and hardly more. */
static nd_status pack_rows(nd_dataset *dataset)
{
    nd_documents *d = dataset->documents;
    packing p = {.dataset = dataset, .most = dataset->sequence + 1};
    nd_status status = ND_OK;
    p.room = (int64_t)d->borders + dataset->tokens / p.most;
    ND_TRY_OUT(ND_ALLOC(p.room, &d->firsts));
    p.firsts = d->firsts;
    ND_TRY_OUT(ND_ALLOC(p.room, &p.counts));
    ND_TRY_OUT(ND_ALLOC(p.most + 1, &p.left));
    ND_TRY_OUT(ND_ALLOC(p.most + 1, &p.ends));
    ND_TRY_OUT(nd_fs_map_guard(&dataset->map, dataset->path, list_pieces, &p));
    ND_TRY_OUT(p.pieces > 0
                   ? ND_ALLOC(p.pieces, &p.sorted)
                   : nd_fail(ND_ERR_DATA, "no row of \"%s\" has 2 to %lld tokens%s", dataset->path,
                             (long long)p.most,
                             d->long_rows > 0
                                 ? ", and data.long_rows is drop; raise train.sequence_length, or "
                                   "set data.long_rows: cut"
                                 : "; a row needs an input and the label after it"));
    sort_pieces(&p);
    const int64_t in_order = lay_pieces(&p, false, NULL);
    const bool longest_first = lay_pieces(&p, true, NULL) <= in_order;
    ND_TRY_OUT(ND_ALLOC(in_order + 1, &d->begins));
    dataset->blocks = lay_pieces(&p, longest_first, d);
    d->begins[dataset->blocks] = p.pieces;
out:
    free(p.counts);
    free(p.left);
    free(p.ends);
    free(p.sorted);
    return status;
}

/* Blocks are numbered in a drawn order: of a validation that reads a part of them, the first ones
 * are not those of the longest rows. */
static nd_status next_of_rows(const nd_dataset *dataset, int64_t index, block_piece *piece)
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
    ND_TRY(border_after(dataset, piece->first, &end));
    piece->count = nd_min(end - piece->first, dataset->sequence + 1 - piece->place);
    return piece->count > 1 ? ND_OK : fail_changed(dataset);
}

/* Blocks. */

/* The next piece of a block, or its first one where *piece is all zeros. A count of 0: there are no
 * more, and `place` is the number of the block's tokens. */
static nd_status next_piece(const nd_dataset *dataset, int64_t index, block_piece *piece)
{
    const int64_t length = dataset->sequence + 1;
    piece->place += piece->count;
    if (nd_dataset_is_packed(dataset)) {
        return next_of_rows(dataset, index, piece);
    }
    piece->first = index * length;
    piece->count = piece->number++ > 0 ? 0 : nd_min(dataset->tokens - piece->first, length);
    return ND_OK;
}

static nd_status bad_id(const nd_dataset *dataset, int64_t token, int64_t id)
{
    size_t byte = dataset->first_byte + (size_t)token * dataset->type.width;
    if (id < 0) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": token %lld (byte %zu) has the negative id %lld: the file is damaged "
            "or has another token type",
            dataset->path, (long long)token, byte, (long long)id);
    }
    return nd_fail(
        ND_ERR_DATA,
        "\"%s\": token %lld (byte %zu) has id %lld, but the model's vocabulary ends at %lld; "
        "tokenize the data for this model, or use a model whose vocab_size is above %lld",
        dataset->path, (long long)token, byte, (long long)id, (long long)dataset->vocab - 1,
        (long long)id);
}

/* Puts the ids of a piece, with their marks, at its place into the inputs and labels of a block, or
 * sends for them only. The label of its last token, and what lies behind, are not written. */
static nd_status read_piece(const nd_dataset *dataset, const block_piece *piece, bool prefetch,
                            const nd_block *block)
{
    const size_t width = dataset->type.width, bytes = (size_t)piece->count * width;
    const size_t begin = dataset->first_byte + (size_t)piece->first * width;
    const uint8_t *p = dataset->map.data + begin;
    if (prefetch) {
        dataset->cache ? nd_token_cache_prefetch(dataset->cache, begin, bytes)
                       : nd_fs_map_prefetch(&dataset->map, begin, bytes);
        return ND_OK;
    }
    ND_TRY(dataset->cache ? nd_token_cache_check(dataset->cache, begin, bytes) : ND_OK);
    for (int64_t i = 0; i < piece->count; i++, p += width) {
        const int64_t id = nd_id_at(p, dataset->type), place = piece->place + i;
        if (id < 0 || id >= dataset->vocab) {
            return bad_id(dataset, piece->first + i, id);
        }
        if (place < dataset->sequence) {
            block->inputs[place] = (int32_t)id;
        }
        if (i > 0) {
            block->labels[place - 1] = (int32_t)id;
        }
    }
    return mark_piece(dataset, piece, block);
}

typedef struct block_read {
    const nd_dataset *dataset;
    int64_t index;
    nd_block *block;
    int64_t tokens; /* of the block */
} block_read;

static nd_status read_block(void *context)
{
    block_read *r = context;
    /* All pieces, which may lie anywhere in the file, are on their way before the first one is
     * waited for. */
    for (int pass = 0; pass < 2; pass++) {
        block_piece piece = {0};
        ND_TRY(next_piece(r->dataset, r->index, &piece));
        while (piece.count > 0) {
            ND_TRY(read_piece(r->dataset, &piece, pass == 0, r->block));
            ND_TRY(next_piece(r->dataset, r->index, &piece));
        }
        r->tokens = piece.place;
    }
    return ND_OK;
}

nd_status nd_dataset_block(const nd_dataset *dataset, int64_t index, nd_block *block)
{
    const int64_t S = dataset->sequence;
    block_read read = {.dataset = dataset, .index = index, .block = block};
    ND_ASSERT(index >= 0 && index <= dataset->blocks);
    if (dataset->blend && index < dataset->blocks) {
        const int j = nd_blend_part_of(dataset->blend, index);
        return nd_dataset_block(dataset->blend->parts[j].data, index - dataset->blend->firsts[j],
                                block);
    }
    for (int64_t i = 0; block->first_keys && i < S; i++) {
        block->first_keys[i] = 0;
    }
    if (index < dataset->blocks) {
        ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, read_block, &read));
    }
    for (int64_t i = nd_max(read.tokens, 1) - 1; i < S; i++) {
        block->labels[i] = ND_LABEL_IGNORED;
    }
    for (int64_t i = read.tokens; i < S; i++) {
        block->inputs[i] = 0;
    }
    /* Joined documents fill their blocks. */
    block->filled = dataset->documents || read.tokens == 0 ? nd_min(read.tokens, S) : S;
    for (int64_t i = 1; block->first_keys && i < S; i++) {
        int32_t *key = &block->first_keys[i];
        *key = i >= block->filled ? (int32_t)i : *key == 0 ? key[-1] : *key;
    }
    return ND_OK;
}

/* Tokens that do not count. */

typedef struct span_count {
    const nd_dataset *dataset;
    int64_t tokens;
} span_count;

static nd_status count_spans(void *context)
{
    span_count *c = context;
    const nd_dataset *dataset = c->dataset;
    const bool all = nd_dataset_tokens(dataset) == dataset->tokens;
    const uint64_t rows = all ? 0 : dataset->documents->borders;
    uint64_t row = 0; /* the first one that may have tokens of the span */
    for (uint64_t i = 0; i < dataset->spans; i++) {
        range span, r = {0};
        ND_TRY(span_at(dataset, i, &span));
        c->tokens += all ? (int64_t)(span.end - span.begin) : 0;
        for (; row < rows; row++) { /* those tokens that blocks hold */
            ND_TRY(row_at(dataset, row, &r));
            const uint64_t kept = r.begin + (uint64_t)kept_of(dataset, &r);
            const uint64_t begin = r.begin > span.begin ? r.begin : span.begin;
            const uint64_t end = kept < span.end ? kept : span.end;
            c->tokens += end > begin ? (int64_t)(end - begin) : 0;
            if (r.end >= span.end) {
                break;
            }
        }
    }
    return ND_OK;
}

nd_status nd_dataset_ignored(const nd_dataset *dataset, int64_t *tokens)
{
    span_count count = {.dataset = dataset};
    for (int j = 0; dataset->blend && j < dataset->blend->count; j++) {
        int64_t part;
        ND_TRY(nd_dataset_ignored(dataset->blend->parts[j].data, &part));
        count.tokens += part;
    }
    if (dataset->spans > 0) {
        ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, count_spans, &count));
    }
    *tokens = count.tokens;
    return ND_OK;
}

/* The choice of data whose documents are separate, and of what ends these. */

/* Documents of a cache or an index without those that are left out, or of a file that is one; -1:
 * not known. */
static int64_t count_listed(const nd_dataset *dataset)
{
    const nd_documents *d = dataset->documents;
    if (nd_dataset_is_packed(dataset)) {
        return d->rows;
    }
    if (dataset->cache) {
        return (int64_t)dataset->cache->view.documents;
    }
    if (d && d->borders > 0) { /* of an index: all beginnings, and the end of the last one */
        return (int64_t)d->borders - 1;
    }
    return d && d->end_of_text < 0 ? 1 : -1; /* a file of bytes */
}

typedef struct id_search {
    const nd_dataset *dataset;
    int64_t id, count;
    bool found;
} id_search;

static nd_status find_id(void *context)
{
    id_search *s = context;
    const nd_dataset *dataset = s->dataset;
    const uint8_t *p = dataset->map.data + dataset->first_byte;
    for (int64_t i = 0; i < s->count && !s->found; i++) {
        s->found = nd_id_at(p + i * dataset->type.width, dataset->type) == s->id;
    }
    return ND_OK;
}

/* Where the data list documents, an id may end none within them. */
static nd_status check_end_of_text(const nd_dataset *dataset, int32_t id)
{
    const int64_t listed = count_listed(dataset);
    id_search search = {.dataset = dataset,
                        .id = id,
                        .count =
                            nd_min(dataset->tokens, SEARCH_BYTES / (int64_t)dataset->type.width)};
    ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, find_id, &search));
    if (!search.found && listed > 1) {
        nd_log_warning("id %d (data.end_of_text) does not occur in the first %d MiB of \"%s\"; "
                       "only its %lld documents are separate",
                       id, SEARCH_BYTES >> 20, dataset->path, (long long)listed);
    }
    return search.found || listed > 1
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "data.documents is separate, but id %d, which should end a "
                         "document, does not occur in the first %d MiB of \"%s\"; give "
                         "another one as data.end_of_text, or set data.documents: join",
                         id, SEARCH_BYTES >> 20, dataset->path);
}

nd_status nd_dataset_set_documents(nd_dataset *dataset, const nd_document_rules *rules)
{
    const bool prompts = dataset->mask || dataset->spans > 0;
    const bool listed = dataset->cache || dataset->index.borders > 0;
    /* A file of text that lists no documents is one. */
    const int64_t id = rules->end_of_text >= 0 || listed || !dataset->format->holds_ids
                           ? rules->end_of_text
                           : rules->model_end;
    ND_ASSERT(!dataset->blend && !dataset->documents);
    if (rules->end_of_text >= dataset->vocab) {
        const bool bytes = !dataset->cache && !dataset->format->holds_ids;
        return nd_fail(ND_ERR_CONFIG,
                       "data.end_of_text is %lld, but %s at %lld; give the id of a token, or leave "
                       "it out",
                       (long long)rules->end_of_text,
                       bytes ? "bytes end" : "the model's vocabulary ends",
                       (long long)dataset->vocab - 1);
    }
    if (rules->rule == ND_DOCUMENTS_JOIN || (rules->rule == ND_DOCUMENTS_AUTO && !prompts)) {
        nd_fs_map_close(&dataset->index.map); /* only its borders are read from now on */
        return ND_OK;
    }
    if (id < 0 && !listed && dataset->format->holds_ids) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.documents is separate, but neither \"%s\" nor the model's config.json "
                       "says where documents end; give the id that ends them as data.end_of_text, "
                       "or set data.documents: join",
                       dataset->path);
    }
    ND_TRY(ND_ALLOC(1, &dataset->documents));
    *dataset->documents = (nd_documents){
        .end_of_text = (int32_t)id,
        .borders = dataset->cache ? dataset->cache->view.documents : dataset->index.borders,
        .drops = rules->drop_long,
    };
    ND_TRY(id >= 0 ? check_end_of_text(dataset, (int32_t)id) : ND_OK);
    return listed && prompts ? pack_rows(dataset) : ND_OK;
}

nd_documents_rule nd_dataset_documents(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    if (!blend) {
        return dataset->documents ? ND_DOCUMENTS_SEPARATE : ND_DOCUMENTS_JOIN;
    }
    const nd_documents_rule first = nd_dataset_documents(blend->parts[0].data);
    for (int j = 1; j < blend->count; j++) {
        if (nd_dataset_documents(blend->parts[j].data) != first) {
            return ND_DOCUMENTS_AUTO;
        }
    }
    return first;
}

bool nd_dataset_is_separate(const nd_dataset *dataset)
{
    return nd_dataset_documents(dataset) != ND_DOCUMENTS_JOIN;
}

nd_dataset_facts nd_dataset_facts_of(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    const bool mixed = blend && blend->phases;
    const nd_documents *rows = nd_dataset_is_packed(dataset) ? dataset->documents : NULL;
    const double inputs = (double)dataset->blocks * (double)dataset->sequence;
    nd_dataset_facts facts = {
        .path = dataset->path,
        .format = dataset->format->name,
        .cache = dataset->cache ? dataset->cache->path : NULL,
        .documents = blend ? -1 : count_listed(dataset),
        .long_rows = rows ? rows->long_rows : 0,
        .drops = rows && rows->drops,
        .padding = rows ? 1 - (double)rows->inputs / inputs : 0,
        .lists = rows ? sizeof *rows->firsts * (size_t)rows->begins[dataset->blocks] +
                            sizeof *rows->begins * (size_t)(dataset->blocks + 1)
                      : 0,
        .samples = blend ? blend->samples : INT64_MAX,
        .epoch = mixed && blend->parts[0].weight == 0 ? blend->samples : dataset->blocks,
        .period = blend ? blend->period : 0,
    };
    for (int j = 0; blend && j < blend->count; j++) {
        facts.lists += nd_dataset_facts_of(blend->parts[j].data).lists;
    }
    return facts;
}
