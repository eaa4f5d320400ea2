// SPDX-License-Identifier: Apache-2.0
/* Threads that serve: stacks, signals, what is handed over under a monitor, and how they end. */
#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>

#include "runtime/base/clock.h"
#include "runtime/base/thread.h"

typedef struct seen {
    bool blocked;
    size_t stack;
} seen;

static void look(void *context)
{
    seen *s = context;
    sigset_t now;
    pthread_attr_t attributes;
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    s->blocked = sigismember(&now, SIGTERM) == 1 && sigismember(&now, SIGCHLD) == 1;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstacksize(&attributes, &s->stack);
    pthread_attr_destroy(&attributes);
}

Test(thread, stack_and_signals)
{
    seen s = {0};
    nd_monitor monitor = ND_MONITOR_INIT;
    nd_thread thread = {0};
    sigset_t after;
    cr_assert_eq(nd_thread_start(&thread, &monitor, "the thread", look, &s), ND_OK);
    cr_assert(nd_thread_join(&thread, INFINITY));
    cr_expect(s.blocked);
    cr_expect_eq(s.stack, ND_THREAD_STACK_BYTES, "a stack of %zu bytes", s.stack);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    cr_expect_eq(sigismember(&after, SIGTERM), 0, "the caller still gets its signals");
    cr_expect(nd_thread_join(&thread, 0), "a thread that has been joined may be joined again");
    cr_assert_eq(nd_thread_start(&thread, &monitor, "the thread", look, &s), ND_OK);
    cr_expect_not(thread.stop, "and started again, which is no request to end");
    cr_assert(nd_thread_join(&thread, INFINITY));
    nd_monitor_fini(&monitor);
}

/* A queue of at most two numbers. */
typedef struct queue {
    nd_monitor monitor;
    nd_thread thread;
    int waiting, most, sum;
} queue;

static void add_up(void *context)
{
    queue *q = context;
    nd_monitor_lock(&q->monitor);
    while (!q->thread.stop || q->waiting > 0) {
        if (q->waiting == 0) {
            nd_monitor_wait(&q->monitor, ND_CLOCK_NEVER);
            continue;
        }
        q->most = q->waiting > q->most ? q->waiting : q->most;
        q->waiting--;
        q->sum++;
        nd_monitor_tell(&q->monitor);
    }
    nd_monitor_unlock(&q->monitor);
}

/* The thread takes all that was handed over before the join, and never has more than two. */
Test(thread, bounded_queue)
{
    queue q = {.monitor = ND_MONITOR_INIT};
    cr_assert_eq(nd_thread_start(&q.thread, &q.monitor, "the thread", add_up, &q), ND_OK);
    nd_monitor_lock(&q.monitor);
    for (int i = 0; i < 1000; i++) {
        while (q.waiting == 2) {
            nd_monitor_wait(&q.monitor, ND_CLOCK_NEVER);
        }
        q.waiting++;
        nd_monitor_tell(&q.monitor);
    }
    nd_monitor_unlock(&q.monitor);
    cr_assert(nd_thread_join(&q.thread, INFINITY));
    cr_expect_eq(q.sum, 1000);
    cr_expect_leq(q.most, 2);
    nd_monitor_fini(&q.monitor);
}

static void wait_until_allowed(void *context)
{
    queue *q = context;
    nd_monitor_lock(&q->monitor);
    while (q->waiting == 0) { /* and not for `stop` */
        nd_monitor_wait(&q->monitor, ND_CLOCK_NEVER);
    }
    q->sum++;
    nd_monitor_tell(&q->monitor);
    nd_monitor_unlock(&q->monitor);
}

/* A thread that is abandoned can still use what it was given, and calls `release` in the end. */
Test(thread, abandoned)
{
    static queue q = {.monitor = ND_MONITOR_INIT};
    cr_assert_eq(nd_thread_start(&q.thread, &q.monitor, "the thread", wait_until_allowed, &q),
                 ND_OK);
    q.thread.release = wait_until_allowed;
    cr_expect_not(nd_thread_join(&q.thread, 0.01));
    nd_monitor_lock(&q.monitor);
    q.waiting = 1;
    nd_monitor_tell(&q.monitor);
    while (!q.thread.ended || q.sum < 2) {
        nd_monitor_wait(&q.monitor, ND_CLOCK_NEVER);
    }
    nd_monitor_unlock(&q.monitor);
    cr_expect_not(nd_thread_join(&q.thread, INFINITY), "its memory is never given back");
}

static void pass_through(void *context)
{
    nd_gate *gate = context;
    if (nd_gate_enter(gate, ND_CLOCK_NEVER)) {
        nd_gate_leave(gate);
    }
}

Test(thread, gate)
{
    nd_gate gate = ND_GATE_INIT;
    nd_monitor monitor = ND_MONITOR_INIT;
    nd_thread other = {0};
    cr_assert(nd_gate_enter(&gate, 0), "a free gate is entered, whatever the deadline");
    cr_expect_not(nd_gate_enter(&gate, nd_clock_after(0.01)));
    cr_assert_eq(nd_thread_start(&other, &monitor, "the thread", pass_through, &gate), ND_OK);
    nd_gate_leave(&gate);
    cr_expect(nd_thread_join(&other, INFINITY), "a thread that waits enters when the other leaves");
    cr_expect(nd_gate_enter(&gate, 0));
    nd_monitor_fini(&gate.monitor);
    nd_monitor_fini(&monitor);
}

Test(thread, deadline_and_beat)
{
    nd_monitor monitor = ND_MONITOR_INIT;
    nd_thread thread = {0};
    const int64_t deadline = nd_clock_after(0.02);
    nd_monitor_lock(&monitor);
    while (nd_monitor_wait(&monitor, deadline)) {
    }
    while (nd_monitor_wait(&monitor, -1)) { /* has passed, too */
    }
    nd_monitor_unlock(&monitor);
    cr_expect_geq(nd_clock_ns(), deadline, "the wait ends at its deadline, not before");
    atomic_store(&thread.beat, nd_clock_ns() - 5000000000);
    cr_expect_geq(nd_thread_silence(&thread), 5);
    nd_thread_beat(&thread);
    cr_expect_lt(nd_thread_silence(&thread), 5);
    cr_expect_eq(nd_clock_after(INFINITY), ND_CLOCK_NEVER);
    cr_expect_geq(nd_clock_after(0.75), deadline + 730000000); /* which was now and 0.02 s */
    char text[ND_CLOCK_UTC_MAX];
    cr_expect_str_eq(nd_clock_utc(1769903999, text), "2026-01-31T23:59:59Z");
    cr_expect_str_eq(nd_clock_utc(INT64_MAX, text), "");
    cr_expect(nd_thread_join(&thread, 0), "a thread that was never started may be joined");
    nd_monitor_fini(&monitor);
}
