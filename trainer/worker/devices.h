// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_DEVICES_H
#define ND_WORKER_DEVICES_H
/* Which device a worker computes on, and its GPU where it is one. */
#include "kernels/ops.h"
#include "runtime/config/config.h"
#include "runtime/device/cuda.h"
#include "runtime/rdzv/identity.h"

/*
 * launch.device resolved: cuda when it is asked for, or auto and a GPU is visible. ND_ERR_CONFIG
 * with the reason when cuda was asked for and there is none.
 */
nd_status nd_gpu_is_wanted(const nd_config *config, bool *out);
/* One line of warning where auto takes the CPU although there is a driver: why. */
void nd_gpu_warn_of_cpu(const nd_config *config);
/* ND_ERR_CONFIG unless `local_workers` of this host find a GPU each (launch.gpu_ids). */
nd_status nd_gpu_check(const nd_config *config, int local_workers);
/* The GPU that this worker takes (runtime/device/gpu_choice.h). */
nd_status nd_gpu_open(const nd_config *config, const nd_identity *identity, nd_device **device,
                      const nd_ops **ops);
/* Names the hardware among all of the host, "" on the CPU or where the driver does not say. */
nd_status nd_gpu_id(nd_device *device, char out[ND_CUDA_ID_MAX]);

/* What the ops run on, for the log and run.json: the CPU's instruction set, or the GPU's kind and
 * its libraries. */
const char *nd_device_machine(const nd_device *device);

#endif
