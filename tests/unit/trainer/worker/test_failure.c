// SPDX-License-Identifier: Apache-2.0
/* Which rank reports when several fail. The ranks are threads that meet over loopback, as those of
 * a torchrun-like start; with a PMIx server that no call reaches, one of them reports. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/failure_record.h"
#include "tests/support/port.h"
#include "tests/support/skip.h"
#include "tests/support/tempdir.h"
#include "trainer/worker/failure.h"

enum { RANKS = 4, SECONDS = 60, LATER_MS = 300 };

static const double patience = 3; /* of the ranks below, unless a case gives another */
static tempdir dir;

typedef enum role {
    STANDS_BY = 0,
    FAILS,
    LEAVES,
    DIES_UNPRINTED, /* its failure is the first, and it ends before it has printed that */
    DIES_PRINTED
} role;

/* rank_case.after of a rank that acts when rank r has. */
#define AFTER(r) ((r) + 1)

typedef struct rank_case {
    role role;
    nd_error error;
    int after; /* 0: at once */
    int after_ms;
    double patience; /* 0: as above */
    bool claimed;    /* out */
    bool held;       /* out: it has claimed its host */
    double seconds;  /* out */
    char suffix[ND_ERROR_MESSAGE_MAX];
} rank_case;

typedef struct job {
    int port;
    bool collected; /* as by PMIx */
    pthread_barrier_t started, claimed, ended;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    bool acted[RANKS];
    int asked;  /* how often on_lost was called */
    bool heard; /* some rank was lost */
    bool first; /* ... and the first of them was the first failure, with this message: */
    char message[ND_ERROR_MESSAGE_MAX];
} job;

typedef struct rank_thread {
    pthread_t native;
    int rank;
    job *job;
    rank_case *c;
} rank_thread;

static void wait_until(job *j, const bool *done)
{
    pthread_mutex_lock(&j->lock);
    while (!*done) {
        pthread_cond_wait(&j->changed, &j->lock);
    }
    pthread_mutex_unlock(&j->lock);
}

static void set_acted(job *j, int rank)
{
    pthread_mutex_lock(&j->lock);
    j->acted[rank] = true;
    pthread_cond_broadcast(&j->changed);
    pthread_mutex_unlock(&j->lock);
}

/* Called on rank 0 in the thread of its store. The first time it has no time for the loss. */
static bool on_lost(void *context, const char *message, bool first)
{
    job *j = context;
    pthread_mutex_lock(&j->lock);
    bool takes = ++j->asked > 1;
    if (takes && !j->heard) {
        j->heard = true;
        j->first = first;
        snprintf(j->message, sizeof j->message, "%s", message);
    }
    pthread_cond_broadcast(&j->changed);
    pthread_mutex_unlock(&j->lock);
    return takes;
}

static nd_identity identity_of(int rank, int port)
{
    nd_identity id = {.source = ND_IDENTITY_ENVIRONMENT,
                      .rank = rank,
                      .world_size = RANKS,
                      .local_rank = rank,
                      .local_world_size = RANKS,
                      .nnodes = 1,
                      .master_addr = "127.0.0.1",
                      .master_port = port,
                      .host = "here",
                      .key_fd = -1};
    snprintf(id.run_id, sizeof id.run_id, "failures-%ld", (long)getpid());
    return id;
}

static void claim(rank_case *c, nd_failure *failure)
{
    int64_t begin = nd_clock_ns();
    c->claimed = nd_failure_claim(failure, &c->error, c->patience > 0 ? c->patience : patience,
                                  c->suffix, sizeof c->suffix);
    c->seconds = (double)(nd_clock_ns() - begin) * 1e-9;
    c->held = failure->held >= 0;
}

static void claim_and_die(nd_store *store, bool prints)
{
    bool set;
    cr_assert_eq(nd_store_set(store, ND_FAILURE_FIRST, "its reason", 10, &set), ND_OK);
    cr_assert(set);
    if (prints) {
        cr_assert_eq(nd_store_set(store, ND_FAILURE_PRINTED, "", 0, NULL), ND_OK);
    }
}

static void *run_rank(void *argument)
{
    rank_thread *t = argument;
    rank_case *c = t->c;
    job *j = t->job;
    nd_identity id = identity_of(t->rank, j->port);
    nd_failure failure = ND_FAILURE_INIT;
    nd_store *store = NULL;
    nd_status status = nd_store_open(&id, SECONDS, &store);
    cr_assert_eq(status, ND_OK, "rank %d: %s", t->rank, nd_error_last()->message);
    failure.identity = &id;
    failure.store = store;
    id.pmix = j->collected ? (struct nd_pmix *)(void *)&id : NULL;
    if (t->rank == 0) {
        cr_assert_eq(nd_store_watch(store, on_lost, j), ND_OK);
    }
    pthread_barrier_wait(&j->started);
    if (c->after > 0) {
        wait_until(j, &j->acted[c->after - 1]);
    }
    usleep((useconds_t)c->after_ms * 1000);
    if (c->role == FAILS) {
        claim(c, &failure);
    } else if (c->role == DIES_UNPRINTED || c->role == DIES_PRINTED) {
        claim_and_die(store, c->role == DIES_PRINTED);
    }
    if (c->role != FAILS && c->role != STANDS_BY) {
        nd_store_abandon(store);
        store = NULL;
    }
    set_acted(j, t->rank);
    pthread_barrier_wait(&j->claimed);
    if (failure.held >= 0) {
        close(failure.held);
    }
    pthread_barrier_wait(&j->ended);
    nd_store_abandon(store);
    return NULL;
}

/* With `hears` the job lives until rank 0 knows of a lost rank. */
static void run_job(rank_case cases[RANKS], bool collected, bool hears, job *out)
{
    rank_thread threads[RANKS];
    *out = (job){.port = port_reserve(),
                 .collected = collected,
                 .lock = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER};
    pthread_barrier_init(&out->started, NULL, RANKS);
    pthread_barrier_init(&out->claimed, NULL, RANKS);
    pthread_barrier_init(&out->ended, NULL, RANKS + 1);
    for (int r = 0; r < RANKS; r++) {
        threads[r] = (rank_thread){.rank = r, .job = out, .c = &cases[r]};
        cr_assert_eq(pthread_create(&threads[r].native, NULL, run_rank, &threads[r]), 0);
    }
    if (hears) {
        wait_until(out, &out->heard);
    }
    pthread_barrier_wait(&out->ended);
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r].native, NULL);
    }
    pthread_barrier_destroy(&out->started);
    pthread_barrier_destroy(&out->claimed);
    pthread_barrier_destroy(&out->ended);
}

static void run_pmix(rank_case cases[RANKS])
{
    job j;
    run_job(cases, true, false, &j);
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

/* What a child prints that ends in nd_failure_end_lost. The returned status is that of waitpid. */
static int end_lost(nd_failure *f, const char *message, bool first, char *text, size_t capacity)
{
    int ends[2], status = -1;
    size_t used = 0;
    ssize_t count;
    cr_assert_eq(pipe(ends), 0);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        _exit(nd_failure_end_lost(f, message, first) ? 1 : 2);
    }
    close(ends[1]);
    while (used + 1 < capacity && (count = read(ends[0], text + used, capacity - 1 - used)) > 0) {
        used += (size_t)count;
    }
    text[used] = '\0';
    close(ends[0]);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status), "%d", status);
    return WEXITSTATUS(status);
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
    run_pmix(cases);
    expect_one(cases, 2);
    for (int r = 0; r < RANKS; r++) {
        cr_expect_lt(cases[r].seconds, patience, "rank %d waited %g s", r, cases[r].seconds);
    }
}

Test(failure, the_first_of_several_reasons_wins)
{
    rank_case cases[RANKS] = {{FAILS, own, .after = AFTER(3)},
                              {FAILS, own, .after = AFTER(3)},
                              {FAILS, own, .after = AFTER(3)},
                              {FAILS, own}};
    run_pmix(cases);
    expect_one(cases, 3);
}

Test(failure, without_a_better_reason_one_rank_reports_the_lost_peer)
{
    rank_case cases[RANKS] = {{FAILS, lost_peer, .patience = 2.5},
                              {FAILS, lost_peer, .patience = 1},
                              {STANDS_BY},
                              {FAILS, lost_peer, .patience = 2.5}};
    run_pmix(cases);
    expect_one(cases, 1);
    cr_expect_gt(cases[1].seconds, 0.9);
}

/* Rank 0, which hosts the store, reports that loss. */
Test(failure, a_rank_that_ends_without_a_reason_is_the_first_failure)
{
    rank_case cases[RANKS] = {
        {STANDS_BY}, {FAILS, lost_peer}, {LEAVES, .after_ms = LATER_MS}, {FAILS, lost_peer}};
    run_pmix(cases);
    expect_one(cases, -1);
    cr_expect_lt(cases[1].seconds, patience);
}

Test(failure, ranks_with_separate_outputs_all_report_and_name_the_first)
{
    rank_case cases[RANKS] = {
        {FAILS, lost_peer}, {STANDS_BY}, {FAILS, own, .after_ms = LATER_MS}, {FAILS, named}};
    job j;
    run_job(cases, false, false, &j);
    cr_expect(cases[0].claimed && cases[2].claimed && cases[3].claimed);
    cr_expect_str_eq(cases[0].suffix, "; first failure: rank 2 (here): a bad file");
    cr_expect_str_eq(cases[3].suffix, cases[0].suffix);
    cr_expect_str_empty(cases[2].suffix);
}

/* Which of them is the first is open. */
Test(failure, the_rank_that_waits_for_nobody_is_the_stuck_one)
{
    rank_case cases[RANKS] = {{FAILS, deadline}, {FAILS, deadline}, {STANDS_BY}, {FAILS, deadline}};
    int reports = 0;
    run_pmix(cases);
    for (int r = 0; r < RANKS; r++) {
        reports += cases[r].claimed;
        if (cases[r].claimed) {
            cr_expect_str_eq(cases[r].suffix, "; not waiting for anyone: rank 2");
        }
    }
    cr_expect_eq(reports, 1);
}

/* Rank 3 reports and ends the job, which rank 0 is the first to notice. */
Test(failure, a_rank_that_had_heard_of_a_failure_does_not_report_that_rank_0_is_lost)
{
    rank_case cases[RANKS] = {{LEAVES, .after = AFTER(3)},
                              {FAILS, lost_peer, .after = AFTER(0)},
                              {FAILS, own, .after = AFTER(0)},
                              {FAILS, own}};
    run_pmix(cases);
    expect_one(cases, 3);
    cr_expect_lt(cases[1].seconds, patience);
}

Test(failure, where_the_store_was_lost_without_a_failure_one_rank_of_the_host_reports)
{
    rank_case cases[RANKS] = {{LEAVES},
                              {FAILS, lost_peer, .after = AFTER(0)},
                              {FAILS, lost_peer, .after = AFTER(0)},
                              {FAILS, lost_peer, .after = AFTER(0)}};
    int reports = 0;
    run_pmix(cases);
    for (int r = 1; r < RANKS; r++) {
        reports += cases[r].claimed;
        cr_expect_lt(cases[r].seconds, patience, "the connection is closed: nothing to wait for");
        cr_expect_str_eq(cases[r].suffix, "; rank 0, which hosts the store, was lost");
    }
    cr_expect_eq(reports, 1);
}

Test(failure, a_rank_with_its_own_output_names_the_failure_that_the_lost_store_told)
{
    rank_case cases[RANKS] = {
        {LEAVES, .after = AFTER(3)}, {FAILS, own, .after = AFTER(0)}, {STANDS_BY}, {FAILS, own}};
    job j;
    run_job(cases, false, false, &j);
    cr_expect(cases[1].claimed);
    cr_expect_str_eq(cases[1].suffix, "; first failure: rank 3 (here): a bad file");
}

Test(failure, a_lost_rank_ends_this_process_unless_another_thread_or_rank_does)
{
    nd_identity id = identity_of(0, 1);
    char text[4096];
    nd_failure f = ND_FAILURE_INIT;
    f.identity = &id;
    cr_expect_eq(end_lost(&f, "rank 2 was lost", true, text, sizeof text), ND_ERR_IO);
    cr_expect_not_null(strstr(text, "rank 2 was lost"), "%s", text);
    f.gate.closed = true;
    cr_expect_eq(end_lost(&f, "rank 2 was lost", true, text, sizeof text), 2, "ask again");
    f.gate.closed = false;
    cr_expect_str_empty(text);
    f.ended = true;
    cr_expect_eq(end_lost(&f, "rank 2 was lost", true, text, sizeof text), 1, "it is reported");
    cr_expect_str_empty(text);
    f.ended = false;
    id.pmix = (struct nd_pmix *)(void *)&id; /* no call reaches it */
    cr_expect_eq(end_lost(&f, "rank 2 was lost", false, text, sizeof text), 1, "another reports");
    cr_expect_str_empty(text);
}

/* The rank that the others leave the report to. */
Test(failure, a_reporter_that_dies_before_it_has_printed_leaves_its_reason_to_rank_0)
{
    rank_case cases[RANKS] = {{STANDS_BY}, {STANDS_BY}, {DIES_UNPRINTED}, {STANDS_BY}};
    job j;
    run_job(cases, true, true, &j);
    cr_expect(j.first);
    cr_expect_str_eq(j.message, "rank 2 (here) was lost: it ended without a goodbye, before it had "
                                "printed its failure: its reason");
}

Test(failure, a_reporter_that_dies_afterwards_is_not_reported_again)
{
    rank_case cases[RANKS] = {{STANDS_BY}, {STANDS_BY}, {DIES_PRINTED}, {STANDS_BY}};
    job j;
    run_job(cases, true, true, &j);
    cr_expect_not(j.first);
}

/* A process that hosts the store as rank 0 until it is killed; 2 ranks of the job have met. */
static pid_t start_host(const nd_identity *id, int *ready)
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        nd_store *store = NULL;
        nd_identity host = *id;
        host.rank = 0;
        bool opened = nd_store_open(&host, SECONDS, &store) == ND_OK;
        (void)!write(ends[1], opened ? "y" : "n", 1);
        for (;;) {
            pause();
        }
    }
    close(ends[1]);
    *ready = ends[0];
    return child;
}

Test(failure, a_store_that_does_not_answer_is_named_and_its_late_answers_are_not_taken)
{
    nd_identity id = identity_of(1, port_reserve());
    nd_failure failure = ND_FAILURE_INIT;
    char suffix[ND_ERROR_MESSAGE_MAX], answer = 0;
    int ready;
    bool is_new = false;
    pid_t host = start_host(&id, &ready);
    cr_assert_eq(read(ready, &answer, 1), 1);
    cr_assert_eq(answer, 'y');
    cr_assert_eq(nd_store_open(&id, SECONDS, &failure.store), ND_OK);
    failure.identity = &id;
    cr_assert_eq(kill(host, SIGSTOP), 0);
    cr_assert_eq(waitpid(host, NULL, WUNTRACED), host);
    cr_expect_eq(nd_store_check(failure.store, 0.1), ND_ERR_HANG);
    cr_expect(nd_failure_claim(&failure, &own, patience, suffix, sizeof suffix));
    cr_expect_str_eq(suffix, "; rank 0, which hosts the store, does not answer");
    cr_assert_eq(kill(host, SIGCONT), 0);
    nd_store_set_timeout(failure.store, SECONDS);
    cr_expect_eq(nd_store_set(failure.store, "key", "", 0, &is_new), ND_OK, "%s",
                 nd_error_last()->message);
    cr_expect(is_new);
    nd_store_abandon(failure.store);
    kill(host, SIGKILL);
    cr_assert_eq(waitpid(host, NULL, 0), host);
    close(ready);
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

Test(failure, where_there_is_no_store_one_rank_of_the_host_reports)
{
    nd_identity id = job_of("unmet"), other = job_of("other");
    nd_failure failures[RANKS];
    int reports = 0, others, again;
    char suffix[ND_ERROR_MESSAGE_MAX];
    id.pmix = (struct nd_pmix *)(void *)&id; /* no call reaches it */
    for (id.rank = 0; id.rank < RANKS; id.rank++) {
        failures[id.rank] = (nd_failure)ND_FAILURE_INIT;
        failures[id.rank].identity = &id;
        reports += nd_failure_claim(&failures[id.rank], &own, patience, suffix, sizeof suffix);
        cr_expect_str_empty(suffix);
    }
    cr_expect_eq(reports, 1);
    cr_expect_geq(failures[0].held, 0, "the first rank that asks");
    cr_expect_eq(failures[1].held, -1);
    cr_expect(nd_failure_claim_host(&other, &others), "another job");
    close(others);
    close(failures[0].held);
    cr_expect(nd_failure_claim_host(&id, &again));
    close(again);
}

typedef struct keeper {
    int held;
    atomic_bool answered;
} keeper;

static void *keep_host(void *argument)
{
    keeper *k = argument;
    while (!k->answered) {
        nd_failure_keep_host(k->held, 0.05);
    }
    return NULL;
}

/* Connections that nobody has accepted fill the queue of the one that holds the host. */
Test(failure, more_processes_than_a_queue_holds_stay_silent)
{
    enum { MOST = 1 << 17 };
    const nd_identity id = job_of("crowd");
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ndtrain-failure-%lu-%s",
                          (unsigned long)geteuid(), id.run_id);
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    keeper k = {0};
    pthread_t thread;
    int asker, code = 0;
    cr_assert(nd_failure_claim_host(&id, &k.held));
    for (int i = 0; code == 0 && i < MOST; i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
        code = connect(fd, (struct sockaddr *)&name, bytes);
        close(fd);
    }
    cr_assert_eq(code, -1, "the queue is full");
    cr_assert_eq(pthread_create(&thread, NULL, keep_host, &k), 0);
    cr_expect_not(nd_failure_claim_host(&id, &asker));
    k.answered = true;
    pthread_join(thread, NULL);
    close(k.held);
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
    run_pmix(cases);
    expect_one(cases, 1);
    cr_expect(cases[1].held, "its host is claimed");
}
