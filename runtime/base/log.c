// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/outlet.h"
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

bool nd_log_write(const char *bytes, size_t count)
{
    static nd_outlet standard_error = {.fd = STDERR_FILENO};
    return nd_outlet_write(&standard_error, bytes, count);
}

void nd_log_text(const char *text)
{
    (void)nd_log_write(text, strlen(text));
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
    (void)nd_log_write(line, length);
}
