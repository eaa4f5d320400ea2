// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_GPU_CHOICE_H
#define ND_DEVICE_GPU_CHOICE_H
/* The choice of a worker's GPU among the visible ones: pure arithmetic, in every build. */
#include <stdbool.h>

#include "runtime/base/status.h"

typedef struct nd_gpu_request {
    const char *gpu_ids; /* launch.gpu_ids: "all", or ordinals among the visible GPUs, as "0,2" */
    int visible;         /* GPUs that this process sees */
    int local_rank, local_workers;
    bool launched; /* by ndlaunch, whose workers all see the same GPUs */
} nd_gpu_request;

/*
 * The GPU of the local rank; 0 where a worker that ndlaunch did not start sees exactly one, as each
 * task does under srun --gpus-per-task=1. ND_ERR_CONFIG with the numbers when there are fewer GPUs
 * than workers. Only a comparison of the hardware shows whether two tasks were given the same GPU
 * (trainer/worker/worker.h).
 */
nd_status nd_gpu_choose(const nd_gpu_request *request, int *ordinal);

/*
 * Returns whether several workers of this host see one GPU each, as under srun --gpus-per-task=1.
 * They train, but NCCL may not reach the GPUs of the others directly: a worker should see all GPUs
 * of its node.
 */
static inline bool nd_gpu_is_seen_alone(const nd_gpu_request *r)
{
    return r->visible == 1 && r->local_workers > 1 && !r->launched;
}

#endif
