// SPDX-License-Identifier: Apache-2.0
/* Ranks that a PMIx server started, with the stand-in of fake_pmix.c: also a server that does not
 * answer. tests/slurm has the true one. */
#include <string.h>

#include "tests/launch/tiny_job.h"

enum { RANKS_MAX = 4 };

static tempdir dir;
static launched ranks[RANKS_MAX];

static void setup(void)
{
    char folder[PATH_MAX];
    tempdir_make(&dir);
    tiny_write_inputs(&dir);
    snprintf(folder, sizeof folder, "%s/tests/launch/fake_pmix", launched_build_root());
    setenv("LD_LIBRARY_PATH", folder, 1);
    setenv("FAKE_PMIX_FOLDER", dir.path, 1);
    setenv("PMIX_NAMESPACE", "fake", 1);
}

static void teardown(void)
{
    launched_remove(&dir);
}

TestSuite(fake_pmix, .init = setup, .fini = teardown, .timeout = 280);

static void start(int count, const char *const *further)
{
    char program[PATH_MAX], number[16], name[32];
    tiny_arguments a = {0};
    snprintf(program, sizeof program, "%s/ndtrain", launched_build_root());
    tiny_add(&a, (const char *[]){program, "train", "--dp-shard-size", "-1", "--set",
                                  "log.interval=1", "--num-steps", "4", NULL});
    tiny_add(&a, tiny_flags(&dir, "ranks"));
    tiny_add(&a, further);
    snprintf(number, sizeof number, "%d", count);
    setenv("FAKE_PMIX_SIZE", number, 1);
    setenv("FAKE_PMIX_LOCAL_SIZE", number, 1);
    for (int rank = 0; rank < count; rank++) {
        snprintf(number, sizeof number, "%d", rank);
        snprintf(name, sizeof name, "rank%d", rank);
        setenv("PMIX_RANK", number, 1);
        launched_start(&ranks[rank], &dir, name, a.list);
    }
}

static void expect(int count, int code)
{
    for (int rank = 0; rank < count; rank++) {
        int got = launched_wait(&ranks[rank], LAUNCHED_SECONDS);
        cr_assert_eq(got, code, "rank %d: %d: %s", rank, got, launched_read(&ranks[rank]));
    }
}

Test(fake_pmix, ranks_train_as_under_ndlaunch)
{
    launched one;
    static char whole[8192], apart[8192];
    start(4, NULL);
    expect(4, 0);
    tiny_ndlaunch(&one, &dir, "one", 4, (const char *[]){"--num-steps", "4", NULL});
    cr_assert_eq(launched_wait(&one, LAUNCHED_SECONDS), 0, "%s", launched_read(&one));
    tiny_metrics(&dir, "ranks", apart, sizeof apart);
    tiny_metrics(&dir, "one", whole, sizeof whole);
    cr_assert_str_eq(apart, whole);
}

Test(fake_pmix, a_server_that_is_deaf_at_the_start_is_code_124)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Init", 1);
    setenv("SLURM_PMIX_TIMEOUT", "3", 1);
    start(1, NULL);
    expect(1, 124);
    assert_says(&ranks[0], "PMIx_Init did not return within 3 s: the PMIx server of this node does "
                           "not answer");
}

/* The run is complete: its code stands. */
Test(fake_pmix, a_server_that_is_deaf_at_the_end_does_not_change_the_code)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Finalize", 1);
    setenv("SLURM_PMIX_TIMEOUT", "3", 1);
    start(2, NULL);
    expect(2, 0);
    assert_says(&ranks[0], "step 4/4");
    assert_says(&ranks[0], "PMIx_Finalize did not return within 3 s");
    assert_says(&ranks[1], "PMIx_Finalize did not return within 3 s");
}

/* The server's own deadline should come first; this one does not know it. */
Test(fake_pmix, a_meeting_without_an_end_is_code_124)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Fence", 1);
    start(2, (const char *[]){"--rdzv-timeout-seconds", "1", NULL});
    expect(2, 124);
    assert_says(&ranks[0], "PMIx_Fence at 'networks of the ranks' did not return within 4 s: other "
                           "ranks are missing there");
}

/* Ten seconds for the server to hear of the failure. */
Test(fake_pmix, a_failure_that_the_server_does_not_hear_of_keeps_its_code)
{
    setenv("FAKE_PMIX_HANG", "PMIx_Abort", 1);
    start(1, (const char *[]){"--set", "optimizer.lrr=1", NULL});
    expect(1, 2);
    assert_says(&ranks[0], "did you mean optimizer.lr?");
    assert_says(&ranks[0], "PMIx_Abort did not return within 10 s");
}

Test(fake_pmix, the_server_is_told_the_code_of_a_failure)
{
    char code[8] = "";
    start(1, (const char *[]){"--set", "optimizer.lrr=1", NULL});
    expect(1, 2);
    FILE *f = fopen(tempdir_file(&dir, "aborted.0"), "r");
    cr_assert_not_null(f);
    cr_assert_not_null(fgets(code, sizeof code, f));
    fclose(f);
    cr_assert_str_eq(code, "2");
}
