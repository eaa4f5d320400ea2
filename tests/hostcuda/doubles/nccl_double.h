// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_NCCL_DOUBLE_H
#define ND_TESTS_HOSTCUDA_NCCL_DOUBLE_H
/* What tests do to the double of NCCL. */
#include <nccl.h>
#include <stdint.h>

/* Declared with a prototype, which nccl.h lacks in C. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* From now on every communicator of this world reports this error, on every rank; that of CUDA is
 * one of memory. */
void nd_double_nccl_break(ncclComm_t comm, ncclResult_t result);

/* From now on this rank (-1: none) does not come to worlds, or to splits. */
typedef enum nd_double_absence { ND_DOUBLE_FROM_WORLDS, ND_DOUBLE_FROM_SPLITS } nd_double_absence;
void nd_double_nccl_absent(int rank, nd_double_absence from);

/* The next finalize of this process is seen to be done after so many more looks at it. */
void nd_double_nccl_finalize_late(int looks);

/* Communicators that this process has aborted. */
int64_t nd_double_nccl_aborts(void);

/* Groups with collectives in them that this process has ended. */
int64_t nd_double_nccl_groups(void);

#endif
