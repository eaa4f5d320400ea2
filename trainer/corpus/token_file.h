// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_TOKEN_FILE_H
#define ND_CORPUS_TOKEN_FILE_H
/*
 * Files of tokens under construction: the token cache, or the pair of Megatron-LM with a loss mask;
 * and what the mask holds for those who read it. docs/formats.md has the bytes of all.
 *
 * The files take pieces in order, are written as PATH.part, and appear under their own names only
 * when they are complete and durable. The process that writes a .part has it locked; one that a
 * killed process left is written anew. Ids have 2 bytes when the vocabulary has less than 65,500,
 * else 4: Megatron's rule.
 */
#include "runtime/base/hash.h"
#include "trainer/corpus/corpus.h"

/* For a file that other processes, also of other users, may need too: they wait for the one that
 * writes it. */
typedef struct nd_token_sharing {
    const atomic_bool *stop; /* ends waiting with ND_ERR_PREEMPTED; NULL: nothing does */
    double stall_seconds;    /* without progress of the writer, then ND_ERR_HANG; 0: 300 */
} nd_token_sharing;

typedef struct nd_token_output {
    char *path, *part; /* part: NULL once it has its own name */
    int fd;
    uint64_t bytes, sent; /* that were written; that are on their way to the disk */
    nd_bytes chunk;       /* what is not written yet */
    nd_u64s sums;         /* of the chunks that were written */
} nd_token_output;

typedef struct nd_token_files {
    nd_token_output tokens, idx, mask; /* the cache, or PREFIX.bin, .idx and .mask */
    bool is_cache;
    int32_t vocab;
    size_t width;        /* bytes of an id */
    uint64_t count;      /* tokens */
    nd_u64s ends, spans; /* tokens before them; begin and end of each */
    nd_bytes buffer;
} nd_token_files;

/*
 * With sharing, the cache of this path; it is an error that its file system has no locks. Else the
 * pair PATH.bin and PATH.idx of Megatron-LM, in which each document is one sequence: it is an error
 * that another process writes them, or that a .part lies where there are no locks. *out: to be
 * finished after a failure too.
 */
nd_status nd_token_files_open(const char *path, int32_t vocab, const nd_token_sharing *sharing,
                              nd_token_files *out);
nd_status nd_token_files_write(nd_token_files *files, const nd_corpus_piece *piece);
/* With PATH.mask when some tokens do not count in the loss; else a mask that is there is removed,
 * since it belongs to other files. The .idx gets its name last, so that a reader refuses files of
 * which only some were renamed. */
nd_status nd_token_files_commit(nd_token_files *files);
/* Removes what was not committed; an all-zero one is legal. */
void nd_token_files_fini(nd_token_files *files);

/* Bytes of a mapped file, which may be too many to be read whole. */
typedef struct nd_samples {
    nd_hash *hash;
    const uint8_t *data;
    size_t size;
    size_t bytes, sample; /* of a longer file `bytes` are read, `sample` at a time */
} nd_samples;

/* Adds to the hash of nd_samples all bytes, or samples of them: the first at the beginning, the
 * last at the end, the others evenly between them. nd_fs_map_guard calls it. */
nd_status nd_samples_add(void *samples);

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

/* ND_ERR_DATA: `data` is no mask, cut, damaged, or counts no token. `name` is for messages. Apart
 * from files so that it can be fuzzed. */
nd_status nd_loss_mask_parse(const uint8_t *data, size_t size, const char *name,
                             nd_loss_mask_view *out);
/* The mask at `path`, whose bytes become the caller's, if there is one. ND_ERR_DATA also when it is
 * not that of this pair, whose .bin has so many tokens. */
nd_status nd_loss_mask_read(const char *path, const char *bin, const char *idx, int64_t tokens,
                            uint8_t **data, nd_loss_mask_view *out);
/* The bytes of the file into an empty buffer. Of the spans, begin and end of each, adjacent ones
 * become one. */
nd_status nd_loss_mask_make(const nd_u64s *spans, const char *bin, const char *idx, int64_t tokens,
                            nd_bytes *out);

#endif
