// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "runtime/base/fs.h"

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

/* Pages of address space and of data that the process has. False: unknown. */
static bool read_pages(long long *space, long long *data)
{
    char line[256];
    nd_fs_read_kernel("/proc/self/statm", line, sizeof line);
    return sscanf(line, "%lld %*d %*d %*d %*d %lld", space, data) == 2;
}

nd_memory_limit nd_limits_read_memory(void)
{
    static const struct {
        int resource;
        const char *option;
    } limits[] = {{RLIMIT_AS, "ulimit -v"}, {RLIMIT_DATA, "ulimit -d"}};
    nd_memory_limit least = {0};
    long long pages[2];
    if (!read_pages(&pages[0], &pages[1])) {
        return least;
    }
    for (int i = 0; i < 2; i++) {
        struct rlimit limit;
        if (getrlimit(limits[i].resource, &limit) != 0 || limit.rlim_cur > INT64_MAX) {
            continue; /* RLIM_INFINITY */
        }
        int64_t bytes = (int64_t)limit.rlim_cur, left = bytes - pages[i] * sysconf(_SC_PAGESIZE);
        if (!least.option || left < least.left) {
            least = (nd_memory_limit){limits[i].option, bytes, left};
        }
    }
    return least;
}

nd_status nd_limits_check_memory(int64_t more, const char *who)
{
    nd_memory_limit limit = nd_limits_read_memory();
    if (!limit.option || limit.left >= more) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_RESOURCE,
                   "%s needs about %lld KiB of memory, but the limit is %lld KiB (%s); raise it",
                   who, (long long)(limit.bytes - limit.left + more) / 1024,
                   (long long)limit.bytes / 1024, limit.option);
}

nd_status nd_limits_check_stack(void)
{
    const rlim_t needed = 512 * 1024; /* four times what a small run takes */
    struct rlimit stack;
    if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= needed) {
        return ND_OK;
    }
    return nd_fail(
        ND_ERR_RESOURCE,
        "the stack may have %lld KiB only, and at least %lld are needed; raise ulimit -s",
        (long long)stack.rlim_cur / 1024, (long long)needed / 1024);
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

/* A jump to `guarded` ends this thread's guarded call; NULL: there is none. */
static _Thread_local sigjmp_buf *guarded;
static _Thread_local nd_abort_kind guarded_kind;

/* libstdc++ has this where a library brought it: not NULL while an exception is handled, which one
 * that nobody catches is when it ends the process. A failed assertion, or a heap that the C library
 * finds damaged while it holds a lock, is none. */
extern void *__cxa_current_exception_type(void) __attribute__((weak));

static void on_abort(int number)
{
    sigjmp_buf *back = guarded;
    const bool exception = __cxa_current_exception_type && __cxa_current_exception_type();
    if (back && (exception || guarded_kind == ND_ABORT_ANY)) { /* else abort goes on */
        guarded = NULL;
        siglongjmp(*back, 1);
    }
}

/* abort of glibc 2.41 does not call the handler in a thread that blocks the signal. */
static void watch_abort(void)
{
    const struct sigaction action = {.sa_handler = on_abort, .sa_flags = SA_NODEFER};
    sigset_t aborts;
    sigemptyset(&aborts);
    sigaddset(&aborts, SIGABRT);
    pthread_sigmask(SIG_UNBLOCK, &aborts, NULL);
    sigaction(SIGABRT, &action, NULL);
}

bool nd_abort_guard(nd_abort_kind kind, void (*call)(void *context), void *context)
{
    static _Thread_local bool watched;
    sigjmp_buf here;
    if (!watched) {
        watch_abort();
        watched = true;
    }
    if (sigsetjmp(here, 0) != 0) {
        return false;
    }
    guarded = &here;
    guarded_kind = kind;
    call(context);
    guarded = NULL;
    return true;
}
