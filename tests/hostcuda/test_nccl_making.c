// SPDX-License-Identifier: Apache-2.0
/* Worlds and communicators that are not made, over the double of NCCL. */
#include <criterion/criterion.h>

#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/nccl_expect.h"
#include "tests/hostcuda/nccl_job.h"

static nd_status nothing(job *j)
{
    return ND_OK;
}

/* Ranks 0 and 1 say that; all abort what there is of their communicators. */
static void expect_flaw(nd_double_flaw flaw, nd_status status, const char *text, int communicators)
{
    job_context context = {nothing, {{1, 1, 1, 1, 3}}, 1.0};
    nd_ranks ranks = nccl_job_ranks(&context);
    int64_t before = nd_double_nccl_aborts();
    nd_double_nccl_flaw(2, flaw);
    nd_ranks_run_threads(&ranks);
    expect_message(&ranks, 0, status, text);
    expect_message(&ranks, 1, status, text);
    cr_expect_eq(nd_double_nccl_aborts() - before, 3 * communicators, "%ld aborts",
                 (long)(nd_double_nccl_aborts() - before));
}

Test(nccl_making, a_rank_that_does_not_join, .timeout = 60)
{
    expect_flaw(ND_DOUBLE_ABSENT_FROM_WORLDS, ND_ERR_HANG,
                "s in the start of NCCL of the world, for ranks ", 1);
}

/* The world, and a child of it that a thread of NCCL is making. */
Test(nccl_making, a_rank_that_does_not_split, .timeout = 60)
{
    expect_flaw(ND_DOUBLE_ABSENT_FROM_SPLITS, ND_ERR_HANG,
                "s in the communicator of tp, for ranks ", 2);
}

Test(nccl_making, a_communicator_that_fails_half_way, .timeout = 60)
{
    expect_flaw(ND_DOUBLE_BREAKS_SPLITS, ND_ERR_IO,
                "NCCL error 2 (an error of the double) from the communicator, tp", 2);
}

static void expect_dead(nd_double_flaw flaw, const char *text)
{
    job_context context = {nothing, {{1, 1, 1, 1, 3}}, 90};
    nd_ranks ranks = nccl_job_ranks(&context);
    nd_double_nccl_flaw(2, flaw);
    nd_ranks_run_processes(&ranks);
    expect_message(&ranks, 0, ND_ERR_IO, text);
    expect_message(&ranks, 1, ND_ERR_IO, text);
}

Test(nccl_making, a_rank_that_ends_at_the_start_is_named, .timeout = 100)
{
    expect_dead(ND_DOUBLE_DIES_AT_WORLDS, "rank 2 has ended while rank ");
}

Test(nccl_making, a_rank_that_ends_at_a_split_is_named, .timeout = 100)
{
    expect_dead(ND_DOUBLE_DIES_AT_SPLITS, "rank 2 has ended while rank ");
}
