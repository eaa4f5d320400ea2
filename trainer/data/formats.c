// SPDX-License-Identifier: Apache-2.0
/*
 * Files of tokens, each a flat array of ids once it is checked.
 *
 * Text: a byte is its id.
 *
 * llm.c: 256 int32 of header (magic, version, token count), then the ids. Source: llm.c dev/data.
 *
 * Megatron-LM: ids without a header in .bin; lengths, positions and document boundaries in .idx.
 * Source: Megatron-LM core/datasets/indexed_dataset.py. Its writer places the sequences one after
 * another, so the .bin is the concatenation of all documents. An .idx that does not describe such a
 * .bin is refused; after this check only the .bin, and a loss mask beside it, is read, and where
 * documents are separate the places of documents in the .idx.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/hash.h"
#include "runtime/base/math.h"
#include "runtime/base/text.h"
#include "trainer/data/dataset.h"

enum { BYTE_VOCAB = 256 };

static nd_status text_open(void *context)
{
    nd_dataset *dataset = context;
    const uint8_t *data = dataset->map.data;
    const size_t size = dataset->map.size;
    ND_TRY(nd_text_check(dataset->path, data, size));
    /* As in a text that is encoded, and in JSON rows, a byte order mark is not text. */
    dataset->first_byte = size >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    dataset->type = (nd_token_type){1, false};
    dataset->tokens = (int64_t)(size - dataset->first_byte);
    return ND_OK;
}

enum {
    LLMC_HEADER_BYTES = 1024,
    MAGIC_GPT2 = 20240520,   /* version 1, u16 ids */
    MAGIC_LLAMA3 = 20240801, /* version 7, u32 ids */
};

static nd_status llmc_has_magic(const char *path, bool *out)
{
    int32_t magic = 0;
    int fd = -1;
    struct stat st;
    nd_status status = nd_fs_open(path, ND_ERR_DATA, &fd, &st);
    *out = false;
    if (status == ND_OK && st.st_size >= (off_t)sizeof magic) {
        status = nd_fs_pread(fd, path, &magic, sizeof magic, 0);
        *out = magic == MAGIC_GPT2 || magic == MAGIC_LLAMA3;
    }
    if (fd >= 0) {
        close(fd);
    }
    return status == ND_ERR_DATA ? ND_OK : status; /* no file, which its reader says */
}

static nd_status llmc_open(void *context)
{
    nd_dataset *dataset = context;
    const uint8_t *data = dataset->map.data;
    size_t size = dataset->map.size;
    const char *path = dataset->path;
    if (size < LLMC_HEADER_BYTES) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" has %zu bytes, less than the %d of an llm.c header: it is truncated or "
            "not an llm.c file",
            path, size, LLMC_HEADER_BYTES);
    }
    int32_t header[3];
    memcpy(header, data, sizeof header);
    const int32_t magic = header[0], version = header[1], count = header[2];
    if (magic == MAGIC_GPT2 && version == 1) {
        dataset->type = (nd_token_type){2, false};
    } else if (magic == MAGIC_LLAMA3 && version == 7) {
        dataset->type = (nd_token_type){4, false};
    } else {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" begins with magic %d, version %d; llm.c files have %d, 1 (GPT-2, 16-bit "
            "ids) or %d, 7 (Llama 3, 32-bit ids); set data.format to what the file is",
            path, magic, version, MAGIC_GPT2, MAGIC_LLAMA3);
    }
    size_t width = dataset->type.width;
    if (count < 0 || size != LLMC_HEADER_BYTES + (size_t)count * width) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %zu bytes, but its header announces %d tokens of %zu bytes, %zu "
                       "bytes with the header: it is truncated or was written only in part",
                       path, size, count, width,
                       LLMC_HEADER_BYTES + (count < 0 ? 0 : (size_t)count * width));
    }
    dataset->first_byte = LLMC_HEADER_BYTES;
    dataset->tokens = count;
    return ND_OK;
}

static const char index_magic[9] = "MMIDIDX\0";

enum { INDEX_HEADER_BYTES = 34, INDEX_VERSION = 1 };

static int64_t i64_at(const uint8_t *p, uint64_t index)
{
    int64_t x;
    memcpy(&x, p + 8 * index, sizeof x);
    return x;
}

static nd_status type_of_code(const char *idx, uint8_t code, nd_token_type *type)
{
    static const nd_token_type codes[] = {[1] = {1, false}, [2] = {1, true}, [3] = {2, true},
                                          [4] = {4, true},  [5] = {8, true}, [8] = {2, false}};
    if (code >= sizeof codes / sizeof *codes || codes[code].width == 0) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": token type code %u is not an integer type (1 u8, 2 i8, 3 i16, 4 i32, 5 "
            "i64, 8 u16)",
            idx, code);
    }
    *type = codes[code];
    return ND_OK;
}

static nd_status parse_index_header(const uint8_t *data, size_t size, const char *idx,
                                    nd_index *out)
{
    if (size < INDEX_HEADER_BYTES) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %zu bytes, less than the %d of a Megatron index header: it is "
                       "truncated or not an index",
                       idx, size, INDEX_HEADER_BYTES);
    }
    if (memcmp(data, index_magic, sizeof index_magic) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" does not begin with MMIDIDX: it is not a Megatron index", idx);
    }
    int64_t version = i64_at(data + 9, 0);
    if (version != INDEX_VERSION) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has version %lld of the Megatron index; version 1 is read", idx,
                       (long long)version);
    }
    ND_TRY(type_of_code(idx, data[17], &out->type));
    uint64_t room = size - INDEX_HEADER_BYTES;
    uint64_t S = (uint64_t)i64_at(data + 18, 0), D = (uint64_t)i64_at(data + 26, 0);
    bool fits = S <= room / 12 && D <= (room - 12 * S) / 8;
    uint64_t rest = fits ? room - 12 * S - 8 * D : 0;
    if (!fits || (rest != 0 && rest != S)) { /* optional modes take one byte per sequence */
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" has %zu bytes, which does not match its %llu sequences and %llu document "
            "boundaries: it is truncated or damaged",
            idx, size, (unsigned long long)S, (unsigned long long)D);
    }
    out->sequences = S;
    out->borders = D;
    out->lengths = data + INDEX_HEADER_BYTES;
    out->pointers = out->lengths + 4 * S;
    out->documents = out->pointers + 8 * S;
    return ND_OK;
}

static nd_status check_sequences(const nd_index *index, uint64_t bin_bytes, const char *idx,
                                 const char *bin)
{
    uint64_t end = 0; /* of the previous sequence, in bytes of the .bin */
    for (uint64_t i = 0; i < index->sequences; i++) {
        int32_t length;
        memcpy(&length, index->lengths + 4 * i, sizeof length);
        int64_t pointer = i64_at(index->pointers, i);
        if (length < 0 || pointer < 0 || (uint64_t)pointer != end) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\": sequence %llu has length %d and begins at byte %lld of the .bin, "
                "where %llu was expected: the index is damaged or belongs to another .bin",
                idx, (unsigned long long)i, length, (long long)pointer, (unsigned long long)end);
        }
        end += (uint64_t)length *
               index->type.width; /* no overflow: end was at most bin_bytes before */
        if (end > bin_bytes) {
            break;
        }
    }
    if (end != bin_bytes) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" describes %s%llu bytes of tokens, but \"%s\" has %llu: one of them is "
            "truncated, or they are not a pair",
            idx, end > bin_bytes ? "at least " : "", (unsigned long long)end, bin,
            (unsigned long long)bin_bytes);
    }
    return ND_OK;
}

/* Document boundaries, counted in sequences, must begin at 0, never decrease, and end at the number
 * of sequences. */
static nd_status check_documents(const nd_index *index, const char *idx)
{
    int64_t before = 0;
    for (uint64_t i = 0; i < index->borders; i++) {
        int64_t at = i64_at(index->documents, i);
        if (at < before || (i == 0 && at != 0) || (uint64_t)at > index->sequences) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\": document boundary %llu is %lld after %lld, with %llu sequences: the "
                "index is damaged",
                idx, (unsigned long long)i, (long long)at, (long long)before,
                (unsigned long long)index->sequences);
        }
        before = at;
    }
    if (index->borders == 0 || (uint64_t)before != index->sequences) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the document boundaries end at sequence %lld, but there are %llu "
                       "sequences: the index is damaged",
                       idx, (long long)before, (unsigned long long)index->sequences);
    }
    return ND_OK;
}

nd_status nd_index_parse(const uint8_t *data, size_t size, uint64_t bin_bytes, const char *idx,
                         const char *bin, nd_index *out)
{
    ND_TRY(parse_index_header(data, size, idx, out));
    ND_TRY(check_sequences(out, bin_bytes, idx, bin));
    return check_documents(out, idx);
}

static nd_status megatron_path(const char *path, const char *suffix, char **out)
{
    const int cut = nd_ends_with(path, ".bin") || nd_ends_with(path, ".idx") ? 4 : 0;
    return nd_fs_format(out, "%.*s%s", (int)strlen(path) - cut, path, suffix);
}

static nd_status read_index(void *context)
{
    nd_dataset *dataset = context;
    nd_index *index = &dataset->index;
    ND_TRY(nd_index_parse(index->map.data, index->map.size, dataset->map.size, index->path,
                          dataset->path, index));
    nd_hash_128(index->map.data, index->map.size, index->digest);
    dataset->type = index->type;
    dataset->tokens = (int64_t)(dataset->map.size / index->type.width);
    return ND_OK;
}

static nd_status megatron_open(void *context)
{
    nd_dataset *dataset = context;
    nd_index *index = &dataset->index;
    nd_loss_mask_view view = {0};
    char *mask = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(megatron_path(dataset->path, ".idx", &index->path));
    ND_TRY_OUT(megatron_path(dataset->path, ".mask", &mask));
    ND_TRY_OUT(nd_fs_exists(index->path, &there));
    ND_TRY_OUT(there ? ND_OK
                     : nd_fail(ND_ERR_DATA,
                               "\"%s\" is taken for Megatron data, but its index \"%s\" is "
                               "missing; an llm.c file would begin with its magic number; copy "
                               "the index next to it, or set data.format",
                               dataset->path, index->path));
    ND_TRY_OUT(nd_fs_map_open(index->path, ND_ERR_DATA, &index->map));
    ND_TRY_OUT(nd_fs_map_guard(&index->map, index->path, read_index, dataset));
    ND_TRY_OUT(nd_loss_mask_read(mask, dataset->path, index->path, dataset->tokens, &dataset->mask,
                                 &view));
    dataset->mask_digest = view.digest;
    dataset->spans = view.spans;
    dataset->span_pairs = view.pairs;
out:
    free(mask);
    return status;
}

/* The format of a file. */

static const nd_format formats[] = {
    [ND_DATA_TEXT] = {"text", false, 1, text_open},
    [ND_DATA_JSONL] = {"jsonl", false, 2, NULL},
    [ND_DATA_LLMC] = {"llmc", true, 3, llmc_open},
    [ND_DATA_MEGATRON] = {"megatron", true, 4, megatron_open},
};

static nd_status guess_format(const char *path, nd_data_format *out)
{
    bool magic = false, there = true, indexed = false;
    char *idx = NULL;
    *out = nd_is_name_of_rows(path) ? ND_DATA_JSONL : ND_DATA_MEGATRON;
    if (*out == ND_DATA_JSONL || nd_ends_with(path, ".idx")) {
        return ND_OK;
    }
    if (nd_ends_with(path, ".bin")) {
        ND_TRY(llmc_has_magic(path, &magic));
        *out = magic ? ND_DATA_LLMC : ND_DATA_MEGATRON;
        return ND_OK;
    }
    ND_TRY(megatron_path(path, ".idx", &idx));
    nd_status status = nd_fs_exists(path, &there);
    status = status == ND_OK && !there ? nd_fs_exists(idx, &indexed) : status;
    free(idx);
    *out = indexed ? ND_DATA_MEGATRON : ND_DATA_TEXT;
    return status;
}

/* Sets the format, and the path of the file that holds the tokens. */
static nd_status set_format(nd_dataset *dataset, const char *path, nd_data_format format)
{
    ND_TRY(format == ND_DATA_AUTO ? guess_format(path, &format) : ND_OK);
    dataset->format = &formats[format];
    return format == ND_DATA_MEGATRON ? megatron_path(path, ".bin", &dataset->path)
                                      : nd_fs_format(&dataset->path, "%s", path);
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

static nd_status check_bytes(bool holds_ids, int64_t vocab)
{
    return vocab == BYTE_VOCAB
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "data.tokenizer is \"bytes\", which has 256 ids, but the model's "
                         "vocab_size is %lld; %s",
                         (long long)vocab,
                         holds_ids ? "set data.tokenizer to \"file\" to take the ids of the token "
                                     "file as they are"
                                   : "set data.tokenizer to \"model\" (--tokenizer model) to take "
                                     "the tokenizer.json of model.path, or to the path of another "
                                     "one, or use a model with vocab_size 256");
}

static nd_status check_tokenizer(const nd_dataset *dataset, const char *tokenizer)
{
    if (strcmp(tokenizer, "bytes") == 0) {
        return check_bytes(dataset->format->holds_ids, dataset->vocab);
    }
    ND_ASSERT(strcmp(tokenizer, "file") == 0);
    return dataset->format->holds_ids
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "data.tokenizer is \"file\", but \"%s\" is %s and holds no token ids; "
                         "set data.tokenizer to \"bytes\", \"model\" or the path of a "
                         "tokenizer.json, or make a token file with ndtrain tokenize",
                         dataset->path, dataset->format->name);
}

/* Datasets of one file, or of one text. */

static nd_status make_dataset(int64_t vocab, int64_t sequence, nd_dataset **out)
{
    ND_ASSERT(sequence >= 1 && sequence < INT32_MAX && vocab >= 1 && vocab <= INT32_MAX);
    ND_TRY(ND_ALLOC(1, out));
    (*out)->vocab = vocab;
    (*out)->sequence = sequence;
    return ND_OK;
}

/* Takes over a dataset that was opened, or could not be. A last block of one token has an input but
 * no label, so it is left out. */
static nd_status finish(nd_dataset *dataset, nd_status opened, nd_dataset **out)
{
    const int64_t length = dataset->sequence + 1;
    dataset->blocks = dataset->tokens / length + (dataset->tokens % length > 1);
    if (opened == ND_OK && dataset->blocks == 0) {
        opened = nd_fail(
            ND_ERR_DATA,
            dataset->tokens == 0
                ? "\"%s\" is empty (%s); name a file that holds some tokens"
                : "\"%s\" holds a single token (%s): at least two are needed, an input and the "
                  "label after it",
            dataset->path, dataset->format->name);
    }
    if (opened == ND_OK) {
        *out = dataset;
    } else {
        nd_dataset_close(dataset);
    }
    return opened;
}

/* Opens a file of the format that is asked for, or of the one that it seems to have. */
static nd_status open_file(nd_dataset *dataset, const char *path, nd_data_format asked,
                           const char *tokenizer)
{
    bool there = false;
    ND_TRY(set_format(dataset, path, asked));
    ND_TRY(nd_fs_exists(dataset->path, &there));
    ND_TRY(there ? ND_OK
                 : nd_fail(ND_ERR_DATA,
                           "the data file \"%s\" does not exist; set data.path to a file of yours, "
                           "or make one: scripts/prepare_data writes the default text, "
                           "scripts/make_tokens.py makes tokens of a text of yours",
                           dataset->path));
    ND_TRY(check_tokenizer(dataset, tokenizer));
    ND_ASSERT(dataset->format->open);
    ND_TRY(nd_fs_map_open(dataset->path, ND_ERR_DATA, &dataset->map));
    if (asked == ND_DATA_AUTO && dataset->format == &formats[ND_DATA_TEXT]) {
        ND_TRY(nd_corpus_check_text(path));
    }
    return nd_fs_map_guard(&dataset->map, dataset->path, dataset->format->open, dataset);
}

nd_status nd_dataset_open(const char *path, nd_data_format format, const char *tokenizer,
                          int64_t vocab, int64_t sequence, nd_dataset **out)
{
    nd_dataset *dataset;
    ND_TRY(make_dataset(vocab, sequence, &dataset));
    return finish(dataset, open_file(dataset, path, format, tokenizer), out);
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

static nd_status open_text(nd_dataset *dataset, const char *path,
                           const nd_token_cache_request *request)
{
    static const nd_format encoded = {"encoded text", true, 0, NULL};
    const nd_corpus_files *files = request->job.files;
    nd_corpus_files_say_left_out(files, path);
    ND_TRY(nd_token_cache_open(request, &dataset->cache));
    const nd_token_view *view = &dataset->cache->view;
    if (request->job.rules->separator) {
        say_separator(path, files, view->documents);
    }
    dataset->map = dataset->cache->map;
    dataset->format = &encoded;
    dataset->type = (nd_token_type){(uint8_t)view->width, view->width == 4};
    dataset->first_byte = ND_TOKEN_CACHE_HEADER_BYTES;
    dataset->tokens = (int64_t)view->tokens;
    dataset->spans = view->spans;
    dataset->span_pairs = view->span_pairs;
    return nd_fs_format(&dataset->path, "%s", path);
}

nd_status nd_dataset_open_text(const char *path, nd_data_format format,
                               nd_token_cache_request request, int64_t sequence, nd_dataset **out)
{
    nd_corpus_files files = {0};
    nd_dataset *dataset;
    request.job.files = &files;
    ND_TRY(request.tokenizer ? ND_OK : check_bytes(false, request.vocab));
    ND_TRY(make_dataset(request.vocab, sequence, &dataset));
    nd_status status = nd_corpus_files_add(&files, path, format);
    status = status == ND_OK ? open_text(dataset, path, &request) : status;
    status = finish(dataset, status, out);
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
        free(dataset->blend->phases);
        free(dataset->blend->places);
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
    free(dataset->index.path);
    free(dataset->mask);
    if (dataset->documents) {
        free(dataset->documents->firsts);
        free(dataset->documents->begins);
        free(dataset->documents);
    }
    free(dataset->path);
    free(dataset);
}
