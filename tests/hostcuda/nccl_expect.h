// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_NCCL_EXPECT_H
#define ND_TESTS_HOSTCUDA_NCCL_EXPECT_H
/* What a rank of nccl_job.h should have ended with. */
#include "tests/hostcuda/nccl_job.h"

void expect_message(const nd_ranks *ranks, int rank, nd_status status, const char *text);

#endif
