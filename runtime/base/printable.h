// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_PRINTABLE_H
#define ND_BASE_PRINTABLE_H
/*
 * Text that may go to a terminal. A file or a command line can hold bytes that move the cursor,
 * change colours or begin a new line. Error records (nd_fail) and log lines (nd_log) pass through
 * nd_escape, so no such byte from outside reaches a terminal raw.
 */
#include <stdbool.h>
#include <stddef.h>

/*
 * The length, 1 to 4 bytes, of the character at `text`, of which `count` >= 1 bytes are there, and
 * its number in *code. 0: they begin a character whose other bytes are missing. -1: no whole
 * character in its shortest form of UTF-8 begins there.
 */
int nd_utf8_decode(const char *text, size_t count, unsigned *code);

/* True for UTF-8 without control characters, line separators, byte order marks and marks that
 * reverse the direction of writing. */
bool nd_is_printable(const char *text);

/*
 * Copies `text` to `out` and writes whatever nd_is_printable refuses as \n, \t, \x1b (a byte) or
 * \u202e (a character). Characters listed in `keep` stay as they are. The copy ends where `size`
 * bytes are full, never within an escape or a character.
 */
void nd_escape(char *out, size_t size, const char *text, const char *keep);

/*
 * Bytes of others, as they may go to a terminal, in whatever pieces they come: names of folders,
 * what a model writes, the output of workers. What nd_is_printable refuses, and bytes that are no
 * UTF-8, become text like \x1b and \u202e. Line ends and tabs pass, and what a progress bar needs.
 */
enum { ND_SHOWN_GROWTH = 6, ND_SHOWN_HELD = 16 };
typedef struct nd_shown {
    bool text_only; /* nothing passes for a progress bar */
    char held[4];   /* bytes that may begin a character or sequence whose rest has not come */
    int count;
} nd_shown;
/* `out` has room for ND_SHOWN_GROWTH x count + ND_SHOWN_HELD bytes; returns how many it got. NULL
 * and 0: no further byte comes, and what is held is written. */
size_t nd_shown_filter(nd_shown *shown, const char *bytes, size_t count, char *out);

/* Writes all of it to standard output, and waits for its reader. False: it cannot be written, for
 * instance as the reader is gone. */
bool nd_stdout_write(const char *bytes, size_t count);
/* Once, at the start of a program: where standard output is a terminal, all that is printed with
 * stdio passes the filter, as text only. A file and a pipe get the bytes as they are. */
void nd_shown_guard_terminal(void);

#endif
