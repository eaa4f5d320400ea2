// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/launched.h"

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "runtime/base/clock.h"
#include "tests/support/patience.h"

enum { POLL_US = 5000, GONE_SECONDS = 30 };

const char *launched_build_root(void)
{
    const char *root = getenv("ND_BUILD_ROOT");
    cr_assert_not_null(root, "run with `meson test`, which sets ND_BUILD_ROOT");
    return root;
}

int launched_shell(const char *format, ...)
{
    char command[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(command, sizeof command, format, args);
    va_end(args);
    cr_assert_lt(n, (int)sizeof command, "too long: %s", command);
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

const char *launched_program(const char *name)
{
    return printed("%s/%s", launched_build_root(), name);
}

void launched_use_test_worker(const char *what, const char *rank)
{
    setenv("ND_WORKER", launched_program("tests/launch/launch_test_worker"), 1);
    if (what) {
        setenv("ND_TEST", what, 1);
    }
    if (rank) {
        setenv("ND_TEST_RANK", rank, 1);
    }
}

void launched_use_plan(const char *plan, const char *rank)
{
    launched_use_test_worker("plan", rank);
    setenv("ND_TEST_PLAN", plan, 1);
}

void launched_start(launched *l, const tempdir *dir, const char *name, const char *const *argv)
{
    snprintf(l->output, sizeof l->output, "%s/%s", dir->path, name);
    int fd = open(l->output, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    l->begin = nd_clock_seconds();
    l->pid = fork();
    cr_assert_geq(l->pid, 0);
    if (l->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
        execv(argv[0], (char *const *)argv);
        _exit(111);
    }
    close(fd);
}

int launched_wait(launched *l, double seconds)
{
    int64_t deadline = nd_clock_ns() + (int64_t)(seconds * 1e9);
    int status = 0;
    while (waitpid(l->pid, &status, WNOHANG) == 0) {
        if (nd_clock_ns() > deadline) {
            kill(l->pid, SIGKILL);
            waitpid(l->pid, &status, 0);
            cr_assert_fail("it did not end within %g s:\n%s", seconds, launched_read(l));
        }
        usleep(POLL_US);
    }
    l->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Appends what the file holds from there on, as far as there is room. */
static void read_from(int fd, off_t from, char *text, size_t capacity)
{
    size_t used = strlen(text);
    ssize_t got = pread(fd, text + used, capacity - 1 - used, from);
    text[used + (size_t)(got > 0 ? got : 0)] = '\0';
}

const char *launched_read(launched *l)
{
    struct stat st = {0};
    int fd = open(l->output, O_RDONLY | O_CLOEXEC);
    l->text[0] = '\0';
    if (fd < 0 || fstat(fd, &st) != 0 || st.st_size < (off_t)sizeof l->text) {
        read_from(fd, 0, l->text, sizeof l->text);
    } else {
        const off_t end = (off_t)sizeof l->text / 2;
        read_from(fd, 0, l->text, (size_t)end);
        strcat(l->text, "\n[lines left out]\n");
        read_from(fd, st.st_size - end + 64, l->text, sizeof l->text);
    }
    close(fd);
    return l->text;
}

int launched_count(launched *l, const char *words)
{
    FILE *f = fopen(l->output, "r");
    char *text = NULL;
    size_t capacity = 0;
    int seen = 0;
    if (f && getdelim(&text, &capacity, '\0', f) > 0) { /* all of it */
        for (const char *at = text; (at = strstr(at, words)); at += strlen(words)) {
            seen++;
        }
    }
    free(text);
    if (f) {
        fclose(f);
    }
    launched_read(l);
    return seen;
}

static bool has_ended(const launched *l)
{
    siginfo_t info = {0};
    return l->pid > 0 && waitid(P_PID, (id_t)l->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid != 0;
}

/* A program's output may come a little after its end, where another process passes it on. */
void launched_until(launched *l, const char *words, int count)
{
    int64_t deadline = nd_clock_ns() + (int64_t)LAUNCHED_SECONDS * 1000000000;
    for (bool ended = false;;) {
        if (!ended && has_ended(l)) {
            ended = true;
            deadline = nd_clock_ns() + (int64_t)5000000000;
        }
        int seen = launched_count(l, words);
        if (seen >= count) {
            return;
        }
        if (nd_clock_ns() > deadline) {
            kill(l->pid, SIGKILL);
            cr_assert_fail("\"%s\" came %d times, not %d, %s %d s:\n%s", words, seen, count,
                           ended ? "until it ended, and of" : "within", LAUNCHED_SECONDS, l->text);
        }
        usleep(POLL_US);
    }
}

pid_t launched_worker(launched *l, int rank)
{
    const char *words = printed("ready %d pid ", rank);
    launched_until(l, words, 1);
    return (pid_t)atol(strstr(l->text, words) + strlen(words));
}

bool launched_has_entry(int pid, const char *wanted)
{
    char path[64], *entry = NULL;
    size_t capacity = 0;
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/environ", pid);
    FILE *environment = fopen(path, "rb");
    while (environment && !found && getdelim(&entry, &capacity, '\0', environment) > 0) {
        found = strcmp(entry, wanted) == 0;
    }
    if (environment) {
        fclose(environment);
    }
    free(entry);
    return found;
}

/* 0: there is none. */
static pid_t find_child(const launched *l, int rank)
{
    char path[64], wanted[32];
    snprintf(wanted, sizeof wanted, "RANK=%d", rank);
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)l->pid, (int)l->pid);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f);
    pid_t found = 0;
    for (int pid; fscanf(f, "%d", &pid) == 1;) {
        found = launched_has_entry(pid, wanted) ? pid : found;
    }
    fclose(f);
    return found;
}

pid_t launched_child(launched *l, int rank)
{
    int64_t deadline = nd_clock_ns() + (int64_t)LAUNCHED_SECONDS * 1000000000;
    for (;;) {
        pid_t found = find_child(l, rank);
        if (found > 0) {
            return found;
        }
        cr_assert(!has_ended(l) && nd_clock_ns() < deadline, "no worker has rank %d:\n%s", rank,
                  launched_read(l));
        usleep(1000);
    }
}

static bool is_gone(pid_t pid)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return true;
    }
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    const char *state = got > 0 ? strrchr(text, ')') : NULL;
    return !state || state[2] == 'Z' || state[2] == 'X';
}

bool launched_gone(pid_t pid)
{
    int64_t deadline = nd_clock_ns() + (int64_t)GONE_SECONDS * 1000000000;
    while (!is_gone(pid)) {
        if (nd_clock_ns() > deadline) {
            return false;
        }
        usleep(POLL_US);
    }
    return true;
}

void launched_expect_gone(const pid_t *pids, int count)
{
    for (int i = 0; i < count; i++) {
        bool gone = launched_gone(pids[i]);
        if (!gone) {
            kill(pids[i], SIGKILL);
        }
        cr_expect(gone, "rank %d is still there", i);
    }
}

static void expect_within(launched *l, double seconds, int code)
{
    int got = launched_wait(l, seconds);
    launched_read(l);
    cr_assert_eq(got, code, "%s: %d, not %d: %s", l->output, got, code, l->text);
}

void launched_expect(launched *l, int code)
{
    expect_within(l, LAUNCHED_SECONDS, code);
}

void launched_expect_all(launched *all, int count, int code)
{
    for (int i = 0; i < count; i++) {
        launched_expect(&all[i], code);
    }
}

void launched_end(launched *l, int number, int code)
{
    kill(l->pid, number);
    launched_expect(l, code);
}

void launched_end_all(launched *all, int count, int number, int code)
{
    for (int i = 0; i < count; i++) {
        kill(all[i].pid, number);
    }
    launched_expect_all(all, count, code);
}

void launched_says(launched *l, const char *const *facts)
{
    launched_read(l);
    for (; *facts != NULL; facts++) {
        cr_assert_not_null(strstr(l->text, *facts), "no \"%s\" in:\n%s", *facts, l->text);
    }
}

void launched_expect_facts(launched *l, int code, const char *const *facts)
{
    launched_expect(l, code);
    launched_says(l, facts);
}

void launched_ends(launched *l, int code)
{
    expect_within(l, l->begin + patience(PATIENCE_SECONDS) - nd_clock_seconds(), code);
}
