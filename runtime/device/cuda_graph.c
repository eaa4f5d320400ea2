// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

struct nd_cuda_graph {
    nd_device *device;
    cudaGraphExec_t executable;
    char ops[ND_CUDA_OPS_MAX];
};

nd_status nd_cuda_capture_begin(nd_stream *stream, const char *name)
{
    ND_CUDA(stream->device,
            cudaStreamBeginCapture(nd_cuda_stream(stream), cudaStreamCaptureModeThreadLocal));
    nd_cuda_ops_begin(stream->device, name);
    return ND_OK;
}

nd_status nd_cuda_capture_end(nd_stream *stream, nd_cuda_graph **out)
{
    nd_device *device = stream->device;
    cudaGraph_t recorded = NULL;
    nd_cuda_graph *graph = NULL;
    char ops[ND_CUDA_OPS_MAX];
    nd_cuda_ops_end(device, ops);
    ND_CUDA(device, cudaStreamEndCapture(nd_cuda_stream(stream), &recorded));
    nd_status status = ND_ALLOC(1, &graph);
    if (status == ND_OK) {
        cudaError_t error = cudaGraphInstantiate(&graph->executable, recorded, 0);
        graph->device = device;
        memcpy(graph->ops, ops, sizeof ops);
        if (error != cudaSuccess) {
            status = nd_cuda_failed(device, error, "cudaGraphInstantiate");
            free(graph);
        }
    }
    cudaGraphDestroy(recorded);
    if (status == ND_OK) {
        *out = graph;
    }
    return status;
}

void nd_cuda_capture_cancel(nd_stream *stream)
{
    cudaGraph_t recorded = NULL;
    char ops[ND_CUDA_OPS_MAX];
    nd_cuda_ops_end(stream->device, ops);
    cudaStreamEndCapture(nd_cuda_stream(stream), &recorded);
    if (recorded) {
        cudaGraphDestroy(recorded);
    }
    cudaGetLastError(); /* a capture that an illegal call ended reports that error again */
}

nd_status nd_cuda_graph_launch(nd_cuda_graph *graph, nd_stream *stream)
{
    cudaError_t launched = cudaGraphLaunch(graph->executable, nd_cuda_stream(stream));
    return nd_cuda_op_done(stream, graph->ops, launched);
}

void nd_cuda_graph_destroy(nd_cuda_graph *graph)
{
    if (graph) {
        nd_cuda_forget(graph->device, graph->ops);
        cudaGraphExecDestroy(graph->executable);
        free(graph);
    }
}
