// SPDX-License-Identifier: Apache-2.0
/*
 * Drawn runs: small models on drawn meshes, compared with one worker, with the reference and with
 * themselves after a restore (drawn_check.h). Every seed is a case.
 *
 *   test_drawn_runs                          the seeds of CI: 300 that are fixed and 100 of the day
 *   test_drawn_runs --fixed N --day N        so many of each
 *   test_drawn_runs --seed N                 one, with what it draws
 *   test_drawn_runs --case "shard=2 tp=3"    the case with these numbers
 *   test_drawn_runs --hours H                random seeds, until so long has passed
 *   --part K                                 of the seeds of CI every twentieth, K is 1 to 20
 *   --jobs N                                 cases at a time; else as many as there are CPUs
 *
 * A case that fails is run again with smaller numbers, as long as it still fails. Each runs in a
 * process of its own, so that crashes and hangs are failures like others.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "tests/drawn/drawn_check.h"

enum {
    CASE_SECONDS = 150,
    TRIES = 60,
    MESSAGE = 1024,
    JOBS_MAX = 64,
    DAY_SEEDS = 1000,
    PARTS = 20
};

typedef struct child {
    pid_t pid;
    int pipe;
    uint64_t seed;
    double begin;
} child;

static int time_factor(void)
{
    const char *factor = getenv("ND_TEST_TIME_FACTOR");
    return factor && atoi(factor) > 0 ? atoi(factor) : 1;
}

static child start(const drawn_case *c, uint64_t seed)
{
    int ends[2];
    child started = {.seed = seed, .begin = nd_clock_seconds()};
    fflush(NULL);
    if (pipe(ends) != 0 || (started.pid = fork()) < 0) {
        perror("drawn runs: cannot start a case");
        exit(1);
    }
    if (started.pid == 0) {
        close(ends[0]);
        nd_log_init(ND_LOG_ERROR, NULL);
        alarm((unsigned)(CASE_SECONDS * time_factor()));
        const nd_status status = drawn_check(c);
        if (status != ND_OK) {
            const char *why = nd_error_last()->message;
            if (write(ends[1], why, strnlen(why, MESSAGE - 1)) < 0) {
                exit(2);
            }
        }
        exit(status != ND_OK);
    }
    close(ends[1]);
    started.pipe = ends[0];
    return started;
}

/* Returns whether the child passed; otherwise `why` holds the reason. */
static bool read_end(const child *c, int status, char why[MESSAGE])
{
    ssize_t got = read(c->pipe, why, MESSAGE - 1);
    why[got > 0 ? got : 0] = '\0';
    close(c->pipe);
    if (WIFSIGNALED(status)) {
        snprintf(why, MESSAGE, "it ended by signal %d (%s)%s", WTERMSIG(status),
                 strsignal(WTERMSIG(status)),
                 WTERMSIG(status) == SIGALRM ? ": it took too long" : "");
    } else if (WEXITSTATUS(status) != 0 && !why[0]) {
        snprintf(why, MESSAGE, "it ended with status %d", WEXITSTATUS(status));
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool fails(void *context, const drawn_case *c)
{
    char *why = context, text[MESSAGE];
    int status;
    const child started = start(c, 0);
    waitpid(started.pid, &status, 0);
    if (read_end(&started, status, text)) {
        return false;
    }
    memcpy(why, text, MESSAGE);
    return true;
}

static void report(uint64_t seed, const char *why)
{
    char text[DRAWN_TEXT_MAX], smallest_why[MESSAGE];
    const drawn_case c = drawn_case_of_seed(seed);
    printf("FAILED: seed %llu: %s\n  case: %s\n", (unsigned long long)seed, why,
           drawn_case_text(&c, text));
    fflush(stdout);
    snprintf(smallest_why, sizeof smallest_why, "%s", why);
    const drawn_case smallest = drawn_case_shrink(c, TRIES, fails, smallest_why);
    printf("  the smallest case that fails: --case \"%s\"\n  with: %s\n",
           drawn_case_text(&smallest, text), smallest_why);
    fflush(stdout);
}

/* Seeds first, first + step, ...; `count` of them, or as many as are begun before `until`. */
typedef struct plan {
    uint64_t seeds[2][2]; /* first, count */
    double until;         /* 0: no such time */
    int jobs;
    uint64_t part; /* 0: all */
    bool verbose;
    int failed, passed, running;
    child children[JOBS_MAX];
} plan;

static void take_one(plan *p)
{
    int status, i = 0;
    char why[MESSAGE];
    pid_t pid;
    do {
        pid = waitpid(-1, &status, 0);
    } while (pid < 0 && errno == EINTR);
    while (p->children[i].pid != pid) {
        i++;
    }
    const child ended = p->children[i];
    p->children[i] = p->children[--p->running];
    const bool passed = read_end(&ended, status, why);
    p->passed += passed;
    if (p->verbose) {
        printf("%s %llu in %.1f s\n", passed ? "passed" : "failed", (unsigned long long)ended.seed,
               nd_clock_seconds() - ended.begin);
    }
    if (!passed && ++p->failed <= 5) { /* the others are named only: shrinking takes long */
        report(ended.seed, why);
    } else if (!passed) {
        printf("FAILED: seed %llu: %s\n", (unsigned long long)ended.seed, why);
    }
}

static void run_seed(plan *p, uint64_t seed)
{
    char text[DRAWN_TEXT_MAX];
    const drawn_case c = drawn_case_of_seed(seed);
    if (p->verbose) {
        printf("seed %llu: %s\n", (unsigned long long)seed, drawn_case_text(&c, text));
    }
    if (p->running == p->jobs) {
        take_one(p);
    }
    p->children[p->running++] = start(&c, seed);
}

static bool goes_on(const plan *p)
{
    return p->until == 0 || nd_clock_seconds() < p->until;
}

static int run_plan(plan *p)
{
    const double begin = nd_clock_seconds();
    for (int part = 0; part < 2; part++) {
        for (uint64_t i = 0; i < p->seeds[part][1] && goes_on(p); i++) {
            if (p->part == 0 || i % PARTS == p->part % PARTS) {
                run_seed(p, p->seeds[part][0] + i);
            }
        }
    }
    while (p->running > 0) {
        take_one(p);
    }
    printf("%d drawn runs passed, %d failed, in %.0f s\n", p->passed, p->failed,
           nd_clock_seconds() - begin);
    return p->failed > 0;
}

static int run_case(const char *text)
{
    char why[MESSAGE];
    drawn_case c;
    if (!drawn_case_parse(text, &c)) {
        fprintf(stderr, "drawn runs: \"%s\" is no case\n", text);
        return 2;
    }
    if (fails(why, &c)) {
        printf("FAILED: %s\n", why);
        return 1;
    }
    printf("passed\n");
    return 0;
}

static int usage(const char *argument)
{
    fprintf(stderr,
            "drawn runs: unknown argument \"%s\"; use --seed N, --case TEXT, --fixed N, --day N, "
            "--hours H, --part K, --jobs N or --verbose\n",
            argument);
    return 2;
}

int main(int argc, char **argv)
{
    const uint64_t today = (uint64_t)time(NULL) / 86400;
    plan p = {.seeds = {{1, 300}, {today * DAY_SEEDS, 100}},
              .jobs = (int)sysconf(_SC_NPROCESSORS_ONLN)};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[++i] : "";
        if (strcmp(name, "--verbose") == 0) {
            p.verbose = true;
            i -= *value != '\0';
        } else if (strcmp(name, "--seed") == 0) {
            p.seeds[0][0] = strtoull(value, NULL, 10);
            p.seeds[0][1] = 1;
            p.seeds[1][1] = 0;
            p.verbose = true;
        } else if (strcmp(name, "--case") == 0) {
            return run_case(value);
        } else if (strcmp(name, "--fixed") == 0) {
            p.seeds[0][1] = strtoull(value, NULL, 10);
        } else if (strcmp(name, "--day") == 0) {
            p.seeds[1][1] = strtoull(value, NULL, 10);
        } else if (strcmp(name, "--hours") == 0) {
            p.until = nd_clock_seconds() + 3600 * strtod(value, NULL);
            p.seeds[0][0] = (uint64_t)time(NULL) << 20;
            p.seeds[0][1] = UINT64_MAX;
            p.seeds[1][1] = 0;
        } else if (strcmp(name, "--part") == 0) {
            p.part = strtoull(value, NULL, 10);
        } else if (strcmp(name, "--jobs") == 0) {
            p.jobs = atoi(value);
        } else {
            return usage(name);
        }
    }
    p.jobs = p.jobs < 1 ? 1 : p.jobs > JOBS_MAX ? JOBS_MAX : p.jobs;
    if (p.seeds[1][1] > 0) {
        printf("the seeds of day %llu begin at %llu\n", (unsigned long long)today,
               (unsigned long long)p.seeds[1][0]);
    }
    return run_plan(&p);
}
