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
/* What nd_is_printable says about each character. */
bool nd_is_printable_code(unsigned code);

/* True for UTF-8 without control characters, line separators, byte order marks and marks that
 * reverse the direction of writing. */
bool nd_is_printable(const char *text);

/*
 * Copies `text` to `out` and writes whatever nd_is_printable refuses as \n, \t, \x1b (a byte) or
 * \u202e (a character). Characters listed in `keep` stay as they are. The copy ends where `size`
 * bytes are full, never within an escape or a character.
 */
void nd_escape(char *out, size_t size, const char *text, const char *keep);

#endif
