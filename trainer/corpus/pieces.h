// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_PIECES_H
#define ND_CORPUS_PIECES_H
/*
 * One block of a corpus becomes one piece of tokens: its rows or texts are read, and encoded. The
 * threads of encode.c have a maker each. Private to trainer/corpus.
 */
#include "trainer/corpus/chat.h"
#include "trainer/corpus/corpus.h"

/* Whole lines of JSON, or a part of a text that can be encoded alone. */
typedef struct nd_corpus_block {
    int64_t number; /* from 0, over all files */
    const nd_corpus_file *file;
    uint64_t line;     /* of its first byte, from 1 */
    bool begins, ends; /* it begins, ends a document; both where it holds whole documents */
    nd_bytes text;
} nd_corpus_block;

typedef struct nd_piece_maker {
    const nd_corpus_job *job;
    const nd_chat *chat;
    nd_encoder *encoder;
    nd_corpus_block block;
    nd_corpus_piece piece;
    nd_ids bad;              /* rows of the block that were left out, by their places in it */
    nd_corpus_counts counts; /* of all blocks so far; `text` comes from the encoder */
    nd_bytes strings[2];     /* of a row, unescaped */
    size_t column;           /* of the fault of a row; 0: it has none */
} nd_piece_maker;

/* Makes the piece of the block. Wrong rows are noted in `bad`, up to one more than may be left
 * out. */
nd_status nd_piece_make(nd_piece_maker *maker);
/* The error of a row that was noted. */
nd_status nd_piece_fail_row(nd_piece_maker *maker, int32_t place);

#endif
