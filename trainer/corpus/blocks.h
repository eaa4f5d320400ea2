// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_BLOCKS_H
#define ND_CORPUS_BLOCKS_H
/*
 * Cuts the files of a corpus into blocks: whole lines of JSON, or parts of a text that can be
 * encoded one by one. The cuts depend on the files and the rules alone. One thread at a time.
 * Private to trainer/corpus.
 */
#include "trainer/corpus/corpus.h"
#include "trainer/corpus/stream.h"

enum { ND_BLOCK_BYTES = 1 << 20, ND_BLOCK_ROW_BYTES_MAX = 256 << 20 };

typedef struct nd_corpus_block {
    int64_t number; /* from 0, over all files */
    const nd_corpus_file *file;
    uint64_t line;     /* of its first byte, from 1 */
    bool begins, ends; /* text: it begins, ends a document; JSON lines: both */
    nd_bytes text;
} nd_corpus_block;

typedef struct nd_block_reader {
    const nd_corpus_job *job;
    nd_text_cut cut;
    size_t file; /* index of the next file, or of the open one */
    nd_text_stream *stream;
    nd_bytes held; /* what follows the last block */
    bool at_end;   /* of the open file */
    bool fresh;    /* no block of the open file was given yet */
    uint64_t line;
    int64_t number;
    uint64_t done; /* bytes of the files before the open one */
} nd_block_reader;

void nd_block_reader_init(nd_block_reader *reader, const nd_corpus_job *job);
void nd_block_reader_fini(nd_block_reader *reader);
/* Fills the block, whose buffer is used again. *end: there is none left. */
nd_status nd_block_reader_next(nd_block_reader *reader, nd_corpus_block *block, bool *end);
/* Bytes of the files that were read. */
uint64_t nd_block_reader_bytes(const nd_block_reader *reader);

#endif
