// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_ROW_H
#define ND_CORPUS_ROW_H
/*
 * One line of JSON: checks that it is an object, and finds the strings of some of its keys without
 * building a tree. When a key stands twice, the last one counts. NaN, Infinity and -Infinity are
 * values, as in Python. Bytes that are no UTF-8 pass; the encoder replaces and counts them. Pure
 * functions over borrowed bytes.
 */
#include <stdbool.h>

#include "trainer/text/buffer.h"

typedef enum nd_row_value {
    ND_ROW_ABSENT = 0,
    ND_ROW_STRING,
    ND_ROW_ARRAY,
    ND_ROW_OTHER,
} nd_row_value;

typedef struct nd_row_field {
    const char *key; /* NULL, after all others: the first key that no field has */
    nd_row_value kind;
    const uint8_t *begin; /* of what is between the quotes; else of the value, with its brackets */
    size_t size;
    bool escaped; /* a string with backslashes */
    bool empty;   /* it is absent, null, or a list, object or string with nothing in it */
} nd_row_field;

enum { ND_ROW_DEPTH_MAX = 512 };

/*
 * Fills the fields of `line`; one without a key gets the first other key, as a string. NULL when it
 * is an object, else what is wrong, with *column, which is counted in bytes from 1.
 */
const char *nd_row_scan(const uint8_t *line, size_t size, nd_row_field *fields, int count,
                        size_t *column);
/*
 * The next element of a list that a value of a row is, or a text that should be one. *at: 0 at
 * first, then as the call before left it. element->kind is ND_ROW_ABSENT behind the last one. NULL,
 * or what is wrong.
 */
const char *nd_row_next(const uint8_t *list, size_t size, size_t *at, nd_row_field *element);
/* Makes the field of a string that of its text, which is lent from the line, or unescaped into the
 * buffer. *lone grows by the halves of surrogate pairs, each of which is replaced by U+FFFD. */
nd_status nd_row_text(nd_row_field *field, nd_bytes *buffer, int64_t *lone);

#endif
