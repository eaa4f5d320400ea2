// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/thread.h"

#include <signal.h>

int nd_thread_start(void *(*run)(void *), void *context, pthread_t *thread)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    int code = pthread_attr_init(&attributes);
    if (code != 0) {
        return code;
    }
    pthread_attr_setstacksize(&attributes, ND_THREAD_STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(thread, &attributes, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return code;
}
