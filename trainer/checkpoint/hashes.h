// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_HASHES_H
#define ND_CHECKPOINT_HASHES_H
/*
 * Digests of a checkpoint's files: one for every 4 MiB chunk, so that a reader verifies exactly the
 * chunks that it reads, before it uses them.
 *
 * Each writer leaves a small binary file with the digests of its data files; the manifest holds the
 * digest of that file.
 *
 * The file, little-endian: "NDHASHES", u32 version (1), u32 checksum kind, u32 digest bytes, u32
 * number of files; for each file 80 bytes of name, padded with zeros, u64 bytes, u64 chunks; then
 * all digests in that order.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/hash.h"

typedef enum nd_checksum {
    ND_CHECKSUM_XXH3 = 0,
    ND_CHECKSUM_SHA256,
    ND_CHECKSUM_COUNT
} nd_checksum;

enum {
    ND_CHUNK_BYTES = 4 << 20,
    ND_HASHED_NAME_MAX = 80, /* with the closing zero */
    ND_HASHED_FILES_MAX = 16 /* of one writer */
};

const char *nd_checksum_name(nd_checksum kind); /* "xxh3", "sha256" */
int nd_checksum_chunk_bytes(nd_checksum kind);  /* of a chunk's digest: 8 or 32 */
int nd_checksum_whole_bytes(nd_checksum kind);  /* of a whole small file's digest: 16 or 32 */

/* The digest of a hash file or a manifest as text: the kind, then lower-case hex:
 * "xxh3:0123...". */
enum { ND_DIGEST_TEXT_MAX = 80 };
nd_status nd_digest_text(nd_checksum kind, const void *data, size_t bytes,
                         char out[ND_DIGEST_TEXT_MAX]);
/* Whether a text has the form that nd_digest_text gives. */
bool nd_digest_text_is_valid(const char *text);

/* The digests of one file's chunks. */
typedef struct nd_hashed_file {
    char name[ND_HASHED_NAME_MAX]; /* a plain name, no folder */
    uint64_t bytes;
    uint8_t *digests; /* [chunks x nd_checksum_chunk_bytes], owned */
    int64_t chunks;   /* bytes / 4 MiB, rounded up */
} nd_hashed_file;

typedef struct nd_hashes {
    nd_checksum kind;
    nd_hashed_file files[ND_HASHED_FILES_MAX];
    int count;
} nd_hashes;

void nd_hashes_fini(nd_hashes *hashes);
/* The bytes of the hash file; owned by the caller. */
nd_status nd_hashes_format(const nd_hashes *hashes, uint8_t **out, size_t *bytes);
/* ND_ERR_DATA names the fault: wrong size, version, kind or counts, names that are no plain file
 * names, two files with one name. `path` is for messages. */
nd_status nd_hashes_parse(const uint8_t *data, size_t bytes, const char *path, nd_hashes *out);
const nd_hashed_file *nd_hashes_find(const nd_hashes *hashes, const char *name);

/* Whether a name stays in its folder: not empty, no slash, no leading dot, printable ASCII. */
bool nd_name_is_plain(const char *name);

/* Digests of chunks that arrive in parts. */
nd_status nd_chunk_hash_create(nd_checksum kind, nd_hash **out);

/* Chunk after chunk of a file that is written from front to back. */
typedef struct nd_chunk_hasher nd_chunk_hasher;
nd_status nd_chunk_hasher_create(nd_checksum kind, uint64_t file_bytes, nd_chunk_hasher **out);
nd_status nd_chunk_hasher_add(nd_chunk_hasher *hasher, const void *data, size_t bytes);
/* All bytes were added: fills digests and chunks of `file`, which then owns them. */
nd_status nd_chunk_hasher_finish(nd_chunk_hasher *hasher, nd_hashed_file *file);
void nd_chunk_hasher_destroy(nd_chunk_hasher *hasher); /* NULL is legal */

#endif
