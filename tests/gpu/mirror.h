// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GPU_MIRROR_H
#define ND_TESTS_GPU_MIRROR_H
/*
 * The CUDA ops for callers that hold host memory: each call copies what its arguments span to the
 * device, runs the op, waits, and copies everything back, gaps between rows included. Addresses
 * keep their alignment. So the conformance suites, written for host memory, run on a GPU (and on
 * its double) without a change.
 */
#include "kernels/ops.h"

/* A plan of cuDNN takes about a second, and scripts/gpu_check.sh gives each test two minutes. */
enum { PLANS_OF_A_TEST = 40 };

/* `ops`: the CUDA table; the device is open. One at a time in a process. */
nd_status mirror_open(nd_device *device, const nd_ops *ops, const nd_ops **out);
void mirror_close(void);

#endif
