// SPDX-License-Identifier: Apache-2.0
/* Node 0's list of nodes: who is missing, who gets a place, whose failure explains the others. */
#include <criterion/criterion.h>
#include <string.h>

#include "launcher/launcher.h"
#include "tests/support/tempdir.h"

static nd_roster roster;

static void setup(void)
{
    assert_ok(nd_roster_init(3, 0, "head", &roster));
}

static void teardown(void)
{
    nd_roster_fini(&roster);
}

TestSuite(roster, .init = setup, .fini = teardown);

/* Another one in its place. */
static void set_size(int places, int spares)
{
    nd_roster_fini(&roster);
    assert_ok(nd_roster_init(places, spares, "head", &roster));
}

Test(roster, nodes_are_missing_until_they_join)
{
    char line[256];
    cr_expect_eq(nd_roster_joined(&roster), 1);
    cr_expect_not(nd_roster_assign(&roster));
    nd_roster_missing(&roster, 12.5, line, sizeof line);
    cr_expect_str_eq(line, "nodes 1-2 of 3 nodes are missing after 12.5 s");
    roster.nodes[2].joined = true;
    nd_roster_missing(&roster, 12.5, line, sizeof line);
    cr_expect_str_eq(line, "node 1 of 3 nodes is missing after 12.5 s");
    nd_roster_missing(&roster, 0, line, sizeof line);
    cr_expect_str_eq(line, "node 1 of 3 nodes is missing");
    roster.nodes[1].joined = true;
    cr_expect(nd_roster_assign(&roster));
}

/* Nodes that have joined, as a set of bits, and then the nodes of the places in order. */
static void expect_places(unsigned joined, const char *expected)
{
    nd_roster *r = &roster;
    char text[64] = "";
    for (int i = 0; i < r->count; i++) {
        r->nodes[i].joined = joined & 1u << i;
    }
    cr_assert(nd_roster_assign(r));
    nd_roster_begin(r);
    for (int p = 0; p < r->places; p++) {
        cr_expect_eq(r->nodes[r->holder[p]].place, p);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%d ", r->holder[p]);
    }
    cr_expect_str_eq(text, expected);
}

/* Node 1 of 4 is lost, then 3 nodes do with 2 places, and all come back. */
Test(roster, places_may_be_fewer_and_grow_again)
{
    set_size(4, 0);
    expect_places(0xf, "0 1 2 3 ");
    roster.nodes[1].joined = false;
    cr_expect_eq(nd_roster_joined(&roster), 3);
    cr_expect_not(nd_roster_assign(&roster));
    nd_roster_set_places(&roster, 2);
    expect_places(0xd, "0 2 ");
    cr_expect_eq(roster.nodes[3].place, -1);
    nd_roster_set_places(&roster, 1);
    expect_places(0x1, "0 ");
    nd_roster_set_places(&roster, 4);
    expect_places(0xf, "0 1 2 3 ");
}

Test(roster, the_first_nodes_by_rank_get_the_places)
{
    set_size(3, 2);
    expect_places(0x1f, "0 1 2 ");
    cr_expect(roster.nodes[3].waits && roster.nodes[4].waits && !roster.nodes[2].waits);
    set_size(3, 2);
    expect_places(0x19, "0 3 4 ");
}

Test(roster, a_spare_takes_the_place_of_a_lost_node_and_keeps_it)
{
    char text[128];
    set_size(3, 2);
    expect_places(0x1f, "0 1 2 ");
    expect_places(0x1d, "0 3 2 ");
    nd_roster_text(&roster, true, text, sizeof text);
    cr_expect_str_eq(text, "0, 2-3");
    expect_places(0x1f, "0 3 2 "); /* node 1 is back, as a spare */
    nd_roster_text(&roster, false, text, sizeof text);
    cr_expect_str_eq(text, "1, 4");
    expect_places(0x13, "0 1 4 ");
    roster.nodes[4].joined = false;
    cr_expect_not(nd_roster_assign(&roster));
    nd_roster_missing(&roster, 6, text, sizeof text);
    cr_expect_str_eq(text,
                     "nodes 2-4 of 5 nodes are missing after 6 s, and the job needs 1 of them");
}

/* A node whose failure has no other weight than its code gives. */
static void end_node(int index, int code, const char *screen)
{
    const nd_nodes_end end = {.code = code, .weight = nd_failure_weight_of(code)};
    nd_node_end(&roster.nodes[index], &end, screen, strlen(screen));
}

/* It has no workers whose end could be waited for. */
Test(roster, a_start_is_over_without_the_spares)
{
    set_size(2, 1);
    expect_places(0x7, "0 1 ");
    end_node(0, 0, "");
    cr_expect_not(nd_roster_all_over(&roster));
    end_node(1, 0, "");
    cr_expect(nd_roster_all_over(&roster));
}

/* Node 0 lost a peer first, node 1 was stopped, and node 2 has the reason. */
Test(roster, the_failure_that_explains_the_others_is_the_first)
{
    roster.nodes[1].joined = roster.nodes[2].joined = true;
    cr_assert(nd_roster_assign(&roster));
    cr_expect_eq(nd_roster_first_failure(&roster), -1);
    end_node(1, ND_ERR_PREEMPTED, "");
    cr_expect_eq(nd_roster_first_failure(&roster), 1);
    nd_node_fail(&roster.nodes[0], ND_ERR_IO);
    cr_expect_eq(nd_roster_first_failure(&roster), 0);
    nd_node_fail(&roster.nodes[2], 137);
    cr_expect_eq(nd_roster_first_failure(&roster), 2);
    cr_expect_not(nd_roster_all_over(&roster));
    end_node(2, 137, "screen");
    end_node(0, ND_ERR_IO, "");
    cr_expect(nd_roster_all_over(&roster));
    cr_expect_str_eq(roster.nodes[2].screen, "screen");
}

Test(roster, of_two_reasons_the_earlier_one_counts)
{
    nd_node_fail(&roster.nodes[2], ND_ERR_DATA);
    nd_node_fail(&roster.nodes[0], 137);
    cr_expect_eq(nd_roster_first_failure(&roster), 2);
    nd_node_fail(&roster.nodes[2], ND_ERR_IO);
    end_node(2, 0, "");
    cr_expect_eq(nd_roster_first_failure(&roster), 2);
    cr_expect_eq(roster.nodes[2].failure.code, ND_ERR_DATA);
    nd_node_lose(&roster.nodes[1], 1, "its cable was cut");
    nd_node_lose(&roster.nodes[1], 1, "it is silent");
    cr_expect_not_null(strstr(roster.nodes[1].screen, "cable"), "%s", roster.nodes[1].screen);
}

Test(roster, a_list_of_nodes_that_is_too_long_is_cut)
{
    char text[24];
    set_size(20, 0);
    for (int i = 0; i < 20; i += 2) {
        roster.nodes[i].place = i;
    }
    nd_roster_text(&roster, true, text, 19);
    cr_expect_str_eq(text, "0, 2, 4, 6, 8, ...");
    nd_roster_text(&roster, true, text, 18);
    cr_expect_str_eq(text, "0, 2, 4, 6, ...");
}

/* The others have lost a peer, and were seen first. */
Test(roster, an_io_error_of_a_node_itself_explains_lost_peers)
{
    roster.nodes[1].joined = roster.nodes[2].joined = true;
    cr_assert(nd_roster_assign(&roster));
    end_node(0, ND_ERR_IO, "");
    cr_expect_eq(nd_roster_first_failure(&roster), 0);
    nd_node_end(&roster.nodes[2], &(nd_nodes_end){.code = ND_ERR_IO}, "", 0);
    cr_expect_eq(nd_roster_first_failure(&roster), 2);
    nd_roster_begin(&roster);
    const nd_nodes_end named = {.code = ND_ERR_DATA, .weight = ND_FAILURE_EFFECT};
    nd_node_end(&roster.nodes[1], &named, "", 0);
    cr_expect_eq(nd_roster_first_failure(&roster), 1);
    end_node(2, ND_ERR_DATA, "");
    cr_expect_eq(nd_roster_first_failure(&roster), 2, "the other one names a rank of this node");
}

Test(roster, a_lost_node_is_a_failure_of_its_own)
{
    nd_node_fail(&roster.nodes[0], ND_ERR_IO); /* it noticed the loss before node 0 did */
    nd_node_lose(&roster.nodes[1], 1, "its cable was cut");
    cr_expect_eq(nd_roster_first_failure(&roster), 1);
    cr_expect_not_null(strstr(roster.nodes[1].screen, "was lost: its cable was cut"));
    end_node(2, 0, "");
    nd_node_lose(&roster.nodes[2], 2, "its workers had ended");
    cr_expect_not(roster.nodes[2].lost);
}

Test(roster, a_new_start_begins_without_failures)
{
    roster.nodes[1].joined = roster.nodes[2].joined = true;
    roster.nodes[1].waits = true;
    cr_assert(nd_roster_assign(&roster));
    nd_node_lose(&roster.nodes[1], 1, "it was frozen");
    end_node(0, 137, "screen");
    end_node(2, 0, "");
    nd_roster_begin(&roster);
    cr_expect_gt(roster.nodes[1].heard_ns, 0, "it is not frozen still");
    cr_expect_eq(nd_roster_first_failure(&roster), -1);
    cr_expect_not(nd_roster_all_over(&roster));
    cr_expect(roster.nodes[1].joined && !roster.nodes[1].waits);
    cr_expect_null(roster.nodes[0].screen);
}
