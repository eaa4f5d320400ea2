// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/spin_turns.h"
#include "kernels/cpu/thread_refusal.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"

enum { CACHE_LINE = 64 };

/* The pieces that a thread begins with, and that others take from it. */
typedef struct range {
    _Alignas(CACHE_LINE) _Atomic int64_t left; /* at most 0: all were begun */
} range;

typedef struct member {
    nd_team *team;
    int index;
    pthread_t thread;
} member;

struct nd_team {
    int threads, started; /* started: beside the caller */
    int64_t spin_turns;
    bool tried; /* to start the threads */
    _Atomic bool ends;
    _Atomic bool runs; /* a region */
    member *members;   /* [threads]; the first is not used */
    range *ranges;     /* [threads] */
    /* The region. Written while no piece is left, read by those who have begun one. */
    nd_team_body body;
    void *arg;
    int64_t pieces;
    int width;                                     /* ranges in use */
    _Alignas(CACHE_LINE) _Atomic uint32_t regions; /* so far; threads sleep on it */
    _Atomic int sleepers;
    _Alignas(CACHE_LINE) _Atomic uint32_t finished; /* pieces; the caller sleeps on it */
    _Atomic bool caller_sleeps;
};

static _Thread_local int thread_index;

int nd_team_thread(void)
{
    return thread_index;
}

int nd_team_threads(const nd_team *team)
{
    return team->threads;
}

/* waiting */

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void pause_briefly(void)
{
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

/* Until `regions` is another than `seen`. */
static void wait_for_region(nd_team *team, uint32_t seen)
{
    for (int64_t turn = 0; turn < team->spin_turns; turn++) {
        if (atomic_load_explicit(&team->regions, memory_order_acquire) != seen) {
            return;
        }
        pause_briefly();
    }
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(&team->regions) == seen) {
        sleep_while(&team->regions, seen);
    }
    atomic_fetch_sub(&team->sleepers, 1);
}

static void wait_for_pieces(nd_team *team, uint32_t pieces)
{
    for (int64_t turn = 0; turn < team->spin_turns; turn++) {
        if (atomic_load_explicit(&team->finished, memory_order_acquire) == pieces) {
            return;
        }
        pause_briefly();
    }
    atomic_store(&team->caller_sleeps, true);
    for (uint32_t now; (now = atomic_load(&team->finished)) != pieces;) {
        sleep_while(&team->finished, now);
    }
    atomic_store(&team->caller_sleeps, false);
}

/* pieces */

/* Takes a piece of range r; false: none is left. The region cannot change before it is finished. */
static bool take(nd_team *team, int r, int64_t *piece)
{
    _Atomic int64_t *left = &team->ranges[r].left;
    if (atomic_load_explicit(left, memory_order_relaxed) <= 0) {
        return false;
    }
    const int64_t n = atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel);
    if (n <= 0) {
        return false;
    }
    *piece = team->pieces * (r + 1) / team->width - n;
    return true;
}

static void finish(nd_team *team)
{
    const uint32_t pieces = (uint32_t)team->pieces;
    if (atomic_fetch_add(&team->finished, 1) + 1 == pieces && atomic_load(&team->caller_sleeps)) {
        wake(&team->finished, 1);
    }
}

/* Its own range first, then what is left of the others. */
static void work(nd_team *team, int index)
{
    for (int i = 0; i < team->threads; i++) {
        const int r = index + i < team->threads ? index + i : index + i - team->threads;
        for (int64_t piece; take(team, r, &piece);) {
            team->body(team->arg, piece);
            finish(team);
        }
    }
}

static void *serve(void *arg)
{
    const member *self = arg;
    nd_team *team = self->team;
    thread_index = self->index;
    uint32_t seen = 0;
    for (;;) {
        wait_for_region(team, seen);
        seen = atomic_load(&team->regions);
        if (atomic_load(&team->ends)) {
            return NULL;
        }
        work(team, self->index);
    }
}

/* Tells the threads that something has changed. */
static void call_up(nd_team *team, int count)
{
    atomic_fetch_add(&team->regions, 1);
    if (atomic_load(&team->sleepers) > 0) {
        wake(&team->regions, count);
    }
}

static void share(nd_team *team, int64_t pieces, nd_team_body body, void *arg)
{
    const int64_t width = nd_min(team->threads, pieces);
    team->body = body;
    team->arg = arg;
    team->pieces = pieces;
    team->width = (int)width;
    atomic_store(&team->finished, 0);
    for (int64_t r = 0; r < width; r++) {
        atomic_store_explicit(&team->ranges[r].left, pieces * (r + 1) / width - pieces * r / width,
                              memory_order_release);
    }
    call_up(team, (int)width - 1);
    work(team, 0);
    wait_for_pieces(team, (uint32_t)pieces);
}

void nd_team_run(nd_team *team, int64_t pieces, nd_team_body body, void *arg)
{
    const bool busy = atomic_exchange(&team->runs, true);
    ND_ASSERT(!busy && thread_index == 0);
    ND_ASSERT(pieces <= INT32_MAX);
    if (!team->tried && pieces > 1 && nd_team_start(team, 0) != ND_OK) {
        nd_log_warning("one thread computes alone: %s", nd_error_last()->message);
        nd_error_clear();
    }
    if (team->started > 0 && pieces > 1) {
        share(team, pieces, body, arg);
    } else {
        for (int64_t piece = 0; piece < pieces; piece++) {
            body(arg, piece);
        }
    }
    atomic_store(&team->runs, false);
}

/* life */

nd_status nd_team_create(int threads, nd_team **out)
{
    nd_team *team = aligned_alloc(CACHE_LINE, sizeof *team);
    if (!team) {
        return nd_fail_memory("the threads of a worker");
    }
    memset(team, 0, sizeof *team);
    team->threads = threads;
    team->spin_turns = nd_cpu_spin_turns();
    team->ranges = aligned_alloc(CACHE_LINE, (size_t)threads * sizeof *team->ranges);
    team->members = calloc((size_t)threads, sizeof *team->members);
    if (!team->ranges || !team->members) {
        nd_team_destroy(team);
        return nd_fail_memory("the threads of a worker");
    }
    for (int r = 0; r < threads; r++) {
        atomic_init(&team->ranges[r].left, 0);
    }
    *out = team;
    return ND_OK;
}

static void end_threads(nd_team *team)
{
    atomic_store(&team->ends, true);
    call_up(team, INT32_MAX);
    for (; team->started > 0; team->started--) {
        pthread_join(team->members[team->started].thread, NULL);
    }
    atomic_store(&team->ends, false);
    atomic_store(&team->regions, 0);
}

void nd_team_destroy(nd_team *team)
{
    if (!team) {
        return;
    }
    end_threads(team);
    free(team->members);
    free(team->ranges);
    free(team);
}

/* What a thread does wrong by itself is not for another thread, and a blocked fault would end the
 * process without its handler. */
static sigset_t all_but_faults(void)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        sigdelset(&set, faults[i]);
    }
    return set;
}

/* Starts as many as possible; the result is 0, or what pthread_create returned in the end. */
static int start_members(nd_team *team, const pthread_attr_t *attributes)
{
    const sigset_t blocked = all_but_faults();
    sigset_t before;
    int code = 0;
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (code == 0 && team->started < team->threads - 1) {
        member *next = &team->members[team->started + 1];
        *next = (member){.team = team, .index = team->started + 1};
        code = pthread_create(&next->thread, attributes, serve, next);
        team->started += code == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

nd_status nd_team_start(nd_team *team, size_t stack_bytes)
{
    pthread_attr_t attributes;
    nd_status status = ND_OK;
    team->tried = true;
    if (team->started == team->threads - 1) {
        return ND_OK;
    }
    pthread_attr_init(&attributes);
    int code = stack_bytes > 0 ? pthread_attr_setstacksize(&attributes, stack_bytes) : 0;
    pthread_attr_getstacksize(&attributes, &stack_bytes);
    code = code == 0 ? start_members(team, &attributes) : code;
    pthread_attr_destroy(&attributes);
    if (code != 0) {
        status = nd_cpu_refuse_threads(team->threads, team->started + 1, code, stack_bytes);
        end_threads(team);
    }
    return status;
}
