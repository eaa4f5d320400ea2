// SPDX-License-Identifier: Apache-2.0
/* The identity of a worker, from the environments of ndlaunch, torchrun and none: a test begins
 * without their variables (tests/support/surroundings.c). */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>

#include "runtime/rdzv/identity.h"
#include "tests/support/printed.h"
#include "tests/support/tempdir.h"
#include "tests/support/variables.h"

static nd_identity id;

/* Rank 5 of 8, the second of four on the second node. */
static void set_torchrun(void)
{
    SET_VARIABLES("RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "MASTER_PORT=29500",
                  "LOCAL_WORLD_SIZE=4", "MASTER_ADDR=10.0.0.1");
}

Test(identity, alone)
{
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.source, ND_IDENTITY_SINGLE);
    cr_assert(id.rank == 0 && id.world_size == 1 && id.local_rank == 0 && id.local_world_size == 1);
    cr_assert(id.key_fd == -1 && id.config_fd == -1 && !id.page.slots);
    cr_assert_neq(id.host[0], '\0');
}

Test(identity, of_ndlaunch)
{
    int file = open("/dev/null", O_RDONLY);
    set_torchrun();
    setenv("ND_CONFIG_FD", printed("%d", file), 1);
    SET_VARIABLES("ND_RUN_ID=nd-1234", "ND_NODE_RANK=1", "ND_NNODES=2", "ND_TERMINAL=1",
                  "GROUP_RANK=9"); /* torchrun's, without a meaning here */
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.source, ND_IDENTITY_NDLAUNCH);
    cr_assert(id.rank == 5 && id.world_size == 8 && id.local_rank == 1 && id.local_world_size == 4);
    cr_assert(id.node_rank == 1 && id.nnodes == 2 && id.restart_epoch == 0);
    cr_assert_str_eq(id.run_id, "nd-1234");
    cr_assert_str_eq(id.master_addr, "10.0.0.1");
    cr_assert_eq(id.master_port, 29500);
    cr_assert_eq(id.config_fd, file);
    cr_assert_eq(id.key_fd, -1);
    cr_assert(fcntl(file, F_GETFD) & FD_CLOEXEC);
    cr_assert(id.terminal);
    setenv("ND_TERMINAL", "0", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_not(id.terminal);
    close(file);
    assert_fails(nd_identity_read(&id), ND_ERR_CONFIG, "ND_CONFIG_FD");
}

Test(identity, of_a_restarted_job)
{
    set_torchrun();
    setenv("ND_RUN_ID", "nd-1234.3", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.restart_epoch, 0);
    cr_assert_str_eq(id.run_folder, "");
    setenv("ND_RESTART_EPOCH", "3", 1);
    setenv("ND_RUN_FOLDER", "/runs/a b", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.restart_epoch, 3);
    cr_assert_str_eq(id.run_folder, "/runs/a b");
    setenv("ND_RUN_FOLDER", "runs/a", 1);
    assert_fails(nd_identity_read(&id), ND_ERR_CONFIG, "ND_RUN_FOLDER=runs/a");
    unsetenv("ND_RUN_FOLDER");
    static const char *const wrong[] = {"x", "3x", "-1", "99999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setenv("ND_RESTART_EPOCH", wrong[i], 1);
        assert_fails(nd_identity_read(&id), ND_ERR_CONFIG, "ND_RESTART_EPOCH=");
    }
}

Test(identity, of_torchrun)
{
    set_torchrun();
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.source, ND_IDENTITY_ENVIRONMENT);
    cr_assert_str_eq(id.run_id, "environment");
    cr_assert(id.node_rank == 1 && id.nnodes == 2 && id.restart_epoch == 0);
    cr_assert_eq(id.master_port, 29500);
    SET_VARIABLES("TORCHELASTIC_USE_AGENT_STORE=False", "WORLD_SIZE=6");
    assert_ok(nd_identity_read(&id));
    cr_assert(id.master_port == 29500 && id.nnodes == 2); /* one of them has two ranks */
    SET_VARIABLES("TORCHELASTIC_RUN_ID=job 7", "TORCHELASTIC_RESTART_COUNT=2",
                  "TORCHELASTIC_USE_AGENT_STORE=True", /* its agent has the port */
                  "GROUP_RANK=3", "GROUP_WORLD_SIZE=4");
    assert_ok(nd_identity_read(&id));
    cr_assert_str_eq(id.run_id, "job 7");
    cr_assert(id.node_rank == 3 && id.nnodes == 4 && id.restart_epoch == 2);
    cr_assert_eq(id.master_port, 29501);
    setenv("MASTER_PORT", "65535", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.master_port, 65534);
    setenv("ND_MASTER_PORT", "4000", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.master_port, 4000);
}

Test(identity, a_variable_that_is_missing)
{
    static const char *const needed[] = {"WORLD_SIZE",       "LOCAL_RANK",  "RANK",
                                         "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        id = (nd_identity){.rank = -7};
        set_torchrun();
        unsetenv(needed[i]);
        assert_fails(nd_identity_read(&id), ND_ERR_CONFIG, needed[i]);
        cr_assert_eq(id.rank, -7, "written on failure");
    }
}

Test(identity, variables_that_contradict_each_other)
{
    static const char *const bad[][3] = {
        {"RANK", "8", "rank 8 of 8, local rank 1 of 4, which contradict each other"},
        {"LOCAL_RANK", "4", "rank 5 of 8, local rank 4 of 4, which contradict each other"},
        {"LOCAL_WORLD_SIZE", "9", "contradict"},
        {"RANK", "0", "contradict"},
        {"RANK", "five", "RANK=five in the environment is not a number"},
        {"RANK", "5 ", "is not a number"},
        {"WORLD_SIZE", "-8", "WORLD_SIZE=-8 in the environment is outside of"},
        {"WORLD_SIZE", "99999999999999999999", "WORLD_SIZE"},
        {"MASTER_PORT", "70000", "outside of 1 to 65535"},
        {"MASTER_PORT", "0", "outside of 1 to 65535"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        set_torchrun();
        setenv(bad[i][0], bad[i][1], 1);
        assert_fails(nd_identity_read(&id), ND_ERR_CONFIG, bad[i][2]);
    }
    char longer[400];
    memset(longer, 'a', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    set_torchrun();
    setenv("MASTER_ADDR", longer, 1);
    assert_fails(nd_identity_read(&id), ND_ERR_CONFIG, "MASTER_ADDR");
}

/* torchrun's variables, PMIx, alone: in this order. */
Test(identity, sources_in_order)
{
    setenv("PMIX_NAMESPACE", "slurm.pmix.7.0", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.source, ND_IDENTITY_SINGLE);
    setenv("PMIX_RANK", "3", 1);
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.source, ND_IDENTITY_PMIX);
    cr_assert_eq(id.rank, 3);
    cr_assert_str_eq(id.run_id, "slurm.pmix.7.0");
    set_torchrun();
    assert_ok(nd_identity_read(&id));
    cr_assert_eq(id.source, ND_IDENTITY_ENVIRONMENT);
    cr_assert_eq(id.rank, 5);
}

Test(identity, several_tasks_of_srun_are_not_alone)
{
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    assert_ok(nd_identity_read(&id));
    assert_ok(nd_identity_join(&id)); /* it is in no step */
    setenv("SLURM_STEP_ID", "0", 1);
    assert_ok(nd_identity_read(&id)); /* ndtrain plan and check may */
    assert_fails(nd_identity_join(&id), ND_ERR_CONFIG, "srun started 4 ndtrain without PMIx");
    setenv("SLURM_STEP_ID", "4294967290", 1); /* the shell of salloc */
    assert_ok(nd_identity_join(&id));
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_STEP_NUM_TASKS", "1", 1);
    assert_ok(nd_identity_join(&id));
}

Test(identity, a_slurm_job_calls_the_host_by_its_node)
{
    char host[128];
    setenv("SLURMD_NODENAME", "c7", 1);
    nd_identity_host(host, sizeof host);
    cr_assert_str_neq(host, "c7");
    setenv("SLURM_JOB_ID", "12", 1);
    nd_identity_host(host, sizeof host);
    cr_assert_str_eq(host, "c7");
}
