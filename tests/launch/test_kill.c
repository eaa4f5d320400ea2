// SPDX-License-Identifier: Apache-2.0
/*
 * The trainer itself under --max-restarts: a rank that is killed at any moment costs steps, and
 * nothing else. Every loss, norm and learning rate equals that of an undisturbed run.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/port.h"

enum { WORKERS = 4, STEPS = 120, STEP_BYTES = 160 };

static tempdir dir;

static void setup(void)
{
    tiny_write_inputs(&dir);
    unsetenv("ND_WORKER");
}

TEMPDIR_SUITE(kill, setup, .timeout = 500);

static void start(launched *l, const char *name, const char *const *further)
{
    char steps[16];
    snprintf(steps, sizeof steps, "%d", STEPS);
    tiny_arguments a = {0};
    tiny_add(&a, (const char *[]){"--num-steps", steps, "--save-steps", "10", NULL});
    tiny_add(&a, further);
    tiny_ndlaunch(l, &dir, name, WORKERS, a.list);
}

typedef struct history {
    char step[STEPS + 1][STEP_BYTES]; /* the last record of each step: loss, norm, learning rate */
} history;

/* How many records of steps there are. */
static int read_history(const char *name, history *out)
{
    char path[256], line[8192];
    int records = 0;
    memset(out, 0, sizeof *out);
    snprintf(path, sizeof path, "%s/run-%s/metrics.jsonl", dir.path, name);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    while (fgets(line, sizeof line, f)) {
        const char *end = strstr(line, ",\"tokens\"");
        long step = strncmp(line, "{\"step\":", 8) == 0 ? strtol(line + 8, NULL, 10) : 0;
        if (step > 0 && end) {
            cr_assert(step <= STEPS && end - line < STEP_BYTES, "%s", line);
            snprintf(out->step[step], STEP_BYTES, "%.*s", (int)(end - line), line);
            records++;
        }
    }
    fclose(f);
    return records;
}

static void expect_history(const char *name, const history *whole)
{
    static history seen;
    int records = read_history(name, &seen);
    cr_expect_geq(records, STEPS);
    for (int i = 1; i <= STEPS; i++) {
        cr_assert_str_eq(seen.step[i], whole->step[i], "%s, step %d", name, i);
    }
}

static void expect_done(launched *l)
{
    int code = launched_wait(l, LAUNCHED_SECONDS);
    cr_assert_eq(code, 0, "%d: %s", code, launched_read(l));
}

static const history *undisturbed(void)
{
    static history whole;
    launched l;
    start(&l, "whole", NULL);
    expect_done(&l);
    cr_assert_eq(read_history("whole", &whole), STEPS);
    return &whole;
}

/* Each rank in turn, before and after the first checkpoint, and while one is written; then at steps
 * that are strewn over the run, as many as ND_KILL_RUNS says. */
Test(kill, each_rank_at_some_step)
{
    static const int chosen[] = {4, 11, 19, 20, 21, 35, 50, 71};
    const int few = (int)(sizeof chosen / sizeof *chosen);
    const char *runs = getenv("ND_KILL_RUNS");
    const history *whole = undisturbed();
    for (int i = 0; i < (runs ? atoi(runs) : few); i++) {
        int at = i < few ? chosen[i] : 3 + i * 37 % 77;
        launched l;
        char name[32];
        snprintf(name, sizeof name, "killed-%d", i);
        start(&l, name, (const char *[]){"--max-restarts", "1", NULL});
        launched_until(&l, "\nstep ", at, LAUNCHED_SECONDS);
        kill(launched_child(&l, i % WORKERS), SIGKILL);
        expect_done(&l);
        assert_says(&l, "restart 1 of 1 follows at once, from ");
        cr_assert_null(strstr(l.text, "process_vm_"), "%s", l.text); /* UCX's own line */
        expect_history(name, whole);
    }
}

/* One job, three kills: the second and third come while the last checkpoint is newer than the one
 * from which the job went on. */
Test(kill, several_times_in_one_job)
{
    const history *whole = undisturbed();
    launched l;
    start(&l, "killed", (const char *[]){"--max-restarts", "3", NULL});
    for (int i = 0; i < 3; i++) {
        char words[32];
        snprintf(words, sizeof words, "checkpoint of step %d ", 20 + 30 * i);
        launched_until(&l, words, 1, LAUNCHED_SECONDS);
        kill(launched_child(&l, 3 - i), SIGKILL);
        snprintf(words, sizeof words, "restart %d of 3 follows", i + 1);
        launched_until(&l, words, 1, LAUNCHED_SECONDS);
    }
    expect_done(&l);
    expect_history("killed", whole);
}

/* A worker that stands still is found by its peers, whose deadline is short here. */
Test(kill, a_stopped_rank_is_a_reason_too)
{
    const history *whole = undisturbed();
    launched l;
    start(&l, "stopped",
          (const char *[]){"--max-restarts", "1", "--comm-timeout-seconds", "5", NULL});
    launched_until(&l, "\nstep ", 25, LAUNCHED_SECONDS);
    kill(launched_child(&l, 2), SIGSTOP);
    expect_done(&l);
    assert_says(&l, "failed (exit code 124, ");
    expect_history("stopped", whole);
}

Test(kill, a_killed_ndlaunch_goes_on_by_resume)
{
    const history *whole = undisturbed();
    launched l;
    start(&l, "resumed", NULL);
    launched_until(&l, "\nstep ", 33, LAUNCHED_SECONDS);
    pid_t workers[WORKERS];
    for (int rank = 0; rank < WORKERS; rank++) {
        workers[rank] = launched_child(&l, rank);
    }
    launched_end(&l, SIGKILL, 128 + SIGKILL);
    for (int rank = 0; rank < WORKERS; rank++) { /* and with them their lock of the run folder */
        cr_assert(launched_gone(workers[rank]));
    }
    start(&l, "resumed", (const char *[]){"--resume-from-checkpoint", "latest", NULL});
    expect_done(&l);
    expect_history("resumed", whole);
}

static char endpoint[32], key_file[160];

static void make_key(void)
{
    launched l;
    char program[PATH_MAX];
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%d", port_reserve());
    snprintf(key_file, sizeof key_file, "%s/key", dir.path);
    snprintf(program, sizeof program, "%s/ndlaunch", launched_build_root());
    launched_start(&l, &dir, "make-key", (const char *[]){program, "--make-key", key_file, NULL});
    expect_done(&l);
}

static void start_node(launched *l, int node, int times, const char *spares)
{
    char name[32], rank[16], folder[160], steps[16];
    snprintf(name, sizeof name, "node%d-%d", node, times);
    snprintf(rank, sizeof rank, "%d", node);
    snprintf(steps, sizeof steps, "%d", STEPS);
    snprintf(folder, sizeof folder, "%s/run-nodes", dir.path);
    tiny_arguments a = {0};
    tiny_add(&a, (const char *[]){"--nnodes", "2", "--node-rank", rank, "--rdzv-endpoint", endpoint,
                                  "--rdzv-key-file", key_file, "--save-dir", folder, "--num-steps",
                                  steps, "--save-steps", "10", "--max-restarts", "3",
                                  "--spare-nodes", spares, NULL});
    tiny_ndlaunch(l, &dir, name, WORKERS, a.list);
}

/* A worker of node 1 first, then node 1's launcher with all of its workers, which comes back. */
Test(kill, a_worker_and_a_launcher_of_another_node)
{
    const history *whole = undisturbed();
    launched nodes[2];
    make_key();
    for (int i = 0; i < 2; i++) {
        start_node(&nodes[i], i, 0, "0");
    }
    launched_until(&nodes[0], "checkpoint of step 20 ", 1, LAUNCHED_SECONDS);
    kill(launched_child(&nodes[1], 3), SIGKILL);
    launched_until(&nodes[0], "restart 1 of 3 follows ", 1, LAUNCHED_SECONDS);
    launched_until(&nodes[0], "checkpoint of step 50 ", 1, LAUNCHED_SECONDS);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    start_node(&nodes[1], 1, 1, "0");
    expect_done(&nodes[1]);
    expect_done(&nodes[0]);
    assert_says(&nodes[0], "was lost; restart 2 of 3 follows ");
    expect_history("nodes", whole);
}

/* Node 1 does not come back; the spare node trains on with the same bits. */
Test(kill, a_launcher_whose_place_a_spare_node_takes)
{
    enum { NODES = 3 };
    const history *whole = undisturbed();
    launched nodes[NODES];
    make_key();
    for (int i = 0; i < NODES; i++) {
        start_node(&nodes[i], i, 0, "1");
    }
    launched_until(&nodes[0], "checkpoint of step 20 ", 1, LAUNCHED_SECONDS);
    launched_end(&nodes[1], SIGKILL, 128 + SIGKILL);
    expect_done(&nodes[2]);
    expect_done(&nodes[0]);
    assert_says(&nodes[0], "workers on nodes 0, 2; spare nodes: none yet");
    expect_history("nodes", whole);
}
