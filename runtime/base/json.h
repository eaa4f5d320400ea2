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

#include "runtime/base/status.h"

/* After a failed json_load*: whether memory ran out. Jansson then leaves the text empty in most
 * cases. */
static inline bool nd_json_no_memory(const json_error_t *error)
{
    return json_error_code(error) == json_error_out_of_memory || !error->text[0];
}

/* The JSON of a file in a folder; NULL where there is none. ND_ERR_DATA names the file and the line
 * of a fault. `flags`: more than JSON_ALLOW_NUL. *out is owned by the caller. */
nd_status nd_json_read(const char *folder, const char *name, size_t flags, json_t **out);

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
