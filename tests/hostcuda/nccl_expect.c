// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/nccl_expect.h"

#include <criterion/criterion.h>
#include <string.h>

void expect_message(const nd_ranks *ranks, int rank, nd_status status, const char *text)
{
    const nd_rank_result *r = &ranks->results[rank];
    cr_expect_eq(r->status, status, "rank %d: %d, %s", rank, (int)r->status, r->message);
    cr_expect(strstr(r->message, text), "rank %d: no \"%s\" in: %s", rank, text, r->message);
}
