// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/hashes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

static const struct {
    const char *name;
    nd_hash_kind chunk, whole;
} kinds[ND_CHECKSUM_COUNT] = {
    [ND_CHECKSUM_XXH3] = {"xxh3", ND_HASH_XXH3_64, ND_HASH_XXH3_128},
    [ND_CHECKSUM_SHA256] = {"sha256", ND_HASH_SHA256, ND_HASH_SHA256},
};

const char *nd_checksum_name(nd_checksum kind)
{
    return kinds[kind].name;
}

int nd_checksum_chunk_bytes(nd_checksum kind)
{
    return nd_hash_bytes(kinds[kind].chunk);
}

int nd_checksum_whole_bytes(nd_checksum kind)
{
    return nd_hash_bytes(kinds[kind].whole);
}

static void store_le(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t load_le(const uint8_t *data, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)data[i] << (8 * i);
    }
    return value;
}

nd_status nd_digest_text(nd_checksum kind, const void *data, size_t bytes,
                         char out[ND_DIGEST_TEXT_MAX])
{
    char hex[ND_HASH_HEX_MAX];
    ND_TRY(nd_hash_text(kinds[kind].whole, data, bytes, hex));
    snprintf(out, ND_DIGEST_TEXT_MAX, "%s:%s", kinds[kind].name, hex);
    return ND_OK;
}

bool nd_digest_text_is_valid(const char *text)
{
    for (int k = 0; k < ND_CHECKSUM_COUNT; k++) {
        size_t prefix = strlen(kinds[k].name);
        if (strncmp(text, kinds[k].name, prefix) == 0 && text[prefix] == ':') {
            const char *hex = text + prefix + 1;
            return strlen(hex) == 2 * (size_t)nd_checksum_whole_bytes(k) &&
                   strspn(hex, "0123456789abcdef") == strlen(hex);
        }
    }
    return false;
}

bool nd_name_is_plain(const char *name)
{
    if (!name[0] || name[0] == '.') {
        return false;
    }
    for (const char *c = name; *c; c++) {
        if (*c <= ' ' || *c > '~' || *c == '/' || *c == '\\') {
            return false;
        }
    }
    return true;
}

/* The hash file. */

enum { HEAD_BYTES = 24, FILE_BYTES = ND_HASHED_NAME_MAX + 16, VERSION = 1 };

static const char magic[8] = {'N', 'D', 'H', 'A', 'S', 'H', 'E', 'S'};

void nd_hashes_fini(nd_hashes *hashes)
{
    for (int i = 0; i < hashes->count; i++) {
        free(hashes->files[i].digests);
    }
    *hashes = (nd_hashes){0};
}

const nd_hashed_file *nd_hashes_find(const nd_hashes *hashes, const char *name)
{
    for (int i = 0; i < hashes->count; i++) {
        if (strcmp(hashes->files[i].name, name) == 0) {
            return &hashes->files[i];
        }
    }
    return NULL;
}

nd_status nd_hashes_format(const nd_hashes *hashes, uint8_t **out, size_t *bytes)
{
    int width = nd_checksum_chunk_bytes(hashes->kind);
    size_t size = HEAD_BYTES + (size_t)hashes->count * FILE_BYTES;
    for (int i = 0; i < hashes->count; i++) {
        size += (size_t)hashes->files[i].chunks * (size_t)width;
    }
    uint8_t *data = NULL;
    ND_TRY(nd_alloc(size, 1, (void **)&data));
    memcpy(data, magic, sizeof magic);
    store_le(data + 8, VERSION, 4);
    store_le(data + 12, (uint64_t)hashes->kind, 4);
    store_le(data + 16, (uint64_t)width, 4);
    store_le(data + 20, (uint64_t)hashes->count, 4);
    uint8_t *at = data + HEAD_BYTES;
    for (int i = 0; i < hashes->count; i++) {
        const nd_hashed_file *file = &hashes->files[i];
        snprintf((char *)at, ND_HASHED_NAME_MAX, "%s", file->name);
        store_le(at + ND_HASHED_NAME_MAX, file->bytes, 8);
        store_le(at + ND_HASHED_NAME_MAX + 8, (uint64_t)file->chunks, 8);
        at += FILE_BYTES;
    }
    for (int i = 0; i < hashes->count; i++) {
        size_t length = (size_t)hashes->files[i].chunks * (size_t)width;
        memcpy(at, hashes->files[i].digests, length);
        at += length;
    }
    *out = data;
    *bytes = size;
    return ND_OK;
}

static nd_status fail_hashes(const char *path, const char *what)
{
    return nd_fail(ND_ERR_DATA, "\"%s\" is no hash file of a checkpoint: %s", path, what);
}

static nd_status parse_head(const uint8_t *data, size_t bytes, const char *path, nd_hashes *out)
{
    if (bytes < HEAD_BYTES || memcmp(data, magic, sizeof magic) != 0) {
        return fail_hashes(path, "its first bytes are others");
    }
    uint64_t version = load_le(data + 8, 4), kind = load_le(data + 12, 4),
             width = load_le(data + 16, 4), count = load_le(data + 20, 4);
    if (version != VERSION) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has version %llu; this program reads version %d", path,
                       (unsigned long long)version, VERSION);
    }
    if (kind >= ND_CHECKSUM_COUNT || width != (uint64_t)nd_checksum_chunk_bytes(kind)) {
        return fail_hashes(path, "its kind of checksum is unknown");
    }
    if (count > ND_HASHED_FILES_MAX || bytes < HEAD_BYTES + count * FILE_BYTES) {
        return fail_hashes(path, "it names more files than it can hold");
    }
    out->kind = (nd_checksum)kind;
    out->count = (int)count;
    return ND_OK;
}

static nd_status parse_file(const uint8_t *at, const char *path, nd_hashes *hashes, int index)
{
    nd_hashed_file *file = &hashes->files[index];
    memcpy(file->name, at, ND_HASHED_NAME_MAX);
    bool closed = file->name[ND_HASHED_NAME_MAX - 1] == '\0';
    file->name[ND_HASHED_NAME_MAX - 1] = '\0';
    file->bytes = load_le(at + ND_HASHED_NAME_MAX, 8);
    uint64_t chunks = load_le(at + ND_HASHED_NAME_MAX + 8, 8);
    if (!closed || !nd_name_is_plain(file->name)) {
        return fail_hashes(path, "it holds a name that is no plain file name");
    }
    if (nd_hashes_find(hashes, file->name) != file) {
        return fail_hashes(path, "it holds a name twice");
    }
    if (file->bytes > (uint64_t)INT64_MAX ||
        chunks != (file->bytes + ND_CHUNK_BYTES - 1) / ND_CHUNK_BYTES) {
        return fail_hashes(path, "its number of chunks is not that of the file's size");
    }
    file->chunks = (int64_t)chunks;
    return ND_OK;
}

static nd_status parse_all(const uint8_t *data, size_t bytes, const char *path, nd_hashes *hashes)
{
    ND_TRY(parse_head(data, bytes, path, hashes));
    const uint8_t *at = data + HEAD_BYTES;
    size_t width = (size_t)nd_checksum_chunk_bytes(hashes->kind);
    size_t left = bytes - HEAD_BYTES - (size_t)hashes->count * FILE_BYTES;
    for (int i = 0; i < hashes->count; i++, at += FILE_BYTES) {
        ND_TRY(parse_file(at, path, hashes, i));
    }
    for (int i = 0; i < hashes->count; i++) {
        nd_hashed_file *file = &hashes->files[i];
        if ((uint64_t)file->chunks > left / width) {
            return fail_hashes(path, "it is too short for its digests");
        }
        size_t length = (size_t)file->chunks * width;
        ND_TRY(nd_alloc(length + 1, 1, (void **)&file->digests));
        memcpy(file->digests, at, length);
        at += length;
        left -= length;
    }
    return left == 0 ? ND_OK : fail_hashes(path, "something was appended to it");
}

nd_status nd_hashes_parse(const uint8_t *data, size_t bytes, const char *path, nd_hashes *out)
{
    nd_hashes hashes = {0};
    nd_status status = parse_all(data, bytes, path, &hashes);
    if (status == ND_OK) {
        *out = hashes;
    } else {
        nd_hashes_fini(&hashes);
    }
    return status;
}

/* Streaming. */

nd_status nd_chunk_hash_create(nd_checksum kind, nd_hash **out)
{
    return nd_hash_create(kinds[kind].chunk, out);
}

struct nd_chunk_hasher {
    nd_checksum kind;
    uint64_t file_bytes, added;
    uint8_t *digests;
    int64_t chunks, done;
    size_t in_chunk; /* bytes of the current one */
    nd_hash *hash;
};

nd_status nd_chunk_hasher_create(nd_checksum kind, uint64_t file_bytes, nd_chunk_hasher **out)
{
    nd_chunk_hasher *h = NULL;
    ND_TRY(ND_ALLOC(1, &h));
    h->kind = kind;
    h->file_bytes = file_bytes;
    h->chunks = nd_ceil_div((int64_t)file_bytes, ND_CHUNK_BYTES);
    size_t bytes = (size_t)h->chunks * (size_t)nd_checksum_chunk_bytes(kind) + 1;
    nd_status status = nd_chunk_hash_create(kind, &h->hash);
    status = status == ND_OK ? nd_alloc(bytes, 1, (void **)&h->digests) : status;
    if (status != ND_OK) {
        nd_chunk_hasher_destroy(h);
        return nd_fail_memory("%zu bytes of digests", bytes);
    }
    *out = h;
    return ND_OK;
}

void nd_chunk_hasher_destroy(nd_chunk_hasher *h)
{
    if (h) {
        nd_hash_destroy(h->hash);
        free(h->digests);
        free(h);
    }
}

static nd_status end_chunk(nd_chunk_hasher *h)
{
    uint8_t digest[ND_HASH_MAX];
    size_t width = (size_t)nd_checksum_chunk_bytes(h->kind);
    ND_TRY(nd_hash_end(h->hash, digest));
    memcpy(h->digests + (size_t)h->done++ * width, digest, width);
    h->in_chunk = 0;
    return ND_OK;
}

nd_status nd_chunk_hasher_add(nd_chunk_hasher *h, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    ND_ASSERT(bytes <= h->file_bytes - h->added);
    h->added += bytes;
    while (bytes > 0) {
        size_t room = ND_CHUNK_BYTES - h->in_chunk, n = bytes < room ? bytes : room;
        ND_TRY(h->in_chunk == 0 ? nd_hash_begin(h->hash) : ND_OK);
        ND_TRY(nd_hash_add(h->hash, at, n));
        h->in_chunk += n;
        at += n;
        bytes -= n;
        ND_TRY(h->in_chunk == ND_CHUNK_BYTES ? end_chunk(h) : ND_OK);
    }
    return ND_OK;
}

nd_status nd_chunk_hasher_finish(nd_chunk_hasher *h, nd_hashed_file *file)
{
    ND_ASSERT(h->added == h->file_bytes);
    ND_TRY(h->in_chunk > 0 ? end_chunk(h) : ND_OK);
    ND_ASSERT(h->done == h->chunks);
    file->bytes = h->file_bytes;
    file->digests = h->digests;
    file->chunks = h->chunks;
    h->digests = NULL;
    return ND_OK;
}
