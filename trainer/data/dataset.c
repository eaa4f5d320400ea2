// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/data/dataset.h"

static const nd_format encoded = {"encoded text", true, 0, NULL};

/* A last block of one token has an input but no label, so it is left out. */
static nd_status count_blocks(nd_dataset *dataset)
{
    int64_t length = dataset->sequence + 1;
    int64_t rest = dataset->tokens % length;
    dataset->blocks = dataset->tokens / length + (rest > 1);
    if (dataset->tokens == 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is empty (%s); name a file that holds some tokens",
                       dataset->path, dataset->format->name);
    }
    if (dataset->blocks == 0) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" holds a single token (%s): at least two are needed, an input and the "
            "label after it",
            dataset->path, dataset->format->name);
    }
    return ND_OK;
}

nd_status nd_dataset_open(const char *path, nd_data_format format, const char *tokenizer,
                          int64_t vocab, int64_t sequence, nd_dataset **out)
{
    ND_ASSERT(sequence >= 1 && sequence < INT32_MAX && vocab >= 1 && vocab <= INT32_MAX);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    if (!path || !*path) {
        return nd_fail(ND_ERR_CONFIG, "no data file is named; set data.path");
    }
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    dataset->vocab = vocab;
    dataset->sequence = sequence;
    ND_TRY_OUT(nd_format_open(dataset, path, format, tokenizer));
    ND_TRY_OUT(count_blocks(dataset));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    return status;
}

void nd_data_say_left_out(const char *path, int64_t files, int64_t folders)
{
    if (files > 0 || folders > 0) {
        nd_log_info("\"%s\": %lld files of other kinds and %lld folders in it are not read", path,
                    (long long)files, (long long)folders);
    }
}

/* A separator that separates nothing is another one than that of the text. */
static void say_separator(const char *path, const nd_corpus_files *files, uint64_t documents)
{
    uint64_t texts = 0, rows = 0;
    for (size_t i = 0; i < files->count; i++) {
        rows += files->list[i].rows;
        texts += !files->list[i].rows && files->list[i].bytes > 0;
    }
    if (texts == 0) {
        nd_log_info("\"%s\": data.document_separator has no effect, since rows of JSON lines are "
                    "documents",
                    path);
    } else if (rows == 0 && documents <= texts) {
        nd_log_warning("\"%s\": data.document_separator separates nothing: each file is one "
                       "document; give what stands between documents",
                       path);
    }
}

nd_status nd_dataset_open_text(const char *path, nd_data_format format,
                               nd_token_cache_request request, int64_t sequence, nd_dataset **out)
{
    const int64_t vocab = request.vocab;
    ND_ASSERT(sequence >= 1 && sequence < INT32_MAX && vocab >= 1 && vocab <= INT32_MAX);
    nd_corpus_files files = {0};
    nd_dataset *dataset = NULL;
    nd_status status = ND_OK;
    request.job.files = &files;
    ND_TRY_OUT(request.tokenizer ? ND_OK : nd_format_check_bytes(false, vocab));
    ND_TRY_OUT(nd_corpus_files_add(&files, path, format));
    nd_data_say_left_out(path, files.skipped, files.folders);
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    ND_TRY_OUT(nd_token_cache_open(&request, &dataset->cache));
    const nd_token_cache *cache = dataset->cache;
    if (request.job.rules->separator) {
        say_separator(path, &files, cache->view.documents);
    }
    dataset->map = cache->map;
    dataset->format = &encoded;
    dataset->type = (nd_token_type){(uint8_t)cache->view.width, cache->view.width == 4};
    dataset->first_byte = ND_TOKEN_CACHE_HEADER_BYTES;
    dataset->tokens = (int64_t)cache->view.tokens;
    dataset->spans = cache->view.spans;
    dataset->span_pairs = cache->view.span_pairs;
    dataset->vocab = vocab;
    dataset->sequence = sequence;
    ND_TRY_OUT(nd_fs_format(&dataset->path, "%s", path));
    ND_TRY_OUT(count_blocks(dataset));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    nd_corpus_files_fini(&files);
    return status;
}

void nd_dataset_close(nd_dataset *dataset)
{
    if (!dataset) {
        return;
    }
    for (int j = 0; dataset->blend && j < dataset->blend->count; j++) {
        nd_dataset_close(dataset->blend->parts[j].data);
        free((char *)dataset->blend->parts[j].name);
    }
    if (dataset->blend) {
        nd_mix_destroy(dataset->blend->mix);
        free(dataset->blend->parts);
        free(dataset->blend->firsts);
        free(dataset->blend);
    }
    if (dataset->cache) {
        nd_token_cache_close(dataset->cache);
    } else {
        nd_fs_map_close(&dataset->map);
    }
    nd_fs_map_close(&dataset->index.map);
    free(dataset->mask);
    if (dataset->documents) {
        free(dataset->documents->firsts);
        free(dataset->documents->begins);
        free(dataset->documents);
    }
    free(dataset->path);
    free(dataset);
}

/* Several sources. */

static nd_status make_mix(nd_blend *blend)
{
    nd_mix_source *list;
    bool mixed = false;
    ND_TRY(ND_ALLOC(blend->count, &list));
    for (int j = 0; j < blend->count; j++) {
        const nd_dataset_part *part = &blend->parts[j];
        mixed = mixed || part->weight > 0 || part->epochs > 0;
        list[j] = (nd_mix_source){part->data->blocks, part->weight, part->epochs};
    }
    nd_status status = mixed ? nd_mix_create(list, blend->count, &blend->mix) : ND_OK;
    free(list);
    return status;
}

static nd_status take_parts(nd_dataset *dataset, nd_dataset_part *parts, int count)
{
    nd_blend *blend = dataset->blend;
    dataset->vocab = parts[0].data->vocab;
    dataset->sequence = parts[0].data->sequence;
    dataset->format = parts[0].data->format;
    for (; blend->count < count; blend->count++) {
        nd_dataset_part *from = &parts[blend->count], *part = &blend->parts[blend->count];
        char *name;
        ND_ASSERT(from->data->sequence == dataset->sequence);
        ND_TRY(nd_fs_format(&name, "%s", from->name));
        *part = *from;
        part->name = name;
        from->data = NULL;
        blend->named = blend->named || name[0];
        blend->firsts[blend->count] = dataset->blocks;
        dataset->blocks += part->data->blocks;
        dataset->tokens += nd_dataset_tokens(part->data);
    }
    ND_TRY(nd_fs_format(&dataset->path, "%s and %d more", blend->parts[0].data->path,
                        blend->count - 1)); /* for messages */
    return make_mix(blend);
}

nd_status nd_dataset_blend(nd_dataset_part *parts, int count, nd_dataset **out)
{
    ND_ASSERT(count >= 1);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    ND_TRY_OUT(ND_ALLOC(1, &dataset->blend));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->parts));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->firsts));
    ND_TRY_OUT(take_parts(dataset, parts, count));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    for (int j = 0; j < count; j++) {
        nd_dataset_close(parts[j].data);
        parts[j].data = NULL;
    }
    return status;
}

/* The part of a blend that has a block: the last one that begins at or before it. */
static int find_part(const nd_blend *blend, int64_t block)
{
    int low = 0, high = blend->count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (blend->firsts[middle] <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

int nd_dataset_sources(const nd_dataset *dataset)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->count : 1;
}

const char *nd_dataset_source_name(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->parts[index].name : "";
}

const nd_dataset *nd_dataset_source(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->parts[index].data : dataset;
}

int nd_dataset_source_of(const nd_dataset *dataset, int64_t block)
{
    return dataset->blend && dataset->blend->named ? find_part(dataset->blend, block) : 0;
}

nd_dataset_facts nd_dataset_facts_of(const nd_dataset *dataset)
{
    const nd_blend *blend = dataset->blend;
    const nd_mix *mix = blend ? blend->mix : NULL;
    const nd_documents *rows = nd_dataset_is_packed(dataset) ? dataset->documents : NULL;
    const double inputs = (double)dataset->blocks * (double)dataset->sequence;
    nd_dataset_facts facts = {
        .path = dataset->path,
        .format = dataset->format->name,
        .cache = dataset->cache ? dataset->cache->path : NULL,
        .documents = blend ? -1 : nd_documents_listed(dataset),
        .long_rows = rows ? rows->long_rows : 0,
        .drops = rows && rows->drops,
        .padding = rows ? 1 - (double)rows->inputs / inputs : 0,
        .lists = rows ? sizeof *rows->firsts * (size_t)rows->begins[dataset->blocks] +
                            sizeof *rows->begins * (size_t)(dataset->blocks + 1)
                      : 0,
        .samples = mix ? mix->samples : INT64_MAX,
        .epoch = mix && blend->parts[0].weight == 0 ? mix->samples : dataset->blocks,
        .period = mix ? mix->period : 0,
    };
    for (int j = 0; blend && j < blend->count; j++) {
        facts.lists += nd_dataset_facts_of(blend->parts[j].data).lists;
    }
    return facts;
}

int64_t nd_dataset_blocks(const nd_dataset *dataset)
{
    return dataset->blocks;
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
static nd_status read_piece(const nd_dataset *dataset, const nd_piece *piece, bool prefetch,
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
    return nd_piece_mark(dataset, piece, block);
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
        nd_piece piece = {0};
        ND_TRY(nd_block_next(r->dataset, r->index, &piece));
        while (piece.count > 0) {
            ND_TRY(read_piece(r->dataset, &piece, pass == 0, r->block));
            ND_TRY(nd_block_next(r->dataset, r->index, &piece));
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
        const int j = find_part(dataset->blend, index);
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
