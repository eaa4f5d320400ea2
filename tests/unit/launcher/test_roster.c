// SPDX-License-Identifier: Apache-2.0
/* What node 0 makes of the ends of several nodes. */
#include <criterion/criterion.h>
#include <string.h>

#include "launcher/roster.h"
#include "tests/support/tempdir.h"

static nd_roster roster;

static void setup(void)
{
    assert_ok(nd_roster_init(3, "head", &roster));
}

static void teardown(void)
{
    nd_roster_fini(&roster);
}

TestSuite(roster, .init = setup, .fini = teardown);

Test(roster, nodes_are_missing_until_they_join)
{
    char line[256];
    cr_expect_not(nd_roster_all_joined(&roster));
    assert_ok(nd_roster_missing(&roster, 12.5, line, sizeof line));
    cr_expect_str_eq(line, "nodes 1-2 of 3 nodes are missing after 12.5 s");
    roster.nodes[2].joined = true;
    assert_ok(nd_roster_missing(&roster, 12.5, line, sizeof line));
    cr_expect_str_eq(line, "node 1 of 3 nodes is missing after 12.5 s");
    roster.nodes[1].joined = true;
    cr_expect(nd_roster_all_joined(&roster));
}

/* Node 0 lost a peer first, node 1 was stopped, and node 2 has the reason. */
Test(roster, the_failure_that_explains_the_others_is_the_first)
{
    cr_expect_eq(nd_roster_first_failure(&roster), -1);
    nd_node_end(&roster.nodes[1], ND_ERR_PREEMPTED, "", 0);
    cr_expect_not(nd_roster_has_failed(&roster));
    cr_expect_eq(nd_roster_first_failure(&roster), 1);
    nd_node_fail(&roster.nodes[0], ND_ERR_IO);
    cr_expect(nd_roster_has_failed(&roster));
    cr_expect_eq(nd_roster_first_failure(&roster), 0);
    nd_node_fail(&roster.nodes[2], 137);
    cr_expect_eq(nd_roster_first_failure(&roster), 2);
    cr_expect_not(nd_roster_all_over(&roster));
    nd_node_end(&roster.nodes[2], 137, "screen", 6);
    nd_node_end(&roster.nodes[0], ND_ERR_IO, "", 0);
    cr_expect(nd_roster_all_over(&roster));
    cr_expect_str_eq(roster.nodes[2].screen, "screen");
}

Test(roster, a_lost_node_is_a_failure_of_its_own)
{
    nd_node_fail(&roster.nodes[0], ND_ERR_IO); /* it noticed the loss before node 0 did */
    nd_node_lose(&roster.nodes[1], 1, "its cable was cut");
    cr_expect_eq(nd_roster_first_failure(&roster), 1);
    cr_expect_not_null(strstr(roster.nodes[1].screen, "was lost: its cable was cut"));
    nd_node_end(&roster.nodes[2], 0, "", 0);
    nd_node_lose(&roster.nodes[2], 2, "its workers had ended");
    cr_expect_not(roster.nodes[2].lost);
}

Test(roster, a_new_start_begins_without_failures)
{
    roster.nodes[1].joined = true;
    roster.nodes[1].waits = true;
    nd_node_lose(&roster.nodes[1], 1, "it was frozen");
    nd_node_end(&roster.nodes[0], 137, "screen", 6);
    nd_roster_begin(&roster);
    cr_expect_eq(nd_roster_first_failure(&roster), -1);
    cr_expect_not(nd_roster_has_failed(&roster));
    cr_expect_not(nd_roster_all_over(&roster));
    cr_expect(roster.nodes[1].joined && !roster.nodes[1].waits);
    cr_expect_null(roster.nodes[0].screen);
}
