// SPDX-License-Identifier: Apache-2.0
/*
 * Megatron-LM token files: ids without a header in .bin; lengths, positions and document boundaries
 * in .idx. Source: Megatron-LM core/datasets/indexed_dataset.py. Its writer places the sequences
 * one after another, so the .bin is the concatenation of all documents. An .idx that does not
 * describe such a .bin is refused; after this check only the .bin, and a loss mask beside it, is
 * read, and where documents are separate the places of documents in the .idx.
 */
#include "trainer/data/formats.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "runtime/base/hash.h"

static const char magic[9] = "MMIDIDX\0";

enum { HEADER_BYTES = 34, VERSION = 1 };

typedef struct idx_view {
    const char *idx, *bin;
    uint64_t sequences, documents;
    const uint8_t *lengths;      /* (sequences) i32 */
    const uint8_t *pointers;     /* (sequences) i64 */
    const uint8_t *documents_at; /* (documents) i64 */
} idx_view;

static int64_t i64_at(const uint8_t *p, uint64_t index)
{
    int64_t x;
    memcpy(&x, p + 8 * index, sizeof x);
    return x;
}

static int32_t i32_at(const uint8_t *p, uint64_t index)
{
    int32_t x;
    memcpy(&x, p + 4 * index, sizeof x);
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

static nd_status parse_header(const uint8_t *data, size_t size, idx_view *view, nd_token_type *type)
{
    if (size < HEADER_BYTES) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %zu bytes, less than the %d of a Megatron index header: it is "
                       "truncated or not an index",
                       view->idx, size, HEADER_BYTES);
    }
    if (memcmp(data, magic, sizeof magic) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" does not begin with MMIDIDX: it is not a Megatron index", view->idx);
    }
    int64_t version = i64_at(data + 9, 0);
    if (version != VERSION) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has version %lld of the Megatron index; version 1 is read",
                       view->idx, (long long)version);
    }
    ND_TRY(type_of_code(view->idx, data[17], type));
    view->sequences = (uint64_t)i64_at(data + 18, 0);
    view->documents = (uint64_t)i64_at(data + 26, 0);

    uint64_t room = size - HEADER_BYTES;
    uint64_t S = view->sequences, D = view->documents;
    bool fits = S <= room / 12 && D <= (room - 12 * S) / 8;
    uint64_t rest = fits ? room - 12 * S - 8 * D : 0;
    if (!fits || (rest != 0 && rest != S)) { /* optional modes take one byte per sequence */
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" has %zu bytes, which does not match its %llu sequences and %llu document "
            "boundaries: it is truncated or damaged",
            view->idx, size, (unsigned long long)S, (unsigned long long)D);
    }
    view->lengths = data + HEADER_BYTES;
    view->pointers = view->lengths + 4 * S;
    view->documents_at = view->pointers + 8 * S;
    return ND_OK;
}

static nd_status check_sequences(const idx_view *view, size_t width, uint64_t bin_bytes)
{
    uint64_t end = 0; /* of the previous sequence, in bytes of the .bin */
    for (uint64_t i = 0; i < view->sequences; i++) {
        int32_t length = i32_at(view->lengths, i);
        int64_t pointer = i64_at(view->pointers, i);
        if (length < 0 || pointer < 0 || (uint64_t)pointer != end) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\": sequence %llu has length %d and begins at byte %lld of the .bin, "
                "where %llu was expected: the index is damaged or belongs to another .bin",
                view->idx, (unsigned long long)i, length, (long long)pointer,
                (unsigned long long)end);
        }
        end += (uint64_t)length * width; /* no overflow: end was at most bin_bytes before */
        if (end > bin_bytes) {
            break;
        }
    }
    if (end != bin_bytes) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" describes %s%llu bytes of tokens, but \"%s\" has %llu: one of them is "
            "truncated, or they are not a pair",
            view->idx, end > bin_bytes ? "at least " : "", (unsigned long long)end, view->bin,
            (unsigned long long)bin_bytes);
    }
    return ND_OK;
}

/* Document boundaries, counted in sequences, must begin at 0, never decrease, and end at the number
 * of sequences. */
static nd_status check_documents(const idx_view *view)
{
    int64_t before = 0;
    for (uint64_t i = 0; i < view->documents; i++) {
        int64_t at = i64_at(view->documents_at, i);
        if (at < before || (i == 0 && at != 0) || (uint64_t)at > view->sequences) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\": document boundary %llu is %lld after %lld, with %llu sequences: the "
                "index is damaged",
                view->idx, (unsigned long long)i, (long long)at, (long long)before,
                (unsigned long long)view->sequences);
        }
        before = at;
    }
    if (view->documents == 0 || (uint64_t)before != view->sequences) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": the document boundaries end at sequence %lld, but there are %llu "
                       "sequences: the index is damaged",
                       view->idx, (long long)before, (unsigned long long)view->sequences);
    }
    return ND_OK;
}

nd_status nd_megatron_parse(const uint8_t *data, size_t size, uint64_t bin_bytes, const char *idx,
                            const char *bin, nd_token_type *type, int64_t *tokens)
{
    idx_view view = {.idx = idx, .bin = bin};
    nd_token_type found = {0};
    ND_TRY(parse_header(data, size, &view, &found));
    ND_TRY(check_sequences(&view, found.width, bin_bytes));
    ND_TRY(check_documents(&view));
    *type = found;
    *tokens = (int64_t)(bin_bytes / found.width);
    return ND_OK;
}

nd_status nd_megatron_path(const char *path, const char *suffix, char **out)
{
    size_t n = strlen(path);
    bool suffixed =
        n >= 4 && (strcmp(path + n - 4, ".bin") == 0 || strcmp(path + n - 4, ".idx") == 0);
    return nd_fs_format(out, "%.*s%s", (int)(suffixed ? n - 4 : n), path, suffix);
}

/* Reads the loss mask at `path`, if there is one, which must belong to this .bin and index. */
static nd_status read_mask(nd_dataset *dataset, const char *path, const char *idx)
{
    char index_sha256[65], bin_sha256[65], *data = NULL;
    size_t size = 0;
    nd_loss_mask_view view;
    const nd_loss_mask_pair pair = {.bin = dataset->path,
                                    .idx = idx,
                                    .tokens = (uint64_t)dataset->tokens,
                                    .index_sha256 = index_sha256,
                                    .bin_sha256 = bin_sha256};
    /* No two spans touch that the writers make; others may. */
    const size_t most =
        ND_LOSS_MASK_HEADER_BYTES + 16 * (size_t)dataset->tokens + ND_LOSS_MASK_DIGEST_BYTES;
    bool there = false; /* a link to nowhere is no reason to count all tokens */
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_read(path, most, ND_ERR_DATA, &data, &size));
    dataset->mask = (uint8_t *)data;
    ND_TRY(nd_sha256_file(idx, index_sha256));
    ND_TRY(nd_loss_mask_bin_sha256(dataset->path, bin_sha256));
    ND_TRY(nd_loss_mask_parse(dataset->mask, size, path, &pair, &view));
    dataset->mask_digest = view.digest;
    dataset->spans = view.spans;
    dataset->span_pairs = view.pairs;
    return ND_OK;
}

typedef struct index_read {
    nd_dataset *dataset;
    const char *path;
    nd_fs_map map;
} index_read;

static nd_status read_index(void *context)
{
    const index_read *r = context;
    nd_dataset *dataset = r->dataset;
    ND_TRY(nd_megatron_parse(r->map.data, r->map.size, dataset->map.size, r->path, dataset->path,
                             &dataset->type, &dataset->tokens));
    const XXH128_hash_t digest = XXH3_128bits(r->map.data, r->map.size);
    dataset->index_digest[0] = digest.low64;
    dataset->index_digest[1] = digest.high64;
    return ND_OK;
}

static nd_status open_index(nd_dataset *dataset, const char *path)
{
    index_read read = {.dataset = dataset, .path = path};
    bool there = false;
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" is taken for Megatron data, but its index \"%s\" is missing; an llm.c "
            "file would begin with its magic number; copy the index next to it, or set data.format",
            dataset->path, path);
    }
    ND_TRY(nd_fs_map_open(path, ND_ERR_DATA, &read.map));
    nd_status status = nd_fs_map_guard(&read.map, path, read_index, &read);
    nd_fs_map_close(&read.map);
    return status;
}

/* The places of documents and sequences in an index that was checked. */
static nd_status view_index(const nd_dataset *dataset, idx_view *view)
{
    const nd_fs_map *index = &dataset->documents->index;
    nd_token_type type;
    *view = (idx_view){.idx = dataset->path, .bin = dataset->path};
    return parse_header(index->data, index->size, view, &type);
}

static nd_status check_again(void *context)
{
    const nd_dataset *dataset = context;
    const nd_fs_map *index = &dataset->documents->index;
    const XXH128_hash_t digest = XXH3_128bits(index->data, index->size);
    return digest.low64 == dataset->index_digest[0] && digest.high64 == dataset->index_digest[1]
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "the index of \"%s\" changed while it was opened; leave the files alone "
                         "during a run",
                         dataset->path);
}

nd_status nd_megatron_open_borders(nd_dataset *dataset)
{
    nd_fs_map *index = &dataset->documents->index;
    char *path = NULL;
    idx_view view;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_megatron_path(dataset->path, ".idx", &path));
    ND_TRY_OUT(nd_fs_map_open(path, ND_ERR_DATA, index));
    ND_TRY_OUT(nd_fs_map_guard(index, path, check_again, dataset));
    ND_TRY_OUT(view_index(dataset, &view));
    dataset->documents->borders = view.documents;
out:
    free(path);
    return status;
}

nd_status nd_megatron_border(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    idx_view view;
    ND_TRY(view_index(dataset, &view));
    const uint64_t sequence = (uint64_t)i64_at(view.documents_at, index);
    *token = sequence < view.sequences
                 ? (uint64_t)i64_at(view.pointers, sequence) / dataset->type.width
                 : (uint64_t)dataset->tokens;
    return ND_OK;
}

nd_status nd_megatron_open(nd_dataset *dataset)
{
    char *path = NULL, *mask = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_megatron_path(dataset->path, ".idx", &path));
    ND_TRY_OUT(nd_megatron_path(dataset->path, ".mask", &mask));
    ND_TRY_OUT(open_index(dataset, path));
    ND_TRY_OUT(read_mask(dataset, mask, path));
out:
    free(path);
    free(mask);
    return status;
}
