// SPDX-License-Identifier: Apache-2.0
/* The threads of a device: every piece is done once, by threads that share, and nobody waits for a
 * thread that has begun nothing. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/team.h"

enum { PIECES_MAX = 300, THREADS_MAX = 7, PATIENCE_SECONDS = 60 };

/* A thread that is not woken waits for ever. */
TestSuite(team, .timeout = 2 * PATIENCE_SECONDS);

static nd_team *make_team(int threads)
{
    nd_team *team = NULL;
    cr_assert_eq(nd_team_create(threads, &team), ND_OK);
    cr_assert_eq(nd_team_start(team, 0), ND_OK, "%s", nd_error_last()->message);
    return team;
}

/* Waits until the flag is set; false: it was not within PATIENCE_SECONDS. */
static bool wait_for_flag(_Atomic bool *flag)
{
    const struct timespec pause = {.tv_nsec = 100000};
    const time_t end = time(NULL) + PATIENCE_SECONDS;
    while (!atomic_load(flag)) {
        if (time(NULL) > end) {
            return false;
        }
        nanosleep(&pause, NULL);
    }
    return true;
}

typedef struct tally {
    int done[PIECES_MAX]; /* not atomic: a piece is one thread's, and the caller reads it after */
    _Atomic int inside[THREADS_MAX];
    _Atomic int clashes;
} tally;

static void count_piece(void *arg, int64_t piece)
{
    tally *t = arg;
    const int thread = nd_team_thread();
    if (thread < 0 || thread >= THREADS_MAX || atomic_fetch_add(&t->inside[thread], 1) != 0) {
        atomic_fetch_add(&t->clashes, 1);
        return;
    }
    t->done[piece]++;
    atomic_fetch_sub(&t->inside[thread], 1);
}

Test(team, does_every_piece_once)
{
    static const int threads[] = {1, 2, 3, THREADS_MAX};
    static const int64_t pieces[] = {0, 1, 2, 5, 6, 7, 8, 28, 29, PIECES_MAX};
    for (int i = 0; i < 4; i++) {
        nd_team *team = make_team(threads[i]);
        cr_expect_eq(nd_team_threads(team), threads[i]);
        for (int region = 0; region < 400; region++) {
            tally t = {0};
            const int64_t count = pieces[region % 10];
            nd_team_run(team, count, count_piece, &t);
            cr_assert_eq(t.clashes, 0, "two pieces at once have the same thread's scratch");
            for (int64_t p = 0; p < PIECES_MAX; p++) {
                cr_assert_eq(t.done[p], p < count, "piece %lld of %lld with %d threads",
                             (long long)p, (long long)count, threads[i]);
            }
        }
        cr_expect_eq(nd_team_thread(), 0);
        nd_team_destroy(team);
    }
}

typedef struct meeting {
    _Atomic bool here[2], missed;
} meeting;

/* Each of two pieces waits for the other, so that one thread alone cannot do them. */
static void meet(void *arg, int64_t piece)
{
    meeting *m = arg;
    atomic_store(&m->here[piece], true);
    if (!wait_for_flag(&m->here[1 - piece])) {
        atomic_store(&m->missed, true);
    }
}

/* The first region starts the threads. The next ones come alternately soon after the last region,
 * and after the threads have fallen asleep. */
Test(team, shares_the_pieces_between_threads)
{
    nd_team *team = NULL;
    cr_assert_eq(nd_team_create(2, &team), ND_OK);
    for (int region = 0; region < 20; region++) {
        meeting m = {0};
        nd_team_run(team, 2, meet, &m);
        cr_assert_not(m.missed, "region %d was done by one thread", region);
        if (region % 2) {
            usleep(20000);
        }
    }
    nd_team_destroy(team);
}

static _Atomic bool held, may_go_on, hold_ended;

/* Stands for a CPU that does something else. */
static void hold(int number)
{
    const struct timespec pause = {.tv_nsec = 100000};
    atomic_store(&held, true);
    for (int i = 0; !atomic_load(&may_go_on) && i < PATIENCE_SECONDS * 10000; i++) {
        nanosleep(&pause, NULL);
    }
    atomic_store(&hold_ended, true);
}

typedef struct names {
    meeting m;
    pthread_t threads[2];
} names;

static void tell_name(void *arg, int64_t piece)
{
    names *n = arg;
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
    n->threads[nd_team_thread()] = pthread_self();
    meet(&n->m, piece);
}

Test(team, does_not_wait_for_a_thread_that_has_begun_nothing)
{
    const struct sigaction action = {.sa_handler = hold};
    nd_team *team = make_team(2);
    names n = {0};
    tally t = {0};
    cr_assert_eq(sigaction(SIGUSR1, &action, NULL), 0);
    nd_team_run(team, 2, tell_name, &n);
    cr_assert_not(n.m.missed);
    cr_assert_eq(pthread_kill(n.threads[1], SIGUSR1), 0);
    cr_assert(wait_for_flag(&held));
    for (int region = 0; region < 3; region++) {
        nd_team_run(team, PIECES_MAX, count_piece, &t);
    }
    for (int p = 0; p < PIECES_MAX; p++) {
        cr_assert_eq(t.done[p], 3, "piece %d", p);
    }
    cr_expect_not(hold_ended, "the regions waited for the thread");
    atomic_store(&may_go_on, true);
    meeting m = {0};
    nd_team_run(team, 2, meet, &m);
    cr_expect_not(m.missed, "the thread is back");
    nd_team_destroy(team);
}

enum { TASKS = 300 };

typedef struct queue {
    const nd_team *team;
    _Atomic int next;
    nd_team_count turn;
    int order[TASKS], count; /* not atomic: only the thread whose turn it is has them */
} queue;

static void take_turns(void *arg, int64_t piece)
{
    queue *q = arg;
    for (int task; (task = atomic_fetch_add(&q->next, 1)) < TASKS;) {
        nd_team_wait(q->team, &q->turn, (uint32_t)task);
        if (task % 40 == 0) {
            usleep(3000); /* those that wait fall asleep */
        }
        q->order[q->count++] = task;
        nd_team_set(&q->turn, (uint32_t)task + 1);
    }
}

Test(team, does_what_has_an_order_in_turns)
{
    nd_team *team = make_team(4);
    for (int round = 0; round < 3; round++) {
        queue q = {.team = team};
        nd_team_run(team, 4, take_turns, &q);
        cr_assert_eq(q.count, TASKS);
        for (int i = 0; i < TASKS; i++) {
            cr_assert_eq(q.order[i], i);
        }
    }
    nd_team_destroy(team);
}

/* Its own pieces must not depend on what happens in between. */
static void *use_a_team(void *arg)
{
    nd_team *team = NULL;
    tally t = {0};
    const int regions = 60;
    bool *right = arg;
    *right = nd_team_create(3, &team) == ND_OK && nd_team_start(team, 0) == ND_OK;
    for (int region = 0; *right && region < regions; region++) {
        nd_team_run(team, PIECES_MAX, count_piece, &t);
        if (region % 10 == 0) {
            usleep(3000); /* the threads fall asleep */
        }
    }
    nd_team_destroy(team);
    for (int p = 0; p < PIECES_MAX; p++) {
        *right = *right && t.done[p] == regions;
    }
    *right = *right && t.clashes == 0;
    return NULL;
}

/* As ranks that are threads of one process. */
Test(team, is_one_of_several_in_a_process)
{
    enum { TEAMS = 8 };
    pthread_t callers[TEAMS];
    bool right[TEAMS];
    for (int i = 0; i < TEAMS; i++) {
        cr_assert_eq(pthread_create(&callers[i], NULL, use_a_team, &right[i]), 0);
    }
    for (int i = 0; i < TEAMS; i++) {
        pthread_join(callers[i], NULL);
        cr_expect(right[i], "team %d", i);
    }
}

Test(team, ends_while_its_threads_sleep)
{
    for (int regions = 0; regions < 3; regions++) {
        nd_team *team = make_team(4);
        tally t = {0};
        for (int region = 0; region < regions; region++) {
            nd_team_run(team, PIECES_MAX, count_piece, &t);
        }
        usleep(20000);
        nd_team_destroy(team);
    }
}

typedef struct masks {
    meeting m;
    sigset_t of[2];
} masks;

static void tell_mask(void *arg, int64_t piece)
{
    masks *k = arg;
    pthread_sigmask(SIG_BLOCK, NULL, &k->of[nd_team_thread()]);
    meet(&k->m, piece);
}

Test(team, leaves_signals_to_the_caller)
{
    masks k = {0};
    nd_team *team = make_team(2);
    nd_team_run(team, 2, tell_mask, &k);
    cr_assert_not(k.m.missed);
    cr_expect_not(sigismember(&k.of[0], SIGTERM));
    cr_expect(sigismember(&k.of[1], SIGTERM));
    cr_expect_not(sigismember(&k.of[1], SIGBUS), "its handler would not be called");
    nd_team_destroy(team);
}

static void run_again(void *team, int64_t piece)
{
    tally t = {0};
    nd_team_run(team, 1, count_piece, &t);
}

Test(team, has_no_regions_within_regions, .signal = SIGABRT)
{
    nd_team *team = make_team(2);
    nd_team_run(team, 2, run_again, team);
}

static void *run_from_elsewhere(void *team)
{
    run_again(team, 0);
    return NULL;
}

static void let_another_run(void *team, int64_t piece)
{
    pthread_t other;
    if (pthread_create(&other, NULL, run_from_elsewhere, team) == 0) {
        pthread_join(other, NULL);
    }
}

Test(team, has_one_caller_at_a_time, .signal = SIGABRT)
{
    nd_team *team = make_team(2);
    nd_team_run(team, 1, let_another_run, team);
}

Test(team, spins_as_long_as_libgomp)
{
    static const struct {
        const char *count, *policy;
        int64_t turns;
    } cases[] = {{NULL, NULL, 2000},
                 {"0", NULL, 0},
                 {" 30 k ", NULL, 30000},
                 {"30K", "passive", 30000},
                 {"2m", NULL, 2000000},
                 {"5000g", NULL, 5000000000000},
                 {"1t", NULL, 1000000000000},
                 {"100000000t", NULL, INT64_MAX},
                 {"Infinite", "passive", INT64_MAX},
                 {"infinity ", NULL, INT64_MAX},
                 {NULL, " PASSIVE ", 0},
                 {NULL, "active", 30000000000},
                 {NULL, "passively", 2000},
                 {NULL, "", 2000},
                 {"30x", "passive", 0},
                 {"30kk", NULL, 2000},
                 {"k", NULL, 2000},
                 {"infinite turns", NULL, 2000},
                 {"99999999999999999999", NULL, 2000},
                 {"", NULL, 2000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *count = cases[i].count, *policy = cases[i].policy;
        unsetenv("GOMP_SPINCOUNT");
        unsetenv("OMP_WAIT_POLICY");
        if (count) {
            setenv("GOMP_SPINCOUNT", count, 1);
        }
        if (policy) {
            setenv("OMP_WAIT_POLICY", policy, 1);
        }
        cr_expect_eq(nd_cpu_spin_turns(), cases[i].turns, "%s, %s: %lld", count ? count : "-",
                     policy ? policy : "-", (long long)nd_cpu_spin_turns());
    }
}

static int64_t address_space(void)
{
    long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    cr_assert_not_null(f);
    cr_assert_eq(fscanf(f, "%lld", &pages), 1);
    fclose(f);
    return pages * sysconf(_SC_PAGESIZE);
}

Test(team, of_which_only_some_can_start_ends_those)
{
    const int64_t stack = (int64_t)1 << 30;
    struct rlimit before, limit;
    nd_team *team = NULL;
    meeting m = {0};
    tally t = {0};
    cr_assert_eq(getrlimit(RLIMIT_AS, &before), 0);
    cr_assert_eq(nd_team_create(4, &team), ND_OK);
    limit = (struct rlimit){(rlim_t)(address_space() + stack * 5 / 2), before.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
    cr_expect_eq(nd_team_start(team, (size_t)stack), ND_ERR_RESOURCE);
    cr_expect(strstr(nd_error_last()->message, "cannot start more than 3 here: "), "%s",
              nd_error_last()->message);
    cr_expect(strstr(nd_error_last()->message, "(ulimit -v)"), "%s", nd_error_last()->message);
    nd_error_clear();
    nd_team_run(team, PIECES_MAX, count_piece, &t);
    cr_expect_eq(t.done[PIECES_MAX - 1], 1);
    cr_assert_eq(setrlimit(RLIMIT_AS, &before), 0);
    cr_expect_eq(nd_team_start(team, 0), ND_OK);
    nd_team_run(team, 2, meet, &m);
    cr_expect_not(m.missed);
    nd_team_destroy(team);
}

/* Fills `text` with the lines that a team without threads writes to the log in two regions. */
static void log_of_a_team_that_cannot_start(char *text, size_t room)
{
    pthread_attr_t usual, huge;
    nd_team *team = NULL;
    tally t = {0};
    FILE *log = tmpfile();
    const int out = dup(STDERR_FILENO);
    cr_assert(log && out >= 0 && dup2(fileno(log), STDERR_FILENO) >= 0);
    pthread_getattr_default_np(&usual);
    pthread_attr_init(&huge);
    cr_assert_eq(pthread_attr_setstacksize(&huge, (size_t)1 << 46), 0);
    pthread_setattr_default_np(&huge);
    cr_assert_eq(nd_team_create(3, &team), ND_OK);
    nd_team_run(team, 5, count_piece, &t);
    nd_team_run(team, 5, count_piece, &t);
    pthread_setattr_default_np(&usual);
    nd_team_destroy(team);
    dup2(out, STDERR_FILENO);
    close(out);
    rewind(log);
    const size_t count = fread(text, 1, room - 1, log);
    text[count] = '\0';
    fclose(log);
    for (int p = 0; p < 5; p++) {
        cr_expect_eq(t.done[p], 2);
    }
}

Test(team, that_cannot_start_when_it_is_needed_says_so_once)
{
    char text[2048];
    log_of_a_team_that_cannot_start(text, sizeof text);
    const char *first = strstr(text, "one thread computes alone: a worker of 3 threads cannot ");
    cr_assert_not_null(first, "%s", text);
    cr_expect(strstr(first, "use a smaller launch.threads_per_worker"), "%s", text);
    cr_expect_null(strstr(first + 1, "one thread"), "%s", text);
    cr_expect_eq(nd_error_last()->status, ND_OK);
}
