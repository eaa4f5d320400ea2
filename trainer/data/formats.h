// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_FORMATS_H
#define ND_DATA_FORMATS_H
/*
 * One row per file format. A dataset is a flat array of ids in a mapped file: text, llm.c,
 * Megatron, or the cache of an encoded text. Private to trainer/data.
 */
#include "runtime/base/fs.h"
#include "trainer/corpus/loss_mask.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/data/data.h"

/* Tokens that stand together both in the file and in a block. */
typedef struct nd_piece {
    int64_t first, count; /* tokens of the dataset; 2 to S + 1 */
    int64_t place;        /* of the first one in the block */
    int64_t number;       /* pieces of the block up to this one */
} nd_piece;

typedef struct nd_format {
    const char *name; /* as in data.format */
    bool holds_ids;   /* token ids; otherwise the file holds text, and ids are its bytes */
    /* Checks dataset->map and fills tokens and what the format needs; under nd_fs_map_guard. NULL:
     * files of this format are encoded into a cache. */
    nd_status (*open)(nd_dataset *dataset);
    /* A piece at its place in the inputs and labels of a block, as nd_dataset_block gives them. The
     * label of its last token, and what lies behind, are not written. */
    nd_status (*piece)(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                       int32_t *labels);
} nd_format;

typedef enum nd_token_type {
    ND_TOKEN_U8 = 0,
    ND_TOKEN_I8,
    ND_TOKEN_U16,
    ND_TOKEN_I16,
    ND_TOKEN_U32,
    ND_TOKEN_I32,
    ND_TOKEN_I64
} nd_token_type;

/* The loss mask of Megatron files, in memory. */
typedef struct nd_masked {
    uint8_t *data; /* of the file; owned */
    nd_loss_mask_view view;
} nd_masked;

/* Of data whose documents are separate. */
typedef struct nd_documents {
    int32_t end_of_text; /* the id that ends a document, beside borders; -1: none does */
    uint64_t borders;    /* of documents, in the cache or the index */
    nd_fs_map index;     /* Megatron's .idx; owned */
    /* Of whole rows. Their pieces, block by block: the first token of each; NULL: a block begins
     * where the one before ends; owned. */
    int64_t *firsts;
    int64_t *begins;   /* (blocks + 1): the first piece of each; owned */
    int64_t rows;      /* that are read */
    int64_t long_rows; /* that are longer than a block */
    bool drops;        /* they are left out */
    int64_t kept;      /* tokens of all blocks */
    int64_t inputs;    /* of all blocks, without what fills them */
} nd_documents;

typedef struct nd_blend nd_blend;

/* The files that share what nd_dataset_content reads; encoded texts are not among them. */
typedef struct nd_content_share {
    uint64_t files, bytes;
} nd_content_share;

/* What nd_dataset_block, _first_keys, _documents, _ignored, _digest, _content and _close do for a
 * blend. */
typedef struct nd_blend_calls {
    nd_status (*block)(const nd_blend *blend, int64_t index, int32_t *inputs, int32_t *labels);
    nd_status (*first_keys)(const nd_blend *blend, int64_t index, const int32_t *inputs,
                            int32_t *first_keys, int64_t *filled);
    nd_documents_rule (*documents)(const nd_blend *blend);
    nd_status (*ignored)(const nd_blend *blend, int64_t *tokens);
    nd_status (*digest)(const nd_blend *blend, char hex[65]);
    void (*count)(const nd_blend *blend, nd_content_share *all); /* adds the blend's files */
    nd_status (*content)(const nd_blend *blend, const nd_content_share *all, char hex[33]);
    void (*destroy)(nd_blend *blend);
} nd_blend_calls;

struct nd_dataset {
    char *path; /* the file that holds the tokens, for messages; owned */
    const nd_format *format;
    nd_fs_map map;
    nd_token_type type;       /* of a flat array */
    size_t first_byte;        /* where the flat array begins in the map */
    uint64_t index_digest[2]; /* of Megatron's .idx; else zero */
    int64_t tokens;
    int64_t vocab;
    int64_t sequence; /* S */
    int64_t blocks;
    nd_token_cache *cache;   /* of an encoded text, which owns the map; else NULL; owned */
    nd_masked *masked;       /* of Megatron files with a loss mask; else NULL; owned */
    nd_documents *documents; /* NULL: joined, and of a blend; owned */
    nd_blend *blend;         /* several sources, and no map; else NULL; owned */
    const nd_blend_calls *blend_calls; /* with a blend */
    bool content_known;
    char content[33]; /* nd_dataset_content, which is computed once */
};

/* Adds the files of a dataset. */
void nd_content_count(const nd_dataset *dataset, nd_content_share *all);
/* nd_dataset_content of a dataset that is all of these files, or a part of them. */
nd_status nd_content_of(const nd_dataset *dataset, const nd_content_share *all, char hex[33]);

/* The next piece of a block, or its first one where *piece is all zeros. A count of 0: there are no
 * more, and `place` is the number of the block's tokens. Under nd_fs_map_guard, as the functions
 * below are. */
nd_status nd_block_next(const nd_dataset *dataset, int64_t index, nd_piece *piece);
/*
 * Makes blocks of whole rows (packing.c), once documents are separate and their borders known; rows
 * longer than a block are left out, or cut. Takes 8 bytes for each row, and while it works as many
 * again; time grows with their number, and hardly more. ND_ERR_DATA: no row is left.
 */
nd_status nd_rows_pack(nd_dataset *dataset, bool drop);
/* The first border of documents behind a token, or the end. ND_ERR_DATA here and below: borders lie
 * behind the last token. */
nd_status nd_border_after(const nd_dataset *dataset, int64_t token, int64_t *out);
/* The tokens between border `index` - 1, or the beginning, and border `index`. */
nd_status nd_border_row(const nd_dataset *dataset, uint64_t index, nd_piece *row);
/* Labels of a piece that are the first token of another document become ND_LABEL_IGNORED. */
nd_status nd_documents_ignore(const nd_dataset *dataset, const nd_piece *piece,
                              const int32_t *inputs, int32_t *labels);
/* Documents of a cache or an index without those that are left out, or of a file that is one; -1:
 * not known. */
int64_t nd_documents_listed(const nd_dataset *dataset);
void nd_documents_close(nd_documents *documents); /* NULL is legal */
/* Opens the index again, for its borders: the beginnings of documents and the end of the last. */
nd_status nd_megatron_open_borders(nd_dataset *dataset);
nd_status nd_megatron_border(const nd_dataset *dataset, uint64_t index, uint64_t *token);
/* Whether an id is among those in the first `bytes` of a flat file. */
nd_status nd_flat_holds(const nd_dataset *dataset, int32_t id, size_t bytes, bool *found);

nd_status nd_text_open(nd_dataset *dataset);
nd_status nd_llmc_open(nd_dataset *dataset);
nd_status nd_megatron_open(nd_dataset *dataset);

nd_status nd_flat_piece(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                        int32_t *labels);
nd_status nd_masked_piece(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                          int32_t *labels);
nd_status nd_encoded_piece(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                           int32_t *labels);

/* Tokens that do not count in the loss. */
typedef struct nd_span_list {
    const uint8_t *pairs; /* [count] pairs of u64: tokens [begin, end), in order */
    uint64_t count;
    /* Called before a pair is read; NULL: nothing is left to check. */
    nd_status (*check)(const void *context, const uint8_t *pair, size_t size);
    const void *context;
} nd_span_list;

typedef struct nd_token_span {
    uint64_t begin, end; /* tokens */
} nd_token_span;

nd_status nd_token_span_at(const nd_span_list *spans, uint64_t index, nd_token_span *out);
/* Their tokens, without those of rows that the dataset leaves out. */
nd_status nd_rows_ignored(const nd_dataset *dataset, const nd_span_list *spans, int64_t *tokens);
nd_span_list nd_encoded_spans(const nd_dataset *dataset);
nd_span_list nd_masked_spans(const nd_dataset *dataset);
/* Labels of a block that are tokens of the piece and lie in spans become ND_LABEL_IGNORED. */
nd_status nd_spans_ignore(const nd_span_list *spans, const nd_piece *piece, int32_t *labels);

/* Opens the loss mask at `path`, if there is one, once dataset->tokens is known; `idx` is the index
 * that it must belong to. ND_ERR_DATA as for nd_loss_mask_parse. */
nd_status nd_masked_open(nd_dataset *dataset, const char *path, const char *idx);
void nd_masked_close(nd_masked *masked); /* NULL is legal */

/* ND_ERR_DATA when the mapped file begins as a compressed or binary file of a known kind does. */
nd_status nd_text_check(const nd_dataset *dataset);
/* Whether the file begins with one of llm.c's magic numbers. */
nd_status nd_llmc_has_magic(const char *path, bool *out);
/* "data/x", "data/x.bin" and "data/x.idx" name the pair data/x.bin and data/x.idx: the path of the
 * one with this suffix. Owned by the caller. */
nd_status nd_megatron_path(const char *path, const char *suffix, char **out);

size_t nd_token_size(nd_token_type type); /* bytes */

/*
 * Checks a Megatron .idx of `size` bytes against the .bin's size; gives the token type and count.
 * Apart from the dataset so that it can be fuzzed. `idx` and `bin` are names for messages.
 */
nd_status nd_megatron_parse(const uint8_t *data, size_t size, uint64_t bin_bytes, const char *idx,
                            const char *bin, nd_token_type *type, int64_t *tokens);

#endif
