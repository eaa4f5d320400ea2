// SPDX-License-Identifier: Apache-2.0
/* Jobs that ndlaunch starts again: with the test worker, whose plan says what each start does. */
#include <signal.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/launch/tiny_job.h"

static tempdir dir;
static launched l;

static void setup(void)
{
    tiny_write_inputs(&dir);
}

TEMPDIR_SUITE(restarts, setup, .timeout = 280);

static void start(const char *plan, const char *max_restarts)
{
    launched_use_plan(plan, "1");
    tiny_ndlaunch(&l, &dir, "out", 3, WORDS("--max-restarts", max_restarts, "--save-steps", "1"));
}

static void expect_starts(int starts)
{
    int seen = launched_count(&l, " of rank 0, run nd-");
    cr_assert_eq(seen, starts, "%d starts, not %d: %s", seen, starts, l.text);
}

/* A job of this plan, which has this code and so many starts. */
static void run(const char *plan, const char *max_restarts, int code, int starts)
{
    start(plan, max_restarts);
    launched_expect(&l, code);
    expect_starts(starts);
}

Test(restarts, a_killed_worker_is_followed_by_a_start_that_goes_on)
{
    run("B0T46D40K9;B40T41X0", "3", 0, 2);
    assert_says(&l, "rank 1 failed first",
                "ndlaunch: rank 1 failed (signal 9, Killed); restart 1 of 3 follows at once, "
                "from step 40; 6 steps are lost\n",
                "epoch 1 of rank 0, run nd-", ".1, folder '/begun/in/start-0'\n");
}

Test(restarts, none_without_max_restarts)
{
    run("B0T2D2K9", "0", 137, 1);
    cr_assert_null(strstr(l.text, "restart"), "%s", l.text);
    cr_assert_null(strstr(l.text, "started again"), "%s", l.text);
}

/* Nor after a restart that made progress. */
Test(restarts, never_after_one_that_fails_before_its_first_step)
{
    run("B0T46D40K9;B40T54D50K9;B50K9", "9", 137, 3);
    assert_says(&l, "not started again: the last restart failed before its first step\n");
}

Test(restarts, never_twice_without_a_newer_checkpoint)
{
    run("B0T5K9;B0T3D3K9;B3T9D3K9", "5", 137, 3);
    assert_says(&l, "not started again: no checkpoint was completed since the last restart\n",
                "restart 1 of 5 follows at once, from the beginning; ",
                "restart 2 of 5 follows in 1 s, from step 3; "); /* it failed soon */
}

Test(restarts, at_most_max_restarts)
{
    run("B0T5D5E74;B5T6D6E1;B6T7D7K9", "2", 128 + SIGKILL, 3);
    assert_says(&l, "not started again: all restarts of launch.max_restarts are used\n");
    cr_assert_eq(launched_count(&l, "failed first"), 3, "%s", l.text);
}

Test(restarts, every_class_of_exit_code)
{
    static const struct {
        int code;
        bool restarts;
    } cases[] = {{1, true},   {2, false}, {65, false}, {70, false}, {71, false},
                 {73, false}, {74, true}, {75, false}, {124, true}, {7, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        start(printed("B0T2D2E%d;B2T3X0", cases[i].code), "1");
        if (cases[i].code == 75) { /* the others are given time to reach the same step */
            launched_until(&l, "epoch 0 waits", 2);
            kill(l.pid, SIGTERM);
        }
        launched_expect(&l, cases[i].restarts ? 0 : cases[i].code);
        expect_starts(cases[i].restarts ? 2 : 1);
        if (!cases[i].restarts && cases[i].code != 75) {
            assert_says(&l, "the job is not started again: this failure would come again\n");
        }
    }
}

/* The third start waits for a minute and more in all; each signal ends it before. */
Test(restarts, a_signal_ends_the_wait_and_the_job)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    for (int i = 0; i < 4; i++) {
        signal(numbers[i], SIG_DFL);
        start("B0T1D1K9;B1T2D2K9;B2T3D3K9;B3T4D4K9", "9");
        launched_until(&l, "follows in 2 s", 1);
        kill(l.pid, numbers[i]);
        int64_t begin = nd_clock_ns();
        launched_expect(&l, 75);
        cr_expect_lt(nd_clock_ns() - begin, 1500000000, "it waited all the same");
        assert_says(&l, ": the job ends before restart 3\n");
        expect_starts(3);
    }
}

/* As in a first start: they reach workers once these handle them. */
Test(restarts, a_signal_in_a_restart_ends_the_job_as_ever)
{
    start("B0T1D1K9;B1", "9");
    launched_until(&l, "epoch 1 waits", 1);
    kill(l.pid, SIGTERM);
    assert_ends(&l, 75, "the job was stopped at a step boundary");
    expect_starts(2);
}

/* A worker that fails after the signal is no reason to start again. */
Test(restarts, none_after_a_signal)
{
    start("B0T1D1", "9");
    launched_until(&l, "epoch 0 waits", 3);
    pid_t one = launched_worker(&l, 1);
    kill(one, SIGSTOP);
    kill(l.pid, SIGTERM);
    usleep(300000);
    kill(one, SIGKILL);
    launched_expect(&l, 137);
    expect_starts(1);
}

/* The workers of a start that waits. */
static void find_workers(int epoch, pid_t pids[3])
{
    launched_until(&l, printed("epoch %d waits", epoch), 3);
    for (int rank = 0; rank < 3; rank++) {
        pids[rank] = launched_child(&l, rank);
    }
}

Test(restarts, any_rank_may_be_killed)
{
    for (int rank = 0; rank < 3; rank++) {
        pid_t pids[3];
        start("B0T8D5;B5T6X0", "1");
        find_workers(0, pids);
        kill(pids[rank], SIGKILL);
        launched_expect(&l, 0);
        launched_expect_gone(pids, 3);
        expect_starts(2);
    }
}

/* Nobody waits for them: a restart follows. */
Test(restarts, workers_that_ignore_the_end_are_killed_at_once)
{
    pid_t pids[3];
    start("B0T8D5;B5T6X0", "1");
    find_workers(0, pids);
    kill(pids[0], SIGSTOP);
    kill(pids[2], SIGKILL);
    int64_t begin = nd_clock_ns();
    launched_expect(&l, 0);
    cr_expect_lt(nd_clock_ns() - begin, 8000000000, "it waited for the 10 s of grace");
    cr_expect_null(strstr(l.text, "did not end in time"), "%s", l.text);
}

Test(restarts, no_worker_of_a_restart_outlives_a_killed_ndlaunch)
{
    pid_t pids[3];
    start("B0T8D5K9;B5T6", "1");
    find_workers(1, pids);
    launched_end(&l, SIGKILL, 137);
    launched_expect_gone(pids, 3);
}

Test(restarts, each_start_has_logs_of_its_own)
{
    const char *logs = printed("%s/logs", dir.path);
    launched_use_plan("B0T8D5K9;B5T6X0", "1");
    tiny_ndlaunch(&l, &dir, "out", 2,
                  WORDS("--max-restarts", "1", "--save-steps", "1", "--log-dir", logs));
    launched_expect(&l, 0);
    cr_expect_eq(launched_shell("grep -q 'epoch 0 ' %s/nd-*/rank-0.stdout.log", logs), 0);
    cr_expect_eq(launched_shell("grep -q 'epoch 1 ' %s/nd-*.1/rank-0.stdout.log", logs), 0);
}

/* ndlaunch does not grow with restarts: it keeps at most one former start, for its last output. */
Test(restarts, many_restarts_leave_no_descriptors)
{
    enum { STARTS = 6 };
    char plan[STARTS * 24] = "";
    for (int i = 0; i < STARTS; i++) {
        size_t used = strlen(plan);
        snprintf(plan + used, sizeof plan - used, "B%dT%dD%d;", i, i + 1, i + 1);
    }
    start(plan, "100");
    int before = 0;
    for (int i = 0; i < 3; i++) {
        launched_until(&l, printed("epoch %d waits", i), 3);
        usleep(200000); /* outputs of the former start are read to their end */
        int now = launched_shell("exit $(ls /proc/%d/fd | wc -l)", (int)l.pid);
        cr_expect(i < 2 || now == before, "%d open files in start %d, %d before", now, i, before);
        before = now;
        kill(launched_child(&l, 1), SIGKILL);
    }
    kill(l.pid, SIGTERM);
    launched_wait(&l, LAUNCHED_SECONDS);
}
