// SPDX-License-Identifier: Apache-2.0
/* A job of two nodes and a spare one, which takes the place of a node that is lost. */
#include <signal.h>
#include <string.h>

#include "tests/launch/tiny_job.h"

enum { NODES = 3, WORKERS = 4, SILENCE_SECONDS = 15 };

static tempdir dir;
static launched nodes[NODES];
static tiny_nodes job = {.nodes = NODES - 1,
                         .workers = WORKERS,
                         .flags = WORDS("--spare-nodes", "1", "--rdzv-timeout-seconds", "30",
                                        "--max-restarts", "3", "--save-steps", "1")};

static void setup(void)
{
    tiny_write_inputs(&dir);
    tiny_nodes_meet(&job, &dir);
}

TEMPDIR_SUITE(spare_nodes, setup, .timeout = 280);

static void start_node(int node)
{
    tiny_nodes_start(&nodes[node], &job, node, 0, NULL);
}

static void start_nodes(const char *plan)
{
    launched_use_plan(plan, "3");
    for (int i = 0; i < NODES; i++) {
        start_node(i);
    }
}

/* Those whose third one is a spare when the workers of the others wait. */
static void start_with_spare(const char *plan)
{
    start_nodes(plan);
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    launched_until(&nodes[2], "this node waits without workers", 1);
}

Test(spare_nodes, a_job_that_needs_no_spare_ends_it_with_0)
{
    start_nodes("B0T1D1X0");
    launched_expect_all(nodes, NODES, 0);
    assert_says(&nodes[0], "workers on nodes 0-1; spare nodes: 2\n");
    assert_says(&nodes[1], "epoch 0 of rank 3");
    cr_assert_null(strstr(nodes[2].text, "of rank"), "%s", nodes[2].text);
}

Test(spare_nodes, the_place_of_a_lost_node_goes_to_the_spare)
{
    start_with_spare("B0T46D40;B40T44X0");
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    launched_expect(&nodes[2], 0);
    assert_ends(&nodes[0], 0, "node 2 (host ", " takes the place of node 1 (host ",
                "), ranks 2 to 3\n", "workers on nodes 0, 2; spare nodes: none yet");
    assert_says(&nodes[2], "epoch 1 of rank 3, run nd-", ".1, folder '/begun/in/start-0'\n");
    cr_assert_null(strstr(nodes[0].text, "missing"), "%s", nodes[0].text);
}

/* It starts with those that are here after 10 s, and node 1 is the spare when it comes. A spare
 * lives longer than the time after which silence is a loss. */
Test(spare_nodes, a_node_that_comes_late_is_the_spare)
{
    launched_use_plan("B0T46D40;B40T44X0", "3");
    start_node(0);
    start_node(2);
    tiny_nodes_wait(&nodes[0], &nodes[2], 0);
    assert_says(&nodes[0], "workers on nodes 0, 2; spare nodes: none yet");
    start_node(1);
    launched_until(&nodes[0], ") joined and is a spare", 1);
    sleep(SILENCE_SECONDS + 5);
    launched_end(&nodes[2], SIGKILL, 128 + SIGKILL);
    launched_expect(&nodes[1], 0);
    assert_ends(&nodes[0], 0, "workers on nodes 0-1; spare nodes: none yet");
    cr_assert_null(strstr(nodes[0].text, "no sign of life"), "%s", nodes[0].text);
}

Test(spare_nodes, without_a_spare_node_0_waits_for_any_other)
{
    launched back;
    start_nodes("B0T46D40;B40T54D50;B50T54X0");
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    tiny_nodes_wait(&nodes[0], &nodes[2], 1);
    launched_end(&nodes[2], SIGKILL, 128 + SIGKILL);
    launched_until(&nodes[0], "nodes 1-2 of 3 nodes are missing after", 1);
    assert_says(&nodes[0], "and the job needs 1 of them\n");
    tiny_nodes_start(&back, &job, 1, 1, NULL);
    assert_ends(&back, 0, "epoch 2 of rank 3");
    launched_expect(&nodes[0], 0);
}

/* By a signal, and by silence; each time the job goes on. */
Test(spare_nodes, the_loss_of_a_spare_does_not_disturb_the_job)
{
    start_with_spare("B0T46D40");
    launched_end(&nodes[2], SIGTERM, 75);
    launched_until(&nodes[0], "spare node 2 (host ", 1);
    tiny_nodes_start(&nodes[2], &job, 2, 1, NULL);
    launched_until(&nodes[2], "this node waits without workers", 1);
    kill(nodes[2].pid, SIGSTOP);
    launched_until(&nodes[0], ") gave no sign of life for 15 s", 1);
    launched_end(&nodes[2], SIGKILL, 128 + SIGKILL);
    cr_assert_null(strstr(nodes[0].text, "restart 1"), "%s", nodes[0].text);
    launched_end_all(nodes, 2, SIGTERM, 75);
}

Test(spare_nodes, the_loss_of_node_0_ends_the_spare)
{
    start_with_spare("B0T46D40");
    launched_end(&nodes[0], SIGKILL, 128 + SIGKILL);
    launched_expect(&nodes[1], 74);
    assert_ends(&nodes[2], 74, "was lost while this node waited");
}
