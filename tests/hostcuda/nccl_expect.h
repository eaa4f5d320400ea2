// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_HOSTCUDA_NCCL_EXPECT_H
#define ND_TESTS_HOSTCUDA_NCCL_EXPECT_H
/* Checks of the status and the message that a rank of nccl_job.h ended with. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/hostcuda/nccl_job.h"

/* The rank ended with this status, and its message has each of the texts. */
#define expect_message(ranks, rank, status, ...)                                                   \
    expect_messages(ranks, rank, status, (const char *const[]){__VA_ARGS__, NULL})
static inline void expect_messages(const nd_ranks *ranks, int rank, nd_status status,
                                   const char *const *texts)
{
    const nd_rank_result *r = &ranks->results[rank];
    cr_expect_eq(r->status, status, "rank %d: %d, %s", rank, (int)r->status, r->message);
    for (; *texts; texts++) {
        cr_expect(strstr(r->message, *texts), "rank %d: no \"%s\" in: %s", rank, *texts,
                  r->message);
    }
}

#endif
