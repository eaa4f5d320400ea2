// SPDX-License-Identifier: Apache-2.0
/* Tests that every transport must pass: the suite SUITE, whose ranks RUN runs. The files that
 * include this define both. */
#include <criterion/criterion.h>

#include <string.h>

#include "tests/unit/runtime/comm/cases.h"

enum { TOGETHER = false, APART = true }; /* nd_ranks.apart */

static void run(int size, bool apart, nd_status (*body)(nd_transport *, void *), void *context)
{
    nd_ranks ranks = {.size = size, .body = body, .context = context, .apart = apart};
    nd_status status = RUN(&ranks);
    cr_assert_eq(status, ND_OK, "%d ranks: %s", size, nd_error_last()->message);
}

static void run_collectives(int size, bool apart, case_collectives wanted)
{
    case_collectives *c = case_shared(sizeof *c);
    *c = wanted;
    run(size, apart, case_collectives_body, c);
}

static void expect_fault(case_fault fault, int64_t count, bool apart, nd_status status,
                         const char *const *words)
{
    const case_expected expected = {fault, count, status, words, apart};
    cr_assert_eq(case_check_fault(&expected, RUN), ND_OK, "%s", nd_error_last()->message);
}

static const int sizes[] = {1, 2, 3, 4, 8, 11}; /* 11: more than take the direct plans */

Test(SUITE, collectives_match_the_serial_model)
{
    for (int s = 0; s < 6; s++) {
        run_collectives(sizes[s], TOGETHER, (case_collectives){{0, 1, 7, 1000, 2049, -1}});
    }
}

Test(SUITE, large_buffers_go_through_the_staging_in_rounds)
{
    for (int s = 1; s < 6; s++) {
        run_collectives(sizes[s], TOGETHER, (case_collectives){{-1}, sizes[s] == 2 ? 1.2 : 2.3});
    }
}

Test(SUITE, operations_of_several_groups_are_pending_together)
{
    run(1, TOGETHER, case_pending_body, NULL);
    run(2, TOGETHER, case_pending_body, NULL);
    run(5, TOGETHER, case_pending_body, NULL);
}

Test(SUITE, groups_of_a_mesh)
{
    run(8, TOGETHER, case_groups_body, NULL);
}

Test(SUITE, nan_reaches_every_member)
{
    run(3, TOGETHER, case_nan_body, NULL);
}

Test(SUITE, a_rank_that_skips_is_named_with_what_it_does)
{
    const char *words[] = {"all_reduce of world, operation 3", "for rank 2;",
                           "rank 2 has not entered it: phase backward, step 41", NULL};
    expect_fault(CASE_SKIP, 10, TOGETHER, ND_ERR_HANG, words);
    expect_fault(CASE_SKIP, 200000, TOGETHER, ND_ERR_HANG, words);
}

Test(SUITE, a_rank_that_ends_is_named_before_the_deadline)
{
    const char *words[] = {"has ended while", "all_reduce of world, operation 3", NULL};
    expect_fault(CASE_LEAVE, 10, TOGETHER, ND_ERR_IO, words);
}

Test(SUITE, different_operations_are_named)
{
    const char *words[] = {"different operations as number 3", NULL};
    expect_fault(CASE_OTHER_COUNT, 200000, TOGETHER, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_SUM, 10, TOGETHER, ND_ERR_INTERNAL, words);
    for (case_fault fault = CASE_OTHER_OP; fault <= CASE_OTHER_TYPE; fault++) {
        expect_fault(fault, 10, TOGETHER, ND_ERR_INTERNAL, words);
    }
}
