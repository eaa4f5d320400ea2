// SPDX-License-Identifier: Apache-2.0
/* Worlds and communicators that are not made, or do not end, over the double of NCCL. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/hostcuda/cuda_ranks.h"
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
    nd_ranks ranks =
        nccl_job_ranks(nothing, (nd_mesh){{1, 1, 1, 1, 3}}, status == ND_ERR_HANG ? 2.0 : 60.0);
    int64_t before = nd_double_nccl_aborts();
    nd_double_nccl_flaw(2, flaw);
    nd_ranks_run_threads(&ranks);
    expect_message(&ranks, 0, status, text);
    expect_message(&ranks, 1, status, text);
    cr_expect_eq(nd_double_nccl_aborts() - before, 3 * communicators, "%ld aborts",
                 (long)(nd_double_nccl_aborts() - before));
}

Test(nccl_making, a_rank_that_does_not_join, .timeout = 100)
{
    expect_flaw(ND_DOUBLE_ABSENT_FROM_WORLDS, ND_ERR_HANG,
                "s in the start of NCCL of the world, for rank 2; rank 2 waits in no operation", 1);
}

/* The world, and a child of it that a thread of NCCL is making. */
Test(nccl_making, a_rank_that_does_not_split, .timeout = 100)
{
    expect_flaw(ND_DOUBLE_ABSENT_FROM_SPLITS, ND_ERR_HANG,
                "s in the communicator of tp, for rank 2; rank 2 waits in no operation", 2);
}

/* The missing rank belongs to another group: all ranks split together. */
Test(nccl_making, a_rank_of_another_group_that_does_not_split, .timeout = 100)
{
    nd_double_nccl_flaw(3, ND_DOUBLE_ABSENT_FROM_SPLITS);
    nd_ranks ranks = nccl_job_run(nothing, (nd_mesh){{1, 1, 2, 1, 2}}, 2.0);
    for (int rank = 0; rank < 3; rank++) {
        expect_message(&ranks, rank, ND_ERR_HANG, ", for rank 3; rank 3 waits in no operation");
    }
}

Test(nccl_making, a_communicator_that_fails_half_way, .timeout = 100)
{
    expect_flaw(ND_DOUBLE_BREAKS_SPLITS, ND_ERR_IO,
                "NCCL error 2 (an error of the double) from the communicator, tp", 2);
}

static void expect_dead(const char *text)
{
    nd_ranks ranks = nccl_job_ranks(nothing, (nd_mesh){{1, 1, 1, 1, 3}}, 90);
    nd_ranks_run_processes(&ranks);
    expect_message(&ranks, 0, ND_ERR_IO, text);
    expect_message(&ranks, 1, ND_ERR_IO, text);
}

Test(nccl_making, a_rank_that_ends_before_it_is_watched_is_named, .timeout = 100)
{
    cuda_rank_dies(2);
    expect_dead("rank 2 has ended while rank ");
}

Test(nccl_making, a_rank_that_ends_at_the_start_is_named, .timeout = 100)
{
    nd_double_nccl_flaw(2, ND_DOUBLE_DIES_AT_WORLDS);
    expect_dead("rank 2 has ended while rank ");
}

Test(nccl_making, a_rank_that_ends_at_a_split_is_named, .timeout = 100)
{
    nd_double_nccl_flaw(2, ND_DOUBLE_DIES_AT_SPLITS);
    expect_dead("rank 2 has ended while rank ");
}

/* Nobody fails by it: what the ranks had to do is done. */
Test(nccl_making, a_communicator_that_does_not_end_is_said, .timeout = 100)
{
    nd_ranks ranks = nccl_job_ranks(nothing, (nd_mesh){{1, 1, 1, 1, 2}}, 2.0);
    char said[4096] = "";
    int heard = memfd_create("stderr", 0);
    nd_double_nccl_finalize_late(1000000);
    cr_assert_eq(dup2(heard, STDERR_FILENO), STDERR_FILENO);
    cr_assert_eq(nd_ranks_run_threads(&ranks), ND_OK);
    cr_assert_gt(pread(heard, said, sizeof said - 1, 0), 0);
    cr_expect(strstr(said, "s in ncclCommFinalize of "), "%s", said);
}
