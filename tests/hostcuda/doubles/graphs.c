// SPDX-License-Identifier: Apache-2.0
/* Capture of streams into graphs, and their launch. */
#include <stdlib.h>

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

cudaError_t machine_end_capture(cudaStream_t stream)
{
    stream->capture->invalid = true;
    return machine_error(cudaErrorStreamCaptureUnsupported);
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
    if (graph->invalid) {
        free_graph(graph);
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
        error = queue_submit(stream, t->run, t->closure, t->bytes);
    }
    counts->calls = calls;
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
