// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/thread.h"

#include <errno.h>
#include <signal.h>

void nd_monitor_fini(nd_monitor *monitor)
{
    pthread_cond_destroy(&monitor->changed);
    pthread_mutex_destroy(&monitor->mutex);
}

void nd_monitor_lock(nd_monitor *monitor)
{
    pthread_mutex_lock(&monitor->mutex);
}

void nd_monitor_unlock(nd_monitor *monitor)
{
    pthread_mutex_unlock(&monitor->mutex);
}

void nd_monitor_tell(nd_monitor *monitor)
{
    pthread_cond_broadcast(&monitor->changed);
}

bool nd_monitor_wait(nd_monitor *monitor, int64_t deadline_ns)
{
    const int64_t ns = deadline_ns > 0 ? deadline_ns : 0; /* or the system call is refused */
    const struct timespec until = {ns / 1000000000, ns % 1000000000};
    return pthread_cond_clockwait(&monitor->changed, &monitor->mutex, CLOCK_MONOTONIC, &until) !=
           ETIMEDOUT;
}

bool nd_gate_enter(nd_gate *gate, int64_t deadline_ns)
{
    nd_monitor_lock(&gate->monitor);
    while (gate->closed && nd_monitor_wait(&gate->monitor, deadline_ns)) {
    }
    const bool entered = !gate->closed;
    gate->closed = true;
    nd_monitor_unlock(&gate->monitor);
    return entered;
}

void nd_gate_leave(nd_gate *gate)
{
    nd_monitor_lock(&gate->monitor);
    gate->closed = false;
    nd_monitor_tell(&gate->monitor);
    nd_monitor_unlock(&gate->monitor);
}

static void *run_thread(void *argument)
{
    nd_thread *thread = argument;
    thread->run(thread->context);
    nd_monitor_lock(thread->monitor);
    thread->ended = true;
    nd_monitor_tell(thread->monitor);
    nd_monitor_unlock(thread->monitor);
    if (thread->abandoned && thread->release) {
        thread->release(thread->context);
    }
    return NULL;
}

nd_status nd_thread_start(nd_thread *thread, nd_monitor *monitor, const char *what,
                          void (*run)(void *context), void *context)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    thread->monitor = monitor;
    thread->run = run;
    thread->context = context;
    thread->abandoned = thread->ended = false;
    atomic_store(&thread->stop, false);
    nd_thread_beat(thread);
    int code = pthread_attr_init(&attributes);
    if (code == 0) {
        pthread_attr_setstacksize(&attributes, thread->runs_library ? ND_THREAD_LIBRARY_STACK_BYTES
                                                                    : ND_THREAD_STACK_BYTES);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        code = pthread_create(&thread->native, &attributes, run_thread, thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    thread->started = code == 0;
    return code == 0 ? ND_OK : nd_fail_system(code, "%s", what);
}

bool nd_thread_join(nd_thread *thread, double seconds)
{
    if (!thread->started) {
        return !thread->abandoned;
    }
    const int64_t deadline = nd_clock_after(seconds);
    nd_monitor_lock(thread->monitor);
    atomic_store(&thread->stop, true);
    nd_monitor_tell(thread->monitor);
    while (!thread->ended && nd_monitor_wait(thread->monitor, deadline)) {
    }
    const bool ended = thread->ended;
    thread->started = false;
    if (!ended) {
        thread->abandoned = true;
        pthread_detach(thread->native);
    }
    nd_monitor_unlock(thread->monitor); /* the last access to a thread that is abandoned */
    if (ended) {
        pthread_join(thread->native, NULL);
    }
    return ended;
}
