// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_CORPUS_CASES_H
#define ND_TESTS_CORPUS_CASES_H
/* A corpus encoded into memory. */
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/corpus/token_cache.h"

/* A family's tokenizer without the added tokens that swallow white space. */
nd_tokenizer *corpus_tokenizer(const char *family);

typedef struct corpus_result {
    nd_ids ids, ends, spans; /* positions from the beginning */
    nd_corpus_counts counts;
} corpus_result;

/* Encodes with the defaults where the job leaves something open. *out: all zeros, or an earlier
 * result, which is freed. */
nd_status corpus_encode(nd_corpus_job job, corpus_result *out);
/* Encodes a file, or what a folder or a pattern has, as corpus_encode does. */
nd_status corpus_encode_path(const char *path, nd_corpus_job job, corpus_result *out);
void corpus_free(corpus_result *result);
void corpus_assert_equal(const corpus_result *a, const corpus_result *b, const char *what);

/* How rows are encoded into a cache of this folder; the tokens are bytes unless there is a
 * tokenizer. */
nd_token_cache_request corpus_request(const tempdir *folder, const char *tokenizer, int64_t vocab);

/* Writes PREFIX.bin and .idx of these pieces, and with spans the mask. */
nd_status corpus_write(const char *prefix, int32_t vocab, const nd_corpus_piece *pieces, int count);

/* Writes one byte of a file, which is made where it is not there. */
void corpus_set_byte(const char *path, off_t at, char byte);

/* Frees what a piece holds that was made by additions. */
void corpus_piece_free(nd_corpus_piece *piece);

#endif
