// SPDX-License-Identifier: Apache-2.0
/* A worker that fails, is killed or stopped, and an ndlaunch that is killed. */
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/skip.h"

static tempdir dir;
static launched l;

static void setup(void)
{
    tiny_write_inputs(&dir);
}

TEMPDIR_SUITE(failures, setup, .timeout = 280);

static void start_test_worker(const char *what, const char *rank, int workers)
{
    launched_use_test_worker(what, rank);
    tiny_ndlaunch(&l, &dir, "out", workers, NULL);
}

Test(failures, the_first_failing_workers_code_is_the_jobs)
{
    start_test_worker("exit 7", "3", 8);
    assert_ends(&l, 7, "rank 3 failed first (host ", "last words",
                "collateral (ended with it): 0-2, 4-7\n");
}

/* Its record is older than the request to end, which the exit of the rank that lost it caused. */
Test(failures, a_deadline_goes_before_the_losses_that_it_caused)
{
    start_test_worker("end late", "1", 2);
    assert_ends(&l, 124, "rank 1 failed first", "it said: the file system does not answer");
}

/* Whole lines of other ranks, and the bytes of rank 0: its own sentence is on the screen, the
 * others are where they were. */
Test(failures, the_workers_own_sentence_is_said_once)
{
    static const char *const ranks[] = {"0", "1"};
    for (int i = 0; i < 2; i++) {
        start_test_worker("fail", ranks[i], 2);
        assert_ends(&l, 65, printed("rank %d failed first", i), "exit code 65 (data)",
                    "it said: the test file is damaged");
        cr_assert_eq(launched_count(&l, "the test file is damaged"), 1, "rank %d: %s", i, l.text);
        cr_assert_eq(launched_count(&l, "a line before\n"), 1, "rank %d: %s", i, l.text);
        cr_assert_eq(launched_count(&l, "a line after\n"), 1, "rank %d: %s", i, l.text);
    }
}

Test(failures, workers_that_ignore_the_end_are_killed)
{
    start_test_worker("stubborn", "1", 2);
    pid_t stubborn = launched_worker(&l, 0);
    kill(launched_worker(&l, 1), SIGABRT);
    assert_ends(&l, 128 + SIGABRT, "did not end in time");
    cr_assert(launched_gone(stubborn));
}

/* A traced process that is killed stays until its tracer has seen its end, like one that waits
 * inside the kernel: ndlaunch ends without it. */
Test(failures, a_killed_worker_that_does_not_end_is_left_behind)
{
    launched_use_test_worker("stubborn", "1");
    tiny_ndlaunch(&l, &dir, "out", 2, WORDS("--max-restarts", "1", "--save-steps", "1"));
    pid_t traced = launched_worker(&l, 0), killed = launched_worker(&l, 1);
    if (ptrace(PTRACE_SEIZE, traced, NULL, NULL) != 0) {
        kill(l.pid, SIGKILL);
        launched_wait(&l, LAUNCHED_SECONDS);
        tempdir_remove(&dir);
        skip_test("this process may not trace others (PTRACE_SEIZE)");
    }
    kill(killed, SIGKILL);
    assert_ends(&l, 137, "ndlaunch: rank 0 (pid ",
                ") did not end within 30 s of being killed, and is left behind\n",
                "rank 1 failed first", "not started again: a killed worker did not end\n");
    waitpid(traced, NULL, __WALL);
}

Test(failures, the_check_does_not_outlive_a_killed_ndlaunch)
{
    start_test_worker("check stays", "0", 2);
    launched_until(&l, "check pid ", 1);
    pid_t check = (pid_t)atol(strstr(l.text, "check pid ") + 10);
    launched_end(&l, SIGKILL, 128 + SIGKILL);
    cr_assert(launched_gone(check));
}

/* Stopped workers notice nothing of a closed pipe or connection: only the system's signal ends
 * them. */
Test(failures, no_trainer_outlives_a_killed_ndlaunch)
{
    tiny_train(&l, &dir, "out", 2, NULL);
    const pid_t workers[] = {launched_child(&l, 0), launched_child(&l, 1)};
    kill(workers[0], SIGSTOP);
    kill(workers[1], SIGSTOP);
    launched_end(&l, SIGKILL, 128 + SIGKILL);
    launched_expect_gone(workers, 2);
}

/* The real trainer: rank 1 is stopped in the middle of its run. */
Test(failures, a_stopped_worker_is_named_within_the_deadline)
{
    tiny_train(&l, &dir, "out", 2, WORDS("--comm-timeout-seconds", "6"));
    pid_t stopped = launched_child(&l, 1);
    kill(stopped, SIGSTOP);
    assert_ends(&l, 124, "rank 0 failed first");
    const char *said = strstr(l.text, "it said: ");
    cr_assert_not_null(said, "%s", l.text);
    cr_assert_not_null(strstr(said, "rank 1"), "%s", l.text);
    cr_assert(launched_gone(stopped));
}

/* Libraries and the guard of mapped files handle these signals, too; one that a process sends is
 * no fault that they know. */
Test(failures, a_fault_signal_that_is_sent_to_a_worker_ends_the_job)
{
    static const int numbers[] = {SIGSEGV, SIGBUS};
    struct rlimit none = {0, 0};
    const char *asan = getenv("ASAN_OPTIONS");
    /* A build with the address sanitizer would turn the signal into a report and an exit code. */
    setenv("ASAN_OPTIONS", printed("%s:handle_segv=0:handle_sigbus=0", asan ? asan : ""), 1);
    unsetenv("ND_WORKER");
    setrlimit(RLIMIT_CORE, &none);
    for (int i = 0; i < 4; i++) {
        int number = numbers[i / 2], rank = i % 2;
        tiny_train(&l, &dir, printed("fault-%d", i), 2, NULL);
        kill(launched_child(&l, rank), number);
        int code = launched_wait(&l, 30);
        cr_expect_eq(code, 128 + number, "signal %d to rank %d: %d: %s", number, rank, code,
                     launched_read(&l));
    }
}

/* The folders for the shared memory of workers that were killed, until the next start. */
Test(failures, the_next_start_removes_shared_memory_of_killed_workers)
{
    unsetenv("ND_WORKER");
    tiny_train(&l, &dir, "killed", 2, NULL);
    const pid_t workers[] = {launched_child(&l, 0), launched_child(&l, 1)};
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(launched_shell("ls -d /dev/shm/ndtrain-*-%d-* >/dev/null", workers[i]), 0);
    }
    launched_end(&l, SIGKILL, 128 + SIGKILL);
    launched_expect_gone(workers, 2);
    tiny_ndlaunch(&l, &dir, "next", 2, WORDS("--num-steps", "2"));
    launched_expect(&l, 0);
    for (int i = 0; i < 2; i++) {
        cr_expect_neq(launched_shell("ls -d /dev/shm/ndtrain-*-%d-* 2>/dev/null", workers[i]), 0);
    }
}
