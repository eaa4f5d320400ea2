// SPDX-License-Identifier: Apache-2.0
/*
 * The trainer itself under --max-restarts: a rank that is killed at any moment costs steps, and
 * nothing else. Every loss, norm and learning rate equals that of an undisturbed run.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tests/launch/tiny_job.h"

enum { NODES = 3, WORKERS = 4, STEPS = 120 };

static tempdir dir;
static launched l, nodes[NODES];

static void setup(void)
{
    tiny_write_inputs(&dir);
    unsetenv("ND_WORKER");
}

TEMPDIR_SUITE(kill, setup, .timeout = 500);

static void start(const char *name, const char *const *further)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("--num-steps", printed("%d", STEPS), "--save-steps", "10"));
    tiny_add(&a, further);
    tiny_ndlaunch(&l, &dir, name, WORKERS, a.list);
}

/* The run that the others are compared with. */
static void train_undisturbed(void)
{
    start("whole", NULL);
    launched_expect(&l, 0);
}

static void expect_undisturbed(const char *name)
{
    launched_expect(&l, 0);
    tiny_expect_same(&dir, name, "whole", STEPS);
}

/* Each rank in turn, before and after the first checkpoint, and while one is written; then at steps
 * that are strewn over the run, as many as ND_KILL_RUNS says. */
Test(kill, each_rank_at_some_step)
{
    static const int chosen[] = {4, 11, 19, 20, 21, 35, 50, 71};
    const int few = (int)(sizeof chosen / sizeof *chosen);
    const char *runs = getenv("ND_KILL_RUNS");
    train_undisturbed();
    for (int i = 0; i < (runs ? atoi(runs) : few); i++) {
        int at = i < few ? chosen[i] : 3 + i * 37 % 77;
        const char *name = printed("killed-%d", i);
        start(name, WORDS("--max-restarts", "1"));
        launched_until(&l, "\nstep ", at);
        kill(launched_child(&l, i % WORKERS), SIGKILL);
        assert_ends(&l, 0, "restart 1 of 1 follows at once, from ");
        cr_assert_null(strstr(l.text, "process_vm_"), "%s", l.text); /* UCX's own line */
        tiny_expect_same(&dir, name, "whole", STEPS);
    }
}

/* One job, three kills: the second and third come while the last checkpoint is newer than the one
 * from which the job went on. */
Test(kill, several_times_in_one_job)
{
    train_undisturbed();
    start("killed", WORDS("--max-restarts", "3"));
    for (int i = 0; i < 3; i++) {
        launched_until(&l, printed("checkpoint of step %d ", 20 + 30 * i), 1);
        kill(launched_child(&l, 3 - i), SIGKILL);
        launched_until(&l, printed("restart %d of 3 follows", i + 1), 1);
    }
    expect_undisturbed("killed");
}

/* A worker that stands still is found by its peers, whose deadline is short here. */
Test(kill, a_stopped_rank_is_a_reason_too)
{
    train_undisturbed();
    start("stopped", WORDS("--max-restarts", "1", "--comm-timeout-seconds", "5"));
    launched_until(&l, "\nstep ", 25);
    kill(launched_child(&l, 2), SIGSTOP);
    assert_ends(&l, 0, "failed (exit code 124, ");
    tiny_expect_same(&dir, "stopped", "whole", STEPS);
}

Test(kill, a_killed_ndlaunch_goes_on_by_resume)
{
    train_undisturbed();
    start("resumed", NULL);
    launched_until(&l, "\nstep ", 33);
    pid_t workers[WORKERS];
    for (int rank = 0; rank < WORKERS; rank++) {
        workers[rank] = launched_child(&l, rank);
    }
    launched_end(&l, SIGKILL, 128 + SIGKILL);
    launched_expect_gone(workers, WORKERS); /* and with them their lock of the run folder */
    start("resumed", WORDS("--resume-from-checkpoint", "latest"));
    expect_undisturbed("resumed");
}

static tiny_nodes job = {.nodes = 2, .workers = WORKERS};

static void start_node(int node, int times, const char *spares)
{
    tiny_nodes_start(&nodes[node], &job, node, times,
                     WORDS("--save-dir", printed("%s/run-nodes", dir.path), "--num-steps",
                           printed("%d", STEPS), "--save-steps", "10", "--max-restarts", "3",
                           "--spare-nodes", spares));
}

/* A worker of node 1 first, then node 1's launcher with all of its workers, which comes back. */
Test(kill, a_worker_and_a_launcher_of_another_node)
{
    train_undisturbed();
    tiny_nodes_meet(&job, &dir);
    for (int i = 0; i < 2; i++) {
        start_node(i, 0, "0");
    }
    launched_until(&nodes[0], "checkpoint of step 20 ", 1);
    kill(launched_child(&nodes[1], 3), SIGKILL);
    launched_until(&nodes[0], "restart 1 of 3 follows ", 1);
    launched_until(&nodes[0], "checkpoint of step 50 ", 1);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    start_node(1, 1, "0");
    launched_expect(&nodes[1], 0);
    assert_ends(&nodes[0], 0, "was lost; restart 2 of 3 follows ");
    tiny_expect_same(&dir, "nodes", "whole", STEPS);
}

/* Node 1 does not come back; the spare node trains on with the same bits. */
Test(kill, a_launcher_whose_place_a_spare_node_takes)
{
    train_undisturbed();
    tiny_nodes_meet(&job, &dir);
    for (int i = 0; i < NODES; i++) {
        start_node(i, 0, "1");
    }
    launched_until(&nodes[0], "checkpoint of step 20 ", 1);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    launched_expect(&nodes[2], 0);
    assert_ends(&nodes[0], 0, "workers on nodes 0, 2; spare nodes: none yet");
    tiny_expect_same(&dir, "nodes", "whole", STEPS);
}
