// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_CUDA_RANKS_H
#define ND_TESTS_HOSTCUDA_CUDA_RANKS_H
/* Ranks as threads, each with a GPU of the double and a transport over the double of NCCL. */
#include "runtime/comm/comm.h"

/*
 * The device of one rank and its NCCL transport; `local` (tests/support/ranks.h) carries what the
 * rendezvous store would. A world of one gets the self transport (see cuda_rank_alone). Close the
 * transport, then the device.
 */
nd_status cuda_rank_open(nd_transport *local, double timeout_seconds, nd_device **device,
                         nd_transport **transport);

/* From now on ranks that are opened use NCCL in groups of one member too, and in a world of one. */
void cuda_rank_alone(bool on);

/* From now on ranks that are opened have nd_transport_options.max_blocks; 0: NCCL chooses. */
void cuda_rank_blocks(int blocks);

/* From now on this rank, a process, is killed when the ranks have told each other who they are; the
 * others go on when it is not there any more. */
void cuda_rank_dies(int rank);

#endif
