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
