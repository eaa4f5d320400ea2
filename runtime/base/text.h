// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_TEXT_H
#define ND_BASE_TEXT_H
/* Questions about text that the C library does not answer. */
#include <stdbool.h>
#include <string.h>
#include <strings.h>

static inline bool nd_ends_with(const char *text, const char *end)
{
    size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

/* Returns whether a file of this name has JSON lines, compressed or not; case does not matter. */
static inline bool nd_is_name_of_rows(const char *name)
{
    static const char *const endings[] = {".jsonl",  ".jsonl.gz",  ".jsonl.zst",
                                          ".ndjson", ".ndjson.gz", ".ndjson.zst"};
    const size_t size = strlen(name);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        const size_t n = strlen(endings[i]);
        if (size > n && strcasecmp(name + size - n, endings[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* 0 to 15 for a digit of either case, else -1; whatever the locale. */
static inline int nd_hex_digit(int c)
{
    int letter = c | 0x20;
    return c >= '0' && c <= '9' ? c - '0' : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

#endif
