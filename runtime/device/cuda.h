// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_H
#define ND_DEVICE_CUDA_H
/*
 * NVIDIA GPUs as devices. A program built without CUDA has these functions too: they fail with that
 * reason.
 *
 * One process drives one GPU with one thread. Everything is asynchronous on streams; a fault that a
 * kernel caused shows at some later call, so the device remembers the last ops that were enqueued
 * and names them ("after rmsnorm_fwd, matmul"). ND_CUDA_SYNC=1 in the environment makes every op
 * wait for its result: slow, but the fault then names its op.
 */
#include "runtime/device/device.h"

typedef struct nd_cuda_options {
    int ordinal;       /* among the visible GPUs (CUDA_VISIBLE_DEVICES) */
    int local_workers; /* workers of this host, for the message when there are fewer GPUs */
    bool fp8;          /* compute capability 8.9 or newer */
} nd_cuda_options;

enum { ND_CUDA_ID_MAX = 64 };

typedef struct nd_cuda_info {
    int major, minor;               /* compute capability */
    int processors;                 /* streaming multiprocessors */
    int driver, runtime;            /* CUDA versions, 13000 is 13.0 */
    size_t total_bytes, free_bytes; /* device memory; free at the time of the call */
    char id[ND_CUDA_ID_MAX]; /* "GPU-...", as nvidia-smi -L has it; "" where the driver is silent */
} nd_cuda_info;

/* Fails with the sentence that this program was built without the CUDA part; in such a program
 * only. */
nd_status nd_cuda_absent(void);

/* Visible GPUs. ND_ERR_CONFIG with the reason (no CUDA in this program, no driver, an older driver,
 * no GPU) when none. */
nd_status nd_cuda_count(int *out);
/* Returns whether a driver is installed, of whatever version and state. */
bool nd_cuda_has_driver(void);
nd_status nd_device_open_cuda(const nd_cuda_options *options, nd_device **out);
nd_status nd_cuda_info_of(nd_device *device, nd_cuda_info *out);

/* From now on nothing of the device is freed, which would wait for what the GPU still runs: the
 * process is about to end, and the driver frees everything. */
void nd_cuda_give_up(nd_device *device);

#endif
