// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/signals.h"

#include <pthread.h>
#include <signal.h>

void nd_signals_unblock(void)
{
    sigset_t none;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
}
