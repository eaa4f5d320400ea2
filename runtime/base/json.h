// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_JSON_H
#define ND_BASE_JSON_H
/*
 * For code that reads or writes JSON with Jansson.
 *
 * Jansson drops a value without an error when memory runs out in the wrong place. The functions for
 * writing give NULL instead, and take it: code that builds a document checks its root alone.
 */
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

/* After a failed json_load*: whether memory ran out. Jansson then leaves the text empty in most
 * cases. */
static inline bool nd_json_no_memory(const json_error_t *error)
{
    return json_error_code(error) == json_error_out_of_memory || !error->text[0];
}

/* Parses as json_loadb does. ND_ERR_DATA names the file and the line of a fault; without a path,
 * for a row, the column alone: which row it is, the caller adds. *out is owned by the caller. */
nd_status nd_json_parse(const char *text, size_t size, size_t flags, const char *path,
                        json_t **out);
/* nd_json_parse of a file in a folder; NULL where there is none. `flags`: more than
 * JSON_ALLOW_NUL. */
nd_status nd_json_read(const char *folder, const char *name, size_t flags, json_t **out);

/* JSON lines in memory: `next` and `left` are what is left of them, to begin with all of it. */
typedef struct nd_json_lines {
    const char *next; /* borrowed */
    size_t left;
    const char *line; /* the line that was taken last, without its end */
    size_t size;
    int64_t number; /* of that line, from 1 if it was 0 to begin with */
} nd_json_lines;

/* Takes the next line that is not blank; false: there is none. */
bool nd_json_lines_next(nd_json_lines *lines);

/*
 * Add a value, which may be NULL and is stolen, to an object or array. One that would lack the
 * value is freed, and *object or *array becomes NULL.
 */
void nd_json_set(json_t **object, const char *key, json_t *value);
void nd_json_append(json_t **array, json_t *value);
/* JSON must be UTF-8, but a path or an argument need not be: in a text that is not UTF-8, bytes
 * that are not ASCII become '?'. */
json_t *nd_json_string(const char *text);
/*
 * ND_ERR_DATA when an object has another key than the `known` ones (up to NULL): a key that nobody
 * reads is a request that nobody honours. Names it and the nearest known one, or else says
 * `otherwise`.
 */
nd_status nd_json_check_keys(const json_t *object, const char *const *known, const char *otherwise);
/* json_dumps, whole or NULL: that function may leave out a part where it cannot enlarge its buffer.
 * Owned by the caller. */
char *nd_json_text(const json_t *root, size_t flags);
/* Replaces FOLDER/name durably by this text; `root` is stolen, and NULL where memory ran out. */
nd_status nd_json_write(const char *folder, const char *name, json_t *root, size_t flags);

#endif
