// SPDX-License-Identifier: Apache-2.0
#include "trainer/thread_wait.h"

#include <stdlib.h>
#include <unistd.h>

void nd_thread_wait_shorten(char **argv)
{
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) {
        return;
    }
    if (setenv("GOMP_SPINCOUNT", "2000", 1) == 0) {
        execv("/proc/self/exe", argv);
    }
}
