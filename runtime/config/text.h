// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONFIG_TEXT_H
#define ND_CONFIG_TEXT_H
/* Strings of the configuration: owned, growing, fit for the echo. Internal to runtime/config. */
#include <stdbool.h>
#include <stddef.h>

#include "runtime/base/status.h"

/* Replaces an owned string; NULL is stored as "". */
nd_status nd_text_replace(char **target, const char *text);

/* Printable UTF-8 without control characters: what the echo can write and any node can read
 * back. */
bool nd_text_is_clean(const char *text);

/* A string that grows; on any failure `status` stays set and later appends do nothing. */
typedef struct nd_text {
    char *data;
    size_t used, room;
    nd_status status;
} nd_text;

void nd_text_append(nd_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Hands the string over (or frees it and returns the failure). */
nd_status nd_text_take(nd_text *text, char **out);

#endif
