// SPDX-License-Identifier: Apache-2.0
/*
 * The thread that looks for faults while the driving thread does not: that thread may be inside
 * NCCL, or inside CUDA, which accepts no more work while a collective does not end.
 *
 * It calls cudaSetDevice and cudaEventQuery, which any thread may call. If the driver makes the
 * query wait for the driving thread, a limit on the call ends the process.
 */
#include <math.h>
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
    const int64_t until = nd_clock_after(seconds);
    nd_monitor_lock(&state->watching);
    while (!state->watch.stop && nd_monitor_wait(&state->watching, until)) {
    }
    nd_monitor_unlock(&state->watching);
    return !state->watch.stop;
}

static void watch(void *argument)
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
}

nd_status nccl_thread_start(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    return nd_thread_start(&state->watch, &state->watching, "the thread that watches NCCL", watch,
                           transport);
}

void nccl_thread_stop(nd_transport *transport)
{
    nd_thread_join(&nccl_state_of(transport)->watch, INFINITY);
}
