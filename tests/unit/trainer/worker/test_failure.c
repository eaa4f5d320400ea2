// SPDX-License-Identifier: Apache-2.0
/* Which rank reports when several fail. The ranks are threads that meet over loopback, as those of
 * a torchrun-like start; with a PMIx server that no call reaches, one of them reports. */
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "tests/support/port.h"
#include "tests/support/skip.h"
#include "tests/support/tempdir.h"
#include "trainer/worker/failure.h"

enum { RANKS = 4, SECONDS = 60, LATER_MS = 300 };

static const double patience = 3; /* of the ranks below, unless a case gives another */
static tempdir dir;

typedef enum role { STANDS_BY = 0, FAILS, LEAVES } role;

typedef struct rank_case {
    role role;
    nd_error error;
    int after_ms;
    double patience; /* 0: as above */
    bool claimed;    /* out */
    bool held;       /* out: it has claimed its host */
    double seconds;  /* out */
    char suffix[ND_ERROR_MESSAGE_MAX];
} rank_case;

typedef struct rank_thread {
    pthread_t native;
    int rank, port;
    bool collected;
    pthread_barrier_t *started, *ended;
    rank_case *c;
} rank_thread;

static void *run_rank(void *argument)
{
    rank_thread *t = argument;
    rank_case *c = t->c;
    nd_identity id = {.source = ND_IDENTITY_ENVIRONMENT,
                      .rank = t->rank,
                      .world_size = RANKS,
                      .local_rank = t->rank,
                      .local_world_size = RANKS,
                      .nnodes = 1,
                      .master_addr = "127.0.0.1",
                      .master_port = t->port,
                      .host = "here",
                      .key_fd = -1};
    nd_store *store = NULL;
    snprintf(id.run_id, sizeof id.run_id, "failures-%ld", (long)getpid());
    nd_status status = nd_store_open(&id, SECONDS, &store);
    cr_assert_eq(status, ND_OK, "rank %d: %s", t->rank, nd_error_last()->message);
    id.pmix = t->collected ? (struct nd_pmix *)(void *)&id : NULL;
    pthread_barrier_wait(t->started);
    int64_t begin = nd_clock_ns();
    usleep((useconds_t)c->after_ms * 1000);
    if (c->role == FAILS) {
        int held = -1;
        const nd_failure failure = {&id, store, &held};
        c->claimed = nd_failure_claim(&failure, &c->error, c->patience > 0 ? c->patience : patience,
                                      c->suffix, sizeof c->suffix);
        c->seconds = (double)(nd_clock_ns() - begin) * 1e-9;
        c->held = held >= 0;
        if (held >= 0) {
            close(held);
        }
    } else if (c->role == LEAVES) {
        nd_store_abandon(store);
        store = NULL;
    }
    pthread_barrier_wait(t->ended);
    nd_store_abandon(store);
    return NULL;
}

static void run_job(rank_case cases[RANKS], bool collected)
{
    rank_thread threads[RANKS];
    pthread_barrier_t started, ended;
    int port = port_reserve();
    pthread_barrier_init(&started, NULL, RANKS);
    pthread_barrier_init(&ended, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        threads[r] = (rank_thread){.rank = r,
                                   .port = port,
                                   .collected = collected,
                                   .started = &started,
                                   .ended = &ended,
                                   .c = &cases[r]};
        cr_assert_eq(pthread_create(&threads[r].native, NULL, run_rank, &threads[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r].native, NULL);
    }
    pthread_barrier_destroy(&started);
    pthread_barrier_destroy(&ended);
}

static void expect_one(const rank_case cases[RANKS], int reporter)
{
    for (int r = 0; r < RANKS; r++) {
        cr_expect_eq(cases[r].claimed, r == reporter, "rank %d: %d%s", r, cases[r].claimed,
                     cases[r].suffix);
    }
}

static void setup(void)
{
    tempdir_make(&dir);
    setenv("XDG_RUNTIME_DIR", dir.path, 1); /* for the key */
}

static void teardown(void)
{
    tempdir_remove(&dir);
}

TestSuite(failure, .init = setup, .fini = teardown, .timeout = 60);

static const nd_error own = {ND_ERR_DATA, ND_CAUSE_OWN, "a bad file"};
static const nd_error lost_peer = {ND_ERR_IO, ND_CAUSE_OWN, "rank 2 has ended"};
static const nd_error named = {ND_ERR_RESOURCE, ND_CAUSE_ELSEWHERE, "see the message of rank 2"};
static const nd_error deadline = {ND_ERR_HANG, ND_CAUSE_OWN, "the deadline passed"};

Test(failure, a_reason_beats_its_consequences_which_came_before)
{
    rank_case cases[RANKS] = {{FAILS, lost_peer},
                              {FAILS, named},
                              {FAILS, own, .after_ms = LATER_MS},
                              {FAILS, lost_peer, .after_ms = 2 * LATER_MS}};
    run_job(cases, true);
    expect_one(cases, 2);
    for (int r = 0; r < RANKS; r++) {
        cr_expect_lt(cases[r].seconds, patience, "rank %d waited %g s", r, cases[r].seconds);
    }
}

Test(failure, the_first_of_several_reasons_wins)
{
    rank_case cases[RANKS] = {{FAILS, own, .after_ms = LATER_MS},
                              {FAILS, own, .after_ms = LATER_MS},
                              {FAILS, own, .after_ms = LATER_MS},
                              {FAILS, own}};
    run_job(cases, true);
    expect_one(cases, 3);
}

Test(failure, without_a_better_reason_one_rank_reports_the_lost_peer)
{
    rank_case cases[RANKS] = {{FAILS, lost_peer, .patience = 2.5},
                              {FAILS, lost_peer, .patience = 1},
                              {STANDS_BY},
                              {FAILS, lost_peer, .patience = 2.5}};
    run_job(cases, true);
    expect_one(cases, 1);
    cr_expect_gt(cases[1].seconds, 0.9);
}

/* Rank 0, which hosts the store, reports that loss. */
Test(failure, a_rank_that_ends_without_a_reason_is_the_first_failure)
{
    rank_case cases[RANKS] = {
        {STANDS_BY}, {FAILS, lost_peer}, {LEAVES, .after_ms = LATER_MS}, {FAILS, lost_peer}};
    run_job(cases, true);
    expect_one(cases, -1);
    cr_expect_lt(cases[1].seconds, patience);
}

Test(failure, ranks_with_separate_outputs_all_report_and_name_the_first)
{
    rank_case cases[RANKS] = {
        {FAILS, lost_peer}, {STANDS_BY}, {FAILS, own, .after_ms = LATER_MS}, {FAILS, named}};
    run_job(cases, false);
    cr_expect(cases[0].claimed && cases[2].claimed && cases[3].claimed);
    cr_expect_str_eq(cases[0].suffix, "; first failure: rank 2 (here): a bad file");
    cr_expect_str_eq(cases[3].suffix, cases[0].suffix);
    cr_expect_str_empty(cases[2].suffix);
}

Test(failure, the_rank_that_waits_for_nobody_is_the_stuck_one)
{
    rank_case cases[RANKS] = {{FAILS, deadline, .after_ms = LATER_MS},
                              {FAILS, deadline},
                              {STANDS_BY},
                              {FAILS, deadline, .after_ms = LATER_MS}};
    run_job(cases, true);
    expect_one(cases, 1);
    cr_expect_str_eq(cases[1].suffix, "; not waiting for anyone: rank 2");
}

enum { PROCESSES = 8 };

/* Processes of one host that claim it at the same moment; how many may report. All of them live
 * until the last has answered. */
static int claim_together(const nd_identity *id)
{
    int begin[2], end[2], answers[2], reports = 0;
    cr_assert(pipe(begin) == 0 && pipe(end) == 0 && pipe(answers) == 0);
    for (int i = 0; i < PROCESSES; i++) {
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            char byte;
            int held = -1;
            close(begin[1]);
            close(end[1]);
            (void)!read(begin[0], &byte, 1); /* until the parent closes it */
            byte = nd_failure_claim_host(id, &held);
            (void)!write(answers[1], &byte, 1);
            (void)!read(end[0], &byte, 1);
            _exit(0);
        }
    }
    close(begin[1]);
    for (int i = 0; i < PROCESSES; i++) {
        char claimed = 0;
        cr_assert_eq(read(answers[0], &claimed, 1), 1);
        reports += claimed;
    }
    close(end[1]);
    for (int i = 0; i < PROCESSES; i++) {
        wait(NULL);
    }
    close(begin[0]);
    close(end[0]);
    close(answers[0]);
    close(answers[1]);
    return reports;
}

/* A job of PMIx, of a name that no other test has at this moment. */
static nd_identity job_of(const char *name)
{
    nd_identity id = {.source = ND_IDENTITY_PMIX, .world_size = RANKS, .local_world_size = RANKS};
    snprintf(id.run_id, sizeof id.run_id, "%s-%ld", name, (long)getpid());
    return id;
}

Test(failure, one_process_of_a_host_reports)
{
    const nd_identity id = job_of("together");
    cr_assert_eq(claim_together(&id), 1);
    cr_assert_eq(claim_together(&id), 1, "the first ones have ended, and their claim with them");
}

Test(failure, ranks_that_have_not_met_are_decided_without_the_store)
{
    nd_identity id = job_of("unmet"), other = job_of("other");
    int held[RANKS], reports = 0, others;
    char suffix[ND_ERROR_MESSAGE_MAX];
    id.pmix = (struct nd_pmix *)(void *)&id; /* no call reaches it */
    for (id.rank = 0; id.rank < RANKS; id.rank++) {
        const nd_failure failure = {&id, NULL, &held[id.rank]};
        reports += nd_failure_claim(&failure, &own, patience, suffix, sizeof suffix);
        cr_expect_str_empty(suffix);
    }
    cr_expect_eq(reports, 1);
    cr_expect_geq(held[0], 0, "the first rank that asks");
    cr_expect_eq(held[1], -1);
    cr_expect(nd_failure_claim_host(&other, &others), "another job");
    close(others);
    close(held[0]);
    cr_expect(nd_failure_claim_host(&id, &held[1]));
    close(held[1]);
}

/* The name of this user's ranks in the hands of somebody else. */
Test(failure, another_user_cannot_silence_a_job)
{
    const nd_identity id = job_of("foreign");
    const uid_t nobody = 65534;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ndtrain-failure-%lu-%s",
                          (unsigned long)geteuid(), id.run_id);
    int held, fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (geteuid() != 0) {
        close(fd);
        teardown();
        skip_test("only root can be two users");
    }
    cr_assert_eq(seteuid(nobody), 0);
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    cr_assert_eq(bind(fd, (struct sockaddr *)&name, bytes), 0);
    cr_assert_eq(listen(fd, 1), 0);
    cr_assert_eq(seteuid(0), 0);
    cr_expect(nd_failure_claim_host(&id, &held));
    cr_expect_eq(held, -1);
    close(fd);
}

/* A rank that the store has chosen also claims its host. */
Test(failure, the_rank_that_the_store_chose_silences_those_that_cannot_ask)
{
    rank_case cases[RANKS] = {{STANDS_BY}, {FAILS, own}, {STANDS_BY}, {STANDS_BY}};
    run_job(cases, true);
    expect_one(cases, 1);
    cr_expect(cases[1].held, "its host is claimed");
}
