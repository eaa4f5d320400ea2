// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SOURCE_FILES_H
#define ND_CHECKPOINT_SOURCE_FILES_H
/*
 * The two kinds of sources, for source.c: the writers of a checkpoint of ours, each known by its
 * plan; and the files of a DCP folder, known by their headers.
 */
#include "trainer/checkpoint/reads.h"
#include "trainer/checkpoint/source.h"

/* A file of a writer or of a DCP folder. It is open only while it is read. */
typedef struct nd_source_file {
    char name[256];
    uint64_t bytes;         /* that it must have */
    const uint8_t *digests; /* NULL: none */
    nd_reads reads;
} nd_source_file;

/* One rank of the mesh that wrote a checkpoint. */
typedef struct nd_source_writer {
    nd_shard_plan plan;
    nd_hashes hashes;
    nd_source_file files[ND_RECT_KIND_COUNT];
} nd_source_writer;

/* A stored rectangle of a DCP folder; sorted by name. */
typedef struct nd_source_entry {
    const nd_dcp_entry *entry;
    nd_source_file *file;
} nd_source_entry;

/* A source without files; `inside` NULL: they lie in the folder itself. */
nd_status nd_source_create(const char *folder, const char *inside, nd_source **out);

struct nd_source {
    char *folder;      /* with the files */
    nd_hash *digester; /* NULL: a DCP folder */
    uint8_t *staging;
    nd_source_stats stats;
    bool verify;
    /* A checkpoint of ours: */
    const nd_manifest *manifest; /* NULL: a DCP folder */
    nd_layout **layouts;         /* [tp of the manifest's mesh] */
    nd_source_writer **writers;  /* [ranks of that mesh]; NULL until one is needed */
    /* A DCP folder: */
    int64_t head_dim;
    nd_source_file *files; /* [file_count] */
    nd_dcp_list *lists;    /* [file_count] */
    int64_t file_count;
    nd_source_entry *entries; /* [entry_count] */
    int64_t entry_count;
};

/* A regular file of the folder, not a link: ND_ERR_DATA when it is not there, or of another size
 * (bytes 0: any). */
nd_status nd_source_open_plain(const char *folder, const char *name, uint64_t bytes, int *fd,
                               uint64_t *size);

/* The writer's plan and digests; they are made when they are first asked for. */
nd_status nd_source_writer_of(nd_source *source, int rank, nd_source_writer **out);
void nd_source_writer_free(nd_source_writer *writer);

/* Plans the read of what `want` and a stored rectangle share, of a tensor whose rectangle `want`
 * goes to `to` densely. *found grows by the shared elements. */
nd_status nd_source_plan_read(nd_source_file *file, const nd_dcp_entry *stored, const nd_rect *want,
                              float *to, int64_t *found);

/* Reads all of a file that was planned. */
nd_status nd_source_run_file(nd_source *source, nd_source_file *file);

/* Wants a rectangle of a parameter from a DCP folder, under the name that it has there. */
nd_status nd_source_add_dcp(nd_source *source, const nd_param *param, nd_state_kind array,
                            const nd_rect *rect, float *to);

#endif
