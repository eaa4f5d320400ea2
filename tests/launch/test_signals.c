// SPDX-License-Identifier: Apache-2.0
/* Signals to ndlaunch reach the workers; the trainer ends at a step boundary. */
#include <signal.h>
#include <string.h>
#include <sys/resource.h>

#include "runtime/base/clock.h"
#include "tests/launch/tiny_job.h"
#include "tests/support/sentences.h"

static tempdir dir;
static launched l;

static void setup(void)
{
    tiny_write_inputs(&dir);
}

TEMPDIR_SUITE(signals, setup, .timeout = 280);

static void ends_at_a_step_boundary(int number)
{
    signal(number, SIG_DFL); /* these tests may themselves run under nohup */
    tiny_train(&l, &dir, "out", 2, NULL);
    launched_end(&l, number, 75);
    assert_says(&l, "the job was stopped at a step boundary",
                "it cannot be resumed there, since it saves no checkpoints",
                "with --checkpoint-frequency N a signal saves one too");
    cr_assert_null(strstr(l.text, "failed first"), "%s", l.text);
}

#define TEST_STEP_BOUNDARY(name, number)                                                           \
    Test(signals, name##_ends_the_trainer_at_a_step_boundary)                                      \
    {                                                                                              \
        ends_at_a_step_boundary(number);                                                           \
    }
TEST_STEP_BOUNDARY(term, SIGTERM)
TEST_STEP_BOUNDARY(usr1, SIGUSR1)
TEST_STEP_BOUNDARY(int, SIGINT)
TEST_STEP_BOUNDARY(hup, SIGHUP)

/*
 * The job's last word: 75 is explained once, by one of two lines, and rank 0 names the step
 * boundary. A signal that does nothing is not mentioned.
 */
static void assert_one_reason(int expected)
{
    static const char early[] = "ndlaunch: stopped by a signal before the first worker started\n",
                      boundary[] = "ndlaunch: the job was stopped at a step boundary\n",
                      rank_0[] = "error: stopped by a signal after step ";
    const char *text = launched_read(&l);
    int at_boundary = lines_that_begin(text, boundary);
    cr_assert_eq(lines_that_begin(text, early) + at_boundary, expected == 75, "%s", text);
    cr_assert_eq(lines_that_begin(text, rank_0), at_boundary, "%s", text);
    cr_assert_eq(sentences_in(text), at_boundary, "%s", text);
}

/*
 * From the first moment of a start, the codes are those of a signal at any later time. The signal
 * is blocked for the programs' parent, or it could end ndlaunch before its main begins.
 */
static void sweep(int number, const char *steps, int expected, int step_ms)
{
    enum { LAST_MS = 210 };
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    signal(number, SIG_DFL);
    sigprocmask(SIG_BLOCK, &one, NULL);
    for (int ms = 0; ms <= LAST_MS; ms += step_ms) {
        tiny_ndlaunch(&l, &dir, printed("sweep-%d-%d", number, ms), 2, WORDS("--num-steps", steps));
        usleep((useconds_t)ms * 1000);
        kill(l.pid, number);
        launched_ends(&l, expected);
        assert_one_reason(expected);
    }
}

#define TEST_START(name, number, step_ms)                                                          \
    Test(signals, name##_during_the_start_is_75)                                                   \
    {                                                                                              \
        sweep(number, "1000000", 75, step_ms);                                                     \
    }
TEST_START(term, SIGTERM, 30)
TEST_START(int, SIGINT, 70) /* one function handles these signals like TERM */
TEST_START(hup, SIGHUP, 70)
TEST_START(usr1, SIGUSR1, 70)

Test(signals, usr2_during_the_start_does_nothing)
{
    sweep(SIGUSR2, "3", 0, 30);
}

/* Whatever the other worker loses by it, the job's code is that of the signal. */
Test(signals, a_trainer_that_is_killed_during_its_start_is_named)
{
    for (int ms = 0; ms <= 125; ms += 25) {
        tiny_ndlaunch(&l, &dir, printed("kill-%d", ms), 2, WORDS("--num-steps", "1000000"));
        pid_t child = launched_child(&l, 1);
        usleep((useconds_t)ms * 1000);
        kill(child, SIGKILL);
        launched_ends(&l, 128 + SIGKILL);
        cr_assert_eq(sentences_in(launched_read(&l)), 1, "%s", l.text);
        assert_says(&l, "rank 1 failed first", "signal 9 (Killed)");
    }
}

static void block_all(void)
{
    sigset_t all;
    sigfillset(&all);
    cr_assert_eq(sigprocmask(SIG_SETMASK, &all, NULL), 0);
}

/* Programs inherit what their parent has blocked, also the signal of a child that ends. */
Test(signals, term_ends_the_trainer_whose_parent_had_blocked_it)
{
    block_all();
    ends_at_a_step_boundary(SIGTERM);
}

/* ndtrain without ndlaunch and without an end, once its second step is done. */
static void train_alone(const char *interval)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS(launched_program("ndtrain"), "train", "--num-steps", "1000000", "--set",
                       interval));
    tiny_add(&a, tiny_flags(&dir, "out"));
    launched_start(&l, &dir, "out", a.list);
    launched_until(&l, "\nstep ", 2);
}

Test(signals, term_ends_a_trainer_without_ndlaunch_whose_parent_had_blocked_it)
{
    block_all();
    train_alone("log.interval=1");
    launched_end(&l, SIGTERM, 75);
}

/* One of two replicas gets the signal; its validation would go on for long. */
Test(signals, term_to_one_replica_ends_the_validation_of_all)
{
    enum { BYTES = 8 << 20 };
    static char text[BYTES];
    memset(text, 'a', BYTES);
    const char *validation = tempdir_write(&dir, "long.txt", text, BYTES);
    tiny_ndlaunch(&l, &dir, "out", 2,
                  WORDS("--dp-replicate-size", "2", "--num-steps", "1", "--set",
                        printed("data.validation_path=%s", validation)));
    launched_until(&l, "\nstep ", 1);
    kill(launched_child(&l, 1), SIGTERM);
    launched_expect(&l, 75);
}

/* Steps go on after the signal; TERM ends the run. */
static void goes_on(int number)
{
    kill(l.pid, number);
    int seen = launched_count(&l, "\nstep ");
    launched_until(&l, "\nstep ", seen + 3);
    launched_end(&l, SIGTERM, 75);
}

static void is_passed_over(int number)
{
    tiny_train(&l, &dir, "out", 2, WORDS("--set", "log.interval=20"));
    goes_on(number);
}

Test(signals, usr2_is_passed_over)
{
    is_passed_over(SIGUSR2);
}

Test(signals, hup_is_passed_over_under_nohup)
{
    signal(SIGHUP, SIG_IGN); /* what nohup does; programs inherit it */
    is_passed_over(SIGHUP);
}

/* A worker that ndlaunch starts has a session of its own. */
Test(signals, hup_is_passed_over_by_ndtrain_alone_under_nohup)
{
    signal(SIGHUP, SIG_IGN);
    train_alone("log.interval=20");
    goes_on(SIGHUP);
}

Test(signals, quit_ends_the_trainer_at_once)
{
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    tiny_train(&l, &dir, "out", 2, NULL);
    kill(l.pid, SIGQUIT);
    assert_ends(&l, 128 + SIGQUIT, "signal 3 (Quit)");
}

/* Two test workers, once both have begun; the pid of the first one. */
static pid_t start_workers(const char *what, const char *grace_seconds)
{
    launched_use_test_worker(what, NULL);
    tiny_ndlaunch(&l, &dir, "out", 2, WORDS("--grace-seconds", grace_seconds));
    launched_worker(&l, 1);
    return launched_worker(&l, 0);
}

Test(signals, each_worker_gets_the_signal)
{
    const pid_t first = start_workers("until signal", "600");
    cr_assert_eq(getsid(first), first, "it would get those of the terminal, too");
    kill(l.pid, SIGUSR1);
    assert_ends(&l, 0, "rank 0 ended by signal 10", "rank 1 ended by signal 10");
}

Test(signals, workers_that_do_not_end_are_killed_after_the_grace_time)
{
    const pid_t first = start_workers("stubborn", "0.3");
    const int64_t begin = nd_clock_ns();
    kill(l.pid, SIGTERM);
    launched_until(&l, "Terminated forwarded", 1);
    kill(l.pid, SIGTERM); /* that time runs already */
    assert_ends(&l, 128 + SIGKILL,
                "ended by ndlaunch: launch.grace_seconds (0.3) were over; raise it with "
                "--grace-seconds where a step or saving needs longer; ranks 0-1\n");
    cr_expect_geq(nd_clock_ns() - begin, 290000000, "timers count whole milliseconds");
    cr_assert_null(strstr(l.text, "failed first"), "%s", l.text);
    cr_assert_eq(launched_count(&l, " forwarded; "), 1, "%s", l.text);
    cr_assert(launched_gone(first));
}

/* All ranks agree on the step after which they end: the others have the grace time from there. */
Test(signals, after_the_first_75_the_others_have_the_grace_time)
{
    launched_use_plan("E75", NULL);
    tiny_ndlaunch(&l, &dir, "out", 2, WORDS("--grace-seconds", "0.3"));
    assert_ends(&l, 128 + SIGKILL, "launch.grace_seconds (0.3) were over");
}

Test(signals, a_second_interrupt_kills)
{
    start_workers("stubborn", "600");
    kill(l.pid, SIGINT);
    launched_until(&l, "Interrupt forwarded", 1);
    kill(l.pid, SIGINT);
    assert_ends(&l, 128 + SIGKILL, "ended by ndlaunch at the second interrupt, ranks 0-1\n");
}

/* It is another request to end, which these workers ignore; they end at SIGUSR1. */
Test(signals, an_interrupt_a_second_after_another_kills_nobody)
{
    enum { SECOND_US = 1000000 };
    start_workers("stubborn", "600");
    kill(l.pid, SIGINT);
    launched_until(&l, "Interrupt forwarded", 1);
    usleep(SECOND_US);
    kill(l.pid, SIGINT);
    launched_end(&l, SIGUSR1, 99);
}
