// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/nccl_expect.h"

#include <criterion/criterion.h>
#include <string.h>

void expect_messages(const nd_ranks *ranks, int rank, nd_status status, const char *const *texts)
{
    const nd_rank_result *r = &ranks->results[rank];
    cr_expect_eq(r->status, status, "rank %d: %d, %s", rank, (int)r->status, r->message);
    for (; *texts; texts++) {
        cr_expect(strstr(r->message, *texts), "rank %d: no \"%s\" in: %s", rank, *texts,
                  r->message);
    }
}
