// SPDX-License-Identifier: Apache-2.0
/* The batch scripts on two nodes of a real Slurm, one ndlaunch on each. */
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/slurm/slurm_job.h"

static tempdir dir;
static launched l;

static void setup(void)
{
    slurm_setup(&dir);
}

TEMPDIR_SUITE(batch, setup, .timeout = 600);

/* An executable shell script in place of ndlaunch; $real is the true one. */
static void replace_ndlaunch(const char *body)
{
    const char *text = printed("#!/bin/sh\nreal=%s\n%s\n", getenv("ND_LAUNCH"), body);
    tempdir_write(&dir, "ndlaunch", text, strlen(text));
    cr_assert_eq(chmod(dir.name, 0755), 0);
    setenv("ND_LAUNCH", dir.name, 1);
}

/* A batch script trains as ndlaunch does on one host, in as many steps; returns the job's id. */
static int trains_as_one_host(const char *config, const char *script, const char *const *further,
                              int steps)
{
    slurm_train_on_one_host(&dir, config, further);
    int job = slurm_submit(&l, &dir, "two", NULL, script, further);
    slurm_expect(&l, job, 0);
    tiny_expect_same(&dir, "two", "one", steps);
    return job;
}

Test(batch, two_nodes_of_four_workers_train_as_one_host_bit_for_bit)
{
    int job = trains_as_one_host("tp_hsdp.yaml", "tp_hsdp.sbatch", WORDS("--num-steps", "5"), 5);
    const char *record = tiny_record(&dir, "two");
    cr_assert_not_null(strstr(record, printed("\"slurm_job_id\": \"%d\"", job)), "%s", record);
    cr_assert_not_null(strstr(record, "\"slurm_nodes\": \"node[1-2]\""), "%s", record);
    cr_assert_not_null(strstr(record, "\"nnodes\": 2"), "%s", record);
    const char *hosts = strstr(record, "\"hosts\": [");
    cr_assert(hosts && strstr(hosts, "\"node1\"") && strstr(hosts, "\"node2\""), "%s", record);
}

Test(batch, context_parallelism_on_two_nodes_trains_as_one_host_bit_for_bit)
{
    trains_as_one_host("cp.yaml", "cp.sbatch", WORDS("--num-steps", "3"), 3);
}

/* The script's own precision; only its model and its data are replaced by small ones. */
Test(batch, fp8_on_two_nodes_trains_as_one_host_bit_for_bit)
{
    trains_as_one_host("llama-3.1-8b/fp8.yaml", "fp8.sbatch",
                       WORDS("--precision", "fp8", "--num-steps", "5", "--set", "data.format=text",
                             "--set", "data.tokenizer=bytes"),
                       5);
    assert_says(&l, "13 of 15 linears in FP8, weights gathered as codes");
    const char *record = tiny_record(&dir, "two");
    cr_assert_not_null(strstr(record, "\"train.precision\": \"fp8\""), "%s", record);
}

/* Two GPUs of each node are the job's. A script of the user's own, below salloc or sbatch. */
Test(batch, workers_per_node_are_counted)
{
    const char *text = printed("#!/bin/sh\n#SBATCH --nodes=2\n%s \"$@\"\n",
                               slurm_source("scripts/slurm/launch_nodes"));
    tempdir_write(&dir, "own.sh", text, strlen(text));
    const char *const two[] = {"--gpus-per-node=2", NULL};
    const char *const further[] = {"--dp-shard-size",  "-1",   "--num-steps", "2",
                                   "--nproc-per-node", "auto", NULL};
    int job = slurm_submit(&l, &dir, "counted", two, dir.name, further);
    assert_job_ends(&l, job, 0, "ndlaunch: 4 workers, mesh 1 x 4 x 1 x 1 ",
                    "nnodes 2, nproc_per_node 2,", "step 2/2");
}

/* Options before the script go before its own. */
Test(batch, one_node_needs_no_other_script)
{
    int job = slurm_submit(&l, &dir, "single", WORDS("--nodes=1"), "cp.sbatch",
                           WORDS("--num-steps", "2"));
    assert_job_ends(&l, job, 0, "step 2/2");
    cr_assert_null(strstr(l.text, "nnodes"), "%s", l.text);
}

/* As from a terminal: salloc runs a command within its allocation. */
Test(batch, an_allocation_of_salloc_does_as_well)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("/usr/bin/env", "salloc", "--nodes=2", "--ntasks-per-node=1",
                       slurm_source("scripts/slurm/launch_nodes"), "--dp-shard-size", "4",
                       "--num-steps", "2"));
    tiny_add(&a, slurm_flags(&dir, "salloc"));
    launched_start(&l, &dir, "salloc", a.list);
    assert_ends(&l, 0, "ndlaunch: 4 workers", "nnodes 2, nproc_per_node 2,", "step 2/2");
}

/* A suite that cannot run must not pass in CI. Without its path munged stands for one that is not
 * installed. */
Test(batch, a_machine_without_slurm_fails_in_ci_and_skips_elsewhere)
{
    static const char *const ci[] = {"CI=true", "CI="};
    for (int i = 0; i < 2; i++) {
        launched_start(&l, &dir, "without",
                       WORDS("/usr/bin/env", "PATH=/usr/bin:/bin", ci[i],
                             slurm_source("tests/slurm/private_slurm"), "true"));
        int code = launched_wait(&l, LAUNCHED_SECONDS);
        cr_assert_eq(code, i == 0 ? 1 : 77, "%d: %s", code, launched_read(&l));
        assert_says(&l, "private_slurm: Slurm cannot run here: munged is not installed");
        cr_assert_eq(launched_count(&l, "\n"), 1, "%s", l.text);
    }
}

/* A copy of what a job needs of the project, in a folder with spaces in its name, as are output and
 * data. The configuration is the project's own file, relative to it. */
Test(batch, a_project_below_a_path_with_spaces)
{
    cr_assert_eq(
        launched_shell("mkdir -p '%s/a project  of mine/build' && cd '%s/a project  of mine' "
                       "&& cp -r '%s/scripts' '%s/configs' . && cp '%s/ndlaunch' "
                       "'%s/ndtrain' build/ && cp ../text.txt 'the text.txt'",
                       dir.path, dir.path, getenv("ND_SOURCE_ROOT"), getenv("ND_SOURCE_ROOT"),
                       launched_build_root(), launched_build_root()),
        0);
    unsetenv("ND_LAUNCH");
    int job = slurm_submit(&l, &dir, "spaces", NULL,
                           tempdir_file(&dir, "a project  of mine/scripts/slurm/tp_hsdp.sbatch"),
                           WORDS("--num-steps", "2", "--set", "data.path=the text.txt", "--set",
                                 "output.dir=a run", "--log-dir", "some logs"));
    assert_job_ends(&l, job, 0, "step 2/2");
    const char *record = tempdir_file(&dir, "a project  of mine/a run/run.json");
    cr_assert_eq(access(record, R_OK), 0, "%s", record);
}

Test(batch, a_bad_configuration_is_code_2)
{
    int job =
        slurm_submit(&l, &dir, "bad", NULL, "tp_hsdp.sbatch", WORDS("--set", "optimizer.lrr=1"));
    assert_job_ends(&l, job, 2, "optimizer.lrr");
}

Test(batch, a_node_whose_settings_differ_ends_all_with_key_and_both_values)
{
    replace_ndlaunch(
        "[ \"$SLURM_NODEID\" = 1 ] && [ $# -gt 2 ] && set -- \"$@\" --learning-rate 0.25\n"
        "exec \"$real\" \"$@\"");
    int job =
        slurm_submit(&l, &dir, "differs", NULL, "tp_hsdp.sbatch", WORDS("--learning-rate", "0.5"));
    assert_job_ends(&l, job, 2, "optimizer.lr is '0.5' on node 0 (node1)",
                    "'0.25' on node 1 (node2)");
}

Test(batch, a_killed_worker_is_named_with_job_and_node)
{
    int job =
        slurm_submit(&l, &dir, "killed", NULL, "tp_hsdp.sbatch", WORDS("--num-steps", "1000000"));
    launched_until(&l, "\nstep ", 2);
    kill(slurm_worker(job, 5), SIGKILL);
    slurm_expect(&l, job, 137);
    assert_says(&l, printed("rank 5 failed first (host node2, Slurm job %d, pid ", job),
                "signal 9 (Killed)");
}

/* Slurm may signal every process of the step, and ndlaunch passes the signal on: twice is once. */
Test(batch, an_interrupt_of_the_whole_step_ends_it_at_a_step)
{
    int job = slurm_submit(&l, &dir, "interrupt", NULL, "tp_hsdp.sbatch",
                           WORDS("--num-steps", "1000000"));
    launched_until(&l, "\nstep ", 2);
    cr_assert_eq(launched_shell("scancel --signal=INT %d", job), 0);
    slurm_expect(&l, job, 75);
}

/* ndlaunch by itself is right only once per node. */
Test(batch, several_ndlaunch_on_a_node_are_refused)
{
    slurm_run(&l, &dir, "several", WORDS("--nodes=2", "--ntasks=4", "--overcommit"), "ndlaunch",
              slurm_flags(&dir, "several"));
    assert_ends(&l, 2, "srun started 4 ndlaunch on 2 nodes");
}

/* While a job runs its key is in nobody's arguments and environment, and in nothing that Slurm
 * keeps. */
Test(batch, the_key_is_nowhere_to_be_seen_and_term_ends_the_job_at_a_step)
{
    replace_ndlaunch("[ \"$1\" = --make-key ] || exec \"$real\" \"$@\"\n"
                     "\"$real\" \"$@\" && cp \"$2\" \"${0%/*}/copy\"");
    int job =
        slurm_submit(&l, &dir, "key", NULL, "tp_hsdp.sbatch", WORDS("--num-steps", "1000000"));
    launched_until(&l, "\nstep ", 2);
    struct stat st;
    cr_assert_eq(stat(tempdir_file(&dir, "copy"), &st), 0);
    cr_assert_geq(st.st_size, 64);
    /* With -q grep says 0 for a find, also when a process or a file went meanwhile. */
    cr_assert_neq(
        launched_shell("grep -saqFf %s /proc/[0-9]*/cmdline /proc/[0-9]*/environ", dir.name), 0);
    cr_assert_neq(launched_shell("grep -rsaqFf %s %s", dir.name, getenv("ND_SLURM_FOLDER")), 0);
    cr_assert_neq(launched_shell("grep -saqFf %s %s", dir.name, l.output), 0);
    cr_assert_eq(launched_shell("grep -saqFf %s %s", dir.name, dir.name), 0);
    cr_assert_eq(launched_shell("scancel --signal=TERM %d", job), 0);
    assert_job_ends(&l, job, 75, "the job was stopped at a step boundary");
    cr_assert_null(strstr(l.text, "failed first"), "%s", l.text);
}

/* A script without ndlaunch. */
static void write_direct_script(void)
{
    const char *text = printed("#!/bin/sh\nexec srun --mpi=pmix --ntasks=8 --overcommit %s train "
                               "--config-file %s \"$@\"\n",
                               launched_program("ndtrain"), slurm_source("configs/tp_hsdp.yaml"));
    tempdir_write(&dir, "direct.sh", text, strlen(text));
}

/* Slurm looks at time limits and warnings every 30 s; the job's own limit is made shorter than the
 * minute it can be. */
Test(batch, warnings_and_a_time_limit_end_jobs_at_a_step)
{
    launched warned, direct, limited;
    const char *const steps[] = {"--num-steps", "1000000", NULL};
    const char *const minute[] = {"--oversubscribe", "--time=1", NULL};
    const char *const to_step[] = {"--oversubscribe", "--time=1", "--nodes=2", "--signal=USR1@120",
                                   NULL};
    const char *const minutes[] = {"--oversubscribe", "--time=9", NULL};
    write_direct_script();
    int to_shell = slurm_submit(&warned, &dir, "warned", minute, "tp_hsdp.sbatch", steps);
    int to_tasks = slurm_submit(&direct, &dir, "direct", to_step, dir.name, steps);
    int limit = slurm_submit(&limited, &dir, "limited", minutes, "tp_hsdp.sbatch", steps);
    launched_until(&limited, "\nstep ", 2);
    cr_assert_eq(launched_shell("scontrol update jobid=%d EndTime=now+1second", limit), 0);
    assert_job_ends(&warned, to_shell, 75, "the job was stopped at a step boundary");
    assert_job_ends(&direct, to_tasks, 75, "stopped by a signal after step ");
    assert_job_ends(&limited, limit, 75, "the job was stopped at a step boundary");
}

/* Slurm's warning reaches the batch shell: the job saves, requeues itself, and goes on. */
Test(batch, a_warned_job_saves_requeues_itself_and_goes_on)
{
    const char *const further[] = {
        "--num-steps", "500", "--checkpoint-frequency", "100000", "--resume-from-checkpoint",
        "auto",        NULL};
    slurm_train_on_one_host(&dir, "tp_hsdp.yaml", further);
    int job = slurm_submit(&l, &dir, "requeue", NULL, "tp_hsdp.sbatch", further);
    launched_until(&l, "\nstep 20/", 1);
    cr_assert_eq(launched_shell("scancel --batch --signal=USR1 %d", job), 0);
    slurm_until_requeued(&l, job);
    assert_says(&l, "the job is requeued");
    /* Slurm waits two minutes, so that the credential that it has just revoked is not met again;
     * three seconds are enough. */
    cr_assert_eq(launched_shell("sleep 3; scontrol update jobid=%d StartTime=now", job), 0);
    assert_job_ends(&l, job, 0, "resumed after step ");
    tiny_expect_same(&dir, "requeue", "one", 500);
}

/* A job whose launcher of node 0 was lost has nobody to restart it but Slurm, and one that a
 * library has ended is worth another start. The number may stand in the configuration. */
Test(batch, a_job_with_restarts_is_requeued_as_often_after_a_lost_node)
{
    static const char yaml[] = "launch:\n  max_restarts: 1  # after a lost node\n";
    const char *file = printed("%s", tempdir_write(&dir, "restarts.yaml", yaml, sizeof yaml - 1));
    const char *const further[] = {"--config-file", file, "--resume-from-checkpoint", "auto", NULL};
    replace_ndlaunch("[ \"$1\" = --make-key ] && exec $real \"$@\"\n"
                     "echo start ${SLURM_RESTART_COUNT:-0}\n"
                     "exit $((${SLURM_RESTART_COUNT:-0} ? 74 : 134))");
    int job = slurm_submit(&l, &dir, "lost", NULL, "tp_hsdp.sbatch", further);
    slurm_until_requeued(&l, job);
    cr_assert_eq(launched_shell("sleep 3; scontrol update jobid=%d StartTime=now", job), 0);
    assert_job_ends(&l, job, 74, "start 0", "start 1");
}
