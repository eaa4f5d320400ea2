// SPDX-License-Identifier: Apache-2.0
/* Threads that serve: whatever ulimit -s says, their stacks are small, and signals pass them by. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdbool.h>

#include "runtime/base/thread.h"

typedef struct seen {
    bool blocked;
    size_t stack;
} seen;

static void *look(void *context)
{
    seen *s = context;
    sigset_t now;
    pthread_attr_t attributes;
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    s->blocked = sigismember(&now, SIGTERM) == 1 && sigismember(&now, SIGCHLD) == 1;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstacksize(&attributes, &s->stack);
    pthread_attr_destroy(&attributes);
    return NULL;
}

Test(thread, stack_and_signals)
{
    seen s = {0};
    pthread_t thread;
    sigset_t after;
    cr_assert_eq(nd_thread_start(look, &s, &thread), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect(s.blocked);
    cr_expect_eq(s.stack, ND_THREAD_STACK_BYTES, "a stack of %zu bytes", s.stack);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    cr_expect_eq(sigismember(&after, SIGTERM), 0, "the caller still gets its signals");
}
