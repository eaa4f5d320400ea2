// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_LOG_H
#define ND_BASE_LOG_H
/*
 * The human log: lower-case sentences on stderr, whole lines, one write() each. A terminal or a
 * pipe that nobody reads stops no program: lines are lost, and counted (outlet.h).
 *
 * One of the two places of global mutable state: level and prefix are set once by main() before
 * threads start. Rank 0 logs without a prefix; other ranks log only warnings and errors unless the
 * level is debug.
 */
#include <stdbool.h>
#include <stddef.h>

typedef enum nd_log_level {
    ND_LOG_ERROR = 0,
    ND_LOG_WARNING,
    ND_LOG_INFO,
    ND_LOG_DEBUG
} nd_log_level;

void nd_log_init(nd_log_level level, const char *prefix); /* prefix copied; NULL or "" for none */
nd_log_level nd_log_get_level(void);
void nd_log(nd_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes as they are, such as a progress bar. False: they are lost, since nobody reads. */
bool nd_log_write(const char *bytes, size_t count);
/* Like nd_log_write, but for a text of several lines. */
void nd_log_text(const char *text);

#define nd_log_error(...)   nd_log(ND_LOG_ERROR, __VA_ARGS__)
#define nd_log_warning(...) nd_log(ND_LOG_WARNING, __VA_ARGS__)
#define nd_log_info(...)    nd_log(ND_LOG_INFO, __VA_ARGS__)
#define nd_log_debug(...)   nd_log(ND_LOG_DEBUG, __VA_ARGS__)

#endif
