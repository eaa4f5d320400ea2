// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_CLOCK_H
#define ND_BASE_CLOCK_H
/* Monotonic time, for durations, deadlines and the order of failures on one host; and the calendar
 * time that files are marked with. */
#include <stdint.h>
#include <time.h>

static inline int64_t nd_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline double nd_clock_seconds(void)
{
    return (double)nd_clock_ns() * 1e-9;
}

/* The deadline of what begins now and may take so long; INFINITY gives ND_CLOCK_NEVER. */
#define ND_CLOCK_NEVER INT64_MAX
static inline int64_t nd_clock_after(double seconds)
{
    return seconds < 1e9 ? nd_clock_ns() + (int64_t)(seconds * 1e9) : ND_CLOCK_NEVER;
}

/* "2026-01-31T23:59:59Z" for seconds since 1970; returns text. A time that the calendar cannot hold
 * is "". */
enum { ND_CLOCK_UTC_MAX = 32 };
static inline const char *nd_clock_utc(int64_t seconds, char text[ND_CLOCK_UTC_MAX])
{
    struct tm utc;
    time_t time = (time_t)seconds;
    if (!gmtime_r(&time, &utc) ||
        strftime(text, ND_CLOCK_UTC_MAX, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0) {
        text[0] = '\0';
    }
    return text;
}

#endif
