// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_SCAN_H
#define ND_VIEW_SCAN_H
/*
 * JSON of one line, read without a tree and without memory. A function takes where a value begins
 * and the end of the line; it returns where the value ends, or NULL when the text is no JSON. Of
 * values that are not used only the brackets are checked.
 */
#include <stdbool.h>
#include <stddef.h>

/* A number. The value may differ by four units in the last place from strtod's. */
const char *nd_scan_number(const char *text, const char *end, double *out);
/* The same, or null, which gives NaN. */
const char *nd_scan_amount(const char *text, const char *end, double *out);
/* Any value. */
const char *nd_scan_value(const char *text, const char *end);

const char *nd_scan_blanks(const char *text, const char *end);
bool nd_scan_has(const char *text, const char *end, const char *word, size_t length);

typedef struct nd_scan_key {
    const char *name;
    size_t length;
    int meaning; /* at least 0 */
} nd_scan_key;

#define ND_SCAN_KEY(name, meaning)                                                                 \
    {                                                                                              \
        name, sizeof(name) - 1, meaning                                                            \
    }

typedef struct nd_scan_member {
    int meaning;      /* of its key; -1: the key is not in the table */
    const char *name; /* as it stands between the quotes */
    size_t length;
} nd_scan_member;

typedef struct nd_scan_object {
    const nd_scan_key *keys; /* fastest when members come in this order */
    int key_count;
    /* Reads the value at `text`, and returns as the functions above do. */
    const char *(*read)(void *context, const nd_scan_member *member, const char *text,
                        const char *end);
    void *context;
} nd_scan_object;

const char *nd_scan_members(const nd_scan_object *object, const char *text, const char *end);

#endif
