// SPDX-License-Identifier: Apache-2.0
/*
 * Separate documents: which data have them, and where they begin in a block. spans.c has the
 * borders that the data list; an id that ends a document shows others in a block itself. packing.c
 * makes blocks of whole rows.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/data/formats.h"

/* Bytes of a file within which an id that ends documents must occur. */
enum { SEARCH_BYTES = 64 << 20 };

void nd_documents_close(nd_documents *documents)
{
    if (documents) {
        nd_fs_map_close(&documents->index);
        free(documents->firsts);
        free(documents->begins);
        free(documents);
    }
}

/* Calls `begin` for each document that begins in the piece behind its first token: with the place
 * of its first token in the block, in order. */
static nd_status each_document(const nd_dataset *dataset, const nd_piece *piece,
                               const int32_t *inputs, void (*begin)(int32_t *to, int64_t place),
                               int32_t *to)
{
    const nd_documents *d = dataset->documents;
    const int64_t end = piece->place + piece->count;
    int64_t at = piece->first;
    for (int64_t i = piece->place; d->end_of_text >= 0 && i + 1 < end; i++) {
        if (inputs[i] == d->end_of_text) {
            begin(to, i + 1);
        }
    }
    for (;;) {
        ND_TRY(nd_border_after(dataset, at, &at));
        const int64_t place = piece->place + at - piece->first;
        if (place >= end) {
            return ND_OK;
        }
        begin(to, place);
    }
}

/* The label of the token before is the first token of another document. */
static void ignore_first(int32_t *labels, int64_t place)
{
    labels[place - 1] = ND_LABEL_IGNORED;
}

nd_status nd_documents_ignore(const nd_dataset *dataset, const nd_piece *piece,
                              const int32_t *inputs, int32_t *labels)
{
    return each_document(dataset, piece, inputs, ignore_first, labels);
}

static void mark_first(int32_t *first_keys, int64_t place)
{
    first_keys[place] = (int32_t)place;
}

typedef struct keys_read {
    const nd_dataset *dataset;
    int64_t index;
    const int32_t *inputs;
    int32_t *first_keys;
    int64_t filled;
} keys_read;

static nd_status read_keys(void *context)
{
    keys_read *r = context;
    const int64_t S = r->dataset->sequence;
    nd_piece piece = {0};
    ND_TRY(nd_block_next(r->dataset, r->index, &piece));
    while (piece.count > 0) {
        piece.count = nd_min(piece.count, S - piece.place); /* a last label is no input */
        mark_first(r->first_keys, piece.place);
        ND_TRY(each_document(r->dataset, &piece, r->inputs, mark_first, r->first_keys));
        ND_TRY(nd_block_next(r->dataset, r->index, &piece));
    }
    r->filled = piece.place;
    return ND_OK;
}

nd_status nd_dataset_first_keys(const nd_dataset *dataset, int64_t index, const int32_t *inputs,
                                int32_t *first_keys, int64_t *filled)
{
    const int64_t S = dataset->sequence;
    if (dataset->blend) {
        const nd_source *s = &dataset->blend->sources[nd_blend_find(dataset->blend, index)];
        return nd_dataset_first_keys(s->data, index - s->first, inputs, first_keys, filled);
    }
    *filled = S;
    for (int64_t i = 0; i < S; i++) {
        first_keys[i] = 0;
    }
    if (!dataset->documents) {
        return ND_OK;
    }
    keys_read read = {dataset, index, inputs, first_keys, 0};
    ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, read_keys, &read));
    *filled = read.filled;
    for (int64_t i = 1; i < S; i++) { /* what fills a short block sees itself alone */
        first_keys[i] = i >= read.filled     ? (int32_t)i
                        : first_keys[i] == 0 ? first_keys[i - 1]
                                             : first_keys[i];
    }
    return ND_OK;
}

/* Which data are separate, and how. */

typedef struct id_search {
    const nd_dataset *dataset;
    int32_t id;
    bool found;
} id_search;

static nd_status search_id(void *context)
{
    id_search *s = context;
    return nd_flat_holds(s->dataset, s->id, SEARCH_BYTES, &s->found);
}

/* Where the data list documents, an id may end none within them. */
static nd_status find_end_of_text(const nd_dataset *dataset, int64_t id)
{
    const int64_t listed = nd_documents_listed(dataset);
    id_search search = {.dataset = dataset, .id = (int32_t)id};
    ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, search_id, &search));
    if (!search.found && listed > 1) {
        nd_log_warning("id %lld (data.end_of_text) does not occur in the first %d MiB of \"%s\"; "
                       "only its %lld documents are separate",
                       (long long)id, SEARCH_BYTES >> 20, dataset->path, (long long)listed);
    }
    return search.found || listed > 1
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "data.documents is separate, but id %lld, which should end a "
                         "document, does not occur in the first %d MiB of \"%s\"; give "
                         "another one as data.end_of_text, or set data.documents: join",
                         (long long)id, SEARCH_BYTES >> 20, dataset->path);
}

static nd_status take_end_of_text(nd_dataset *dataset, const nd_document_rules *rules)
{
    const bool named = rules->end_of_text >= 0;
    const int64_t id = named ? rules->end_of_text : rules->model_end;
    dataset->documents->end_of_text = -1;
    if (!named && !dataset->format->holds_ids) {
        return ND_OK; /* a file of text is one document */
    }
    if (id < 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.documents is separate, but neither \"%s\" nor the model's config.json "
                       "says where documents end; give the id that ends them as data.end_of_text, "
                       "or set data.documents: join",
                       dataset->path);
    }
    dataset->documents->end_of_text = (int32_t)id;
    return find_end_of_text(dataset, id);
}

/* As large as the vocabulary: it can never occur. */
static nd_status fail_end_of_text(const nd_dataset *dataset, int64_t id)
{
    const bool bytes = !dataset->cache && !dataset->format->holds_ids;
    return nd_fail(ND_ERR_CONFIG,
                   "data.end_of_text is %lld, but %s at %lld; give the id of a token, or leave it "
                   "out",
                   (long long)id, bytes ? "bytes end" : "the model's vocabulary ends",
                   (long long)dataset->vocab - 1);
}

int64_t nd_documents_listed(const nd_dataset *dataset)
{
    const nd_documents *d = dataset->documents;
    if (d && d->firsts) {
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

nd_status nd_dataset_set_documents(nd_dataset *dataset, const nd_document_rules *rules)
{
    const bool prompts = dataset->mask || dataset->spans > 0;
    ND_ASSERT(!dataset->blend && !dataset->documents);
    if (rules->end_of_text >= dataset->vocab) {
        return fail_end_of_text(dataset, rules->end_of_text);
    }
    if (rules->rule == ND_DOCUMENTS_JOIN || (rules->rule == ND_DOCUMENTS_AUTO && !prompts)) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(1, &dataset->documents));
    /* Beside borders that are listed. */
    dataset->documents->end_of_text = (int32_t)rules->end_of_text;
    if (dataset->cache) {
        dataset->documents->borders = dataset->cache->view.documents;
    } else if (dataset->format->indexed) {
        ND_TRY(nd_megatron_open_borders(dataset));
    } else {
        return take_end_of_text(dataset, rules);
    }
    ND_TRY(rules->end_of_text >= 0 ? find_end_of_text(dataset, rules->end_of_text) : ND_OK);
    return prompts ? nd_rows_pack(dataset, rules->drop_long) : ND_OK;
}

nd_documents_rule nd_dataset_documents(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    if (!blend) {
        return dataset->documents ? ND_DOCUMENTS_SEPARATE : ND_DOCUMENTS_JOIN;
    }
    const nd_documents_rule first = nd_dataset_documents(blend->sources[0].data);
    for (int j = 1; j < blend->count; j++) {
        if (nd_dataset_documents(blend->sources[j].data) != first) {
            return ND_DOCUMENTS_AUTO;
        }
    }
    return first;
}

bool nd_dataset_is_separate(const nd_dataset *dataset)
{
    return nd_dataset_documents(dataset) != ND_DOCUMENTS_JOIN;
}
