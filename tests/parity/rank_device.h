// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_PARITY_RANK_DEVICE_H
#define TESTS_PARITY_RANK_DEVICE_H
/*
 * The device, the ops and, where it is not the one that is there, the transport of a rank; and
 * their end. rank_cpu.c here; tests/gpu/rank_gpu.c for one worker on a GPU or its double;
 * tests/hostcuda/mesh_cuda.c for meshes on doubles.
 */
#include "runtime/base/status.h"
#include "runtime/comm/comm.h"

struct nd_rank;
/* threads: of a CPU. */
nd_status rank_device_open(struct nd_rank *rank, int threads);
void rank_device_close(struct nd_rank *rank, nd_transport *local);

#endif
