// SPDX-License-Identifier: Apache-2.0
/* Streams as queues of tasks. Events, copies and graphs are in files of their own. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/hostcuda/doubles/machine.h"

enum { WAIT_SECONDS = 120 };

task *queue_task(nd_double_task *run, const void *closure, size_t bytes)
{
    task *t = malloc(sizeof *t + bytes);
    if (!t) {
        nd_double_violation("out of host memory");
    }
    t->next = NULL;
    t->run = run;
    t->bytes = bytes;
    if (bytes > 0) {
        memcpy(t->closure, closure, bytes);
    }
    return t;
}

/* Runs the queue's first task; false when there is none or it is blocked. */
static bool step(double_device *device, cudaStream_t stream)
{
    task *t = stream->head;
    if (!t || stream->running) {
        return false;
    }
    stream->running = true;
    nd_double_state state = ND_DOUBLE_DONE;
    if (device->broken) {
        event_forget(t);
    } else {
        state = t->run(t->closure);
    }
    stream->running = false;
    if (state == ND_DOUBLE_BLOCKED) {
        return false;
    }
    stream->head = t->next;
    if (!stream->head) {
        stream->tail = &stream->head;
    }
    stream->finished++;
    free(t);
    return true;
}

static bool step_others(double_device *device, cudaStream_t stream)
{
    bool moved = false;
    for (cudaStream_t other = device->streams; other; other = other->next) {
        if (other != stream) {
            moved |= step(device, other);
        }
    }
    return moved;
}

/* One task of a stream that is drawn, or of the next one that can go; false when none can. */
static bool step_random(double_device *device)
{
    uint64_t count = 0, turns = 0;
    for (cudaStream_t s = device->streams; s; s = s->next) {
        count++;
    }
    turns = count > 0 ? machine_draw(device) % count : 0;
    cudaStream_t s = device->streams;
    while (turns-- > 0) {
        s = s->next;
    }
    for (; count > 0; count--, s = s->next ? s->next : device->streams) {
        if (step(device, s)) {
            return true;
        }
    }
    return false;
}

static void step_some(double_device *device, uint64_t most)
{
    machine_open(device);
    while (most-- > 0 && step_random(device)) {
    }
    machine_close(device);
}

void queue_look(double_device *device, cudaStream_t stream)
{
    if (nd_double_machine_get()->order == ND_DOUBLE_RANDOM) {
        step_some(device, 1 + machine_draw(device) % 8);
    } else {
        queue_round(device, stream);
    }
}

static void round_random(double_device *device, cudaStream_t stream)
{
    machine_open(device);
    while ((!stream || stream->head) && step_random(device)) {
    }
    machine_close(device);
}

void queue_round(double_device *device, cudaStream_t stream)
{
    if (nd_double_machine_get()->order == ND_DOUBLE_RANDOM) {
        round_random(device, stream);
        return;
    }
    bool others_first = nd_double_machine_get()->order != ND_DOUBLE_LAZY;
    machine_open(device);
    for (bool moved = true; moved;) {
        while (others_first && step_others(device, stream)) {
        }
        moved = stream && step(device, stream);
        if (!moved && (!stream || stream->head)) {
            moved = step_others(device, stream);
        }
    }
    machine_close(device);
}

void queue_run(double_device *device, cudaStream_t stream, uint64_t until)
{
    int64_t begin = nd_clock_ns();
    for (;;) {
        queue_round(device, stream);
        if (stream->finished >= until) {
            return;
        }
        if (nd_clock_ns() - begin > (int64_t)WAIT_SECONDS * 1000000000) {
            nd_double_violation("a stream has waited for %d s: a peer is missing, or two ranks "
                                "wait for each other",
                                WAIT_SECONDS);
        }
        sched_yield();
    }
}

void queue_wait(double_device *device, cudaStream_t stream)
{
    device->counts.host_waits++;
    queue_run(device, stream, stream->submitted);
}

void queue_wait_all(double_device *device)
{
    for (cudaStream_t stream = device->streams; stream; stream = stream->next) {
        queue_run(device, stream, stream->submitted);
    }
}

void queue_asked(double_device *device, bool pending)
{
    pending = pending && !device->settling;
    device->counts.host_waits += pending && !device->waiting;
    device->waiting = device->waiting || pending;
}

void nd_double_drain(void)
{
    queue_round(machine_current(), NULL);
}

cudaError_t nd_double_submit(cudaStream_t stream, nd_double_task *run, const void *closure,
                             size_t bytes)
{
    double_device *device = machine_current();
    if (!stream) {
        nd_double_violation("work on the default stream: it would serialise all others");
    }
    if (device->broken) {
        return machine_error(device->broken);
    }
    task *t = queue_task(run, closure, bytes);
    device->counts.submitted++;
    device->waiting = false;
    if (stream->capture) {
        if (stream->capture->invalid) {
            free(t);
            return machine_error(cudaErrorStreamCaptureInvalidated);
        }
        *stream->capture->tail = t;
        stream->capture->tail = &t->next;
        stream->unjoined = stream != stream->capture->origin;
        return cudaSuccess;
    }
    device->counts.calls++;
    long room = nd_double_machine_get()->queue;
    if (room > 0 && stream->submitted - stream->finished >= (uint64_t)room && !stream->running) {
        queue_run(device, stream, stream->submitted - (uint64_t)room + 1);
    }
    *stream->tail = t;
    stream->tail = &t->next;
    stream->submitted++;
    if (nd_double_machine_get()->order == ND_DOUBLE_EAGER && !stream->running) {
        queue_round(device, stream);
    }
    if (nd_double_machine_get()->order == ND_DOUBLE_RANDOM && device->open == 0) {
        step_some(device, machine_draw(device) % 4);
    }
    return cudaSuccess;
}

typedef struct kernel_call {
    void (*kernel)(void *);
    _Alignas(max_align_t) unsigned char closure[];
} kernel_call;

static nd_double_state run_kernel(void *closure)
{
    kernel_call *call = closure;
    call->kernel(call->closure);
    return ND_DOUBLE_DONE;
}

cudaError_t nd_double_launch(cudaStream_t stream, void (*kernel)(void *closure),
                             const void *closure, size_t bytes)
{
    kernel_call *call = malloc(sizeof *call + bytes);
    if (!call) {
        nd_double_violation("out of host memory");
    }
    call->kernel = kernel;
    memcpy(call->closure, closure, bytes);
    cudaError_t error = nd_double_submit(stream, run_kernel, call, sizeof *call + bytes);
    free(call);
    return error;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    double_device *device = machine_current();
    cudaStream_t stream = calloc(1, sizeof *stream);
    if (flags != cudaStreamNonBlocking) {
        nd_double_violation("a stream that synchronises with the default stream");
    }
    stream->tail = &stream->head;
    atomic_store(&device->driver, pthread_self());
    stream->next = device->streams;
    device->streams = stream;
    *out = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    cudaError_t error = cudaStreamCreateWithFlags(out, flags);
    (*out)->priority = priority;
    return error;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out)
{
    *out = stream->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* Work that is still queued runs first, as far as it can: a peer may need it. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    double_device *device = machine_current();
    if (stream->capture) {
        nd_double_violation("a stream is destroyed while it is captured");
    }
    queue_round(device, stream);
    struct CUstream_st **at = &device->streams;
    while (*at != stream) {
        at = &(*at)->next;
    }
    *at = stream->next;
    while (stream->head) {
        task *t = stream->head;
        stream->head = t->next;
        event_forget(t);
        free(t);
    }
    free(stream);
    return cudaSuccess;
}

static cudaError_t refuse_in_capture(cudaStream_t stream)
{
    if (nd_double_machine_get()->strict_capture && !stream->capture) {
        machine_outside_capture("a query of another stream, or a wait for it,");
    }
    return stream->capture ? machine_end_capture(stream) : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    double_device *device = machine_current();
    cudaError_t error = refuse_in_capture(stream);
    if (error != cudaSuccess) {
        return error;
    }
    bool pending = stream->head != NULL;
    queue_look(device, stream);
    queue_asked(device, pending);
    return device->broken ? machine_error(device->broken)
           : stream->head ? cudaErrorNotReady
                          : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    double_device *device = machine_current();
    cudaError_t error = refuse_in_capture(stream);
    if (error != cudaSuccess) {
        return error;
    }
    queue_wait(device, stream);
    return device->broken ? machine_error(device->broken) : cudaSuccess;
}

/* Kernels compiled for the host come here (tests/hostcuda/fibers.h). */
int hostcuda_submit(void *queue, void (*run)(void *closure), const void *closure, size_t bytes);
int hostcuda_submit(void *queue, void (*run)(void *closure), const void *closure, size_t bytes)
{
    return (int)nd_double_launch((cudaStream_t)queue, run, closure, bytes);
}
