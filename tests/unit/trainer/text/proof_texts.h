// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_PROOF_TEXTS_H
#define ND_TESTS_PROOF_TEXTS_H
/*
 * Texts on which our ids are compared with those of the Python package tokenizers: random ones over
 * several alphabets, all code points, and long runs, in chunks that are pure functions of their
 * numbers. scripts/goldens/proofs.py reads them from text_tool and keeps digests of the package's
 * ids in proofs.txt; test_proofs.c makes the same texts and compares digests of ours.
 *
 *   alone     each code point as a text
 *   letters   each code point between an "a" and a "b"
 *   marked    each code point before, behind and between marks that sort and compose
 *   composed  the code points below U+3400 and from U+11000 to U+11FFF, before all that compose
 *   runs      a megabyte of "a", of blanks, of line ends, of a Chinese character
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "trainer/text/buffer.h"

enum { PROOF_CHUNKS = 8, PROOF_CHUNK_BYTES = 125000 };

/* The names of the kinds of texts: first the alphabets of random ones, of which each chunk has at
 * least PROOF_CHUNK_BYTES bytes, then those above. Ends with NULL. */
extern const char *const proof_alphabets[];
/* How many chunks it has: at most PROOF_CHUNKS. */
int proof_chunks(int alphabet);
/* Returns whether special tokens are written in the alphabet's texts. */
bool proof_has_special(int alphabet);

/* Returns whether not all packages know this character, or not all in the same way. Such a
 * character is in no text. */
bool proof_is_newer(uint32_t p);

/* Adds the texts of a chunk to `records`: for each, 32 bits with its number of bytes, and these. */
void proof_chunk(int alphabet, int chunk, nd_bytes *records);

#endif
