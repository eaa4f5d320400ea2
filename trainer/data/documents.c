// SPDX-License-Identifier: Apache-2.0
/*
 * Separate documents: where they begin in a block, and blocks of whole rows.
 *
 * A token cache and a Megatron index list the borders of documents: tokens before each, in order.
 * Other files of ids may have an id that ends a document, and a block then shows its borders
 * itself.
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
        free(documents->blocks);
        free(documents);
    }
}

static nd_status encoded_border(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    const nd_token_cache *cache = dataset->cache;
    const uint8_t *p = cache->view.ends + index * sizeof *token;
    ND_TRY(nd_token_cache_check(cache, (uint64_t)(p - cache->map.data), sizeof *token));
    memcpy(token, p, sizeof *token);
    return ND_OK;
}

static nd_status border_at(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    ND_TRY(dataset->cache ? encoded_border(dataset, index, token)
                          : nd_megatron_border(dataset, index, token));
    return *token <= (uint64_t)dataset->tokens
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\": document boundary %llu is token %llu, but there are %lld: the "
                         "boundaries are damaged or belong to another file",
                         dataset->path, (unsigned long long)index, (unsigned long long)*token,
                         (long long)dataset->tokens);
}

/* The number of the first border behind `token`. */
static nd_status find_border(const nd_dataset *dataset, uint64_t token, uint64_t *out)
{
    uint64_t low = 0, high = dataset->documents->borders;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        uint64_t at;
        ND_TRY(border_at(dataset, middle, &at));
        if (at <= token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *out = low;
    return ND_OK;
}

/* Calls `begin` for each document that begins in the block behind its first token: with the place
 * of its first token, in order. */
static nd_status each_document(const nd_dataset *dataset, nd_block_place block,
                               const int32_t *inputs, void (*begin)(int32_t *to, int64_t place),
                               int32_t *to)
{
    const nd_documents *d = dataset->documents;
    uint64_t border = 0, at;
    for (int64_t i = 0; d->end_of_text >= 0 && i + 1 < block.count; i++) {
        if (inputs[i] == d->end_of_text) {
            begin(to, i + 1);
        }
    }
    ND_TRY(find_border(dataset, (uint64_t)block.first, &border));
    for (; border < d->borders; border++) {
        ND_TRY(border_at(dataset, border, &at));
        if (at >= (uint64_t)(block.first + block.count)) {
            break;
        }
        if (at > (uint64_t)block.first) {
            begin(to, (int64_t)at - block.first);
        }
    }
    return ND_OK;
}

/* The label of the token before is the first token of another document. */
static void ignore_first(int32_t *labels, int64_t place)
{
    labels[place - 1] = ND_LABEL_IGNORED;
}

nd_status nd_documents_ignore(const nd_dataset *dataset, nd_block_place block,
                              const int32_t *inputs, int32_t *labels)
{
    return each_document(dataset, block, inputs, ignore_first, labels);
}

/* -1: no document begins here. A block has one place more than inputs. */
static void mark_first(int32_t *first_keys, int64_t place)
{
    first_keys[place] = (int32_t)place;
}

typedef struct keys_read {
    const nd_dataset *dataset;
    nd_block_place block;
    const int32_t *inputs;
    int32_t *first_keys;
} keys_read;

static nd_status read_keys(void *context)
{
    const keys_read *r = context;
    nd_block_place inputs = r->block;
    inputs.count = nd_min(inputs.count, r->dataset->sequence);
    return each_document(r->dataset, inputs, r->inputs, mark_first, r->first_keys);
}

nd_status nd_dataset_first_keys(const nd_dataset *dataset, int64_t index, const int32_t *inputs,
                                int32_t *first_keys, int64_t *filled)
{
    const int64_t S = dataset->sequence;
    if (dataset->blend) {
        return dataset->blend_calls->first_keys(dataset->blend, index, inputs, first_keys, filled);
    }
    *filled = S;
    for (int64_t i = 0; i < S; i++) {
        first_keys[i] = 0;
    }
    if (!dataset->documents) {
        return ND_OK;
    }
    keys_read read = {dataset, nd_block_place_of(dataset, index), inputs, first_keys};
    ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, read_keys, &read));
    *filled = nd_min(read.block.count, S);
    for (int64_t i = 1; i < S; i++) { /* what fills a short block sees itself alone */
        first_keys[i] = i >= read.block.count ? (int32_t)i
                        : first_keys[i] == 0  ? first_keys[i - 1]
                                              : first_keys[i];
    }
    return ND_OK;
}

nd_block_place nd_block_place_of(const nd_dataset *dataset, int64_t index)
{
    const int64_t length = dataset->sequence + 1;
    if (dataset->documents && dataset->documents->blocks) {
        return dataset->documents->blocks[index];
    }
    return (nd_block_place){index * length, nd_min(dataset->tokens - index * length, length)};
}

/* Blocks of whole rows. */

typedef struct row_layout {
    const nd_dataset *dataset;
    bool drop;
    nd_block_place *list; /* NULL: they are counted */
    int64_t blocks, long_rows, tokens, kept;
    nd_block_place open; /* the block that rows are added to */
} row_layout;

static void end_block(row_layout *l)
{
    if (l->open.count > 1) { /* one token alone has no label */
        if (l->list) {
            l->list[l->blocks] = l->open;
        }
        l->blocks++;
        l->tokens += nd_min(l->open.count, l->dataset->sequence);
        l->kept += l->open.count;
    }
    l->open = (nd_block_place){0};
}

/* A row that does not fit into what is left of a block begins the next one. */
static void lay_row(row_layout *l, int64_t first, int64_t count)
{
    const int64_t most = l->dataset->sequence + 1;
    l->long_rows += count > most;
    if (count > most && l->drop) {
        end_block(l);
        return;
    }
    if (l->open.count + count > most) {
        end_block(l);
    }
    for (; count > most; first += most, count -= most) {
        l->open = (nd_block_place){first, most};
        end_block(l);
    }
    l->open.first = l->open.count > 0 ? l->open.first : first;
    l->open.count += count;
}

static nd_status lay_rows(void *context)
{
    row_layout *l = context;
    uint64_t before = 0, at;
    l->blocks = l->long_rows = l->tokens = l->kept = 0;
    for (uint64_t i = 0; i < l->dataset->documents->borders; i++) {
        ND_TRY(border_at(l->dataset, i, &at));
        if (at > before) {
            lay_row(l, (int64_t)before, (int64_t)(at - before));
        }
        before = at;
    }
    end_block(l);
    return ND_OK;
}

static nd_status make_blocks(nd_dataset *dataset, bool drop)
{
    nd_documents *d = dataset->documents;
    row_layout l = {.dataset = dataset, .drop = drop};
    ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, lay_rows, &l));
    if (l.blocks == 0) {
        return nd_fail(ND_ERR_DATA,
                       "no row of \"%s\" has at most %lld tokens, and data.long_rows is drop; "
                       "raise train.sequence_length, or set data.long_rows: cut",
                       dataset->path, (long long)dataset->sequence + 1);
    }
    ND_TRY(ND_ALLOC(l.blocks, &d->blocks));
    l.list = d->blocks;
    ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, lay_rows, &l));
    dataset->blocks = l.blocks;
    d->long_rows = l.long_rows;
    d->drops = drop;
    d->tokens = l.tokens;
    d->kept = l.kept;
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
    const int64_t left_out = d && d->drops ? d->long_rows : 0;
    if (dataset->cache) {
        return (int64_t)dataset->cache->view.documents - left_out;
    }
    if (d && d->borders > 0) { /* of an index: all beginnings, and the end of the last one */
        return (int64_t)d->borders - 1 - left_out;
    }
    return d && d->end_of_text < 0 ? 1 : -1; /* a file of bytes */
}

nd_status nd_dataset_set_documents(nd_dataset *dataset, const nd_document_rules *rules)
{
    const bool prompts = dataset->masked || (dataset->cache && dataset->cache->view.spans > 0);
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
    } else if (dataset->format->block == nd_masked_block) {
        ND_TRY(nd_megatron_open_borders(dataset));
    } else {
        return take_end_of_text(dataset, rules);
    }
    ND_TRY(rules->end_of_text >= 0 ? find_end_of_text(dataset, rules->end_of_text) : ND_OK);
    return prompts ? make_blocks(dataset, rules->drop_long) : ND_OK;
}

nd_documents_rule nd_dataset_documents(const nd_dataset *dataset)
{
    return dataset->blend       ? dataset->blend_calls->documents(dataset->blend)
           : dataset->documents ? ND_DOCUMENTS_SEPARATE
                                : ND_DOCUMENTS_JOIN;
}

bool nd_dataset_is_separate(const nd_dataset *dataset)
{
    return nd_dataset_documents(dataset) != ND_DOCUMENTS_JOIN;
}
