// SPDX-License-Identifier: Apache-2.0
/* The threads of a device: every piece is done once, by threads that share, and nobody waits for a
 * thread that has begun nothing. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/team.h"

enum { PIECES_MAX = 300, THREADS_MAX = 7, PATIENCE_SECONDS = 60 };

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

/* Alternately soon after the last region, and after the threads have fallen asleep. */
Test(team, shares_the_pieces_between_threads)
{
    nd_team *team = make_team(2);
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

Test(team, starts_its_threads_when_they_are_needed)
{
    nd_team *team = NULL;
    meeting m = {0};
    cr_assert_eq(nd_team_create(2, &team), ND_OK);
    nd_team_run(team, 2, meet, &m);
    cr_expect_not(m.missed);
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

/* Room for a stack stands for every limit. */
Test(team, that_cannot_start_is_an_error_and_works_alone)
{
    nd_team *team = NULL;
    tally t = {0};
    cr_assert_eq(nd_team_create(3, &team), ND_OK);
    cr_assert_eq(nd_team_start(team, (size_t)1 << 46), ND_ERR_RESOURCE);
    cr_expect(strstr(nd_error_last()->message, "a worker of 3 threads cannot start more than 1 "),
              "%s", nd_error_last()->message);
    nd_error_clear();
    nd_team_run(team, 5, count_piece, &t);
    for (int p = 0; p < 5; p++) {
        cr_expect_eq(t.done[p], 1);
    }
    nd_team_destroy(team);
    nd_team_destroy(NULL);
}
