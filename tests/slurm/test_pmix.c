// SPDX-License-Identifier: Apache-2.0
/* srun --mpi=pmix ndtrain: workers without a launcher, on two nodes of a real Slurm. */
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

TEMPDIR_SUITE(pmix, setup, .timeout = 600);

#define TWO_NODES "--nodes=2", "--ntasks=8", "--overcommit", "--mpi=pmix"
static const char *const two_nodes[] = {TWO_NODES, NULL};

/* Eight tasks on two nodes, or what the options say. */
static void start(const char *name, const char *const *options, const char *program,
                  const char *const *further)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("train", "--config-file", slurm_source("configs/tp_hsdp.yaml")));
    tiny_add(&a, slurm_flags(&dir, name));
    tiny_add(&a, further);
    slurm_run(&l, &dir, name, options, program, a.list);
}

/* A run without an end, once its second step is done. */
static void train(const char *name, const char *const *options)
{
    start(name, options, "ndtrain", WORDS("--num-steps", "1000000"));
    launched_until(&l, "\nstep ", 2);
}

Test(pmix, eight_tasks_on_two_nodes_train_as_ndlaunch_does_bit_for_bit)
{
    slurm_train_on_one_host(&dir, "tp_hsdp.yaml", WORDS("--num-steps", "5"));
    start("two", two_nodes, "ndtrain", WORDS("--num-steps", "5"));
    launched_expect(&l, 0);
    tiny_expect_same(&dir, "two", "one", 5);
    const char *record = tiny_record(&dir, "two");
    cr_assert_not_null(strstr(record, "\"started_by\": \"PMIx\""), "%s", record);
    cr_assert_not_null(strstr(record, "\"slurm_nodes\": \"node[1-2]\""), "%s", record);
    cr_assert_not_null(strstr(record, "\"node2\""), "%s", record);
    cr_assert_null(strstr(record, "\"slurm_job_id\": null"), "%s", record);
}

/* Ranks that go round the nodes have no adjacent rank on theirs, and the same numbers. */
Test(pmix, a_cyclic_distribution_gives_the_same)
{
    start("block", two_nodes, "ndtrain", WORDS("--num-steps", "3"));
    launched_expect(&l, 0);
    start("cyclic", WORDS(TWO_NODES, "--distribution=cyclic"), "ndtrain",
          WORDS("--num-steps", "3"));
    launched_expect(&l, 0);
    tiny_expect_same(&dir, "cyclic", "block", 3);
}

Test(pmix, a_bad_configuration_is_code_2_said_once)
{
    start("bad", two_nodes, "ndtrain", WORDS("--set", "optimizer.lrr=1"));
    assert_ends(&l, 2, "did you mean optimizer.lr?");
    cr_assert_leq(launched_count(&l, "optimizer.lrr"), 4, "%s",
                  l.text); /* once, but for a very slow end */
}

Test(pmix, another_number_of_tasks_than_the_mesh_is_code_2)
{
    start("four", WORDS(TWO_NODES, "--ntasks=4"), "ndtrain", NULL);
    assert_ends(&l, 2, "the configuration needs 8 workers, but this job has 4 (PMIx)");
}

/* launch.rdzv_endpoint says where rank 0 listens, which must be an address of its host. */
Test(pmix, rank_0_listens_where_the_endpoint_says)
{
    start("named", two_nodes, "ndtrain",
          WORDS("--num-steps", "2", "--rdzv-endpoint", "127.0.0.1:0"));
    launched_expect(&l, 0);
    start("foreign", two_nodes, "ndtrain",
          WORDS("--num-steps", "2", "--rdzv-endpoint", "192.0.2.77:0"));
    assert_ends(&l, 2, "192.0.2.77 is not an address of this host");
}

Test(pmix, a_node_whose_settings_differ_ends_all_with_key_and_both_values)
{
    const char *text =
        printed("#!/bin/sh\n[ \"$SLURM_NODEID\" = 1 ] && set -- \"$@\" --learning-rate 0.25\n"
                "exec %s \"$@\"\n",
                launched_program("ndtrain"));
    tempdir_write(&dir, "ndtrain", text, strlen(text));
    cr_assert_eq(chmod(dir.name, 0755), 0);
    start("differs", two_nodes, dir.name, WORDS("--learning-rate", "0.5"));
    assert_ends(&l, 2, "optimizer.lr is '0.5' on rank 0 (node1)", "'0.25' on rank 4 (node2)");
}

Test(pmix, a_failure_of_one_rank_is_the_code_of_srun)
{
    /* Rank 0 cannot write its folder; the others learn of it only by the end of the job. */
    const char *out = printed("output.dir=%s/text.txt/below", dir.path);
    start("cannot", two_nodes, "ndtrain", WORDS("--set", out));
    assert_ends(&l, 73, "text.txt/below");
}

static void kill_rank(int rank, const char *words)
{
    train(printed("kill%d", rank), two_nodes);
    cr_assert_eq(kill(slurm_worker(slurm_current_job(), rank), SIGKILL), 0);
    launched_expect(&l, 74); /* KillOnBadExit is 0 here: it is our end of the job */
    assert_says(&l, words);
    cr_assert_null(strstr(l.text, "the deadline"), "%s", l.text);
}

Test(pmix, a_killed_rank_ends_the_step_and_is_named)
{
    kill_rank(5, "rank 5 (node2) was lost");
    kill_rank(0, "rank 0, which hosts the store, was lost");
}

/* launch.comm_timeout_seconds is the bound: a rank that waits for the frozen one names it and ends
 * the step. */
Test(pmix, a_frozen_rank_is_named_within_the_deadline)
{
    start("frozen", two_nodes, "ndtrain",
          WORDS("--num-steps", "1000000", "--comm-timeout-seconds", "10"));
    launched_until(&l, "\nstep ", 2);
    cr_assert_eq(kill(slurm_worker(slurm_current_job(), 5), SIGSTOP), 0);
    assert_ends(&l, 124, "; rank 5 has not answered"); /* of a rank that waits for it */
}

static void ends_at_a_step(const char *name, const char *const *options)
{
    train(name, options);
    cr_assert_eq(launched_shell("scancel --signal=TERM %d", slurm_current_job()), 0);
    launched_expect(&l, 75);
    const char *step = strstr(launched_read(&l), "stopped by a signal after step ");
    cr_assert_not_null(step, "%s", l.text);
    const size_t number = strcspn(step, "0123456789");
    const size_t end = number + strspn(step + number, "0123456789");
    const char *words = printed("%.*s", (int)end, step);
    cr_assert_eq(launched_count(&l, words), 8, "\"%s\" in: %s", words, l.text);
}

/* Also where Slurm kills at the first bad exit. */
Test(pmix, term_ends_all_ranks_at_the_same_step)
{
    ends_at_a_step("term", two_nodes);
    ends_at_a_step("bad-exit", WORDS(TWO_NODES, "--kill-on-bad-exit=1"));
}

/* Signals to srun itself, as a batch script passes them on. */
Test(pmix, usr1_to_srun_reaches_all_ranks)
{
    train("usr1", two_nodes);
    launched_end(&l, SIGUSR1, 75);
    assert_says(&l, "stopped by a signal after step ");
}

Test(pmix, tasks_without_pmix_are_refused)
{
    start("none", WORDS(TWO_NODES, "--mpi=none"), "ndtrain", NULL);
    assert_ends(&l, 2, "srun started 8 ndtrain without PMIx", "--mpi=pmix");
}

/* A library that cannot be opened stands for one that is missing. */
Test(pmix, a_missing_library_is_a_sentence_only_when_pmix_was_asked_for)
{
    tempdir_write(&dir, "libpmix.so.2", "none", 4);
    setenv("LD_LIBRARY_PATH", dir.path, 1);
    start("library", two_nodes, "ndtrain", NULL);
    assert_ends(&l, 2, "the PMIx library cannot be opened");
    const char *const one[] = {"--nodes=1", "--ntasks=1", "--mpi=none", NULL};
    const char *const mesh[] = {"--num-steps=2",     "--num-processes=1", "--dp-replicate-size=1",
                                "--dp-shard-size=1", "--tp-size=1",       NULL};
    start("alone", one, "ndtrain", mesh);
    launched_expect(&l, 0);
}
