// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/status.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/printable.h"

static _Thread_local nd_error last_error;

nd_status nd_fail_as(nd_failure_cause cause, nd_status status, const char *format, ...)
{
    char text[ND_ERROR_MESSAGE_MAX]; /* the arguments may point into the record */
    va_list args;
    ND_ASSERT(status != ND_OK);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    last_error.status = status;
    last_error.cause = cause;
    nd_escape(last_error.message, sizeof last_error.message, text, "");
    return status;
}

nd_status nd_fail_memory(const char *what, ...)
{
    char text[512];
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    return nd_fail(ND_ERR_RESOURCE, "out of host memory for %s", text);
}

nd_status nd_fail_system(int code, const char *what, ...)
{
    char text[512];
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    if (code == ENOMEM) {
        return nd_fail_memory("%s", text);
    }
    bool descriptors = code == EMFILE || code == ENFILE;
    return nd_fail(code == EAGAIN || descriptors ? ND_ERR_RESOURCE : ND_ERR_INTERNAL,
                   "%s cannot be made: %s%s", text, strerror(code),
                   code == EAGAIN ? "; raise the limit of processes (ulimit -u)"
                   : descriptors  ? "; raise the limit of open files (ulimit -n)"
                                  : "");
}

nd_status nd_fail_context(nd_status status, const char *format, ...)
{
    char text[ND_ERROR_MESSAGE_MAX], *message = last_error.message;
    const size_t size = sizeof last_error.message;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t used = strlen(message);
    snprintf(message + used, size - used, " (while ");
    used = strlen(message);
    nd_escape(message + used, size - used, text, "");
    used = strlen(message);
    snprintf(message + used, size - used, ")");
    return status;
}

const nd_error *nd_error_last(void)
{
    return &last_error;
}

void nd_error_clear(void)
{
    last_error.status = ND_OK;
    last_error.cause = ND_CAUSE_OWN;
    last_error.message[0] = '\0';
}

void nd_error_restore(const nd_error *error)
{
    last_error = *error;
}

const char *nd_status_name(nd_status status)
{
    static const char *const names[] = {
        [ND_OK] = "ok",
        [ND_ERR_INTERNAL] = "internal",
        [ND_ERR_CONFIG] = "configuration",
        [ND_ERR_DATA] = "data",
        [ND_ERR_NUMERIC] = "numeric",
        [ND_ERR_RESOURCE] = "resource",
        [ND_ERR_CANTCREATE] = "output",
        [ND_ERR_IO] = "i/o",
        [ND_ERR_PREEMPTED] = "preempted",
        [ND_ERR_HANG] = "hang",
    };
    const size_t place = (size_t)status;
    return place < sizeof names / sizeof *names && names[place] ? names[place] : "unknown";
}

void nd_assert_failed(const char *expression, const char *file, int line)
{
    fprintf(stderr, "%s:%d: invariant broken: %s\n", file, line, expression);
    abort();
}

nd_status nd_alloc(size_t count, size_t size, void **out)
{
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (!p) {
        return nd_fail_memory("%zu elements of %zu bytes", count, size);
    }
    *out = p;
    return ND_OK;
}
