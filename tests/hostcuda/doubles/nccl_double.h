// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_NCCL_DOUBLE_H
#define ND_TESTS_HOSTCUDA_NCCL_DOUBLE_H
/* Tests steer the double of NCCL through these variables and functions. */
#include <nccl.h>
#include <stdint.h>

/* Declared with a prototype, which nccl.h lacks in C. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* From now on every communicator of this world reports this error, on every rank; that of CUDA is
 * one of memory. */
void nd_double_nccl_break(ncclComm_t comm, ncclResult_t result);

/* From now on this rank (-1: none) does that where worlds, or splits, are made. What breaks is
 * NCCL, on every rank. */
typedef enum nd_double_flaw {
    ND_DOUBLE_ABSENT_FROM_WORLDS, /* for 2.5 s somewhere else, and then it never comes */
    ND_DOUBLE_ABSENT_FROM_SPLITS,
    ND_DOUBLE_LATE_FOR_SPLITS, /* by a quarter of a second */
    ND_DOUBLE_BREAKS_SPLITS,
    ND_DOUBLE_DIES_AT_WORLDS,
    ND_DOUBLE_DIES_AT_SPLITS
} nd_double_flaw;
void nd_double_nccl_flaw(int rank, nd_double_flaw flaw);

/* The next finalize of this process is seen to be done after so many more looks at it. */
void nd_double_nccl_finalize_late(int looks);

/* Communicators that this process has aborted. */
int64_t nd_double_nccl_aborts(void);

/* The most blocks (maxCTAs) that the communicator was made with; 0: NCCL chooses. */
int nd_double_nccl_blocks(ncclComm_t comm);

/* Groups with collectives in them that this process has ended. */
int64_t nd_double_nccl_groups(void);

#endif
