// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/call_limit.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
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
    pthread_t thread;
    pthread_mutex_t mutex; /* of all below */
    pthread_cond_t changed;
    bool stop;
    open_call calls[OPEN_MAX];
    char reason[ND_ERROR_MESSAGE_MAX]; /* or "" */
    int reason_code;
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

static void *watch(void *argument)
{
    nd_call_limit *limit = argument;
    pthread_mutex_lock(&limit->mutex);
    while (!limit->stop) {
        const open_call *call = next_to_end(limit);
        if (!call) {
            pthread_cond_wait(&limit->changed, &limit->mutex);
            continue;
        }
        if (nd_clock_ns() >= call->deadline) {
            nd_log_error("%s did not return within %.4g s: %s", call->what, call->seconds,
                         call->why);
            if (limit->reason[0]) {
                nd_log_error("%s", limit->reason);
            }
            _exit(limit->reason[0]
                      ? limit->reason_code
                      : call->exit_code); /* what exit() runs could wait for the same call */
        }
        struct timespec until = {.tv_sec = call->deadline / 1000000000,
                                 .tv_nsec = call->deadline % 1000000000};
        pthread_cond_timedwait(&limit->changed, &limit->mutex, &until);
    }
    pthread_mutex_unlock(&limit->mutex);
    return NULL;
}

nd_status nd_call_limit_create(nd_call_limit **out)
{
    nd_call_limit *limit;
    pthread_condattr_t monotonic;
    ND_TRY(ND_ALLOC(1, &limit));
    pthread_mutex_init(&limit->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&limit->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int code = nd_thread_start(watch, limit, &limit->thread);
    if (code != 0) {
        pthread_cond_destroy(&limit->changed);
        pthread_mutex_destroy(&limit->mutex);
        free(limit);
        return nd_fail_system(code, "the thread that bounds calls");
    }
    *out = limit;
    return ND_OK;
}

void nd_call_limit_destroy(nd_call_limit *limit)
{
    if (!limit) {
        return;
    }
    pthread_mutex_lock(&limit->mutex);
    limit->stop = true;
    pthread_cond_signal(&limit->changed);
    pthread_mutex_unlock(&limit->mutex);
    pthread_join(limit->thread, NULL);
    pthread_cond_destroy(&limit->changed);
    pthread_mutex_destroy(&limit->mutex);
    free(limit);
}

int nd_call_limit_begin(nd_call_limit *limit, const char *what, double seconds, const char *why,
                        int exit_code)
{
    int number = 0;
    pthread_mutex_lock(&limit->mutex);
    while (number < OPEN_MAX && limit->calls[number].what) {
        number++;
    }
    ND_ASSERT(number < OPEN_MAX);
    limit->calls[number] = (open_call){.what = what,
                                       .why = why,
                                       .seconds = seconds,
                                       .deadline = nd_clock_ns() + (int64_t)(seconds * 1e9),
                                       .exit_code = exit_code};
    pthread_cond_signal(&limit->changed);
    pthread_mutex_unlock(&limit->mutex);
    return number;
}

void nd_call_limit_end(nd_call_limit *limit, int call)
{
    pthread_mutex_lock(&limit->mutex);
    limit->calls[call].what = NULL; /* the thread finds out when it wakes */
    pthread_mutex_unlock(&limit->mutex);
}

void nd_call_limit_set_reason(nd_call_limit *limit, const char *message, int exit_code)
{
    pthread_mutex_lock(&limit->mutex);
    snprintf(limit->reason, sizeof limit->reason, "%s", message);
    limit->reason_code = exit_code;
    pthread_mutex_unlock(&limit->mutex);
}
