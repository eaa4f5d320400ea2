// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_TOKEN_FILE_H
#define ND_CORPUS_TOKEN_FILE_H
/*
 * Files of tokens under construction, and the loss mask beside Megatron's files, also for those who
 * read it (docs/formats.md has the bytes).
 *
 * The files take pieces in order, are written as PATH.part, and appear under their own names only
 * when they are complete and durable. The process that writes a .part has it locked; one that a
 * killed process left is written anew. Ids have 2 bytes when the vocabulary has less than 65,500,
 * else 4: Megatron's rule.
 */
#include "trainer/corpus/corpus.h"

typedef struct nd_token_output {
    char *path, *part; /* part: NULL once it has its own name */
    int fd;
    size_t width; /* bytes of an id */
    uint64_t bytes, tokens;
    nd_bytes buffer; /* a piece in its final width */
} nd_token_output;

/* For a file that other processes, also of other users, may need too: they wait for the one that
 * writes it. */
typedef struct nd_token_sharing {
    const atomic_bool *stop; /* ends waiting with ND_ERR_PREEMPTED; NULL: nothing does */
    double stall_seconds;    /* without progress of the writer, then ND_ERR_HANG; 0: 300 */
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

/* The loss mask P.mask beside P.bin and P.idx: which tokens do not count in the loss, as spans of
 * the .bin. It names its .idx by SHA-256, and its .bin by that of samples. A pair without a mask
 * counts every token. scripts/encode_rows.py writes the same file. */
enum { ND_LOSS_MASK_HEADER_BYTES = 168, ND_LOSS_MASK_DIGEST_BYTES = 64 };

typedef struct nd_loss_mask_view {
    uint64_t tokens, spans;
    uint64_t ignored;     /* tokens in spans, less than `tokens` */
    const uint8_t *pairs; /* [spans] pairs of u64: tokens [begin, end), in order, none empty */
    const char *digest;   /* the 64 digits at the end of the file, without a terminating NUL */
} nd_loss_mask_view;

/* The token files that a mask is beside; names are for messages. */
typedef struct nd_loss_mask_pair {
    const char *bin, *idx;
    uint64_t tokens;          /* of the .bin */
    const char *index_sha256; /* of the .idx, 64 hexadecimal digits */
    const char *bin_sha256;   /* what nd_loss_mask_bin_sha256 gives */
} nd_loss_mask_pair;

/* SHA-256 of a .bin of up to 16 MiB; of a larger one, that of 256 pieces of 64 KiB, the first at
 * its beginning, the last at its end and the others evenly between them. */
nd_status nd_loss_mask_bin_sha256(const char *bin, char hex[65]);

/* ND_ERR_DATA: `data` is no mask, cut, damaged, that of another pair, or counts no token. `name` is
 * for messages. Apart from files so that it can be fuzzed. */
nd_status nd_loss_mask_parse(const uint8_t *data, size_t size, const char *name,
                             const nd_loss_mask_pair *pair, nd_loss_mask_view *out);

/* A mask under construction; an all-zero one has no spans, the owner frees spans.data. */
typedef struct nd_loss_mask {
    nd_u64s spans; /* begin and end of each */
    uint64_t ignored;
} nd_loss_mask;

/* Appends tokens [begin, end), which lie behind the last span; adjacent spans become one. */
nd_status nd_loss_mask_add(nd_loss_mask *mask, uint64_t begin, uint64_t end);
/* Appends the bytes of the file. */
nd_status nd_loss_mask_make(const nd_loss_mask *mask, const nd_loss_mask_pair *pair, nd_bytes *out);

/*
 * The pair PREFIX.bin and PREFIX.idx of Megatron-LM: each document is one sequence. Also
 * PREFIX.mask when some tokens do not count in the loss; else a mask that is there is
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
/* The .idx gets its name last, so that a reader refuses files of which only some were renamed. */
nd_status nd_megatron_output_commit(nd_megatron_output *out);
void nd_megatron_output_fini(nd_megatron_output *out); /* removes what was not committed */

#endif
