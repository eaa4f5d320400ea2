// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_MESH_CUDA_H
#define ND_TESTS_HOSTCUDA_MESH_CUDA_H
/* Ranks of tests/parity/mesh_run.h on the CPU, or each on a GPU of the double. */
#include <stdbool.h>

#include "tests/parity/mesh_data.h"
#include "tests/support/tempdir.h"

enum { MESH_CUDA_STEPS = 3 };

/* The tiny model and its training; the data is written into `dir`. */
mesh_job mesh_cuda_job(tempdir *dir, nd_precision precision);

/* For the runs that follow. cast_units: one GPU alone casts its weights unit by unit, as where they
 * do not all fit. */
void mesh_use_gpus(bool gpus, bool cast_units);
/* GPUs are deterministic, with calls of attention of at most so many bytes of scores; 0: they are
 * not. Until the next mesh_use_gpus. */
void mesh_use_ordered(int64_t bytes);

#endif
