// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_RECENT_OPS_H
#define ND_DEVICE_CUDA_RECENT_OPS_H
/*
 * A CUDA device with the ops that it enqueued last, for device_cuda.c and its test. A fault appears
 * in some later call, and its message can only name these ops (cuda_check.h).
 *
 * The host never waits inside CUDA but polls, so that a lost peer or a passed deadline ends each
 * wait. Freeing memory and closing the device would wait inside CUDA: after a wait that ended so,
 * or another fault of one of several ranks, they are skipped. The process ends, and the driver
 * frees everything.
 */
#include "runtime/device/cuda_check.h"

enum { ND_CUDA_RECENT_OPS = 8 };

typedef struct nd_cuda_recent_ops {
    const char *ops[ND_CUDA_RECENT_OPS]; /* a ring; borrowed strings, NULL: none */
    int next;
    bool captures; /* ops are added to `captured` */
    int captured_ops;
    char captured[ND_CUDA_OPS_MAX];
} nd_cuda_recent_ops;

typedef struct nd_cuda_device {
    nd_device device; /* first: one is the other's address */
    nd_cuda_recent_ops recent_ops;
    bool sync_each_op; /* ND_CUDA_SYNC */
    double patience;   /* seconds that the host waits where while_waiting is NULL */
    bool given_up;     /* nd_cuda_give_up: nothing is freed any more */
} nd_cuda_device;

static inline nd_cuda_device *nd_cuda_device_of(const nd_device *device)
{
    return (nd_cuda_device *)device;
}

#endif
