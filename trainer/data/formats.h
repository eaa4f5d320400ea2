// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_FORMATS_H
#define ND_DATA_FORMATS_H
/*
 * One row per file format. A dataset is a flat array of ids in a mapped file: text, llm.c,
 * Megatron, or the cache of an encoded text. Private to trainer/data.
 */
#include "runtime/base/fs.h"
#include "trainer/corpus/token_file.h"
#include "trainer/corpus/token_cache.h"
#include "trainer/data/data.h"
#include "trainer/data/mix.h"

/* Tokens that stand together both in the file and in a block. */
typedef struct nd_piece {
    int64_t first, count; /* tokens of the dataset; 2 to S + 1 */
    int64_t place;        /* of the first one in the block */
    int64_t number;       /* pieces of the block up to this one */
} nd_piece;

typedef struct nd_format {
    const char *name; /* as in data.format */
    bool holds_ids;   /* token ids; otherwise the file holds text, and ids are its bytes */
    bool indexed;     /* a Megatron index lists the documents */
    uint64_t number;  /* in digests */
    /* Checks dataset->map and fills tokens and what the format needs; under nd_fs_map_guard. NULL:
     * files of this format are encoded into a cache. */
    nd_status (*open)(nd_dataset *dataset);
} nd_format;

typedef struct nd_token_type {
    uint8_t width;  /* bytes of an id; 0: no type */
    bool is_signed; /* an id that is negative is damage */
} nd_token_type;

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

/* A source of a blend. */
typedef struct nd_source {
    nd_dataset *data; /* owned */
    char *name;       /* owned */
    double weight, epochs;
    int64_t first; /* block of the blend */
} nd_source;

typedef struct nd_blend {
    nd_source *sources; /* (count); owned */
    int count;
    bool named;  /* the sources are told apart */
    nd_mix *mix; /* NULL: one text; owned */
} nd_blend;

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
    nd_token_cache *cache;     /* of an encoded text, which owns the map; else NULL; owned */
    uint8_t *mask;             /* the loss mask beside Megatron files; else NULL; owned */
    const char *mask_digest;   /* its own, of ND_LOSS_MASK_DIGEST_BYTES */
    uint64_t spans;            /* of tokens that do not count in the loss */
    const uint8_t *span_pairs; /* (spans) pairs of u64: tokens [begin, end), in order */
    nd_documents *documents;   /* NULL: joined, and of a blend; owned */
    nd_blend *blend;           /* several sources, and no map; else NULL; owned */
    bool content_known;
    char content[33]; /* nd_dataset_content, which is computed once */
};

/* The last source that begins at or before the block. */
static inline int nd_blend_find(const nd_blend *blend, int64_t block)
{
    int low = 0, high = blend->count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (blend->sources[middle].first <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

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

/* A piece at its place in the inputs and labels of a block, as nd_dataset_block gives them. The
 * label of its last token, and what lies behind, are not written. */
nd_status nd_piece_read(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                        int32_t *labels);

typedef struct nd_token_span {
    uint64_t begin, end; /* tokens */
} nd_token_span;

nd_status nd_span_at(const nd_dataset *dataset, uint64_t index, nd_token_span *out);
/* Tokens of all spans, without those of rows that the dataset leaves out. */
nd_status nd_rows_ignored(const nd_dataset *dataset, int64_t *tokens);
/* Labels of a block that are tokens of the piece and lie in spans become ND_LABEL_IGNORED. */
nd_status nd_spans_ignore(const nd_dataset *dataset, const nd_piece *piece, int32_t *labels);

/* Whether the file begins with one of llm.c's magic numbers. */
nd_status nd_llmc_has_magic(const char *path, bool *out);
/* "data/x", "data/x.bin" and "data/x.idx" name the pair data/x.bin and data/x.idx: the path of the
 * one with this suffix. Owned by the caller. */
nd_status nd_megatron_path(const char *path, const char *suffix, char **out);

/*
 * Checks a Megatron .idx of `size` bytes against the .bin's size; gives the token type and count.
 * Apart from the dataset so that it can be fuzzed. `idx` and `bin` are names for messages.
 */
nd_status nd_megatron_parse(const uint8_t *data, size_t size, uint64_t bin_bytes, const char *idx,
                            const char *bin, nd_token_type *type, int64_t *tokens);

#endif
