// SPDX-License-Identifier: Apache-2.0
/* Streams as queues, events, copies, and graphs. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/hostcuda/doubles/machine.h"

enum { WAIT_SECONDS = 120 };

static task *make_task(nd_double_task *run, const void *closure, size_t bytes)
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
    nd_double_state state = device->broken ? ND_DOUBLE_DONE : t->run(t->closure);
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

void queue_round(double_device *device, cudaStream_t stream)
{
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

void nd_double_drain(void)
{
    queue_round(machine_current(), NULL);
}

cudaError_t queue_submit(cudaStream_t stream, nd_double_task *run, const void *closure,
                         size_t bytes)
{
    double_device *device = machine_current();
    if (!stream) {
        nd_double_violation("work on the default stream: it would serialise all others");
    }
    if (device->broken) {
        return machine_error(device->broken);
    }
    task *t = make_task(run, closure, bytes);
    device->counts.submitted++;
    if (stream->capture) {
        *stream->capture->tail = t;
        stream->capture->tail = &t->next;
        stream->unjoined = stream != stream->capture->origin;
        return cudaSuccess;
    }
    *stream->tail = t;
    stream->tail = &t->next;
    stream->submitted++;
    if (nd_double_machine_get()->order == ND_DOUBLE_EAGER && !stream->running) {
        queue_round(device, stream);
    }
    return cudaSuccess;
}

cudaError_t nd_double_submit(cudaStream_t stream, nd_double_task *run, const void *closure,
                             size_t bytes)
{
    return queue_submit(stream, run, closure, bytes);
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
    cudaError_t error = queue_submit(stream, run_kernel, call, sizeof *call + bytes);
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
    stream->next = device->streams;
    device->streams = stream;
    *out = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    return cudaStreamCreateWithFlags(out, flags);
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
    queue_round(device, stream);
    struct CUstream_st **at = &device->streams;
    while (*at != stream) {
        at = &(*at)->next;
    }
    *at = stream->next;
    while (stream->head) {
        task *t = stream->head;
        stream->head = t->next;
        free(t);
    }
    free(stream);
    return cudaSuccess;
}

static cudaError_t refuse_in_capture(cudaStream_t stream)
{
    return stream->capture ? machine_error(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    double_device *device = machine_current();
    cudaError_t error = refuse_in_capture(stream);
    if (error != cudaSuccess) {
        return error;
    }
    queue_round(device, stream);
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
        call->event->when_ns = nd_clock_ns();
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

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    event->capture = stream->capture;
    event->recorded_on = stream;
    if (stream->capture) {
        return cudaSuccess; /* tasks of a graph run in the order of their recording */
    }
    event_call call = {event, ++event->recorded};
    event->pending++;
    return queue_submit(stream, run_record, &call, sizeof call);
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
    event_call call = {event, event->recorded};
    event->pending++;
    return queue_submit(stream, run_wait, &call, sizeof call);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    double_device *device = machine_current();
    if (event->capture) {
        return machine_error(cudaErrorCapturedEvent);
    }
    if (event->done < event->recorded) {
        queue_round(device, NULL);
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

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    if (!begin->timed || !end->timed) {
        return machine_error(cudaErrorInvalidResourceHandle);
    }
    *ms = (float)((double)(end->when_ns - begin->when_ns) * 1e-6);
    return cudaSuccess;
}

typedef struct copy_call {
    void *dst;
    const void *src;
    size_t bytes;
    int value;
    unsigned char inline_source[]; /* pageable host memory is read when the copy is enqueued */
} copy_call;

static nd_double_state run_copy(void *closure)
{
    copy_call *call = closure;
    memmove(call->dst, call->src ? call->src : call->inline_source, call->bytes);
    return ND_DOUBLE_DONE;
}

static nd_double_state run_set(void *closure)
{
    copy_call *call = closure;
    memset(call->dst, call->value, call->bytes);
    return ND_DOUBLE_DONE;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    double_device *device = machine_current();
    const region *to = machine_find(device, dst, bytes), *from = machine_find(device, src, bytes);
    bool pageable = !to || !from;
    if (kind != cudaMemcpyDefault) {
        nd_double_violation("cudaMemcpyAsync of a stated kind: say cudaMemcpyDefault");
    }
    if (pageable && stream->capture) {
        return machine_error(cudaErrorStreamCaptureUnsupported);
    }
    size_t held = from ? 0 : bytes;
    copy_call *call = malloc(sizeof *call + held);
    *call = (copy_call){.dst = dst, .src = from ? src : NULL, .bytes = bytes};
    if (!from) {
        memcpy(call->inline_source, src, bytes);
    }
    cudaError_t error = queue_submit(stream, run_copy, call, sizeof *call + held);
    free(call);
    if (error == cudaSuccess && !to) {
        queue_wait(device, stream); /* into pageable memory: returns when it has arrived */
        error = device->broken;
    }
    return error;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    copy_call call = {.dst = dst, .bytes = bytes, .value = value};
    nd_double_need_device("cudaMemsetAsync", dst, bytes);
    return queue_submit(stream, run_set, &call, sizeof call);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (stream->capture) {
        return machine_error(cudaErrorIllegalState);
    }
    cudaGraph_t graph = calloc(1, sizeof *graph);
    graph->tail = &graph->head;
    graph->origin = stream;
    stream->capture = graph;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    double_device *device = machine_current();
    cudaGraph_t graph = stream->capture;
    cudaError_t error = cudaSuccess;
    if (!graph || graph->origin != stream) {
        return machine_error(cudaErrorStreamCaptureUnmatched);
    }
    for (cudaStream_t s = device->streams; s; s = s->next) {
        if (s->capture == graph) {
            error = s->unjoined ? cudaErrorStreamCaptureUnjoined : error;
            s->capture = NULL;
            s->unjoined = false;
        }
    }
    *out = graph;
    return machine_error(error);
}

static void free_graph(cudaGraph_t graph)
{
    while (graph->head) {
        task *t = graph->head;
        graph->head = t->next;
        free(t);
    }
    free(graph);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    cudaGraph_t copy = calloc(1, sizeof *copy);
    copy->tail = &copy->head;
    for (const task *t = graph->head; t; t = t->next) {
        *copy->tail = make_task(t->run, t->closure, t->bytes);
        copy->tail = &(*copy->tail)->next;
    }
    *out = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    cudaGraph_t graph = (cudaGraph_t)executable;
    cudaError_t error = cudaSuccess;
    machine_current()->counts.graphs_launched++;
    for (const task *t = graph->head; t && error == cudaSuccess; t = t->next) {
        error = queue_submit(stream, t->run, t->closure, t->bytes);
    }
    return error;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free_graph(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    free_graph((cudaGraph_t)executable);
    return cudaSuccess;
}

/* Kernels compiled for the host come here (tests/hostcuda/fibers.h). */
int hostcuda_submit(void *queue, void (*run)(void *closure), const void *closure, size_t bytes);
int hostcuda_submit(void *queue, void (*run)(void *closure), const void *closure, size_t bytes)
{
    return (int)nd_double_launch((cudaStream_t)queue, run, closure, bytes);
}
