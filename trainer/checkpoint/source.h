// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SOURCE_H
#define ND_CHECKPOINT_SOURCE_H
/*
 * The source of loaded state: the stored rectangles of a checkpoint, whatever mesh wrote them.
 *
 * A caller adds the rectangles that it wants, with the memory that they go to, and then runs the
 * reads. Each read is intersected with the stored rectangles, and the reads of a file are done in
 * one pass, through a small buffer. Every chunk of 4 MiB that is touched is verified, after the
 * wanted memory was written, so that a run that fails leaves nothing that may be used. Which files
 * hold a rectangle is computed from the manifest, so that only those are opened.
 *
 * One thread uses a source. Wanted memory is host memory.
 */
#include "trainer/checkpoint/manifest.h"

typedef struct nd_source nd_source;

typedef struct nd_source_stats {
    int64_t wanted_bytes; /* of F32 elements that were asked for */
    int64_t read_bytes;   /* of the files, hash files and headers left out */
    int64_t kept;         /* writers of which the plan and the digests are in memory */
    int64_t suspect;      /* 1 + the writer whose files were found to be damaged; 0: none */
} nd_source_stats;

/* The manifest is borrowed. verify false: digests are not compared. */
nd_status nd_source_open(const char *folder, const nd_manifest *manifest, bool verify,
                         nd_source **out);
void nd_source_close(nd_source *source); /* NULL is legal */

/* Wants a rectangle of a state array, densely at `to` (F32). Its parameter is of any layout of the
 * same model, and where it begins does not matter. The memory is written by nd_source_run. */
nd_status nd_source_add(nd_source *source, const nd_span *want, nd_state_kind array, float *to);
/* Like nd_source_add, for an entry that is alike on all ranks: all of its `count` elements. */
nd_status nd_source_add_extra(nd_source *source, const char *name, int64_t count, float *to);
/*
 * Reads all that was added since the last run. ND_ERR_DATA names file and chunk, or the tensor of
 * which elements are missing; the wanted memory then holds anything. What is kept of the writers is
 * freed where it is much, and made again when it is needed.
 */
nd_status nd_source_run(nd_source *source);

nd_source_stats nd_source_get_stats(const nd_source *source);

/* The files of one writer, or (only -1) of all, and that no file is too many. Hash files must be
 * whole, and every file that they list be there with its size and, with `reads`, be right in every
 * chunk. *bytes: of these files. */
nd_status nd_source_verify(const char *folder, const nd_manifest *manifest, int only, bool reads,
                           int64_t *bytes);

#endif
