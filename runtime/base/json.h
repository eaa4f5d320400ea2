// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_JSON_H
#define ND_BASE_JSON_H
/* For code that reads JSON with Jansson. */
#include <jansson.h>
#include <stdbool.h>

/* After a failed json_load*: whether memory ran out. Jansson then leaves the text empty in most
 * cases. */
static inline bool nd_json_no_memory(const json_error_t *error)
{
    return json_error_code(error) == json_error_out_of_memory || !error->text[0];
}

#endif
