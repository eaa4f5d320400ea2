// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_LOG_H
#define ND_BASE_LOG_H
/*
 * The human log: lower-case sentences on stderr, whole lines, one write() each. A terminal or a
 * pipe that nobody reads stops no program: when it has had no room for 5 s, lines are lost until it
 * has, and their number is said then.
 *
 * One of the two places of global mutable state: level and prefix are set once by main() before
 * threads start. Rank 0 logs without a prefix; other ranks log only warnings and errors unless the
 * level is debug.
 */
#include <stdbool.h>
#include <stddef.h>

enum { ND_LOG_PATIENCE_MS = 5000 };

typedef enum nd_log_level {
    ND_LOG_ERROR = 0,
    ND_LOG_WARNING,
    ND_LOG_INFO,
    ND_LOG_DEBUG
} nd_log_level;

void nd_log_init(nd_log_level level, const char *prefix); /* prefix copied; NULL or "" for none */
nd_log_level nd_log_get_level(void);
void nd_log(nd_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes that are no line, such as a progress bar. False: they are lost, since nobody reads. */
bool nd_log_write(const char *bytes, size_t count);

#define nd_log_error(...)   nd_log(ND_LOG_ERROR, __VA_ARGS__)
#define nd_log_warning(...) nd_log(ND_LOG_WARNING, __VA_ARGS__)
#define nd_log_info(...)    nd_log(ND_LOG_INFO, __VA_ARGS__)
#define nd_log_debug(...)   nd_log(ND_LOG_DEBUG, __VA_ARGS__)

#endif
