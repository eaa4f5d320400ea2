// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_SHOWN_H
#define ND_BASE_SHOWN_H
/*
 * Bytes of others, as they may go to a terminal, in whatever pieces they come: names of folders,
 * what a model writes, the output of workers. What nd_is_printable refuses, and bytes that are no
 * UTF-8, become text like \x1b and \u202e. Line ends and tabs pass, and what a progress bar needs.
 */
#include <stdbool.h>
#include <stddef.h>

enum { ND_SHOWN_GROWTH = 6, ND_SHOWN_HELD = 16 };
typedef struct nd_shown {
    bool text_only; /* nothing passes for a progress bar */
    char held[4];   /* bytes that may begin a character or sequence whose rest has not come */
    int count;
} nd_shown;
/* `out` has room for ND_SHOWN_GROWTH x count + ND_SHOWN_HELD bytes; returns how many it got. */
size_t nd_shown_filter(nd_shown *shown, const char *bytes, size_t count, char *out);
/* What is held when no further byte comes: at most ND_SHOWN_HELD. */
size_t nd_shown_end(nd_shown *shown, char *out);

/* Once, at the start of a program: where standard output is a terminal, all that is printed with
 * stdio passes the filter, as text only. A file and a pipe get the bytes as they are. */
void nd_shown_guard_terminal(void);

#endif
