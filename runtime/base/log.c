// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/printable.h"

static nd_log_level current_level = ND_LOG_INFO;
static char current_prefix[128];

void nd_log_init(nd_log_level level, const char *prefix)
{
    current_level = level;
    snprintf(current_prefix, sizeof current_prefix, "%s", prefix ? prefix : "");
}

nd_log_level nd_log_get_level(void)
{
    return current_level;
}

static atomic_bool unread; /* the last line found no room */
static atomic_long lost;   /* lines since the last one that was written */

/* A pipe that has room takes 4096 bytes at once. Files always have room. */
static bool has_room(void)
{
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    const bool waits = !atomic_load(&unread);
    const bool room = poll(&p, 1, waits ? ND_LOG_PATIENCE_MS : 0) != 0;
    atomic_store(&unread, !room);
    return room;
}

bool nd_log_write(const char *bytes, size_t count)
{
    enum { PART = 4096 };
    for (size_t done = 0; done < count;) {
        if (!has_room()) {
            atomic_fetch_add(&lost, 1);
            return false;
        }
        const size_t part = count - done < PART ? count - done : PART;
        ssize_t n = write(STDERR_FILENO, bytes + done, part);
        if (n <= 0) {
            return true; /* a closed or full stderr must never stop the program */
        }
        done += (size_t)n;
    }
    return true;
}

static void tell_lost(void)
{
    char text[160];
    const long lines = has_room() ? atomic_exchange(&lost, 0) : 0;
    if (lines > 0) {
        int n = snprintf(text, sizeof text,
                         "warning: %ld lines are missing here, which nobody read for %d s\n", lines,
                         ND_LOG_PATIENCE_MS / 1000);
        (void)nd_log_write(text, (size_t)n);
    }
}

void nd_log(nd_log_level level, const char *format, ...)
{
    static const char *const tag[] = {"error: ", "warning: ", "", "debug: "};
    char line[4096], body[4096];
    if (level > current_level) {
        return;
    }
    int used = snprintf(line, sizeof line, "%s%s%s", current_prefix, current_prefix[0] ? ": " : "",
                        tag[level]);
    va_list args;
    va_start(args, format);
    int formatted = vsnprintf(body, sizeof body, format, args);
    va_end(args);
    if (formatted < 0) {
        return;
    }
    /* A line end is a caller's own: values from outside come through nd_fail or are checked. */
    nd_escape(line + used, sizeof line - (size_t)used - 1, body, "\n");
    size_t length = strlen(line);
    if (length == 0) {
        return;
    }
    line[length++] = '\n';
    if (atomic_load(&lost) > 0) {
        tell_lost();
    }
    (void)nd_log_write(line, length);
}
