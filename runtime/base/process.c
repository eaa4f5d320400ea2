// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Some systems allow a billion; programs that our children may be would walk over all of them. */
static const rlim_t enough_files = 1 << 20;

int64_t nd_limits_raise_files(void)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) {
        return 0;
    }
    rlim_t wanted = files.rlim_max < enough_files ? files.rlim_max : enough_files;
    if (files.rlim_cur < wanted) {
        struct rlimit raised = {.rlim_cur = wanted, .rlim_max = files.rlim_max};
        files.rlim_cur = setrlimit(RLIMIT_NOFILE, &raised) == 0 ? wanted : files.rlim_cur;
    }
    return (int64_t)files.rlim_cur;
}

void nd_signals_unblock(void)
{
    sigset_t none;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
}

void nd_streams_open(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) {
            /* The lowest free number, which is fd. */
            int opened = open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY);
            if (opened > STDERR_FILENO) {
                close(opened);
            }
        }
    }
}

nd_status nd_process_flush_output(void)
{
    errno = 0;
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return nd_fail(ND_ERR_CANTCREATE, "standard output cannot be written: %s",
                       errno != 0 ? strerror(errno) : "a part of it was lost");
    }
    return ND_OK;
}
