// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_PROOF_TEXTS_H
#define ND_TESTS_PROOF_TEXTS_H
/*
 * Texts on which our ids are compared with those of the Python package tokenizers: random ones over
 * several alphabets, in chunks that are pure functions of their numbers. scripts/goldens/proofs.py
 * reads them from text_tool and keeps digests of the package's ids in proofs.txt; test_proofs.c
 * makes the same texts and compares digests of ours.
 */
#include <stddef.h>

#include "trainer/text/buffer.h"

enum { PROOF_CHUNKS = 8, PROOF_CHUNK_BYTES = 125000 };

/* The alphabets; each has PROOF_CHUNKS chunks of at least PROOF_CHUNK_BYTES bytes. Ends with
 * NULL. */
extern const char *const proof_alphabets[];

/* Adds the texts of a chunk to `records`: for each, 32 bits with its number of bytes, and these. */
void proof_chunk(int alphabet, int chunk, nd_bytes *records);

#endif
