// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_MESH_CUDA_H
#define ND_TESTS_HOSTCUDA_MESH_CUDA_H
/* Ranks of tests/parity/mesh_run.h on the CPU, or each on a GPU of the double. */
#include <stdbool.h>

void mesh_use_gpus(bool gpus); /* for the runs that follow */

#endif
