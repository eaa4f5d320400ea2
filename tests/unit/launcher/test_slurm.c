// SPDX-License-Identifier: Apache-2.0
/* Settings that ndlaunch takes from Slurm's environment, with variables as Slurm 22.05 and newer
 * set them. */
#include <string.h>

#include "launcher/launcher.h"
#include "tests/support/tempdir.h"
#include "tests/support/variables.h"

static nd_config config;

static void setup(void)
{
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("SLURM_GPUS_ON_NODE");
    assert_ok(nd_config_init(&config));
}

static void teardown(void)
{
    nd_config_fini(&config);
}

TestSuite(slurm, .init = setup, .fini = teardown);

/* The second of two nodes, one ndlaunch on each. */
static void set_step(void)
{
    SET_VARIABLES("SLURM_JOB_ID=77", "SLURMD_NODENAME=c12", "SLURM_JOB_NUM_NODES=2",
                  "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NUM_TASKS=2",
                  "SLURM_NODEID=1");
}

/* With these flags. */
#define COMPLETE(...)                                                                              \
    complete(sizeof((char *[]){"ndlaunch", ##__VA_ARGS__}) / sizeof(char *),                       \
             (char *[]){"ndlaunch", ##__VA_ARGS__})
static nd_slurm complete(int argc, char **argv)
{
    nd_slurm slurm;
    nd_cli cli = {.help_topic = ""};
    assert_ok(nd_slurm_read(&slurm, &config));
    assert_ok(nd_config_parse(&config, &cli, argc, argv));
    assert_ok(nd_slurm_complete(&slurm, &config));
    return slurm;
}

Test(slurm, outside_of_a_job_nothing_changes)
{
    setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
    nd_slurm slurm = COMPLETE();
    cr_assert_not(slurm.in_job);
    cr_assert_str_empty(slurm.job_id);
    cr_assert_eq(config.launch.nnodes, 1);
    cr_assert_eq(config.launch.nproc_per_node, 0);
}

Test(slurm, a_step_gives_nodes_and_gpus)
{
    set_step();
    setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3", 1);
    setenv("SLURM_GPUS_ON_NODE", "8", 1); /* of the job; the step sees four */
    nd_slurm slurm = COMPLETE();
    cr_assert_str_eq(slurm.job_id, "77");
    cr_assert_str_eq(slurm.node, "c12");
    cr_assert_eq(config.launch.nnodes, 2);
    cr_assert_eq(config.launch.node_rank, 1);
    cr_assert_eq(config.launch.nproc_per_node, 4);
}

Test(slurm, what_is_told_goes_before)
{
    set_step();
    setenv("SLURM_GPUS_ON_NODE", "8", 1);
    COMPLETE("--num-processes", "6", "--node-rank", "0");
    cr_assert_eq(config.launch.workers, 6);
    cr_assert_eq(config.launch.nproc_per_node, 0);
    cr_assert_eq(config.launch.node_rank, 0);
    teardown();
    setup();
    setenv("SLURM_GPUS_ON_NODE", "8", 1);
    COMPLETE("--nproc-per-node", "2");
    cr_assert_eq(config.launch.nproc_per_node, 2);
}

Test(slurm, cpus_have_no_workers_for_gpus)
{
    set_step();
    setenv("SLURM_GPUS_ON_NODE", "8", 1);
    COMPLETE("--device", "cpu");
    cr_assert_eq(config.launch.nproc_per_node, 0);
    teardown();
    setup();
    set_step();
    setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles", 1);
    COMPLETE();
    cr_assert_eq(config.launch.nproc_per_node, 0);
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    COMPLETE();
    cr_assert_eq(config.launch.nproc_per_node, 0);
}

Test(slurm, the_shell_of_a_batch_script_is_no_step)
{
    set_step();
    setenv("SLURM_STEP_ID", "4294967291", 1);
    nd_slurm slurm = COMPLETE();
    cr_assert(slurm.in_job);
    cr_assert_not(slurm.in_step);
    cr_assert_eq(config.launch.nnodes, 1);
}

Test(slurm, contradictions_are_refused)
{
    nd_slurm slurm;
    set_step();
    setenv("SLURM_STEP_NUM_TASKS", "8", 1);
    assert_ok(nd_slurm_read(&slurm, &config));
    assert_fails(nd_slurm_complete(&slurm, &config), ND_ERR_CONFIG,
                 "srun started 8 ndlaunch on 2 nodes");
    set_step();
    assert_ok(nd_slurm_read(&slurm, &config));
    config.launch.nnodes = 1; /* as num_machines of a file says */
    assert_fails(nd_slurm_complete(&slurm, &config), ND_ERR_CONFIG,
                 "srun started ndlaunch on 2 nodes, but launch.nnodes is 1");
    config.launch.nnodes = 2;
    config.launch.spare_nodes = 1;
    assert_fails(nd_slurm_complete(&slurm, &config), ND_ERR_CONFIG,
                 "launch.nnodes 2 + launch.spare_nodes 1 are 3; pass --nnodes");
    setenv("SLURM_STEP_NUM_NODES", "3", 1);
    setenv("SLURM_STEP_NUM_TASKS", "3", 1);
    assert_ok(nd_slurm_read(&slurm, &config));
    config.launch.nnodes = 2;
    assert_ok(nd_slurm_complete(&slurm, &config));
    static const char *const wrong[] = {"one", "-1", "4294967296"};
    for (int i = 0; i < 3; i++) {
        setenv("SLURM_NODEID", wrong[i], 1);
        assert_fails(nd_slurm_read(&slurm, &config), ND_ERR_CONFIG, wrong[i]);
    }
    SET_VARIABLES("SLURM_NODEID=0", "SLURM_STEP_NUM_NODES=1", "SLURM_STEP_NUM_TASKS=1");
    assert_ok(nd_slurm_read(&slurm, &config));
    assert_ok(nd_slurm_complete(&slurm, &config));
}
