// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include <string.h>

#include "tests/unit/runtime/comm/cases.h"

/* Ranks as processes over UCX: of one host, and each as if it had a host of its own. */
enum { TOGETHER = false, APART = true };

static void run(int size, bool apart, nd_status (*body)(nd_transport *, void *), void *context)
{
    nd_ranks ranks = {.size = size, .body = body, .context = context, .apart = apart};
    nd_status status = nd_ranks_run_processes(&ranks);
    cr_assert_eq(status, ND_OK, "%d ranks: %s", size, nd_error_last()->message);
}

Test(ucx, collectives_match_the_serial_model)
{
    static const int sizes[] = {1, 2, 3, 4, 8, 10};
    for (int s = 0; s < 6; s++) {
        case_collectives *c = case_shared(sizeof *c);
        *c = (case_collectives){.counts = {0, 1, 7, 1000, 2049, -1}};
        run(sizes[s], TOGETHER, case_collectives_body, c);
    }
}

Test(ucx, large_buffers_go_through_the_staging_in_rounds)
{
    static const int sizes[] = {2, 3, 8};
    for (int s = 0; s < 3; s++) {
        case_collectives *c = case_shared(sizeof *c);
        *c = (case_collectives){.counts = {-1}, .large = sizes[s] == 2 ? 1.2 : 2.3};
        run(sizes[s], TOGETHER, case_collectives_body, c);
    }
}

Test(ucx, over_tcp)
{
    case_collectives *c = case_shared(sizeof *c);
    /* 8192 F32 are the most that leave before they are asked for. */
    *c = (case_collectives){.counts = {1, 1000, 8192, -1}, .large = 1.2};
    run(3, APART, case_collectives_body, c);
    run(8, APART, case_groups_body, NULL);
}

Test(ucx, the_same_bits_as_in_threads_and_over_tcp)
{
    case_collectives *c[4];
    for (int k = 0; k < 4; k++) {
        c[k] = case_shared(sizeof *c[k]);
        *c[k] = (case_collectives){.counts = {3, 70000, -1}};
    }
    nd_ranks threads = {.size = 4, .body = case_collectives_body, .context = c[0]};
    cr_assert_eq(nd_ranks_run_threads(&threads), ND_OK, "%s", nd_error_last()->message);
    run(4, TOGETHER, case_collectives_body, c[1]);
    run(4, TOGETHER, case_collectives_body, c[2]);
    run(4, APART, case_collectives_body, c[3]);
    for (int k = 1; k < 4; k++) {
        cr_assert_eq(memcmp(c[0]->digest, c[k]->digest, sizeof c[0]->digest), 0, "run %d", k);
    }
}

Test(ucx, operations_of_several_groups_are_pending_together)
{
    run(2, TOGETHER, case_pending_body, NULL);
    run(5, TOGETHER, case_pending_body, NULL);
}

Test(ucx, groups_of_a_mesh)
{
    run(8, TOGETHER, case_groups_body, NULL);
}

Test(ucx, nan_reaches_every_member)
{
    run(3, TOGETHER, case_nan_body, NULL);
}

static void expect_fault(case_fault fault, int64_t count, bool apart, nd_status status,
                         const char *const *words)
{
    const case_expected expected = {fault, count, status, words, apart};
    cr_assert_eq(case_check_fault(&expected, nd_ranks_run_processes), ND_OK, "%s",
                 nd_error_last()->message);
}

Test(ucx, a_stopped_process_is_named)
{
    const char *words[] = {"all_reduce of world, operation 3", "for rank 2;",
                           "phase backward, step 41", "is stopped by a signal", NULL};
    expect_fault(CASE_STOP, 10, TOGETHER, ND_ERR_HANG, words);
    expect_fault(CASE_STOP, 200000, TOGETHER, ND_ERR_HANG, words);
    words[3] = "(on another host)";
    expect_fault(CASE_STOP, 200000, APART, ND_ERR_HANG, words);
}

Test(ucx, a_rank_that_skips_is_named)
{
    const char *words[] = {"all_reduce of world, operation 3", "for rank 2;",
                           "rank 2 has not entered it: phase backward, step 41", NULL};
    expect_fault(CASE_SKIP, 200000, TOGETHER, ND_ERR_HANG, words);
}

Test(ucx, a_killed_process_is_named_before_the_deadline)
{
    const char *words[] = {"has ended while", "all_reduce of world, operation 3", NULL};
    expect_fault(CASE_KILL, 10, TOGETHER, ND_ERR_IO, words);
    expect_fault(CASE_KILL, 200000, TOGETHER, ND_ERR_IO, words);
    expect_fault(CASE_KILL, 200000, APART, ND_ERR_IO, words);
    expect_fault(CASE_LEAVE, 10, TOGETHER, ND_ERR_IO, words);
}

static nd_status never(nd_transport *transport, void *context)
{
    return nd_fail(ND_ERR_INTERNAL, "the transport was opened");
}

/* Each rank ends with its own reason, and none by a signal. */
Test(ucx, a_start_that_fails_ends_with_its_reason)
{
    nd_ranks ranks = {.size = 2, .body = never, .apart = APART, .no_network = true};
    nd_ranks_run_processes(&ranks);
    for (int r = 0; r < 2; r++) {
        cr_expect(ranks.results[r].finished, "rank %d did not return", r);
        cr_expect_eq(ranks.results[r].status, ND_ERR_IO);
        cr_expect_str_eq(ranks.results[r].message, "this host has no address");
    }
}

Test(ucx, different_operations_are_named)
{
    const char *words[] = {"different operations as number 3", NULL};
    expect_fault(CASE_OTHER_COUNT, 10, TOGETHER, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_COUNT, 200000, TOGETHER, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_TYPE, 10, TOGETHER, ND_ERR_INTERNAL, words);
    expect_fault(CASE_OTHER_OP, 10, TOGETHER, ND_ERR_INTERNAL, words);
}
