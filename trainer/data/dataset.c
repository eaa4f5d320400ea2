// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/dataset.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/data/formats.h"

enum { BYTE_VOCAB = 256, DIGEST_SAMPLES = 64, DIGEST_SAMPLE_BYTES = 4096 };

static const char *const format_names[] = {
    [ND_DATA_AUTO] = "auto", [ND_DATA_TEXT] = "text",         [ND_DATA_JSONL] = "jsonl",
    [ND_DATA_LLMC] = "llmc", [ND_DATA_MEGATRON] = "megatron",
};

static bool ends_with(const char *text, const char *suffix)
{
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

/* "data/x", "data/x.bin" and "data/x.idx" all name the pair data/x.bin, data/x.idx. */
static nd_status megatron_paths(const char *path, char **bin, char **idx)
{
    size_t stem = strlen(path);
    if (ends_with(path, ".bin") || ends_with(path, ".idx")) {
        stem -= 4;
    }
    ND_TRY(nd_fs_format(bin, "%.*s.bin", (int)stem, path));
    return nd_fs_format(idx, "%.*s.idx", (int)stem, path);
}

static nd_data_format guess_format(const char *path, const char *idx)
{
    if (ends_with(path, ".jsonl")) {
        return ND_DATA_JSONL;
    }
    if (ends_with(path, ".idx")) {
        return ND_DATA_MEGATRON;
    }
    if (ends_with(path, ".bin")) {
        return nd_llmc_has_magic(path) ? ND_DATA_LLMC : ND_DATA_MEGATRON;
    }
    return !nd_fs_exists(path) && nd_fs_exists(idx) ? ND_DATA_MEGATRON : ND_DATA_TEXT;
}

static nd_status check_tokenizer(nd_data_format format, const char *path, const char *tokenizer,
                                 int64_t vocab)
{
    bool token_file = format == ND_DATA_LLMC || format == ND_DATA_MEGATRON;
    if (strcmp(tokenizer, "bytes") == 0) {
        if (vocab == BYTE_VOCAB) {
            return ND_OK;
        }
        return nd_fail(
            ND_ERR_CONFIG,
            "data.tokenizer is \"bytes\", which has 256 ids, but the model's vocab_size is "
            "%lld: %s",
            (long long)vocab,
            token_file ? "set data.tokenizer to \"file\" to take the ids of the token file "
                         "as they are"
                       : "use a model with vocab_size 256, or make a token file with "
                         "scripts/tokenize.py and set data.tokenizer to \"file\"");
    }
    if (strcmp(tokenizer, "file") != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "data.tokenizer is \"%s\"; known are \"bytes\" (id = byte) and \"file\" (the "
            "ids of a token file as they are)",
            tokenizer);
    }
    if (!token_file) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.tokenizer is \"file\", but \"%s\" is %s and holds no token ids: set "
                       "data.tokenizer to \"bytes\", or make a token file with scripts/tokenize.py",
                       path, format_names[format]);
    }
    return ND_OK;
}

nd_status nd_text_open(nd_dataset *dataset)
{
    ND_TRY(nd_fs_map_open(dataset->path, ND_ERR_DATA, &dataset->map));
    ND_TRY(nd_text_check(dataset));
    dataset->type = ND_TOKEN_U8;
    dataset->tokens = (int64_t)dataset->map.size;
    return ND_OK;
}

static nd_status check_exists(const nd_dataset *dataset)
{
    return nd_fs_exists(dataset->path)
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "the data file \"%s\" does not exist: set data.path to a file of yours, "
                         "or make it: scripts/prepare_data writes the default text, "
                         "scripts/tokenize.py tokens of a text of yours",
                         dataset->path);
}

static nd_status open_format(nd_dataset *dataset, const char *idx)
{
    switch (dataset->format) {
    case ND_DATA_JSONL:
        return nd_jsonl_open(dataset);
    case ND_DATA_LLMC:
        return nd_llmc_open(dataset);
    case ND_DATA_MEGATRON:
        return nd_megatron_open(dataset, idx);
    case ND_DATA_AUTO:
    case ND_DATA_TEXT:
        break;
    }
    return nd_text_open(dataset);
}

/* A last block of one token has an input but no label: it is left out. */
static nd_status count_blocks(nd_dataset *dataset)
{
    int64_t length = dataset->sequence + 1;
    int64_t rest = dataset->tokens % length;
    dataset->blocks = dataset->tokens / length + (rest > 1);
    if (dataset->tokens == 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is empty (%s): there is nothing to train on",
                       dataset->path, format_names[dataset->format]);
    }
    if (dataset->blocks == 0) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" holds a single token (%s): at least two are needed, an input and the "
            "label after it",
            dataset->path, format_names[dataset->format]);
    }
    return ND_OK;
}

nd_status nd_dataset_open(const char *path, nd_data_format format, const char *tokenizer,
                          int64_t vocab, int64_t sequence, nd_dataset **out)
{
    ND_ASSERT(sequence >= 1 && sequence < INT32_MAX && vocab >= 1 && vocab <= INT32_MAX);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    char *bin = NULL, *idx = NULL;
    if (!path || !*path) {
        return nd_fail(ND_ERR_CONFIG, "no data file is named: set data.path");
    }
    ND_TRY_OUT(megatron_paths(path, &bin, &idx));
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    dataset->format = format == ND_DATA_AUTO ? guess_format(path, idx) : format;
    dataset->vocab = vocab;
    dataset->sequence = sequence;
    ND_TRY_OUT(
        nd_fs_format(&dataset->path, "%s", dataset->format == ND_DATA_MEGATRON ? bin : path));
    ND_TRY_OUT(check_exists(dataset));
    ND_TRY_OUT(check_tokenizer(dataset->format, path, tokenizer, vocab));
    ND_TRY_OUT(open_format(dataset, idx));
    ND_TRY_OUT(count_blocks(dataset));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    free(idx);
    free(bin);
    return status;
}

void nd_dataset_close(nd_dataset *dataset)
{
    if (!dataset) {
        return;
    }
    nd_fs_map_close(&dataset->map);
    free(dataset->rows);
    free(dataset->path);
    free(dataset);
}

int64_t nd_dataset_blocks(const nd_dataset *dataset)
{
    return dataset->blocks;
}

int64_t nd_dataset_tokens(const nd_dataset *dataset)
{
    return dataset->tokens;
}

const char *nd_dataset_format_name(const nd_dataset *dataset)
{
    return format_names[dataset->format];
}

typedef struct block_read {
    const nd_dataset *dataset;
    int64_t index;
    int32_t *inputs, *labels;
} block_read;

static nd_status read_block(void *context)
{
    const block_read *r = context;
    const int64_t S = r->dataset->sequence, first = r->index * (S + 1);
    const int64_t left = r->dataset->tokens - first;
    const int64_t count = left < S + 1 ? left : S + 1; /* tokens of this block, >= 2 */
    if (r->dataset->format == ND_DATA_JSONL) {
        ND_TRY(nd_jsonl_block(r->dataset, first, count, r->inputs, r->labels));
    } else {
        int64_t head = count < S ? count : S;
        ND_TRY(nd_flat_read(r->dataset, first, head, r->inputs));
        memcpy(r->labels, r->inputs + 1, (size_t)(head - 1) * sizeof *r->labels);
        if (count == S + 1) {
            ND_TRY(nd_flat_read(r->dataset, first + S, 1, r->labels + S - 1));
        }
    }
    for (int64_t i = count; i < S; i++) {
        r->inputs[i] = 0;
    }
    for (int64_t i = count - 1; i < S; i++) {
        r->labels[i] = ND_LABEL_IGNORED;
    }
    return ND_OK;
}

nd_status nd_dataset_block(const nd_dataset *dataset, int64_t index, int32_t *inputs,
                           int32_t *labels)
{
    ND_ASSERT(index >= 0 && index < dataset->blocks);
    block_read read = {.dataset = dataset, .index = index, .inputs = inputs, .labels = labels};
    return nd_fs_map_guard(&dataset->map, dataset->path, read_block, &read);
}

static void put_u64(uint8_t *p, uint64_t x)
{
    for (int i = 0; i < 8; i++) {
        p[i] = (uint8_t)(x >> (8 * i));
    }
}

nd_status nd_dataset_digest(const nd_dataset *dataset, char hex[65])
{
    enum { HEAD = 3 * 8 };
    uint8_t *buffer;
    ND_TRY(nd_alloc(HEAD + (size_t)DIGEST_SAMPLES * DIGEST_SAMPLE_BYTES, 1, (void **)&buffer));
    size_t size = dataset->map.size, used = HEAD;
    put_u64(buffer, size);
    put_u64(buffer + 8, (uint64_t)dataset->format);
    put_u64(buffer + 16, (uint64_t)dataset->tokens);
    if (size <= (size_t)DIGEST_SAMPLES * DIGEST_SAMPLE_BYTES) {
        memcpy(buffer + used, dataset->map.data, size);
        used += size;
    } else { /* evenly spaced, the first at the beginning and the last at the end */
        for (int i = 0; i < DIGEST_SAMPLES; i++) {
            size_t span = size - DIGEST_SAMPLE_BYTES;
            size_t at = span / (DIGEST_SAMPLES - 1) * (size_t)i;
            at = i == DIGEST_SAMPLES - 1 ? span : at;
            memcpy(buffer + used, dataset->map.data + at, DIGEST_SAMPLE_BYTES);
            used += DIGEST_SAMPLE_BYTES;
        }
    }
    nd_status status = nd_fs_sha256(buffer, used, hex);
    free(buffer);
    return status;
}
