// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_STATE_FILE_H
#define ND_CHECKPOINT_STATE_FILE_H
/*
 * One file of a checkpoint, written from front to back and hashed on the way.
 *
 * Its space is reserved first, so that a full disk shows before the data are sent. Pages that wait
 * for the disk are bounded: writeback starts early, and a writer that is far ahead of the disk
 * waits for it. Finishing makes the file durable; a failed fsync is a failed file, never repeated.
 * Used by one thread at a time; blocking.
 */
#include "trainer/checkpoint/hashes.h"

typedef struct nd_state_file nd_state_file;

/* ND_ERR_CANTCREATE: the file exists, the disk or the quota is full, or the folder is read-only. */
nd_status nd_state_file_create(const char *folder, const char *name, uint64_t bytes,
                               nd_checksum kind, nd_state_file **out);
nd_status nd_state_file_append(nd_state_file *file, const void *data, size_t bytes);
/* fsync and close; `out` gets name, size and digests. Frees the file, also on failure. */
nd_status nd_state_file_finish(nd_state_file *file, nd_hashed_file *out);
/* Closes it as it is, half-written. NULL is legal. */
void nd_state_file_abandon(nd_state_file *file);

/* A small file whole: created, written, fsynced. It must not exist. */
nd_status nd_state_file_put(const char *folder, const char *name, const void *data, size_t bytes);

#endif
