// SPDX-License-Identifier: Apache-2.0
/* Events: numbers of records, reached when the recording stream comes to them. */
#include <sched.h>
#include <stdlib.h>

#include "runtime/base/clock.h"
#include "tests/hostcuda/doubles/machine.h"

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    *out = calloc(1, sizeof **out);
    (*out)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

static void event_drop(cudaEvent_t event)
{
    if (event->destroyed && event->pending == 0) {
        free(event);
    }
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    event->destroyed = true;
    event_drop(event);
    return cudaSuccess;
}

typedef struct event_call {
    cudaEvent_t event;
    uint64_t number;
} event_call;

static nd_double_state run_record(void *closure)
{
    event_call *call = closure;
    if (call->event->done < call->number) {
        call->event->done = call->number;
        call->event->when_ns = nd_clock_ns() + machine_current()->spent_ns;
    }
    call->event->pending--;
    event_drop(call->event);
    return ND_DOUBLE_DONE;
}

static nd_double_state run_wait(void *closure)
{
    event_call *call = closure;
    if (call->event->done < call->number) {
        return ND_DOUBLE_BLOCKED;
    }
    call->event->pending--;
    event_drop(call->event);
    return ND_DOUBLE_DONE;
}

void event_forget(const task *t)
{
    const event_call *call = (const event_call *)t->closure;
    if (t->run == run_record || t->run == run_wait) {
        call->event->pending--;
        event_drop(call->event);
    }
}

/* The task may have run when this returns. */
static cudaError_t submit(cudaStream_t stream, nd_double_task *run, event_call call)
{
    call.event->pending++;
    cudaError_t error = nd_double_submit(stream, run, &call, sizeof call);
    call.event->pending -= error != cudaSuccess;
    return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    event->capture = stream->capture;
    event->recorded_on = stream;
    if (stream->capture) {
        return cudaSuccess; /* tasks of a graph run in the order of their recording */
    }
    return submit(stream, run_record, (event_call){event, ++event->recorded});
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    if (event->capture) {
        if (!stream->capture) {
            stream->capture = event->capture; /* joins */
        } else if (stream->capture != event->capture) {
            return machine_error(cudaErrorStreamCaptureMerge);
        }
        if (stream == event->capture->origin) {
            event->recorded_on->unjoined = false;
        }
        return cudaSuccess;
    }
    if (stream->capture) {
        return machine_error(cudaErrorStreamCaptureIsolation);
    }
    return submit(stream, run_wait, (event_call){event, event->recorded});
}

/* Another thread may ask at any time: captures forbid calls to the thread that captures, and states
 * of streams are that thread's alone. */
cudaError_t cudaEventQuery(cudaEvent_t event)
{
    double_device *device = machine_current();
    if (machine_is_driver(device)) {
        bool pending = event->done < event->recorded;
        if (event->capture) {
            return machine_error(cudaErrorCapturedEvent);
        }
        machine_outside_capture("cudaEventQuery");
        if (pending) {
            queue_look(device, NULL);
        }
        queue_asked(device, pending);
    }
    return device->broken                   ? machine_error(device->broken)
           : event->done >= event->recorded ? cudaSuccess
                                            : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    machine_current()->counts.host_waits++;
    cudaError_t state;
    while ((state = cudaEventQuery(event)) == cudaErrorNotReady) {
        sched_yield();
    }
    return state;
}

void nd_double_spend(double seconds)
{
    machine_current()->spent_ns += (int64_t)(seconds * 1e9);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    if (!begin->timed || !end->timed) {
        return machine_error(cudaErrorInvalidResourceHandle);
    }
    machine_current()->counts.timings++;
    *ms = (float)((double)(end->when_ns - begin->when_ns) * 1e-6);
    return cudaSuccess;
}
