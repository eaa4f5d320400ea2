// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_OUTLET_H
#define ND_BASE_OUTLET_H
/*
 * Standard output or error of a program that may not stop when nobody reads it: bytes for a
 * terminal, a pipe or a socket that has had no room for 5 s are lost until it has, and how many
 * lines were lost is said then. A file always has room. Any thread may write.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

enum { ND_OUTLET_PATIENCE_MS = 5000 };

typedef struct nd_outlet {
    int fd;
    atomic_bool unread; /* the newest bytes found no room: the next ones do not wait for any */
    atomic_bool torn;   /* the last line that was written lacks its end */
    atomic_long lost;   /* lines, and ends of lines, since the newest bytes that were written */
} nd_outlet;            /* but for `fd` all zero at first */

/* False: all or the rest of the bytes is lost, since nobody reads. A stream that is closed, or a
 * disk that is full, is no reason to stop either, and true. */
bool nd_outlet_write(nd_outlet *outlet, const char *bytes, size_t count);

#endif
