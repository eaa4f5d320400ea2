// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_READ_H
#define ND_TEXT_READ_H
/*
 * Reading a tokenizer.json. Each function fills its part of the tokenizer from the value of its
 * key, which is borrowed; NULL is a missing key. A component that is not known is refused by its
 * name, and every fault is ND_ERR_DATA with the name of the file.
 */
#include <jansson.h>

#include "trainer/text/parts.h"

/* In the order in which they are called: the vocabulary depends on whether the pre-tokenizer is
 * byte-level, the post-processor's ids are checked against the vocabulary. */
nd_status nd_text_read_normalizer(nd_tokenizer *tokenizer, const json_t *node);
nd_status nd_text_read_pre_tokenizer(nd_tokenizer *tokenizer, const json_t *node);
nd_status nd_text_read_decoder(nd_tokenizer *tokenizer, const json_t *node);
/* `pieces`: the number of pieces of the model. */
nd_status nd_text_read_added(nd_tokenizer *tokenizer, const json_t *list, size_t pieces);
nd_status nd_text_read_post_processor(nd_tokenizer *tokenizer, const json_t *node);

/* Helpers of all readers (read_components.c). */

/* A key that is true or false; `fallback` when it is missing or null. */
nd_status nd_text_read_bool(const nd_tokenizer *tokenizer, const json_t *node, const char *key,
                            bool fallback, bool *out);
/* An id, or -1 when it is none or too great. */
int32_t nd_text_id(const json_t *value);

nd_status nd_text_fail_damaged(const nd_tokenizer *tokenizer, const char *key, const char *wanted);
/* Adds to the error of nd_vocab_add what was being read. */
nd_status nd_text_fail_piece(const nd_tokenizer *tokenizer);

#endif
