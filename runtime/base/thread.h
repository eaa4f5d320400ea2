// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_THREAD_H
#define ND_BASE_THREAD_H
/*
 * Threads that serve beside the one that computes: they read ahead, write files, watch clocks; and
 * the lock that such a thread shares with the threads it serves.
 *
 * What is handed over stands in the user's own struct, under an nd_monitor: one side changes it and
 * calls nd_monitor_tell, the other waits for it with nd_monitor_wait and a deadline of nd_clock_ns.
 * A queue is bounded where the side that fills it waits for room in the same way.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/clock.h"
#include "runtime/base/status.h"

/* A lock and one condition, "something under the lock has changed". Waits can end without a change,
 * so each stands in a loop that looks again. */
typedef struct nd_monitor {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} nd_monitor;
#define ND_MONITOR_INIT                                                                            \
    {                                                                                              \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER                                        \
    }

void nd_monitor_fini(nd_monitor *monitor); /* nobody holds it or waits for it */
void nd_monitor_lock(nd_monitor *monitor);
void nd_monitor_unlock(nd_monitor *monitor);
/* With the lock: wakes all that wait. */
void nd_monitor_tell(nd_monitor *monitor);
/* With the lock, which is free meanwhile: waits for nd_monitor_tell. False: the deadline has
 * passed. ND_CLOCK_NEVER is no deadline. */
bool nd_monitor_wait(nd_monitor *monitor, int64_t deadline_ns);

/* A lock that may be held for long, and that is waited for with a deadline. */
typedef struct nd_gate {
    nd_monitor monitor; /* to be destroyed with nd_monitor_fini */
    bool closed;        /* a thread has entered and not left */
} nd_gate;
#define ND_GATE_INIT                                                                               \
    {                                                                                              \
        .monitor = ND_MONITOR_INIT                                                                 \
    }

/* False: the thread that has entered had not left by the deadline, which may lie in the past. */
bool nd_gate_enter(nd_gate *gate, int64_t deadline_ns);
void nd_gate_leave(nd_gate *gate);

/* Bytes of a thread's stack, whatever ulimit -s says: the room counts against ulimit -v as soon as
 * the thread starts. What it runs keeps larger things elsewhere, unless it is a library's. */
enum { ND_THREAD_STACK_BYTES = 1 << 20, ND_THREAD_LIBRARY_STACK_BYTES = 8 << 20 };

/* A thread, in its owner's storage. Zero it first: one that was never started may be joined. */
typedef struct nd_thread {
    nd_monitor *monitor; /* borrowed */
    void (*run)(void *context);
    void (*release)(void *context); /* NULL, or called by an abandoned thread when it has run */
    void *context;
    bool runs_library; /* the stack has ND_THREAD_LIBRARY_STACK_BYTES */
    pthread_t native;
    bool started, abandoned, ended; /* ended: under the monitor */
    atomic_bool stop;               /* the thread is to end: set under the monitor, read anywhere */
    atomic_llong beat;              /* nd_clock_ns when it last got on; see nd_fs_set_beat */
} nd_thread;

/*
 * Starts a thread that runs `run(context)` with every signal blocked, since signals are for the
 * process's first thread. `run` returns when it sees `stop`, or when its work is done. `what` names
 * the thread in the error, for instance "the thread that bounds calls".
 */
nd_status nd_thread_start(nd_thread *thread, nd_monitor *monitor, const char *what,
                          void (*run)(void *context), void *context);
static inline void nd_thread_beat(nd_thread *thread)
{
    atomic_store(&thread->beat, nd_clock_ns());
}
/* Seconds since the last beat. */
static inline double nd_thread_silence(const nd_thread *thread)
{
    return (double)(nd_clock_ns() - atomic_load(&thread->beat)) * 1e-9;
}
/*
 * Without the lock: sets `stop`, wakes the thread and waits until it has ended; INFINITY waits
 * without a deadline. False: it has not ended within these seconds and is abandoned, now and in
 * each further call: the caller leaves the memory that it uses to it. One with a `release`, which
 * may free that memory at any time, is then not used again.
 */
bool nd_thread_join(nd_thread *thread, double seconds);

#endif
