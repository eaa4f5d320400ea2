// SPDX-License-Identifier: Apache-2.0
/* A job with launch.min_nodes, which goes on with fewer nodes on a smaller mesh. */
#include <signal.h>
#include <string.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/port.h"

enum { NODES = 3 };

static tempdir dir;
static char endpoint[32], key_file[128];

static void setup(void)
{
    launched l;
    char program[PATH_MAX];
    tiny_write_inputs(&dir);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%d", port_reserve());
    snprintf(key_file, sizeof key_file, "%s/key", dir.path);
    snprintf(program, sizeof program, "%s/ndlaunch", launched_build_root());
    launched_start(&l, &dir, "make-key", (const char *[]){program, "--make-key", key_file, NULL});
    launched_expect(&l, 0);
}

TEMPDIR_SUITE(fewer_nodes, setup, .timeout = 280);

typedef struct job {
    int nodes, workers;        /* workers of all nodes */
    const char *micro_batches; /* of a worker in a step, with all nodes */
    const char *patience;      /* --rdzv-timeout-seconds */
    const char *folder;        /* of the run, NULL: one for each start of a node */
    const char *const *further;
} job;

static void start_node(launched *l, const job *j, int node, int times)
{
    char name[32], rank[16], nodes[16], out[200];
    tiny_arguments a = {0};
    snprintf(name, sizeof name, "node%d-%d", node, times);
    snprintf(rank, sizeof rank, "%d", node);
    snprintf(nodes, sizeof nodes, "%d", j->nodes);
    tiny_add(&a, (const char *[]){"--nnodes", nodes, "--min-nodes", "1", "--node-rank", rank,
                                  "--rdzv-endpoint", endpoint, "--rdzv-key-file", key_file,
                                  "--rdzv-timeout-seconds", j->patience, "--max-restarts", "9",
                                  "--save-steps", "1", "--gradient-accumulation-steps",
                                  j->micro_batches, NULL});
    snprintf(out, sizeof out, "output.dir=%s/%s", dir.path, j->folder ? j->folder : name);
    tiny_add(&a, (const char *[]){"--set", out, NULL});
    tiny_add(&a, j->further);
    tiny_ndlaunch(l, &dir, name, j->workers, a.list);
}

static void use_plan(const char *plan, const char *rank)
{
    launched_use_test_worker();
    setenv("ND_TEST", "plan", 1);
    setenv("ND_TEST_RANK", rank, 1);
    setenv("ND_TEST_PLAN", plan, 1);
}

static void lose_node(launched *node)
{
    kill(node->pid, SIGKILL);
    launched_expect(node, 128 + SIGKILL);
}

/* Three nodes have 3 micro-batches a step, which do not divide over 2 ranks: one node goes on, and
 * another one that is there waits. */
Test(fewer_nodes, only_so_many_have_workers_as_the_samples_divide_over)
{
    const job j = {.nodes = NODES, .workers = 3, .micro_batches = "1", .patience = "10"};
    launched nodes[NODES];
    use_plan("B0T46D40;B50T54X0", "9");
    for (int i = 0; i < NODES; i++) {
        start_node(&nodes[i], &j, i, 0);
    }
    for (int i = 0; i < NODES; i++) {
        launched_until(&nodes[i], "of epoch 0 waits", 1, LAUNCHED_SECONDS);
    }
    lose_node(&nodes[2]);
    launched_expect(&nodes[0], 0);
    launched_expect(&nodes[1], 0);
    assert_says(&nodes[0], "the job goes on with 1 of 3 nodes: mesh ");
    assert_says(&nodes[0], "train.gradient_accumulation_steps 3\n");
    assert_says(&nodes[0], "rank 0 is one of 1 on 1 nodes\n");
    assert_says(&nodes[1], "the job goes on without this node");
}

/* After the time for a node to come back. It comes later, and the next start has it again. */
Test(fewer_nodes, a_lost_node_is_waited_for_and_may_come_later)
{
    const job j = {.nodes = 2, .workers = 2, .micro_batches = "1", .patience = "10"};
    launched nodes[2], back;
    use_plan("B0T46D40;B40T54D50;B50T64D60X0", "9");
    start_node(&nodes[0], &j, 0, 0);
    start_node(&nodes[1], &j, 1, 0);
    launched_until(&nodes[0], "of epoch 0 waits", 1, LAUNCHED_SECONDS);
    launched_until(&nodes[1], "of epoch 0 waits", 1, LAUNCHED_SECONDS);
    lose_node(&nodes[1]);
    launched_until(&nodes[0], "node 1 of 2 nodes is missing", 1, LAUNCHED_SECONDS);
    launched_until(&nodes[0], "of epoch 1 waits", 1, LAUNCHED_SECONDS);
    assert_says(&nodes[0], "the job goes on with 1 of 2 nodes: mesh ");
    assert_says(&nodes[0], "train.gradient_accumulation_steps 2\n");
    start_node(&back, &j, 1, 1);
    launched_until(&nodes[0], ") joined and is a spare", 1, LAUNCHED_SECONDS);
    kill(launched_child(&nodes[0], 0), SIGKILL);
    launched_expect(&back, 0);
    assert_ends(&nodes[0], 0, "the job goes on with 2 of 2 nodes: mesh ");
    assert_says(&back, "rank 1 is one of 2 on 2 nodes\n");
}

static void until_further_checkpoint(launched *node)
{
    int before = launched_count(node, "checkpoint of step ");
    launched_until(node, "checkpoint of step ", before + 2, LAUNCHED_SECONDS);
}

/* Real training: the samples of each step stay the same, and the checkpoint fits the new mesh. */
Test(fewer_nodes, training_goes_on_with_the_same_samples_a_step)
{
    const job j = {
        .nodes = 2,
        .workers = 2,
        .micro_batches = "1",
        .patience = "10",
        .folder = "run",
        .further = (const char *[]){"--num-steps", "1000000", "--lr-scheduler", "constant", NULL}};
    launched nodes[2];
    start_node(&nodes[0], &j, 0, 0);
    start_node(&nodes[1], &j, 1, 0);
    until_further_checkpoint(&nodes[0]);
    lose_node(&nodes[1]);
    launched_until(&nodes[0], "the job goes on with 1 of 2 nodes: mesh ", 1, LAUNCHED_SECONDS);
    until_further_checkpoint(&nodes[0]);
    assert_says(&nodes[0], "resume: train.gradient_accumulation_steps was 1 and is 2");
    kill(nodes[0].pid, SIGTERM);
    launched_expect(&nodes[0], 75);
    cr_expect_eq(launched_shell("%s/ndtrain ckpt ls --json %s/run | tail -n 1 > %s/last && "
                                "s=$(sed 's/.*\"step\": *\\([0-9]*\\).*/\\1/' %s/last) && "
                                "grep -q '\"samples_seen\": *'$((2 * s))'[,}]' %s/last",
                                launched_build_root(), dir.path, dir.path, dir.path, dir.path),
                 0);
}

Test(fewer_nodes, need_an_axis_that_can_shrink)
{
    const job j = {.nodes = 2,
                   .workers = 2,
                   .micro_batches = "1",
                   .patience = "60",
                   .further = (const char *[]){"--dp-shard-size", "2", NULL}};
    launched l;
    start_node(&l, &j, 0, 0);
    assert_ends(&l, 2, "every axis of the mesh has a fixed size");
}
