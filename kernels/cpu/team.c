// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/team.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/ops.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"

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
    /* The region. It is written while no piece is left, and a thread that has begun a piece reads
     * it. */
    nd_team_body body;
    void *arg;
    int64_t pieces;
    _Atomic int width; /* ranges in use */
    /* They stand on cache lines of their own, since some threads spin on one while others write the
     * other. */
    _Alignas(CACHE_LINE) nd_team_count regions;  /* so far; threads wait for the next */
    _Alignas(CACHE_LINE) nd_team_count finished; /* pieces; the caller waits for all */
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

/* The value as one bit of a futex, so that only threads that wait for this value are woken. */
static uint32_t bit_of(uint32_t value)
{
    return (uint32_t)1 << value % 32;
}

static void pause_briefly(void)
{
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

/* Waits until the count has the value, or, without `equal`, until it has another. */
static inline void wait_until(const nd_team *team, nd_team_count *count, uint32_t value, bool equal)
{
    for (int64_t turn = 0; turn < team->spin_turns; turn++) {
        if ((atomic_load_explicit(&count->value, memory_order_acquire) == value) == equal) {
            return;
        }
        pause_briefly();
    }
    atomic_fetch_add(&count->sleepers, 1);
    for (uint32_t now; ((now = atomic_load(&count->value)) == value) != equal;) {
        syscall(SYS_futex, &count->value, FUTEX_WAIT_BITSET_PRIVATE, now, NULL, NULL,
                equal ? bit_of(value) : FUTEX_BITSET_MATCH_ANY);
    }
    atomic_fetch_sub(&count->sleepers, 1);
}

void nd_team_wait(const nd_team *team, nd_team_count *count, uint32_t value)
{
    wait_until(team, count, value, true);
}

/* Wakes up to `threads` threads that sleep until the count has this value. */
static void wake_sleepers(nd_team_count *count, uint32_t value, int threads)
{
    if (atomic_load(&count->sleepers) > 0) {
        syscall(SYS_futex, &count->value, FUTEX_WAKE_BITSET_PRIVATE, threads, NULL, NULL,
                bit_of(value));
    }
}

void nd_team_set(nd_team_count *count, uint32_t value)
{
    atomic_store(&count->value, value);
    wake_sleepers(count, value, INT_MAX);
}

/* pieces */

/* Takes a piece of range r; false: none is left. The region cannot change before it is finished. */
static bool take_piece(nd_team *team, int r, int64_t *piece)
{
    _Atomic int64_t *left = &team->ranges[r].left;
    if (atomic_load_explicit(left, memory_order_relaxed) <= 0) {
        return false;
    }
    const int64_t n = atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel);
    if (n <= 0) {
        return false;
    }
    *piece = team->pieces * (r + 1) / atomic_load(&team->width) - n;
    return true;
}

/* Does the pieces of its own range first, then those that are left in other ranges. */
static void do_pieces(nd_team *team, int index)
{
    const int width = atomic_load(&team->width);
    for (int i = 0; i < width; i++) {
        const int r = (index + i) % width;
        for (int64_t piece; take_piece(team, r, &piece);) {
            team->body(team->arg, piece);
            const uint32_t pieces = (uint32_t)team->pieces;
            if (atomic_fetch_add(&team->finished.value, 1) + 1 == pieces) {
                wake_sleepers(&team->finished, pieces, 1);
            }
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
        wait_until(team, &team->regions, seen, false);
        seen = atomic_load(&team->regions.value);
        if (atomic_load(&team->ends)) {
            return NULL;
        }
        do_pieces(team, self->index);
    }
}

/* Tells the threads that something has changed. */
static void call_up(nd_team *team, int count)
{
    const uint32_t region = atomic_fetch_add(&team->regions.value, 1) + 1;
    wake_sleepers(&team->regions, region, count);
}

static void share(nd_team *team, int64_t pieces, nd_team_body body, void *arg)
{
    const int64_t width = nd_min(team->threads, pieces);
    team->body = body;
    team->arg = arg;
    team->pieces = pieces;
    atomic_store(&team->width, (int)width);
    atomic_store(&team->finished.value, 0);
    for (int64_t r = 0; r < width; r++) {
        atomic_store_explicit(&team->ranges[r].left, pieces * (r + 1) / width - pieces * r / width,
                              memory_order_release);
    }
    call_up(team, (int)width - 1);
    do_pieces(team, 0);
    nd_team_wait(team, &team->finished, (uint32_t)pieces);
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
    call_up(team, INT_MAX);
    for (; team->started > 0; team->started--) {
        pthread_join(team->members[team->started].thread, NULL);
    }
    atomic_store(&team->ends, false);
    atomic_store(&team->regions.value, 0);
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

/* Starts as many as possible; the result is 0, or what pthread_create returned in the end. The
 * threads block all signals but faults: the kernel sends a fault to the thread that caused it, and
 * ends the process without calling the handler where that thread blocks it. */
static int start_members(nd_team *team, const pthread_attr_t *attributes)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t blocked, before;
    int code = 0;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        sigdelset(&blocked, faults[i]);
    }
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

static const size_t beside_stack = 1 << 20;

static bool has_room(size_t bytes)
{
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (room == MAP_FAILED) {
        return false;
    }
    munmap(room, bytes);
    return true;
}

/* Says which limit forbids a worker of `wanted` threads to have more than `most`. `code` is what
 * pthread_create returned for a stack of `stack_bytes`. The threads that did start still run, since
 * the limits are looked at as they are now. */
static nd_status refuse_threads(int wanted, int most, int code, size_t stack_bytes)
{
    const bool lacks_room = !has_room(stack_bytes + beside_stack);
    const nd_memory_limit limit = nd_limits_read_memory();
    if (lacks_room && (!limit.option || limit.left >= (int64_t)(stack_bytes + beside_stack))) {
        return nd_fail(ND_ERR_RESOURCE,
                       "a worker of %d threads cannot start more than %d here: a stack of %lld KiB "
                       "has no room (OMP_STACKSIZE, ulimit -s); use a smaller "
                       "launch.threads_per_worker, or make the stacks smaller",
                       wanted, most, (long long)stack_bytes / 1024);
    }
    return nd_fail(ND_ERR_RESOURCE,
                   "a worker of %d threads cannot start more than %d here: %s (%s); use a smaller "
                   "launch.threads_per_worker, or raise that limit",
                   wanted, most, strerror(code),
                   lacks_room ? limit.option : "ulimit -u, or pids.max of the control group");
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
        status = refuse_threads(team->threads, team->started + 1, code, stack_bytes);
        end_threads(team);
    }
    return status;
}

/* before the first op */

static const unsigned long long stack_bytes_max = 1ull << 47; /* more than can be addressed */

/* The stack that libgomp gives each thread by this variable, read as libgomp does: a number of KiB,
 * or of the unit behind it. 0: it is not set, or libgomp does not take it. */
static unsigned long long read_stack_bytes(const char *variable)
{
    const char *text = getenv(variable);
    char *end = NULL;
    unsigned long long number = text ? strtoull(text, &end, 10) : 0;
    int shift = 10;
    if (!text || end == text) {
        return 0;
    }
    end += strspn(end, " \t");
    if (*end) {
        static const char units[] = "bkmg";
        const char *unit = strchr(units, tolower((unsigned char)*end));
        if (!unit || end[1 + strspn(end + 1, " \t")] != '\0') {
            return 0;
        }
        shift = 10 * (int)(unit - units);
    }
    return number <= stack_bytes_max >> shift ? number << shift : stack_bytes_max;
}

int64_t nd_ops_cpu_stack_bytes(void)
{
    pthread_attr_t attributes;
    size_t bytes = 8 << 20;
    unsigned long long set = read_stack_bytes("OMP_STACKSIZE");
    set = set > 0 ? set : read_stack_bytes("GOMP_STACKSIZE");
    if ((int64_t)set >= sysconf(_SC_THREAD_STACK_MIN)) { /* libgomp passes over a smaller one */
        return (int64_t)set;
    }
    if (pthread_getattr_default_np(&attributes) == 0) {
        pthread_attr_getstacksize(&attributes, &bytes);
        pthread_attr_destroy(&attributes);
    }
    return (int64_t)bytes;
}

static void *wait_for(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Starts as many threads at once as the ops will have, with the stacks that libgomp will give its
 * own. sets: 1, ours, or 2, libgomp's too; each beside the calling thread. */
static nd_status try_threads(int wanted, int sets, pthread_t *threads)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    nd_status status = ND_OK;
    const int count = sets * (wanted - 1);
    const size_t stack = (size_t)nd_ops_cpu_stack_bytes();
    int started = 0, code = 0;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack);
    pthread_mutex_lock(&gate);
    while (code == 0 && started < count) {
        code = pthread_create(&threads[started], &attributes, wait_for, &gate);
        started += code == 0;
    }
    if (code != 0) {
        status = refuse_threads(wanted, started / sets + 1, code, stack);
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&gate);
    pthread_attr_destroy(&attributes);
    return status;
}

/* libgomp starts its threads in its first region, and keeps them. */
static void start_libgomp(int wanted)
{
    int running = 0;
    omp_set_num_threads(wanted);
#pragma omp parallel
    {
#pragma omp atomic
        running++; /* the compiler leaves out a region that does nothing */
    }
}

nd_status nd_team_start_early(nd_team *team, bool libgomp)
{
    const int wanted = team->threads;
    pthread_t *threads = NULL;
    if (wanted == 1) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(2 * wanted, &threads));
    const nd_status status = try_threads(wanted, libgomp ? 2 : 1, threads);
    free(threads);
    ND_TRY(status);
    ND_TRY(nd_team_start(team, (size_t)nd_ops_cpu_stack_bytes()));
    if (libgomp) {
        start_libgomp(wanted);
    }
    return ND_OK;
}

/* how long threads spin */

static const int64_t usual_turns = 2000, active_turns = 30000000000; /* minutes */
static const char spaces[] = " \t\n\v\f\r";

static bool begins_with(const char *text, const char *word)
{
    return strncasecmp(text, word, strlen(word)) == 0;
}

/* Reads a number and its unit from the start of the text. *end is the rest of the text, or NULL
 * where it starts with no number. */
static int64_t read_number(const char *text, const char **end)
{
    static const char units[] = "kmgt";
    char *rest = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &rest, 10), scale = 1;
    if (rest == text || errno != 0) {
        *end = NULL;
        return 0;
    }
    rest += strspn(rest, spaces);
    const char *unit = *rest ? strchr(units, tolower((unsigned char)*rest)) : NULL;
    for (const char *u = units; unit && u <= unit; u++) {
        scale *= 1000;
    }
    *end = unit ? rest + 1 : rest;
    return number <= INT64_MAX / scale ? (int64_t)(number * scale) : INT64_MAX;
}

/* GOMP_SPINCOUNT; -1: there is none. */
static int64_t read_count(const char *text)
{
    const char *end = NULL;
    int64_t turns = INT64_MAX;
    if (!text) {
        return -1;
    }
    text += strspn(text, spaces);
    if (begins_with(text, "infinite") || begins_with(text, "infinity")) {
        end = text + strlen("infinite");
    } else {
        turns = read_number(text, &end);
    }
    return end && end[strspn(end, spaces)] == '\0' ? turns : -1;
}

/* OMP_WAIT_POLICY; -1: there is none. */
static int64_t read_policy(const char *text)
{
    if (!text) {
        return -1;
    }
    text += strspn(text, spaces);
    const bool active = begins_with(text, "active"), passive = begins_with(text, "passive");
    text += strlen(active ? "active" : passive ? "passive" : "");
    if (text[strspn(text, spaces)] != '\0') {
        return -1;
    }
    return active ? active_turns : passive ? 0 : -1;
}

int64_t nd_cpu_spin_turns(void)
{
    const int64_t count = read_count(getenv("GOMP_SPINCOUNT"));
    const int64_t of_policy = read_policy(getenv("OMP_WAIT_POLICY"));
    return count >= 0 ? count : of_policy >= 0 ? of_policy : usual_turns;
}
