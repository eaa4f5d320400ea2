// SPDX-License-Identifier: Apache-2.0
/* Messages of ranks that fail together, as PMIx ends their job and without it. Ranks are processes;
 * PMIx_Abort is a function of this program (--wrap) that kills them, as a server does. */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/rdzv/pmix.h"
#include "trainer/worker/worker.h"

enum { RANKS = 4 };

typedef struct shared {
    _Atomic pid_t pids[RANKS];
    _Atomic int joined, code, ended;
} shared;

static shared *job;

void __wrap_nd_pmix_abort(nd_pmix *pmix, int code, const char *message);

void __wrap_nd_pmix_abort(nd_pmix *pmix, int code, const char *message)
{
    int none = 0;
    atomic_compare_exchange_strong(&job->code, &none, code);
    for (int r = 0; r < RANKS; r++) {
        if (job->pids[r] != getpid()) {
            kill(job->pids[r], SIGKILL);
        }
    }
    raise(SIGKILL);
}

static void setup(void)
{
    job = mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(job, MAP_FAILED);
}

TestSuite(failure, .init = setup, .timeout = 120);

static nd_worker worker_of(int rank, bool pmix)
{
    nd_worker w = {.gate = ND_GATE_INIT};
    w.identity = (nd_identity){.source = pmix ? ND_IDENTITY_PMIX : ND_IDENTITY_ENVIRONMENT,
                               .rank = rank,
                               .world_size = RANKS};
    w.identity.pmix = pmix ? (struct nd_pmix *)(void *)job : NULL; /* no call reaches it */
    return w;
}

/* Not a status of the program: the store tells the rank of a loss, whose message this is. */
enum { HEARS = 200 };

static bool one_by_one; /* each rank fails a moment after the rank before, unless one has ended */

/* Rank r of the job, in a process of its own, once all of them are there. */
static void run_rank(int r, bool pmix, const nd_error *error)
{
    nd_worker worker = worker_of(r, pmix);
    job->pids[r] = getpid();
    job->joined++;
    while (job->joined < RANKS) {
        usleep(1000);
    }
    usleep(one_by_one ? (useconds_t)r * 50000 : 0);
    if (one_by_one && job->ended) {
        _exit(ND_ERR_IO);
    }
    if (error->status == ND_OK) {
        pause(); /* it waits for the others in a collective */
    }
    if ((int)error->status == HEARS) {
        nd_worker_report_loss(&worker, error->message);
    }
    nd_worker_report(&worker, error);
    job->ended = 1;
    _exit((int)error->status);
}

/* These are what the ranks printed, and for each its exit code and whether it was killed. */
static char text[4096];
static bool killed[RANKS];
static int codes[RANKS];

static void fail_together(const nd_error errors[RANKS], bool pmix)
{
    int ends[2], status;
    size_t used = 0;
    ssize_t n;
    pid_t pids[RANKS];
    cr_assert_eq(pipe(ends), 0);
    for (int r = 0; r < RANKS; r++) {
        pids[r] = fork();
        cr_assert_geq(pids[r], 0);
        if (pids[r] == 0) {
            dup2(ends[1], STDERR_FILENO);
            run_rank(r, pmix, &errors[r]);
        }
    }
    close(ends[1]);
    while (used + 1 < sizeof text && (n = read(ends[0], text + used, sizeof text - 1 - used)) > 0) {
        used += (size_t)n;
    }
    text[used] = '\0';
    close(ends[0]);
    for (int r = 0; r < RANKS; r++) {
        cr_assert_eq(waitpid(pids[r], &status, 0), pids[r]);
        killed[r] = WIFSIGNALED(status);
        codes[r] = WEXITSTATUS(status);
    }
}

static const nd_error own = {ND_ERR_DATA, ND_CAUSE_OWN, "a bad file"};
static const nd_error lost_peer = {ND_ERR_IO, ND_CAUSE_OWN, "rank 2 has ended"};
static const nd_error named = {ND_ERR_RESOURCE, ND_CAUSE_ELSEWHERE, "see the message of rank 2"};
static const nd_error no_file = {ND_ERR_IO, ND_CAUSE_LOCAL, "a file cannot be read"};

/* PMIx ends the job with this code. */
static void expect_killed(const nd_error errors[RANKS], int code)
{
    fail_together(errors, true);
    cr_expect_eq(job->code, code);
    for (int r = 0; r < RANKS; r++) {
        cr_expect(killed[r], "rank %d", r);
    }
}

/* Each rank ends by itself, with its own code and sentence. */
static void expect_ended(const nd_error errors[RANKS])
{
    fail_together(errors, false);
    cr_expect_eq(job->code, 0);
    for (int r = 0; r < RANKS; r++) {
        cr_expect(!killed[r] && codes[r] == (int)errors[r].status &&
                      strstr(text, errors[r].message),
                  "rank %d: %d: %s", r, codes[r], text);
    }
}

Test(failure, under_pmix_the_rank_with_the_reason_ends_the_job_before_others_print)
{
    expect_killed((const nd_error[]){lost_peer, named, own, lost_peer}, ND_ERR_DATA);
    cr_expect_str_eq(text, "error: a bad file\n");
}

Test(failure, an_io_error_of_the_rank_itself_is_a_reason)
{
    expect_killed((const nd_error[]){lost_peer, {0}, no_file, lost_peer}, ND_ERR_IO);
    cr_expect_str_eq(text, "error: a file cannot be read\n");
}

/* Slurm ends a step soon that has lost a process: rank 1 does not wait for long. */
Test(failure, under_pmix_rank_1_tells_of_a_lost_rank_0_before_the_others)
{
    static const nd_error first = {(nd_status)HEARS, ND_CAUSE_OWN, "rank 0 was lost"};
    static const nd_error later = {(nd_status)HEARS, ND_CAUSE_OWN, "another rank says so"};
    expect_killed((const nd_error[]){{0}, first, later, later}, ND_ERR_IO);
    cr_expect_eq(strncmp(text, "error: rank 0 was lost\n", 23), 0, "%s", text);
}

Test(failure, at_a_deadline_each_rank_says_for_whom_it_waits)
{
    static const nd_error waiting[RANKS] = {{ND_ERR_HANG, ND_CAUSE_OWN, "waits for rank 1"},
                                            {ND_ERR_HANG, ND_CAUSE_OWN, "waits for rank 2"},
                                            {0},
                                            {ND_ERR_HANG, ND_CAUSE_OWN, "waits for rank 0"}};
    expect_killed(waiting, ND_ERR_HANG);
    for (int r = 0; r < RANKS; r++) {
        cr_expect(strstr(text, waiting[r].message), "rank %d: %s", r, text);
    }
}

/* As torchrun starts them: the end of one rank ends the others. */
Test(failure, without_pmix_too_each_rank_reaches_its_deadline_before_one_ends)
{
    const nd_error waits = {ND_ERR_HANG, ND_CAUSE_OWN, "waits for another one"};
    one_by_one = true;
    expect_ended((const nd_error[]){waits, waits, waits, waits});
}

Test(failure, without_pmix_each_rank_prints_its_own)
{
    expect_ended((const nd_error[]){lost_peer, named, own, lost_peer});
}

/* Runs a child that ends in nd_worker_report_loss. Reads its output; returns its exit code. */
static int end_lost(nd_worker *worker)
{
    int ends[2], status = -1;
    cr_assert_eq(pipe(ends), 0);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        nd_worker_report_loss(worker, "rank 2 was lost");
        _exit(1);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    close(ends[0]);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status), "%d", status);
    return WEXITSTATUS(status);
}

Test(failure, a_lost_rank_ends_this_process_unless_another_thread_has_reported)
{
    nd_worker worker = worker_of(0, false);
    cr_expect_eq(end_lost(&worker), ND_ERR_IO);
    cr_expect_not_null(strstr(text, "rank 2 was lost"), "%s", text);
    worker.reported = true;
    cr_expect_eq(end_lost(&worker), 1);
    cr_expect_str_empty(text);
}
