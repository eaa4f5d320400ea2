// SPDX-License-Identifier: Apache-2.0
/* Ranks as processes over UCX: of one host, and each as if it had a host of its own. */
#define SUITE ucx
#define RUN   nd_ranks_run_processes
#include "tests/unit/runtime/comm/transport_tests.h"

Test(ucx, over_tcp)
{
    /* 8192 F32 are the most that leave before they are asked for. */
    run_collectives(3, APART, (case_collectives){{1, 1000, 8192, -1}, 1.2});
    run(8, APART, case_groups_body, NULL);
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

Test(ucx, a_killed_process_is_named_before_the_deadline)
{
    const char *words[] = {"has ended while", "all_reduce of world, operation 3", NULL};
    expect_fault(CASE_KILL, 10, TOGETHER, ND_ERR_IO, words);
    expect_fault(CASE_KILL, 200000, TOGETHER, ND_ERR_IO, words);
    expect_fault(CASE_KILL, 200000, APART, ND_ERR_IO, words);
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
