// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_TOKEN_FILE_H
#define ND_CORPUS_TOKEN_FILE_H
/*
 * Files of tokens under construction. Both kinds take pieces in order, write into files PATH.part,
 * and appear under their own names only when they are complete and durable. The process that writes
 * a .part has it locked; one that a killed process left is written anew.
 *
 * Ids have 2 bytes when the vocabulary has less than 65,500, else 4: Megatron's rule.
 */
#include "trainer/corpus/corpus.h"
#include "trainer/corpus/loss_mask.h"

typedef struct nd_token_output {
    char *path, *part; /* part: NULL once it has its own name */
    int fd;
    size_t width; /* bytes of an id */
    uint64_t bytes, tokens;
    nd_bytes buffer; /* a piece in its final width */
} nd_token_output;

/* For a file that other processes, also of other users, may need too. */
typedef struct nd_token_sharing {
    /* Called while another process has the .part locked, which `fd` is: waits a little, or ends
     * the wait with an error. */
    nd_status (*wait)(void *context, int fd);
    void *context;
} nd_token_sharing;

/*
 * What stands before the tokens is `offset` bytes, not written. Without sharing, which may be NULL,
 * it is an error that another process writes the file, or that a .part lies where there are no
 * locks; with it, that the file system has no locks.
 */
nd_status nd_token_output_open(const char *path, int32_t vocab, uint64_t offset,
                               const nd_token_sharing *sharing, nd_token_output *out);
/* Appends ids; what was written stays in out->buffer until the next call. */
nd_status nd_token_output_add(nd_token_output *out, const nd_ids *ids);
nd_status nd_token_output_append(nd_token_output *out, const void *data, size_t size);
nd_status nd_token_output_sync(const nd_token_output *out);
/* After sync. The file has its name for good, or none once *out is finished. */
nd_status nd_token_output_rename(nd_token_output *out);
/* Removes what was not renamed; an all-zero one is legal. */
void nd_token_output_fini(nd_token_output *out);

/*
 * The pair PREFIX.bin and PREFIX.idx of Megatron-LM: each document is one sequence. Also
 * PREFIX.mask (loss_mask.h) when some tokens do not count in the loss; else a mask that is there is
 * removed, since it belongs to other files.
 */
typedef struct nd_megatron_output {
    nd_token_output bin, idx, mask;
    nd_ids lengths;
    nd_loss_mask loss_mask;
    uint64_t open; /* tokens of the document that has not ended */
} nd_megatron_output;

nd_status nd_megatron_output_open(const char *prefix, int32_t vocab, nd_megatron_output *out);
nd_status nd_megatron_output_write(nd_megatron_output *out, const nd_corpus_piece *piece);
/* ND_ERR_DATA when there are tokens, and none of them counts in the loss. The .idx gets its name
 * last, so that files of which only some were renamed are refused by a reader. */
nd_status nd_megatron_output_commit(nd_megatron_output *out);
void nd_megatron_output_fini(nd_megatron_output *out); /* removes what was not committed */

#endif
