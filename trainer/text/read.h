// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_READ_H
#define ND_TEXT_READ_H
/*
 * Reading a tokenizer.json. Each function fills its part of the tokenizer from borrowed JSON; a
 * key may be missing. A component that is not known is refused by its name, and every fault is
 * ND_ERR_DATA with the name of the file.
 */
#include <jansson.h>

#include "trainer/text/parts.h"

/* The component under a key: "normalizer", "pre_tokenizer" and "decoder" before the vocabulary,
 * which depends on whether they are byte-level; "post_processor", whose ids are checked against the
 * vocabulary, behind the added tokens. */
nd_status nd_text_read_component(nd_tokenizer *tokenizer, const json_t *root, const char *key);
/* `pieces`: the number of pieces of the model. */
nd_status nd_text_read_added(nd_tokenizer *tokenizer, const json_t *list, size_t pieces);

/* Helpers of all readers (read_components.c). */

/* A key that is true or false; `fallback` when it is missing or null. */
nd_status nd_text_read_bool(const nd_tokenizer *tokenizer, const json_t *node, const char *key,
                            bool fallback, bool *out);
/* An id, or -1 when it is none or too great. */
int32_t nd_text_id(const json_t *value);

nd_status nd_text_fail_damaged(const nd_tokenizer *tokenizer, const char *key, const char *wanted);
/* nd_vocab_add, whose error says then what was being read. */
nd_status nd_text_add_piece(nd_tokenizer *tokenizer, int32_t id, const char *text, size_t size,
                            bool model);

#endif
