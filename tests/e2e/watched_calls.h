// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_E2E_WATCHED_CALLS_H
#define TESTS_E2E_WATCHED_CALLS_H
/* Preloaded libraries that number the calls of a process for the files of a folder share this. */
#undef _FILE_OFFSET_BITS /* else the headers make one name of open and open64 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static char folder[PATH_BYTES]; /* absolute; "": nothing is watched */
static int log_fd = -1;
static long count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static inline long number(const char *name)
{
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

/* The variables that name the folder and the log, a file that gets a line for each call. */
static inline void watch(const char *folder_variable, const char *log_variable)
{
    const char *path = getenv(folder_variable), *log = getenv(log_variable);
    snprintf(folder, sizeof folder, "%s", path ? path : "");
    if (log) {
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                              0666);
    }
}

/* The folder itself, or something in it. */
static inline bool is_watched(const char *path)
{
    const size_t n = strlen(folder);
    return n > 0 && strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

/* The absolute path of a descriptor, or of a name in it. */
static inline void path_at(int fd, const char *name, char out[PATH_BYTES])
{
    char link[64];
    long n = 0;
    if (!name || name[0] != '/') {
        snprintf(link, sizeof link, fd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", fd);
        n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_BYTES - 1);
        n = n > 0 ? n : 0;
    }
    snprintf(out + n, (size_t)(PATH_BYTES - n), "%s%s", n > 0 && name ? "/" : "", name ? name : "");
}

/* In one write, which none of the libraries sees. */
__attribute__((format(printf, 1, 2))) static inline void log_line(const char *format, ...)
{
    char line[PATH_BYTES + 64];
    va_list args;
    va_start(args, format);
    const int size = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (log_fd >= 0) {
        syscall(SYS_write, log_fd, line, (size_t)size);
    }
}

/* Opens a file by each of its calls' names. Every library has its own. */
static int open_file(int dir, const char *path, int flags, mode_t mode);

#define OPEN_FILE(DIR)                                                                             \
    va_list args;                                                                                  \
    va_start(args, flags);                                                                         \
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;                  \
    va_end(args);                                                                                  \
    return open_file(DIR, path, flags, mode)
#define OPEN(NAME)                                                                                 \
    int NAME(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        OPEN_FILE(AT_FDCWD);                                                                       \
    }
#define OPENAT(NAME)                                                                               \
    int NAME(int dir, const char *path, int flags, ...)                                            \
    {                                                                                              \
        OPEN_FILE(dir);                                                                            \
    }

static inline void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;) {
        pause();
    }
}

#endif
