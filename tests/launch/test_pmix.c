// SPDX-License-Identifier: Apache-2.0
/* Ranks that a PMIx server started, with the stand-in of fake_pmix.c: also a server that does not
 * answer. tests/slurm has the true one. */
#include <pmix.h>
#include <signal.h>
#include <string.h>

#include "tests/launch/tiny_job.h"

enum { RANKS_MAX = 4 };

static tempdir dir;
static launched ranks[RANKS_MAX];

static void setup(void)
{
    tiny_write_inputs(&dir);
    setenv("LD_LIBRARY_PATH", launched_program("tests/launch/fake_pmix"), 1);
    setenv("FAKE_PMIX_FOLDER", dir.path, 1);
    setenv("PMIX_NAMESPACE", "fake", 1);
}

TEMPDIR_SUITE(fake_pmix, setup, .timeout = 280);

/* Rank `odd` has flags of its own besides; -1: none has. */
static void start_with(int count, int per_host, const char *const *further, int odd,
                       const char *const *flags)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS(launched_program("ndtrain"), "train", "--dp-shard-size", "-1", "--set",
                       "log.interval=1", "--num-steps", "4"));
    tiny_add(&a, tiny_flags(&dir, "ranks"));
    tiny_add(&a, further);
    tiny_arguments of_odd = a;
    tiny_add(&of_odd, flags);
    setenv("FAKE_PMIX_SIZE", printed("%d", count), 1);
    setenv("FAKE_PMIX_LOCAL_SIZE", printed("%d", per_host), 1);
    for (int rank = 0; rank < count; rank++) {
        setenv("PMIX_RANK", printed("%d", rank), 1);
        launched_start(&ranks[rank], &dir, printed("rank%d", rank),
                       rank == odd ? of_odd.list : a.list);
    }
}

static void start(int count, const char *const *further)
{
    start_with(count, count, further, -1, NULL);
}

static const char *const wrong[] = {"--set", "optimizer.lrr=1", NULL};
static const char guess[] = "did you mean optimizer.lr?";

/* How many of the ranks, which have ended, say it. */
static int count_saying(int count, const char *words)
{
    int said = 0;
    for (int rank = 0; rank < count; rank++) {
        said += strstr(launched_read(&ranks[rank]), words) != NULL;
    }
    return said;
}

Test(fake_pmix, ranks_train_as_under_ndlaunch)
{
    launched one;
    start(4, NULL);
    launched_expect_all(ranks, 4, 0);
    tiny_ndlaunch(&one, &dir, "one", 4, WORDS("--num-steps", "4"));
    launched_expect(&one, 0);
    tiny_expect_same(&dir, "ranks", "one", 4);
}

Test(fake_pmix, a_server_that_is_deaf_at_the_start_is_code_124)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Init", 1);
    setenv("SLURM_PMIX_TIMEOUT", "3", 1);
    start(1, NULL);
    assert_ends(
        &ranks[0], 124,
        "PMIx_Init did not return within 3 s: the PMIx server of this node does not answer");
}

Test(fake_pmix, the_code_tells_why_the_server_gives_no_answer)
{
    static const struct {
        int error, code;
        const char *words;
    } cases[] = {{PMIX_ERR_NOMEM, 71, "out of host memory for PMIx ("},
                 {PMIX_ERR_OUT_OF_RESOURCE, 71, "PMIx: reading pmix.job.size failed"},
                 {PMIX_ERR_TIMEOUT, 124, "PMIx: reading pmix.job.size failed"},
                 {PMIX_ERR_UNREACH, 74, "PMIx: reading pmix.job.size failed"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("FAKE_PMIX_GET", printed("%d", cases[i].error), 1);
        start(1, NULL);
        assert_ends(&ranks[0], cases[i].code, cases[i].words);
    }
}

Test(fake_pmix, numbers_are_read_and_pointers_refused)
{
    setenv("FAKE_PMIX_TYPE", printed("%d", PMIX_PROC_RANK), 1);
    start(2, NULL);
    launched_expect_all(ranks, 2, 0);
    setenv("FAKE_PMIX_TYPE", printed("%d", PMIX_POINTER), 1);
    start(1, NULL);
    assert_ends(&ranks[0], 1, "is no number of a known type");
}

/* The run is complete: its code stands. */
Test(fake_pmix, a_server_that_is_deaf_at_the_end_does_not_change_the_code)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Finalize", 1);
    setenv("SLURM_PMIX_TIMEOUT", "3", 1);
    start(2, NULL);
    launched_expect_all(ranks, 2, 0);
    assert_says(&ranks[0], "step 4/4", "PMIx_Finalize did not return within 3 s");
    assert_says(&ranks[1], "PMIx_Finalize did not return within 3 s");
}

/* The server's own deadline should come first; this one does not know it. */
Test(fake_pmix, a_meeting_without_an_end_is_code_124)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Fence", 1);
    start(2, WORDS("--rdzv-timeout-seconds", "1"));
    launched_expect_all(ranks, 2, 124);
    assert_says(&ranks[0], "PMIx_Fence at 'place of the store' did not return within 4 s: other "
                           "ranks are missing there");
}

/* PMIx_Abort has ten seconds to reach the server. */
Test(fake_pmix, a_failure_that_the_server_does_not_hear_of_keeps_its_code)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Abort", 1);
    start(1, wrong);
    assert_ends(&ranks[0], 2, guess, "PMIx_Abort did not return within 10 s");
}

/* Two hosts whose ranks read the same wrong setting, of which rank 0 speaks first: the end of the
 * job reaches the others, in most cases before they print it too. */
Test(fake_pmix, a_failure_before_the_ranks_meet_ends_the_job)
{
    setenv("FAKE_PMIX_KILL", "yes", 1);
    start_with(4, 2, wrong, -1, NULL);
    launched_expect_all(ranks, 4, 128 + SIGKILL);
    cr_assert_geq(count_saying(4, guess), 1);
}

/* The others wait for it and have nothing to report. */
Test(fake_pmix, a_rank_that_alone_fails_before_the_ranks_meet_reports_it)
{
    setenv("FAKE_PMIX_KILL", "yes", 1);
    start_with(4, 2, NULL, 3, wrong);
    launched_expect_all(ranks, 4, 128 + SIGKILL);
    cr_assert_eq(count_saying(4, guess), 1);
    assert_says(&ranks[3], guess);
    cr_assert_eq(count_saying(4, "was lost"), 0);
}

Test(fake_pmix, the_server_is_told_the_code_of_a_failure)
{
    start(1, wrong);
    launched_expect_all(ranks, 1, 2);
    cr_assert_eq(launched_shell("test \"$(cat %s/aborted.0)\" = 2", dir.path), 0);
}
