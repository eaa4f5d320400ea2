// SPDX-License-Identifier: Apache-2.0
/*
 * The thread that looks for faults while the driving thread does not: that thread may be inside
 * NCCL, or inside CUDA, which accepts no more work while a collective does not end.
 *
 * It calls cudaSetDevice and cudaEventQuery, which any thread may call. If the driver makes the
 * query wait for the driving thread, a limit on the call ends the process.
 */
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl/nccl.h"

static const double INTERVAL_SECONDS = 0.1;
static const int64_t ABSENT_NS =
    2000000000; /* without a look of the driving thread: it counts as stuck */

static _Noreturn void end_process(nccl_state *state, nd_status status, double seconds)
{
    nd_fail_context(status,
                    "the host had not looked for %.1f s: it is inside CUDA or "
                    "NCCL, or busy",
                    seconds);
    const char *sentence = nd_error_last()->message;
    if (state->on_fault) {
        state->on_fault(state->fault_context, status, sentence, true);
    } else {
        nd_log_error("%s", sentence);
    }
    _exit((int)status); /* the driver ends what runs on the GPU; exit() could wait for it */
}

/* Sleeps; false when the thread is to end. */
static bool go_on(nccl_state *state, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t at = until.tv_nsec + (int64_t)(seconds * 1e9);
    until.tv_sec += at / 1000000000;
    until.tv_nsec = at % 1000000000;
    pthread_mutex_lock(&state->ring);
    int code = 0;
    while (!state->stop && code == 0) {
        code = pthread_cond_timedwait(&state->stopped, &state->ring, &until);
    }
    bool stop = state->stop;
    pthread_mutex_unlock(&state->ring);
    return !stop;
}

static void *watch(void *argument)
{
    nd_transport *transport = argument;
    nccl_state *state = nccl_state_of(transport);
    double interval = transport->timeout_seconds / 5;
    int64_t noticed = 0; /* 0: no fault */
    nd_status fault = ND_OK;
    interval = interval < INTERVAL_SECONDS ? interval : INTERVAL_SECONDS;
    cudaSetDevice(state->device->ordinal);
    while (go_on(state, interval)) {
        if (atomic_load(&state->taken)) {
            continue;
        }
        int call = nd_call_limit_begin(state->limit, "a query of the GPU by its watch",
                                       10 + 2 * transport->timeout_seconds,
                                       "the driver does not answer", ND_ERR_HANG);
        bool asked = false;
        nd_status status = nccl_look(transport, &asked);
        nd_call_limit_end(state->limit, call);
        int64_t now = nd_clock_ns(), attended = atomic_load(&state->attended_ns);
        if (status != ND_OK) {
            noticed = noticed ? noticed : now;
            fault = status; /* its sentence stays in the error record of this thread */
        } else if (asked) {
            noticed = 0;
        }
        if (noticed && now - noticed > ABSENT_NS && now - attended > ABSENT_NS &&
            !atomic_exchange(&state->taken, true)) {
            end_process(state, fault, (double)(now - attended) * 1e-9);
        }
    }
    return NULL;
}

nd_status nccl_thread_start(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    int code = pthread_create(&state->thread, NULL, watch, transport);
    if (code != 0) {
        return nd_fail_system(code, "the thread that watches NCCL");
    }
    state->has_thread = true;
    return ND_OK;
}

void nccl_thread_stop(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    if (state->has_thread) {
        pthread_mutex_lock(&state->ring);
        state->stop = true;
        pthread_cond_signal(&state->stopped);
        pthread_mutex_unlock(&state->ring);
        pthread_join(state->thread, NULL);
        state->has_thread = false;
    }
}
