// SPDX-License-Identifier: Apache-2.0
/*
 * Ranks that are stopped, killed, stuck or fail alone while eight processes train with device cuda
 * over the doubles under ndlaunch. The mesh is 2 x 2 x 2: the members of a group that lacks rank 5
 * are not all ranks, and others wait for those.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/launch/launched.h"
#include "tests/support/inputs.h"

static tempdir dir;

static void setup(void)
{
    inputs_write_text(&dir, INPUTS_TEXT_MAX);
    inputs_write_model(&dir, 32, 64, 2);
}

TEMPDIR_SUITE(faults_cuda, setup, .timeout = 280);

static void start(launched *l, const char *options)
{
    char command[2048];
    snprintf(command, sizeof command,
             "exec " ND_HOSTCUDA "/ndlaunch --device cuda --workers 8 --dp-replicate-size 2 "
             "--dp-shard-size 2 --tp-size 2 --precision fp32 --sequence-length 32 --set "
             "model.config=%s/model.json --set data.path=%s/text.txt --set data.tokenizer=bytes "
             "--set data.validation_path= --set train.validation_interval=0 --set log.interval=1 "
             "--num-steps 1000000 --set output.save_model=false --set output.dir=%s/run %s",
             dir.path, dir.path, dir.path, options);
    launched_start(l, &dir, "out", (const char *[]){"/bin/bash", "-c", command, NULL});
}

/* Some rank said it; the order of those that wait in different groups is no matter. */
static void assert_said_after(const launched *l, const char *words, const char *before)
{
    const char *at = strstr(l->text, before);
    cr_assert_not_null(at, "no \"%s\" in:\n%s", before, l->text);
    cr_assert_not_null(strstr(at, words), "no \"%s\" after \"%s\" in:\n%s", words, before, l->text);
}

static void start_training(launched *l, const char *options)
{
    start(l, options);
    launched_until(l, "\nstep ", 2);
}

/* All that wait say which rank they wait for, and that its process is stopped. The deadline is far
 * above what a rank of eight computes between two collectives on two busy cores. */
static void train_and_stop_rank_5(launched *l)
{
    char process[64];
    start_training(l, "--comm-timeout-seconds 10");
    pid_t stopped = launched_child(l, 5);
    kill(stopped, SIGSTOP);
    snprintf(process, sizeof process, "(process %d is stopped by a signal", (int)stopped);
    launched_expect(l, 124);
    assert_says(l, process, ", operation ");
    assert_said_after(l, "rank 5 ", "it said: rank ");
    assert_said_after(l, process, "it said: rank "); /* also where it is in no group of theirs */
}

/* Rank 0 alone writes metrics.jsonl, and ends where it is deleted. */
static void train_and_delete_the_file_of_rank_0(launched *l)
{
    start_training(l, ""); /* the deadline is 600 s */
    cr_assert_eq(unlink(tempdir_file(&dir, "run/metrics.jsonl")), 0);
    launched_expect(l, 73);
    assert_says(l, "rank 0 failed first", "metrics.jsonl was deleted");
}

Test(faults_cuda, a_stopped_rank_is_named_by_all)
{
    launched l;
    train_and_stop_rank_5(&l);
    assert_says(&l, "for rank 5; rank 5 ");
}

Test(faults_cuda, a_killed_rank_is_named_by_its_signal)
{
    launched l;
    start_training(&l, "");
    kill(launched_child(&l, 5), SIGKILL);
    launched_expect(&l, 128 + SIGKILL);
    assert_says(&l, "rank 5 failed first");
}

/* CUDA takes no more, and its call waits for work that waits for the stopped rank. */
Test(faults_cuda, a_host_inside_of_cuda_is_watched)
{
    launched l;
    setenv("ND_DOUBLE_QUEUE", "2", 1);
    train_and_stop_rank_5(&l);
    assert_says(&l, "while the host had not looked for ");
}

Test(faults_cuda, an_abort_that_hangs_keeps_the_sentence)
{
    launched l;
    setenv("ND_DOUBLE_NCCL_ABORT", "hangs", 1);
    train_and_stop_rank_5(&l);
    assert_says(&l, "ncclCommAbort did not return within 5 s: rank ");
}

/* It waits for nobody; it speaks and gives up before it closes what it has. */
Test(faults_cuda, a_rank_that_fails_alone_frees_nothing)
{
    launched l;
    setenv("ND_DOUBLE_FREE", "hangs", 1);
    train_and_delete_the_file_of_rank_0(&l);
}

Test(faults_cuda, a_rank_that_fails_alone_and_cannot_abort_ends_with_its_reason)
{
    launched l;
    setenv("ND_DOUBLE_NCCL_ABORT", "hangs", 1);
    train_and_delete_the_file_of_rank_0(&l);
    assert_says(&l, "ncclCommAbort did not return within 5 s: ");
}
