// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_TEXT_H
#define ND_BASE_TEXT_H
/* Questions about text that the C library does not answer. */
#include <stdbool.h>
#include <string.h>

static inline bool nd_ends_with(const char *text, const char *end)
{
    size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

/* 0 to 15 for a digit of either case, else -1; whatever the locale. */
static inline int nd_hex_digit(int c)
{
    int letter = c | 0x20;
    return c >= '0' && c <= '9' ? c - '0' : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

#endif
