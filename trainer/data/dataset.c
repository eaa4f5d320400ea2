// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "trainer/data/formats.h"

enum { BYTE_VOCAB = 256 };

static const nd_format formats[] = {
    [ND_DATA_TEXT] = {"text", false, false, 1, nd_text_open},
    [ND_DATA_JSONL] = {"jsonl", false, false, 2, NULL},
    [ND_DATA_LLMC] = {"llmc", true, false, 3, nd_llmc_open},
    [ND_DATA_MEGATRON] = {"megatron", true, true, 4, nd_megatron_open},
};

static const nd_format encoded = {"encoded text", true, false, 0, NULL};

static nd_status guess_format(const char *path, const char *idx, nd_data_format *out)
{
    bool magic = false, there = true, indexed = false;
    *out = nd_is_name_of_rows(path) ? ND_DATA_JSONL : ND_DATA_MEGATRON;
    if (*out == ND_DATA_JSONL || nd_ends_with(path, ".idx")) {
        return ND_OK;
    }
    if (nd_ends_with(path, ".bin")) {
        ND_TRY(nd_llmc_has_magic(path, &magic));
        *out = magic ? ND_DATA_LLMC : ND_DATA_MEGATRON;
        return ND_OK;
    }
    ND_TRY(nd_fs_exists(path, &there));
    ND_TRY(nd_fs_exists(idx, &indexed));
    *out = !there && indexed ? ND_DATA_MEGATRON : ND_DATA_TEXT;
    return ND_OK;
}

static nd_status check_tokenizer(const nd_format *format, const char *path, const char *tokenizer,
                                 int64_t vocab)
{
    if (strcmp(tokenizer, "bytes") == 0) {
        if (vocab == BYTE_VOCAB) {
            return ND_OK;
        }
        return nd_fail(
            ND_ERR_CONFIG,
            "data.tokenizer is \"bytes\", which has 256 ids, but the model's vocab_size is "
            "%lld; %s",
            (long long)vocab,
            format->holds_ids ? "set data.tokenizer to \"file\" to take the ids of the token file "
                                "as they are"
                              : "set data.tokenizer to \"model\" (--tokenizer model) to take "
                                "the tokenizer.json of model.path, or to the path of another "
                                "one, or use a model with vocab_size 256");
    }
    if (strcmp(tokenizer, "file") != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "data.tokenizer is \"%s\"; known are \"bytes\" (id = byte) and \"file\" (the "
            "ids of a token file as they are)",
            tokenizer);
    }
    if (!format->holds_ids) {
        return nd_fail(
            ND_ERR_CONFIG,
            "data.tokenizer is \"file\", but \"%s\" is %s and holds no token ids; set "
            "data.tokenizer to \"bytes\", \"model\" or the path of a tokenizer.json, or make a "
            "token file with ndtrain tokenize",
            path, format->name);
    }
    return ND_OK;
}

static nd_status check_exists(const nd_dataset *dataset)
{
    bool there = false;
    ND_TRY(nd_fs_exists(dataset->path, &there));
    return there ? ND_OK
                 : nd_fail(ND_ERR_DATA,
                           "the data file \"%s\" does not exist; set data.path to a file of yours, "
                           "or make one: scripts/prepare_data writes the default text, "
                           "scripts/make_tokens.py makes tokens of a text of yours",
                           dataset->path);
}

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

/* Sets the format, and the path of the file that holds the tokens. */
static nd_status set_format(nd_dataset *dataset, const char *path, nd_data_format asked)
{
    char *idx = NULL;
    ND_TRY(nd_megatron_path(path, ".idx", &idx));
    nd_data_format format = asked;
    nd_status status = asked == ND_DATA_AUTO ? guess_format(path, idx, &format) : ND_OK;
    free(idx);
    ND_TRY(status);
    dataset->format = &formats[format];
    return format == ND_DATA_MEGATRON ? nd_megatron_path(path, ".bin", &dataset->path)
                                      : nd_fs_format(&dataset->path, "%s", path);
}

static nd_status open_format(void *context)
{
    nd_dataset *dataset = context;
    return dataset->format->open(dataset);
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
    ND_TRY_OUT(set_format(dataset, path, format));
    ND_TRY_OUT(check_exists(dataset));
    ND_TRY_OUT(check_tokenizer(dataset->format, path, tokenizer, vocab));
    ND_ASSERT(dataset->format->open);
    ND_TRY_OUT(nd_fs_map_open(dataset->path, ND_ERR_DATA, &dataset->map));
    if (format == ND_DATA_AUTO && dataset->format == &formats[ND_DATA_TEXT]) {
        ND_TRY_OUT(nd_corpus_check_text(path));
    }
    ND_TRY_OUT(nd_fs_map_guard(&dataset->map, dataset->path, open_format, dataset));
    ND_TRY_OUT(count_blocks(dataset));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    return status;
}

nd_status nd_data_holds(const char *path, nd_data_format format, bool *ids, bool *streamed)
{
    nd_dataset of = {0};
    nd_status status = set_format(&of, path, format);
    *ids = status == ND_OK && of.format->holds_ids;
    *streamed = status == ND_OK && (of.format == &formats[ND_DATA_JSONL] ||
                                    (of.format == &formats[ND_DATA_TEXT] &&
                                     (nd_ends_with(path, ".gz") || nd_ends_with(path, ".zst"))));
    free(of.path);
    return status;
}

void nd_data_say_left_out(const char *path, int64_t files, int64_t folders)
{
    if (files > 0 || folders > 0) {
        nd_log_info("\"%s\": %lld files of other kinds and %lld folders in it are not read", path,
                    (long long)files, (long long)folders);
    }
}

/* Takes the cache over. */
static nd_status open_cache(const nd_dataset_text *text, nd_token_cache *cache, int64_t vocab,
                            int64_t sequence, nd_dataset **out)
{
    nd_dataset *dataset;
    nd_status status = ND_ALLOC(1, &dataset);
    if (status != ND_OK) {
        nd_token_cache_close(cache);
        return status;
    }
    dataset->cache = cache;
    dataset->map = cache->map;
    dataset->format = &encoded;
    dataset->type = (nd_token_type){(uint8_t)cache->view.width, cache->view.width == 4};
    dataset->first_byte = ND_TOKEN_CACHE_HEADER_BYTES;
    dataset->tokens = (int64_t)cache->view.tokens;
    dataset->spans = cache->view.spans;
    dataset->span_pairs = cache->view.span_pairs;
    dataset->vocab = vocab;
    dataset->sequence = sequence;
    ND_TRY_OUT(nd_fs_format(&dataset->path, "%s", text->path));
    ND_TRY_OUT(count_blocks(dataset));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    return status;
}

/* A separator that separates nothing is another one than that of the text. */
static void say_separator(const nd_dataset_text *text, const nd_corpus_files *files,
                          uint64_t documents)
{
    uint64_t texts = 0, rows = 0;
    for (size_t i = 0; i < files->count; i++) {
        rows += files->list[i].rows;
        texts += !files->list[i].rows && files->list[i].bytes > 0;
    }
    if (texts == 0) {
        nd_log_info("\"%s\": data.document_separator has no effect, since rows of JSON lines are "
                    "documents",
                    text->path);
    } else if (rows == 0 && documents <= texts) {
        nd_log_warning("\"%s\": data.document_separator separates nothing: each file is one "
                       "document; give what stands between documents",
                       text->path);
    }
}

nd_status nd_dataset_open_text(const nd_dataset_text *text, int64_t vocab, int64_t sequence,
                               nd_dataset **out)
{
    ND_ASSERT(sequence >= 1 && sequence < INT32_MAX && vocab >= 1 && vocab <= INT32_MAX);
    nd_corpus_files files = {0};
    nd_token_cache *cache = NULL;
    nd_token_cache_request request = {.job = {.files = &files,
                                              .rules = text->rules,
                                              .skip_bad = text->skip_bad,
                                              .threads = text->threads,
                                              .stop = text->stop},
                                      .tokenizer = text->tokenizer,
                                      .folder = text->cache_dir,
                                      .vocab = vocab};
    nd_status status = text->tokenizer
                           ? ND_OK
                           : check_tokenizer(&formats[ND_DATA_JSONL], text->path, "bytes", vocab);
    status = status == ND_OK ? nd_corpus_files_add(&files, text->path, text->format) : status;
    if (status == ND_OK) {
        nd_data_say_left_out(text->path, files.skipped, files.folders);
    }
    status = status == ND_OK ? nd_token_cache_open(&request, &cache) : status;
    if (status == ND_OK && text->rules->separator) {
        say_separator(text, &files, cache->view.documents);
    }
    status = status == ND_OK ? open_cache(text, cache, vocab, sequence, out) : status;
    nd_corpus_files_fini(&files);
    return status;
}

void nd_dataset_close(nd_dataset *dataset)
{
    if (!dataset) {
        return;
    }
    if (dataset->blend) {
        for (int j = 0; j < dataset->blend->count; j++) {
            nd_dataset_close(dataset->blend->sources[j].data);
            free(dataset->blend->sources[j].name);
        }
        nd_mix_destroy(dataset->blend->mix);
        free(dataset->blend->sources);
        free(dataset->blend);
    }
    if (dataset->cache) {
        nd_token_cache_close(dataset->cache);
    } else {
        nd_fs_map_close(&dataset->map);
    }
    free(dataset->mask);
    nd_documents_close(dataset->documents);
    free(dataset->path);
    free(dataset);
}

nd_dataset_facts nd_dataset_facts_of(const nd_dataset *dataset)
{
    const nd_token_cache *cache = dataset->cache;
    const nd_documents *rows =
        dataset->documents && dataset->documents->firsts ? dataset->documents : NULL;
    const double inputs = (double)dataset->blocks * (double)dataset->sequence;
    return (nd_dataset_facts){
        .path = dataset->path,
        .format = dataset->format->name,
        .cache = cache ? cache->path : NULL,
        .documents = dataset->blend ? -1 : nd_documents_listed(dataset),
        .long_rows = rows ? rows->long_rows : 0,
        .drops = rows && rows->drops,
        .padding = rows ? 1 - (double)rows->inputs / inputs : 0,
    };
}

int64_t nd_dataset_blocks(const nd_dataset *dataset)
{
    return dataset->blocks;
}

int64_t nd_dataset_tokens(const nd_dataset *dataset)
{
    const nd_documents *d = dataset->documents;
    return d && d->firsts ? d->kept : dataset->tokens;
}

typedef struct span_count {
    const nd_dataset *dataset;
    int64_t tokens;
} span_count;

static nd_status count_spans(void *context)
{
    span_count *c = context;
    return nd_rows_ignored(c->dataset, &c->tokens);
}

nd_status nd_dataset_ignored(const nd_dataset *dataset, int64_t *tokens)
{
    span_count count = {.dataset = dataset};
    for (int j = 0; dataset->blend && j < dataset->blend->count; j++) {
        int64_t part;
        ND_TRY(nd_dataset_ignored(dataset->blend->sources[j].data, &part));
        count.tokens += part;
    }
    if (dataset->spans > 0) {
        ND_TRY(nd_fs_map_guard(&dataset->map, dataset->path, count_spans, &count));
    }
    *tokens = count.tokens;
    return ND_OK;
}

typedef struct block_read {
    const nd_dataset *dataset;
    int64_t index;
    int32_t *inputs, *labels;
} block_read;

/* All pieces of a block, which may lie anywhere in the file, are on their way before the first one
 * is waited for. */
static nd_status prefetch_block(const nd_dataset *dataset, int64_t index)
{
    const size_t width = dataset->type.width;
    nd_piece piece = {0};
    ND_TRY(nd_block_next(dataset, index, &piece));
    while (piece.count > 0) {
        const size_t begin = dataset->first_byte + (size_t)piece.first * width;
        if (dataset->cache) {
            nd_token_cache_prefetch(dataset->cache, begin, (size_t)piece.count * width);
        } else {
            nd_fs_map_prefetch(&dataset->map, begin, (size_t)piece.count * width);
        }
        ND_TRY(nd_block_next(dataset, index, &piece));
    }
    return ND_OK;
}

static nd_status read_block(void *context)
{
    const block_read *r = context;
    const nd_dataset *dataset = r->dataset;
    const int64_t S = dataset->sequence;
    nd_piece piece = {0};
    ND_TRY(prefetch_block(dataset, r->index));
    ND_TRY(nd_block_next(dataset, r->index, &piece));
    while (piece.count > 0) {
        ND_TRY(nd_piece_read(dataset, &piece, r->inputs, r->labels));
        ND_TRY(dataset->documents ? nd_documents_ignore(dataset, &piece, r->inputs, r->labels)
                                  : ND_OK);
        ND_TRY(nd_block_next(dataset, r->index, &piece));
        if (piece.place <= S) {
            r->labels[piece.place - 1] = ND_LABEL_IGNORED;
        }
    }
    for (int64_t i = piece.place; i < S; i++) {
        r->inputs[i] = 0;
        r->labels[i] = ND_LABEL_IGNORED;
    }
    return ND_OK;
}

nd_status nd_dataset_block(const nd_dataset *dataset, int64_t index, int32_t *inputs,
                           int32_t *labels)
{
    ND_ASSERT(index >= 0 && index < dataset->blocks);
    if (dataset->blend) {
        const nd_source *s = &dataset->blend->sources[nd_blend_find(dataset->blend, index)];
        return nd_dataset_block(s->data, index - s->first, inputs, labels);
    }
    block_read read = {.dataset = dataset, .index = index, .inputs = inputs, .labels = labels};
    return nd_fs_map_guard(&dataset->map, dataset->path, read_block, &read);
}
