// SPDX-License-Identifier: Apache-2.0
/*
 * Ranks of PMIx that are silent, since another rank reports and ends the job, and whose end does
 * not come. Rank 0 is a process that has the first failure and does nothing more. PMIx_Abort is a
 * function of this file.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/failure_record.h"
#include "runtime/rdzv/pmix.h"
#include "tests/support/port.h"
#include "tests/support/tempdir.h"
#include "trainer/worker/failure.h"

enum { RANKS = 4, SECONDS = 60 };

static const double silence = 0.3;
static tempdir dir;
static nd_identity base; /* of any rank */
static pid_t host;
static int aborts;
static char aborted_with[ND_ERROR_MESSAGE_MAX];
static pthread_mutex_t abort_lock = PTHREAD_MUTEX_INITIALIZER;

void __wrap_nd_pmix_abort(nd_pmix *pmix, int code, const char *message);

void __wrap_nd_pmix_abort(nd_pmix *pmix, int code, const char *message)
{
    pthread_mutex_lock(&abort_lock);
    aborts++;
    snprintf(aborted_with, sizeof aborted_with, "%s", message);
    pthread_mutex_unlock(&abort_lock);
    fprintf(stderr, "aborted with %d\n", code);
}

static nd_identity identity_of(int rank)
{
    nd_identity id = base;
    id.rank = id.local_rank = rank;
    return id;
}

/* Rank 0 of the job, with its failure. */
static void run_host(int ready)
{
    nd_identity id = identity_of(0);
    nd_store *store = NULL;
    bool set = false;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    nd_status status = nd_store_open(&id, SECONDS, &store);
    status =
        status == ND_OK ? nd_store_set(store, ND_FAILURE_FIRST, "its reason", 10, &set) : status;
    (void)!write(ready, status == ND_OK && set ? "y" : "n", 1);
    for (;;) {
        pause();
    }
}

static void setup(void)
{
    int ends[2];
    char answer = 0;
    tempdir_make(&dir);
    setenv("XDG_RUNTIME_DIR", dir.path, 1); /* for the key */
    base = (nd_identity){.source = ND_IDENTITY_ENVIRONMENT,
                         .world_size = RANKS,
                         .local_world_size = RANKS,
                         .nnodes = 1,
                         .master_addr = "127.0.0.1",
                         .master_port = port_reserve(),
                         .host = "here",
                         .key_fd = -1};
    snprintf(base.run_id, sizeof base.run_id, "silence-%ld", (long)getpid());
    cr_assert_eq(pipe(ends), 0);
    host = fork();
    cr_assert_geq(host, 0);
    if (host == 0) {
        run_host(ends[1]);
    }
    close(ends[1]);
    cr_assert_eq(read(ends[0], &answer, 1), 1);
    cr_assert_eq(answer, 'y');
    close(ends[0]);
}

static void teardown(void)
{
    kill(host, SIGKILL);
    waitpid(host, NULL, 0);
    tempdir_remove(&dir);
}

TestSuite(failure_silence, .init = setup, .fini = teardown, .timeout = 60);

/* A rank that has met the others and knows of rank 0's failure. */
typedef struct rank_here {
    nd_identity id;
    nd_failure failure;
    nd_error error; /* with which it ends */
    double seconds; /* out: how long that took */
} rank_here;

static void join(rank_here *r, int rank, double kill_seconds)
{
    r->id = identity_of(rank);
    r->failure = (nd_failure)ND_FAILURE_INIT;
    r->failure.kill_seconds = kill_seconds;
    r->failure.identity = &r->id;
    r->error = (nd_error){ND_ERR_DATA, ND_CAUSE_OWN, ""};
    snprintf(r->error.message, sizeof r->error.message, "a bad file of rank %d", rank);
    cr_assert_eq(nd_store_open(&r->id, SECONDS, &r->failure.store), ND_OK, "%s",
                 nd_error_last()->message);
    cr_assert_eq(nd_store_check(r->failure.store, SECONDS),
                 ND_OK); /* it has received the failure */
    r->id.pmix = (struct nd_pmix *)(void *)&r->id;
}

static void leave(rank_here *r)
{
    nd_store_abandon(r->failure.store);
    if (r->failure.held >= 0) {
        close(r->failure.held);
    }
}

static void *end(void *argument)
{
    rank_here *r = argument;
    double begin = nd_clock_seconds();
    nd_failure_end(&r->failure, &r->error);
    r->seconds = nd_clock_seconds() - begin;
    return NULL;
}

Test(failure_silence, where_nobody_ends_the_job_one_rank_of_the_host_reports)
{
    static rank_here ranks[RANKS];
    pthread_t threads[RANKS];
    int reporter = 0;
    for (int r = 1; r < RANKS; r++) {
        join(&ranks[r], r, silence);
        cr_assert_eq(pthread_create(&threads[r], NULL, end, &ranks[r]), 0);
    }
    for (int r = 1; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        cr_expect_geq(ranks[r].seconds, silence, "rank %d was silent for %g s", r,
                      ranks[r].seconds);
        cr_expect(ranks[r].failure.ended);
        reporter = ranks[r].failure.held >= 0 ? r : reporter;
        leave(&ranks[r]);
    }
    cr_assert_eq(aborts, 1);
    cr_assert_gt(reporter, 0);
    cr_expect_str_eq(aborted_with, ranks[reporter].error.message);
}

static bool end_lost(rank_here *r)
{
    return nd_failure_end_lost(&r->failure, "rank 2 was lost", true);
}

/* What a child prints in which `act` ends the process. */
static void expect_end(rank_here *r, bool (*act)(rank_here *r), const char *words)
{
    char text[4096];
    int ends[2], status = -1;
    size_t used = 0;
    ssize_t count;
    cr_assert_eq(pipe(ends), 0);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        _exit(act(r) ? 1 : 2);
    }
    close(ends[1]);
    while (used + 1 < sizeof text &&
           (count = read(ends[0], text + used, sizeof text - 1 - used)) > 0) {
        used += (size_t)count;
    }
    text[used] = '\0';
    close(ends[0]);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == ND_ERR_IO, "%x: %s", (unsigned)status,
              text);
    cr_expect_not_null(strstr(text, words), "%s", text);
    cr_expect_not_null(strstr(text, "aborted with 74"), "%s", text);
}

/* Its connection to rank 0 breaks, and the end that rank 0 had announced does not come. */
Test(failure_silence, a_rank_that_was_told_of_a_failure_reports_a_loss_only_afterwards)
{
    static rank_here r;
    join(&r, 1, silence);
    double begin = nd_clock_seconds();
    expect_end(&r, end_lost, "rank 2 was lost; first failure: its reason");
    /* The silence, and as long again behind the report. */
    cr_expect_geq(nd_clock_seconds() - begin, 2 * silence);
    leave(&r);
}

/* Rank 0's main thread is silent, and the thread of its store learns that the reporter was lost. */
static bool end_beside_silence(rank_here *r)
{
    pthread_t main_thread;
    static const struct timespec pause = {.tv_nsec = 1000000};
    bool silent = false, ended = false;
    r->id.rank = 0;
    if (pthread_create(&main_thread, NULL, end, r) != 0) {
        return true;
    }
    while (!silent) { /* it has entered, and then left for the silence */
        nanosleep(&pause, NULL);
        silent = r->failure.silent;
    }
    while (!ended) {
        ended = end_lost(r);
    }
    return true;
}

Test(failure_silence, a_loss_is_reported_while_another_thread_is_silent)
{
    static rank_here r;
    join(&r, 1, 2); /* so long it waits again for its end, behind the report */
    expect_end(&r, end_beside_silence, "rank 2 was lost");
    leave(&r);
}
