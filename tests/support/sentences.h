// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_SENTENCES_H
#define ND_TESTS_SUPPORT_SENTENCES_H
/*
 * The sentences of an output that say why a program ended: a line of the log that begins with
 * "error: ", or the first line of ndlaunch's screen, which names what failed first. A user should
 * find exactly one.
 */
#include <string.h>

static inline int lines_that_begin(const char *text, const char *words)
{
    int count = 0;
    size_t length = strlen(words);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        count += strncmp(line, words, length) == 0;
    }
    return count;
}

static inline int sentences_in(const char *text)
{
    int count = lines_that_begin(text, "error: ");
    for (const char *at = text; (at = strstr(at, " failed first (")) != NULL; at++) {
        count++;
    }
    return count;
}

#endif
