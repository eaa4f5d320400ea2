// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_STATE_FILE_H
#define ND_CHECKPOINT_STATE_FILE_H
/*
 * One file of a checkpoint, written from front to back and hashed on the way: a digest for every 4
 * MiB chunk, so that a reader verifies exactly the chunks that it reads.
 *
 * Its space is reserved first, so that a full disk shows before the data are sent. Pages that wait
 * for the disk are bounded: writeback starts early, and a writer that is far ahead of the disk
 * waits for it. Finishing makes the file durable; a failed fsync is a failed file, never repeated.
 * Used by one thread at a time; blocking.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/hash.h"

/* Digests of a checkpoint: of chunks, and of whole small files. */
typedef enum nd_checksum {
    ND_CHECKSUM_XXH3 = 0,
    ND_CHECKSUM_SHA256,
    ND_CHECKSUM_COUNT
} nd_checksum;

enum { ND_CHUNK_BYTES = 4 << 20 };

typedef struct nd_checksum_hashes {
    const char *name; /* "xxh3", "sha256" */
    nd_hash_kind chunk, whole;
} nd_checksum_hashes;
extern const nd_checksum_hashes nd_checksums[ND_CHECKSUM_COUNT];

/* The digest of a hash file or a manifest as text: the kind, then lower-case hex:
 * "xxh3:0123...". */
enum { ND_DIGEST_TEXT_MAX = 80 };
nd_status nd_digest_text(nd_checksum kind, const void *data, size_t bytes,
                         char out[ND_DIGEST_TEXT_MAX]);
/* Whether a text has the form that nd_digest_text gives for this kind. */
bool nd_digest_text_is_valid(nd_checksum kind, const char *text);

typedef struct nd_state_file nd_state_file;

/* `digests` gets those of the chunks, one after the other, and is borrowed until the end.
 * ND_ERR_CANTCREATE: the file exists, the disk or the quota is full, or the folder is read-only. */
nd_status nd_state_file_create(const char *folder, const char *name, uint64_t bytes,
                               nd_checksum kind, uint8_t *digests, nd_state_file **out);
nd_status nd_state_file_append(nd_state_file *file, const void *data, size_t bytes);
/* All bytes were appended: fsync and close. Frees the file, also on failure. */
nd_status nd_state_file_finish(nd_state_file *file);
/* Closes it as it is, half-written. NULL is legal. */
void nd_state_file_abandon(nd_state_file *file);

/* A small file whole: created, written, fsynced. It must not exist. */
nd_status nd_state_file_put(const char *folder, const char *name, const void *data, size_t bytes);

#endif
