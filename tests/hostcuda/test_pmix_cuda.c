// SPDX-License-Identifier: Apache-2.0
/* Ranks on the doubles that a PMIx server started (tests/launch/fake_pmix), without ndlaunch: who
 * fails alone says why before a peer can see it. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/launch/launched.h"
#include "tests/support/inputs.h"

enum { RANKS = 2 };

static tempdir dir;
static launched ranks[RANKS];

static void setup(void)
{
    inputs_write_text(&dir, INPUTS_TEXT_MAX);
    inputs_write_model(&dir, 32, 64, 2);
    setenv("LD_LIBRARY_PATH", ND_FAKE_PMIX, 1);
    setenv("FAKE_PMIX_FOLDER", dir.path, 1);
    setenv("FAKE_PMIX_SIZE", "2", 1);
    setenv("FAKE_PMIX_LOCAL_SIZE", "2", 1);
    setenv("FAKE_PMIX_KILL", "yes", 1);
    setenv("PMIX_NAMESPACE", "fake", 1);
}

TEMPDIR_SUITE(pmix_cuda, setup, .timeout = 280);

static void start(void)
{
    char command[2048], name[32];
    snprintf(command, sizeof command,
             "exec " ND_HOSTCUDA "/ndtrain train --device cuda --dp-shard-size -1 --precision fp32 "
             "--sequence-length 32 --set model.config=%s/model.json --set data.path=%s/text.txt "
             "--set data.tokenizer=bytes --set data.validation_path= --set "
             "train.validation_interval=0 --set log.interval=1 --num-steps 1000000 --set "
             "output.save_model=false --set output.dir=%s/run",
             dir.path, dir.path, dir.path);
    for (int rank = 0; rank < RANKS; rank++) {
        snprintf(name, sizeof name, "%d", rank);
        setenv("PMIX_RANK", name, 1);
        snprintf(name, sizeof name, "rank%d", rank);
        launched_start(&ranks[rank], &dir, name,
                       (const char *[]){"/bin/bash", "-c", command, NULL});
    }
}

/* Rank 0 calls PMIx_Abort before it aborts its communicators, which takes for ever here. */
Test(pmix_cuda, the_reason_is_out_before_communicators_are_aborted)
{
    char code[8] = "";
    setenv("ND_DOUBLE_NCCL_ABORT", "hangs", 1);
    start();
    launched_until(&ranks[0], "\nstep ", 2);
    cr_assert_eq(unlink(tempdir_file(&dir, "run/metrics.jsonl")), 0);
    int ended = launched_wait(&ranks[0], LAUNCHED_SECONDS);
    cr_assert_eq(ended, 128 + SIGKILL, "%d: %s", ended, launched_read(&ranks[0]));
    launched_until(&ranks[0], "metrics.jsonl was deleted", 1);
    cr_assert_null(strstr(ranks[0].text, "ncclCommAbort"), "%s", ranks[0].text);
    FILE *f = fopen(tempdir_file(&dir, "aborted.0"), "r");
    cr_assert_not_null(f);
    cr_assert_not_null(fgets(code, sizeof code, f));
    fclose(f);
    cr_assert_str_eq(code, "73");
    launched_expect(&ranks[1], 128 + SIGKILL);
    cr_assert_null(strstr(launched_read(&ranks[1]), "was lost"), "%s", ranks[1].text);
}

/* Each task sees one GPU: local rank 0 warns, and the job trains. */
Test(pmix_cuda, tasks_that_see_one_gpu_each_are_warned)
{
    setenv("ND_DOUBLE_DEVICES", "1", 1);
    start();
    launched_until(&ranks[0], "each of 2 workers of this host sees one GPU alone", 1);
    launched_until(&ranks[0], "\nstep ", 2);
    launched_end(&ranks[0], SIGTERM, 75);
    launched_wait(&ranks[1], LAUNCHED_SECONDS);
    cr_assert_not_null(strstr(launched_read(&ranks[0]), "srun --gpus-per-node=2"), "%s",
                       ranks[0].text);
    cr_assert_null(strstr(launched_read(&ranks[1]), "sees one GPU alone"), "%s", ranks[1].text);
}
