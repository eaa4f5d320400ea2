// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/call_limit.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"

enum { OPEN_MAX = 8 }; /* threads that are in such a call at the same time */

typedef struct open_call {
    const char *what, *why; /* what: NULL where nothing is open */
    double seconds;
    int64_t deadline; /* nd_clock_ns */
    int exit_code;
} open_call;

struct nd_call_limit {
    nd_thread thread;
    nd_monitor monitor; /* of all below */
    open_call calls[OPEN_MAX];
};

static const open_call *next_to_end(const nd_call_limit *limit)
{
    const open_call *first = NULL;
    for (int i = 0; i < OPEN_MAX; i++) {
        const open_call *call = &limit->calls[i];
        if (call->what && (!first || call->deadline < first->deadline)) {
            first = call;
        }
    }
    return first;
}

static void watch(void *argument)
{
    nd_call_limit *limit = argument;
    nd_monitor_lock(&limit->monitor);
    while (!limit->thread.stop) {
        const open_call *call = next_to_end(limit);
        if (call && nd_clock_ns() >= call->deadline) {
            nd_log_error("%s did not return within %.4g s: %s", call->what, call->seconds,
                         call->why);
            _exit(call->exit_code); /* what exit() runs could wait for the same call */
        }
        nd_monitor_wait(&limit->monitor, call ? call->deadline : ND_CLOCK_NEVER);
    }
    nd_monitor_unlock(&limit->monitor);
}

nd_status nd_call_limit_create(nd_call_limit **out)
{
    nd_call_limit *limit;
    ND_TRY(ND_ALLOC(1, &limit));
    limit->monitor = (nd_monitor)ND_MONITOR_INIT;
    nd_status status = nd_thread_start(&limit->thread, &limit->monitor,
                                       "the thread that bounds calls", watch, limit);
    if (status != ND_OK) {
        nd_call_limit_destroy(limit);
        return status;
    }
    *out = limit;
    return ND_OK;
}

void nd_call_limit_destroy(nd_call_limit *limit)
{
    if (limit) {
        nd_thread_join(&limit->thread, INFINITY);
        nd_monitor_fini(&limit->monitor);
        free(limit);
    }
}

int nd_call_limit_begin(nd_call_limit *limit, const char *what, double seconds, const char *why,
                        int exit_code)
{
    int number = 0;
    nd_monitor_lock(&limit->monitor);
    while (number < OPEN_MAX && limit->calls[number].what) {
        number++;
    }
    ND_ASSERT(number < OPEN_MAX);
    limit->calls[number] = (open_call){.what = what,
                                       .why = why,
                                       .seconds = seconds,
                                       .deadline = nd_clock_after(seconds),
                                       .exit_code = exit_code};
    nd_monitor_tell(&limit->monitor);
    nd_monitor_unlock(&limit->monitor);
    return number;
}

void nd_call_limit_end(nd_call_limit *limit, int call)
{
    nd_monitor_lock(&limit->monitor);
    limit->calls[call].what = NULL; /* the thread finds out when it wakes */
    nd_monitor_unlock(&limit->monitor);
}
