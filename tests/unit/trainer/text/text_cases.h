// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_TEXT_CASES_H
#define ND_TESTS_TEXT_CASES_H
/* Small tokenizers with texts and what the package `tokenizers` makes of them, written by
 * scripts/goldens/text.py. */
#include <criterion/criterion.h>
#include <jansson.h>

#include "trainer/text/tokenizer.h"

/* Name of a family, as goldens/NAME.json; the list ends with NULL. */
extern const char *const text_families[];

/* The path of its file, valid until the next call. */
const char *text_path(const char *family);
nd_tokenizer *text_open(const char *family);
/* The file of a family, to be changed by a test; and opening such a file. */
json_t *text_file(const char *family);
nd_status text_parse(const json_t *file, nd_tokenizer **out);
/* Valid text of characters of all classes, and of both borders of each range of letters. `runs`:
 * also in long runs. Returns its bytes, at most `room`. */
size_t text_random(uint64_t seed, bool runs, char *out, size_t room);
/* The list of cases of a family. */
json_t *text_cases(const char *family);

/* Ids of a list, and their number. */
size_t text_ids(const json_t *list, int32_t *ids, size_t room);
/* Encodes and compares with a list of ids. */
void text_assert_ids(const char *family, nd_encoder *encoder, const json_t *text,
                     const json_t *expected);
/* The ids are those of this text. */
void text_expect_ids(nd_encoder *encoder, const char *text, const int32_t *ids, size_t count);
/* All ids decoded, with what is held back; valid until the next call. */
const char *text_decode(nd_decoder *decoder, const int32_t *ids, size_t count, size_t piece,
                        size_t *size);

#endif
