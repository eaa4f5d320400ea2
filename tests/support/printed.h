// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_PRINTED_H
#define ND_TESTS_SUPPORT_PRINTED_H
#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>

/* A text with values in it, as printf puts them there; good until 16 more have been printed. */
__attribute__((format(printf, 1, 2))) static inline const char *printed(const char *format, ...)
{
    static char texts[16][4096];
    static int next;
    char *text = texts[next++ % 16];
    va_list values;
    va_start(values, format);
    int n = vsnprintf(text, sizeof texts[0], format, values);
    va_end(values);
    cr_assert_lt(n, (int)sizeof texts[0], "too long: %s", format);
    return text;
}

#endif
