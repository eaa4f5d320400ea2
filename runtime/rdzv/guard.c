// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/guard.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

void nd_worker_guard(void)
{
    const char *launcher = getenv("ND_LAUNCHER_PID");
    if (!launcher) {
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* ndlaunch may have died before prctl: then this process has another parent already and no
     * signal will come. */
    if ((long)getppid() != strtol(launcher, NULL, 10)) {
        _exit(128 + SIGKILL);
    }
}
