// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_FORMATS_H
#define ND_DATA_FORMATS_H
/*
 * What the formats share: a dataset is either a flat array of ids in a mapped file (text, llm.c,
 * Megatron) or JSONL with an index of its rows. Private to trainer/data.
 */
#include "runtime/base/fsio.h"
#include "trainer/data/dataset.h"

typedef enum nd_token_type {
    ND_TOKEN_U8 = 0,
    ND_TOKEN_I8,
    ND_TOKEN_U16,
    ND_TOKEN_I16,
    ND_TOKEN_U32,
    ND_TOKEN_I32,
    ND_TOKEN_I64
} nd_token_type;

/* A non-empty row of a JSONL file; the row after the last is a sentinel with the totals. */
typedef struct nd_jsonl_row {
    uint64_t offset; /* of its first byte in the file */
    uint64_t token;  /* tokens of all rows before it */
} nd_jsonl_row;

struct nd_dataset {
    char *path; /* the file that holds the tokens, for messages; owned */
    nd_data_format format;
    nd_fs_map map;
    nd_token_type type; /* of a flat array */
    size_t first_byte;  /* where the flat array begins in the map */
    int64_t tokens;
    int64_t vocab;
    int64_t sequence; /* S */
    int64_t blocks;
    nd_jsonl_row *rows; /* (row_count + 1); JSONL only; owned */
    int64_t row_count;
};

/*
 * Each fills map, tokens and what its format needs; path is owned by the dataset already. On
 * failure the caller closes the dataset.
 */
nd_status nd_text_open(nd_dataset *dataset);
/* ND_ERR_DATA when the mapped file begins as a compressed or binary file of a known kind does. */
nd_status nd_text_check(const nd_dataset *dataset);
nd_status nd_jsonl_open(nd_dataset *dataset);
nd_status nd_llmc_open(nd_dataset *dataset);
nd_status nd_megatron_open(nd_dataset *dataset, const char *idx_path);

/* The number of an llm.c magic at the beginning of the file, without opening the dataset. */
bool nd_llmc_has_magic(const char *path);

size_t nd_token_size(nd_token_type type); /* bytes */

/* Tokens [first, first + count) of a flat array; ND_ERR_DATA names an id that is not below
 * vocab. */
nd_status nd_flat_read(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *out);

/* A block of JSONL, in the form of nd_dataset_block. */
nd_status nd_jsonl_block(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *inputs,
                         int32_t *labels);

/*
 * Checks a Megatron .idx of `size` bytes against the .bin's size; gives the token type and count.
 * Apart from the dataset so that it can be fuzzed. `idx` and `bin` are names for messages.
 */
nd_status nd_megatron_parse(const uint8_t *data, size_t size, uint64_t bin_bytes, const char *idx,
                            const char *bin, nd_token_type *type, int64_t *tokens);

#endif
