// SPDX-License-Identifier: Apache-2.0
/* A job with launch.min_nodes, which goes on with fewer nodes on a smaller mesh. */
#include <signal.h>

#include "tests/launch/tiny_job.h"

enum { NODES = 5 };

static tempdir dir;
static launched nodes[NODES];
static tiny_nodes job = {.flags = WORDS("--min-nodes", "1", "--rdzv-timeout-seconds", "10",
                                        "--max-restarts", "9", "--save-steps", "1",
                                        "--gradient-accumulation-steps", "1")};

static void setup(void)
{
    tiny_write_inputs(&dir);
    tiny_nodes_meet(&job, &dir);
}

TEMPDIR_SUITE(fewer_nodes, setup, .timeout = 280);

static void start_nodes(int count, const char *const *further)
{
    job.nodes = job.workers = count;
    tiny_nodes_start_all(nodes, &job, further);
}

/* Five nodes have 5 micro-batches a step, which divide over no fewer ranks than 5 but over one: one
 * node goes on, and the others wait. One of them that is asked to end disturbs nobody. */
Test(fewer_nodes, only_so_many_have_workers_as_the_samples_divide_over)
{
    launched_use_plan("B0T46D40;B50T54", "9");
    start_nodes(NODES, NULL);
    for (int i = 0; i < NODES; i++) {
        launched_until(&nodes[i], "of epoch 0 waits", 1);
    }
    launched_end(&nodes[4], SIGKILL, 128 + SIGKILL);
    launched_until(&nodes[1], "the job goes on without this node", 1);
    launched_end(&nodes[1], SIGTERM, 75);
    launched_until(&nodes[0], "of epoch 1 waits", 1);
    launched_end(&nodes[0], SIGUSR1, 0);
    launched_expect_all(nodes + 2, 2, 0);
    assert_says(&nodes[0], "the job goes on with 1 of 5 nodes: mesh ",
                "train.gradient_accumulation_steps 5\n", "rank 0 is one of 1 on 1 nodes\n");
}

/* After the time for a node to come back. It comes later, and the next start has it again. */
Test(fewer_nodes, a_lost_node_is_waited_for_and_may_come_later)
{
    launched back;
    launched_use_plan("B0T46D40;B40T54D50;B50T64D60X0", "9");
    start_nodes(2, NULL);
    launched_until(&nodes[0], "of epoch 0 waits", 1);
    launched_until(&nodes[1], "of epoch 0 waits", 1);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    launched_until(&nodes[0], "node 1 of 2 nodes is missing", 1);
    launched_until(&nodes[0], "of epoch 1 waits", 1);
    assert_says(&nodes[0], "the job goes on with 1 of 2 nodes: mesh ",
                "train.gradient_accumulation_steps 2\n");
    tiny_nodes_start(&back, &job, 1, 1, NULL);
    launched_until(&nodes[0], ") joined and is a spare", 1);
    kill(launched_child(&nodes[0], 0), SIGKILL);
    launched_expect(&back, 0);
    assert_ends(&nodes[0], 0, "the job goes on with 2 of 2 nodes: mesh ");
    assert_says(&back, "rank 1 is one of 2 on 2 nodes\n");
}

static void until_further_checkpoint(launched *node)
{
    int before = launched_count(node, "checkpoint of step ");
    launched_until(node, "checkpoint of step ", before + 2);
}

/* Real training: the samples of each step stay the same, and the checkpoint fits the new mesh. */
Test(fewer_nodes, training_goes_on_with_the_same_samples_a_step)
{
    start_nodes(2, WORDS("--num-steps", "1000000", "--lr-scheduler", "constant", "--set",
                         printed("output.dir=%s/run", dir.path)));
    until_further_checkpoint(&nodes[0]);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    launched_until(&nodes[0], "the job goes on with 1 of 2 nodes: mesh ", 1);
    until_further_checkpoint(&nodes[0]);
    assert_says(&nodes[0], "resume: train.gradient_accumulation_steps was 1 and is 2");
    launched_end(&nodes[0], SIGTERM, 75);
    cr_expect_eq(launched_shell("%s/ndtrain ckpt ls --json %s/run | tail -n 1 > %s/last && "
                                "s=$(sed 's/.*\"step\": *\\([0-9]*\\).*/\\1/' %s/last) && "
                                "grep -q '\"samples_seen\": *'$((2 * s))'[,}]' %s/last",
                                launched_build_root(), dir.path, dir.path, dir.path, dir.path),
                 0);
}

Test(fewer_nodes, need_an_axis_that_can_shrink)
{
    job.nodes = job.workers = 2;
    tiny_nodes_start(&nodes[0], &job, 0, 0,
                     WORDS("--rdzv-timeout-seconds", "60", "--dp-shard-size", "2"));
    assert_ends(&nodes[0], 2, "every axis of the mesh has a fixed size");
}
