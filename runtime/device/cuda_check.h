// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_CHECK_H
#define ND_DEVICE_CUDA_CHECK_H
/* For code that calls the CUDA runtime: error mapping and the ops that a device enqueued last. */
#include <cuda_runtime_api.h>

#include "runtime/device/device.h"

/*
 * Fills the error record from a CUDA error: the call, the error's name and text, the device, and
 * the last ops enqueued on it, or, where the fault is not of an op, what to do. Returns
 * ND_ERR_INTERNAL, ND_ERR_RESOURCE (no memory, a GPU that another process has for itself), or
 * ND_ERR_CONFIG (a driver or a build that does not fit). `device` may be NULL.
 */
nd_status nd_cuda_failed(const nd_device *device, cudaError_t error, const char *call);

#define ND_CUDA(device_, call_)                                                                    \
    do {                                                                                           \
        cudaError_t nd_cuda_error_ = (call_);                                                      \
        if (nd_cuda_error_ != cudaSuccess) {                                                       \
            return nd_cuda_failed((device_), nd_cuda_error_, #call_);                              \
        }                                                                                          \
    } while (0)

/* Notes that `op` (a string that lives as long, or is forgotten) was enqueued, and reports what its
 * launch returned. */
nd_status nd_cuda_op_done(nd_stream *stream, const char *op, cudaError_t launched);

/*
 * The names of the ops that are enqueued from begin to end, which a graph keeps, after `name`:
 * "name (op, op)", cut where it is too long. They are not among the recent ops meanwhile.
 */
enum { ND_CUDA_OPS_MAX = 384 };

static inline cudaStream_t nd_cuda_stream(const nd_stream *stream)
{
    return (cudaStream_t)stream->native;
}

#endif
