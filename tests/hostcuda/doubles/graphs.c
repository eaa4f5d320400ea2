// SPDX-License-Identifier: Apache-2.0
/* Capture of streams into graphs, and their launch. */
#include <stdlib.h>
#include <string.h>

#include "tests/hostcuda/doubles/machine.h"

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (stream->capture) {
        return machine_error(cudaErrorIllegalState);
    }
    if (mode != cudaStreamCaptureModeThreadLocal) {
        nd_double_violation("a capture that a query of another thread would end");
    }
    cudaGraph_t graph = calloc(1, sizeof *graph);
    graph->tail = &graph->head;
    graph->origin = stream;
    graph->thread = pthread_self();
    stream->capture = graph;
    return cudaSuccess;
}

void machine_outside_capture(const char *call)
{
    for (cudaStream_t s = machine_current()->streams; s; s = s->next) {
        if (s->capture) {
            nd_double_violation("%s while a stream is captured", call);
        }
    }
}

static bool is_loaded(double_device *device, uint64_t hash)
{
    for (int i = 0; i < device->loaded_count; i++) {
        if (device->loaded[i] == hash) {
            return true;
        }
    }
    if (device->loaded_count < MACHINE_LOADED) {
        device->loaded[device->loaded_count++] = hash;
    }
    return false;
}

cudaError_t nd_double_load(cudaStream_t stream, const void *what, size_t bytes)
{
    const char *loading = getenv("CUDA_MODULE_LOADING");
    const unsigned char *byte = what;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ byte[i]) * 1099511628211u;
    }
    bool eager = loading && strcmp(loading, "EAGER") == 0;
    bool refuses = nd_double_machine_get()->strict_capture && !eager && stream->capture;
    return !is_loaded(machine_current(), hash) && refuses ? machine_end_capture(stream)
                                                          : cudaSuccess;
}

cudaError_t machine_end_capture(cudaStream_t stream)
{
    stream->capture->invalid = true;
    return machine_error(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    while (graph->head) {
        task *t = graph->head;
        graph->head = t->next;
        free(t);
    }
    free(graph);
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
    if (!pthread_equal(graph->thread, pthread_self())) {
        return machine_error(cudaErrorStreamCaptureWrongThread);
    }
    for (cudaStream_t s = device->streams; s; s = s->next) {
        if (s->capture == graph) {
            error = s->unjoined ? cudaErrorStreamCaptureUnjoined : error;
            s->capture = NULL;
            s->unjoined = false;
        }
    }
    if (graph->invalid) {
        cudaGraphDestroy(graph);
        *out = NULL;
        return machine_error(cudaErrorStreamCaptureInvalidated);
    }
    *out = graph;
    return machine_error(error);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    cudaGraph_t copy = calloc(1, sizeof *copy);
    copy->tail = &copy->head;
    for (const task *t = graph->head; t; t = t->next) {
        *copy->tail = queue_task(t->run, t->closure, t->bytes);
        copy->tail = &(*copy->tail)->next;
    }
    *out = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    cudaGraph_t graph = (cudaGraph_t)executable;
    nd_double_counts *counts = &machine_current()->counts;
    cudaError_t error = cudaSuccess;
    long calls = counts->calls + 1;
    counts->graphs_launched++;
    for (const task *t = graph->head; t && error == cudaSuccess; t = t->next) {
        error = nd_double_submit(stream, t->run, t->closure, t->bytes);
    }
    counts->calls = calls;
    return error;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    return cudaGraphDestroy((cudaGraph_t)executable);
}
