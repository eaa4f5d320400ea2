// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_READS_H
#define ND_CHECKPOINT_READS_H
/*
 * Reads of one file that were planned before: runs of bytes with a stride in the file and another
 * in memory. They are sorted and done in one pass.
 *
 * A long run of elements is read straight to where it is wanted, slice by slice, and each slice
 * is hashed while it is still in the processor's cache. What is short or strided
 * passes through a staging buffer of one chunk. The wanted memory is therefore written before the
 * digest of its chunk was compared: it must not be used when nd_reads_run fails.
 */
#include "trainer/checkpoint/state_file.h"

typedef struct nd_read {
    uint64_t from;     /* byte of the file */
    uint64_t stride;   /* bytes between the beginnings of two runs in the file */
    int64_t runs, run; /* number of runs, elements of each */
    int64_t to_stride; /* elements between them in memory */
    float *to;         /* F32, as in the file */
} nd_read;

typedef struct nd_reads {
    nd_read *list;
    int64_t count, capacity;
} nd_reads;

void nd_reads_fini(nd_reads *reads);
nd_status nd_reads_add(nd_reads *reads, const nd_read *read);

typedef struct nd_read_file {
    int fd;
    const char *path;
    uint64_t bytes;
    const uint8_t *digests; /* of its chunks, to compare; NULL: none */
    nd_checksum kind;
    nd_hash *digester; /* of this kind */
    uint8_t *staging;  /* ND_CHUNK_BYTES */
} nd_read_file;

/* Does all reads of the list, and empties it. *bytes grows by what was read. */
nd_status nd_reads_run(nd_reads *reads, const nd_read_file *file, int64_t *bytes);

/* Reads chunk `index` of the file into the staging buffer and compares its digest. ND_ERR_DATA
 * names both. */
nd_status nd_read_chunk(const nd_read_file *file, int64_t index, size_t *size);

#endif
