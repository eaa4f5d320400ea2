// SPDX-License-Identifier: Apache-2.0
/* Trainers without a launcher of ours, with the variables that torchrun --no-python sets: rank 0
 * hosts the store. */
#include <signal.h>
#include <string.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/port.h"
#include "tests/support/variables.h"

enum { RANKS = 4 };

static tempdir dir;
static launched ranks[RANKS];

static void setup(void)
{
    tiny_write_inputs(&dir);
    setenv("XDG_RUNTIME_DIR", dir.path, 1); /* for the key */
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", printed("%d", port_reserve()), 1);
    SET_VARIABLES("WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4", "TORCHELASTIC_RUN_ID=some-run");
}

TEMPDIR_SUITE(environment, setup, .timeout = 280);

/* All ranks with these steps; the one that differs has the further flag, too. */
static void start(const char *steps, int different, const char *flag)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS(launched_program("ndtrain"), "train", "--dp-shard-size", "-1", "--set",
                       "log.interval=1", "--num-steps", steps));
    tiny_add(&a, tiny_flags(&dir, "ranks"));
    for (int rank = RANKS - 1; rank >= 0; rank--) {
        const char *number = printed("%d", rank);
        setenv("RANK", number, 1);
        setenv("LOCAL_RANK", number, 1);
        tiny_arguments one = a;
        tiny_add(&one, WORDS(rank == different ? flag : NULL));
        launched_start(&ranks[rank], &dir, printed("rank%d", rank), one.list);
    }
}

/* Also the ranks that come before rank 0, which hosts the store. */
Test(environment, ranks_train_as_under_ndlaunch)
{
    launched one;
    start("4", -1, NULL); /* the axis that is -1 takes WORLD_SIZE */
    launched_expect_all(ranks, RANKS, 0);
    tiny_ndlaunch(&one, &dir, "one", RANKS, WORDS("--num-steps", "4"));
    launched_expect(&one, 0);
    tiny_expect_same(&dir, "ranks", "one", 4);
}

static void kill_one(int victim, int witness, const char *words)
{
    start("1000000", -1, NULL);
    launched_until(&ranks[0], "\nstep ", 2);
    kill(ranks[victim].pid, SIGKILL);
    for (int rank = 0; rank < RANKS; rank++) {
        int code = launched_wait(&ranks[rank], LAUNCHED_SECONDS);
        cr_assert_eq(code, rank == victim ? 137 : 74, "rank %d: %d: %s", rank, code,
                     launched_read(&ranks[rank]));
    }
    assert_says(&ranks[witness], words);
}

Test(environment, a_killed_rank_ends_the_others_and_rank_0_names_it)
{
    kill_one(2, 0, "error: rank 2 "); /* the store sees it, or the transport */
}

Test(environment, a_killed_rank_0_ends_the_others)
{
    kill_one(0, 1, "rank 0");
}

static void differs(const char *flag, const char *words)
{
    start("4", 2, flag);
    for (int rank = 0; rank < RANKS; rank++) {
        int code = launched_wait(&ranks[rank], LAUNCHED_SECONDS);
        /* 74: it saw another rank end before it failed */
        cr_assert(code == 2 || (code == 74 && rank != 2), "rank %d: %d: %s", rank, code,
                  launched_read(&ranks[rank]));
    }
    assert_says(&ranks[2], words, "' on rank 2 (");
}

Test(environment, different_settings_stop_all_with_key_and_both_values)
{
    differs("--learning-rate=0.125", "optimizer.lr is '");
    assert_says(&ranks[2], "'0.125' on rank 2 (");
}

/* Data are compared by their content, as the same data may have another path on each host. */
Test(environment, different_data_stop_all)
{
    char other[4096];
    memset(other, 'b', sizeof other);
    differs(printed("--data-path=%s", tempdir_write(&dir, "other.txt", other, sizeof other)),
            "data.path is '");
}

Test(environment, a_signal_to_one_rank_ends_all_at_the_same_step)
{
    start("1000000", -1, NULL);
    launched_until(&ranks[0], "\nstep ", 2);
    kill(ranks[3].pid, SIGTERM);
    launched_expect_all(ranks, RANKS, 75);
    const char *step = strstr(ranks[3].text, "stopped by a signal after step ");
    cr_assert_not_null(step, "%s", ranks[3].text);
    const char *words = printed("%.*s", (int)strcspn(step, "\n"), step);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_says(&ranks[rank], words);
    }
}
