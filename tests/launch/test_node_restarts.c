// SPDX-License-Identifier: Apache-2.0
/* Restarts of a job of two nodes: all workers at the same epoch, and nodes that come back. */
#include <signal.h>
#include <string.h>

#include "tests/launch/tiny_job.h"

static tempdir dir;
static launched nodes[3], back;
static tiny_nodes job = {
    .nodes = 2,
    .workers = 4,
    .flags = WORDS("--rdzv-timeout-seconds", "30", "--max-restarts", "3", "--save-steps", "1")};

static void setup(void)
{
    tiny_write_inputs(&dir);
    tiny_nodes_meet(&job, &dir);
}

TEMPDIR_SUITE(node_restarts, setup, .timeout = 280);

static void start_nodes(const char *plan, const char *rank)
{
    launched_use_plan(plan, rank);
    tiny_nodes_start_all(nodes, &job, NULL);
}

/* Nodes of which none fails by itself: node 1's launcher is killed in the first start. */
static void lose_node_1(const char *plan)
{
    start_nodes(plan, "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    launched_end(&nodes[1], SIGKILL, 137);
}

Test(node_restarts, a_worker_killed_on_either_node_restarts_both)
{
    static const char *const ranks[] = {"1", "3"};
    for (int i = 0; i < 2; i++) {
        start_nodes("B0T46D40K9;B40T44X0", ranks[i]);
        launched_expect_all(nodes, 2, 0);
        assert_says(&nodes[0], "restart 1 of 3 follows at once, from step 40; ",
                    "epoch 1 of rank 1, run nd-");
        assert_says(&nodes[1], "epoch 1 of rank 3, run nd-", ".1, folder '/begun/in/start-0'\n");
        cr_assert_null(strstr(nodes[1].text, "was lost"), "%s", nodes[1].text);
    }
}

Test(node_restarts, what_failed_on_another_node_is_in_the_line)
{
    start_nodes("B0T46D40K9;B40T44", "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 1);
    assert_says(&nodes[0], "rank 3 failed first", "ndlaunch: node 1 (host ",
                ") failed first; restart 1 of 3 follows at once, from step 40; 6 steps");
    launched_end_all(nodes, 2, SIGTERM, 75); /* these workers do not tell each other */
}

Test(node_restarts, a_node_leaves_and_comes_back_twice)
{
    launched twice;
    start_nodes("B0T46D40;B40T46D43;B43T46X0", "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    pid_t former = launched_worker(&nodes[1], 3);
    launched_end(&nodes[1], SIGKILL, 137);
    launched_until(&nodes[0], "node 1 of 2 nodes is missing", 1);
    cr_assert(launched_gone(former));
    tiny_nodes_start(&back, &job, 1, 1, NULL);
    tiny_nodes_wait(&nodes[0], &back, 1);
    launched_end(&back, SIGKILL, 137);
    assert_says(&back, "ndlaunch: joined node 0 (127.0.0.1 port ", ") as node 1 of 2\n",
                "epoch 1 of rank 3, run nd-", ".1, folder '/begun/in/start-0'\n");
    tiny_nodes_start(&twice, &job, 1, 2, NULL);
    launched_expect(&twice, 0);
    assert_ends(&nodes[0], 0, "node 1 (host ",
                "was lost; restart 1 of 3 follows when enough nodes are back, from step 40; ",
                "node 1 of 2 nodes is missing; start the same command there within ",
                "was lost; restart 2 of 3 follows in 1 s, from step 43; ");
    assert_says(&twice, "epoch 2 of rank 3, run nd-");
}

/* Its ndlaunch is started again before node 0 has ended its own workers. */
Test(node_restarts, a_node_that_comes_back_at_once_waits_for_the_others)
{
    start_nodes("B0T46D40;B40T44X0", "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    kill(nodes[1].pid, SIGKILL);
    tiny_nodes_start(&back, &job, 1, 1, NULL);
    launched_expect(&nodes[1], 137);
    launched_expect(&back, 0);
    launched_expect(&nodes[0], 0);
}

/* With other settings it is refused, and may come once more. */
Test(node_restarts, a_node_that_comes_back_changed_is_refused)
{
    launched changed;
    lose_node_1("B0T46D40;B40T44X0");
    launched_until(&nodes[0], "node 1 of 2 nodes is missing", 1);
    tiny_nodes_start(&changed, &job, 1, 1, WORDS("--learning-rate", "0.25"));
    assert_ends(&changed, 2, "optimizer.lr is '");
    tiny_nodes_start(&changed, &job, 1, 2, WORDS("--set", "data.path=/nonexistent/text.txt"));
    launched_expect(&changed, 65);
    tiny_nodes_start(&back, &job, 1, 3, NULL);
    launched_expect(&back, 0);
    launched_expect(&nodes[0], 0);
}

Test(node_restarts, a_node_that_does_not_come_back_ends_the_job)
{
    launched_use_plan("B0T46D40", NULL);
    tiny_nodes_start_all(nodes, &job, WORDS("--rdzv-timeout-seconds", "6"));
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    launched_end(&nodes[1], SIGKILL, 137);
    assert_ends(&nodes[0], 74, "node 1 of 2 nodes is missing after 6 s");
}

Test(node_restarts, a_signal_ends_the_wait_for_a_node)
{
    lose_node_1("B0T46D40");
    launched_until(&nodes[0], "node 1 of 2 nodes is missing", 1);
    launched_end(&nodes[0], SIGTERM, 75);
}

/* Node 1 has no worker then, and tells node 0. */
Test(node_restarts, a_signal_to_another_node_ends_the_wait)
{
    start_nodes("B0T1D1K9;B1T2D2K9;B2T3D3K9;B3T4X0", "3");
    launched_until(&nodes[0], "follows in 2 s", 1);
    kill(nodes[1].pid, SIGTERM);
    launched_expect_all(nodes, 2, 75);
    cr_assert_null(strstr(nodes[0].text, "epoch 3"), "%s", nodes[0].text);
}

/* As on one node: node 1 tells that it was asked to end when its workers have ended. */
Test(node_restarts, none_after_a_signal_to_another_node)
{
    start_nodes("B0T46D40", "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    pid_t stopped = launched_worker(&nodes[1], 3);
    kill(stopped, SIGSTOP);
    kill(nodes[1].pid, SIGTERM);
    launched_until(&nodes[1], "Terminated forwarded", 1);
    kill(stopped, SIGKILL);
    launched_expect_all(nodes, 2, 137);
    cr_assert_null(strstr(nodes[0].text, "restart 1"), "%s", nodes[0].text);
    cr_assert_null(strstr(nodes[0].text, "started again"), "nothing is to be explained");
}

/* Node 1 cannot tell why node 0 is gone, and ends its workers, also in a restart. */
Test(node_restarts, the_loss_of_node_0_ends_the_job)
{
    start_nodes("B0T46D40K9;B40T41", "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 1);
    pid_t other = launched_child(&nodes[1], 3);
    launched_end(&nodes[0], SIGKILL, 137);
    launched_expect(&nodes[1], 74);
    cr_assert(launched_gone(other));
}

/* Its silence is noticed after 15 s. Node 0 closes its connection, so that it ends when it wakes
 * up, while the one that took its place goes on. */
Test(node_restarts, a_frozen_launcher_is_replaced)
{
    start_nodes("B0T46D40;B40T44", "3");
    tiny_nodes_wait(&nodes[0], &nodes[1], 0);
    kill(nodes[1].pid, SIGSTOP);
    launched_until(&nodes[0], "no sign of life for 15 s", 1);
    launched_until(&nodes[0], "node 1 of 2 nodes is missing", 1);
    sleep(3); /* for the connection to close */
    tiny_nodes_start(&back, &job, 1, 1, NULL);
    launched_until(&back, "of epoch 1 waits", 2);
    launched_end(&nodes[1], SIGCONT, 74);
    kill(back.pid, SIGTERM);
    kill(nodes[0].pid, SIGTERM);
    launched_expect(&back, 75);
    launched_expect(&nodes[0], 75);
}

/* Node 1 says nothing while it waits for node 2 to come back as well: that is no silence. */
Test(node_restarts, a_node_that_is_back_waits_longer_than_a_silence)
{
    enum { NODES = 3, SILENCE_SECONDS = 15 };
    job.nodes = NODES;
    job.workers = 2 * NODES;
    launched_use_plan("B0T46D40;B40T44X0", NULL);
    tiny_nodes_start_all(nodes, &job, NULL);
    for (int i = 0; i < NODES; i++) {
        launched_until(&nodes[i], "of epoch 0 waits", 2);
    }
    for (int i = 1; i < NODES; i++) {
        launched_end(&nodes[i], SIGKILL, 137);
    }
    launched_until(&nodes[0], "nodes 1-2 of 3 nodes are missing", 1);
    tiny_nodes_start(&nodes[1], &job, 1, 1, NULL);
    sleep(SILENCE_SECONDS + 3);
    tiny_nodes_start(&nodes[2], &job, 2, 1, NULL);
    launched_expect_all(nodes, NODES, 0);
}
