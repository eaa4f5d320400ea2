// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_DATASET_H
#define ND_DATA_DATASET_H
/*
 * A file of text or tokens as a sequence of blocks of S + 1 tokens: inputs are the first S, labels
 * the last S.
 *
 * Packing: all documents are concatenated and cut into blocks of S + 1 (as the reference program
 * does); the last, short block is kept, its missing labels are -100 (its missing inputs are 0); one
 * token left over has no label and is dropped. Files are memory-mapped; a block is decoded on
 * demand, nothing is copied at open. Only JSONL is read whole at open, for an index of 16 bytes a
 * row; decoding its rows allocates (in the prefetch thread).
 *
 * Formats: text (bytes; id = byte), JSONL ({"text": ...} or {"prompt": ..., "completion": ...};
 * prompt labels are -100; UTF-8 bytes of the strings), llm.c .bin, Megatron .bin/.idx (path with or
 * without the suffix). auto picks by suffix: .txt .jsonl .bin .idx (a .bin with the llm.c magic is
 * llm.c), anything else is text.
 *
 * Errors (ND_ERR_DATA) name file, offset or row, and how to mend: missing, empty, truncated, token
 * id >= vocab, .idx that disagrees with its .bin, bad JSON. ND_ERR_CONFIG: byte tokenizer with a
 * vocab that is not 256.
 */
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/config/config.h"

typedef struct nd_dataset nd_dataset;

/* The label of a position that does not count: the short last block, prompts of JSONL, validation
 * past the end. */
enum { ND_LABEL_IGNORED = -100 };

/* vocab: the model's; every id is checked against it when a block is read (and all of a text's at
 * open: byte < 256). */
nd_status nd_dataset_open(const char *path, nd_data_format format, const char *tokenizer,
                          int64_t vocab, int64_t sequence, nd_dataset **out);
void nd_dataset_close(nd_dataset *dataset);

int64_t nd_dataset_blocks(const nd_dataset *dataset); /* >= 1 */
int64_t nd_dataset_tokens(const nd_dataset *dataset);
const char *nd_dataset_format_name(const nd_dataset *dataset);

/* Block `index`: inputs, labels I32 (S). Thread-safe (read only). */
nd_status nd_dataset_block(const nd_dataset *dataset, int64_t index, int32_t *inputs,
                           int32_t *labels);

/* Content digest for the comparison between nodes: SHA-256 of size and of samples of the content,
 * hex. O(1) in size. */
nd_status nd_dataset_digest(const nd_dataset *dataset, char hex[65]);

#endif
