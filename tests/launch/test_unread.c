// SPDX-License-Identifier: Apache-2.0
/* ndlaunch whose output goes into a pipe that nobody reads, or not for a while. */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/launch/tiny_job.h"

enum { PIPE_BYTES = 4096, TALKS = 450 /* lines of a rank of the test worker */ };

static tempdir dir;
static launched l;
static char fifo[160];
static int reader;

static void setup(void)
{
    tiny_write_inputs(&dir);
    snprintf(fifo, sizeof fifo, "%s/fifo", dir.path);
    cr_assert_eq(mkfifo(fifo, 0600), 0);
    reader = open(fifo, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    cr_assert_geq(reader, 0);
    cr_assert_eq(fcntl(reader, F_SETPIPE_SZ, PIPE_BYTES), PIPE_BYTES);
    cr_assert_eq(fcntl(reader, F_SETFL, 0), 0);
}

TEMPDIR_SUITE(unread, setup, .timeout = 280);

/* `streams`: what a shell sends into the pipe, whose name is $0. */
static void start(const char *streams, const char *const *further)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("/bin/sh", "-c", printed("exec \"$@\" %s", streams), fifo,
                       launched_program("ndlaunch"), "--num-processes", "2", "--dp-shard-size",
                       "-1", "--set", "log.interval=1"));
    tiny_add(&a, tiny_flags(&dir, "unread"));
    tiny_add(&a, further);
    launched_start(&l, &dir, "unread", a.list);
}

/* More lines than the pipe holds. */
Test(unread, a_run_ends_well)
{
    start("2>$0", WORDS("--num-steps", "150"));
    launched_expect(&l, 0);
    tiny_expect_same(&dir, "unread", "unread", 150);
}

/* The failure screen has no reader, either; the exit code is the worker's. */
Test(unread, a_run_that_fails_ends_with_its_code)
{
    char page[PIPE_BYTES] = "";
    int writer = open(fifo, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    cr_assert_eq(write(writer, page, sizeof page), (ssize_t)sizeof page);
    close(writer);
    launched_use_test_worker("fail", "1");
    start(">$0 2>&1", NULL);
    launched_expect(&l, 65);
}

static bool is_whole(const char *line)
{
    int number = 0, rank = -1, end = 0;
    const char *at = strstr(line, "line "); /* behind "host:1: " of rank 1 */
    const char *ready = strstr(line, "ready ");
    if (ready && sscanf(ready, "ready %d pid %d%n", &rank, &number, &end) == 2) {
        return !ready[end];
    }
    return at &&
           sscanf(at, "line %d of rank %d, of which there are many%n", &number, &rank, &end) == 2 &&
           end > 0 && !at[end] && (at == line) == (rank == 0);
}

/* Each line comes whole, or is among those that are said to be missing. */
Test(unread, a_reader_that_pauses_is_told_what_it_lacks)
{
    char line[512];
    int whole = 0, missing = 0, others = 0, lost;
    launched_use_test_worker("talk", NULL);
    start(">$0", NULL);
    sleep(7);
    FILE *f = fdopen(reader, "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        lost = 0;
        if (sscanf(line, "warning: %d lines are missing here", &lost) == 1) {
            missing += lost;
        } else if (is_whole(line)) {
            whole++;
        } else {
            others++; /* the beginning of a line */
        }
    }
    fclose(f);
    launched_expect(&l, 0);
    cr_expect_gt(missing, 0);
    cr_expect_eq(whole + missing, 2 * (TALKS + 1), "%d whole, %d missing", whole, missing);
    cr_expect_leq(others, 1, "%d lines are torn", others);
}
