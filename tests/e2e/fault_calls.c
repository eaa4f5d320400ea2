// SPDX-License-Identifier: Apache-2.0
/*
 * A preloaded library that numbers the calls by which one worker changes or reads a run's
 * checkpoints, and kills the process before one of them, or lets some fail or take long.
 *
 *   ND_FAULT_FOLDER=PATH     the run folder, absolute
 *   ND_FAULT_RANK=R          the worker that is counted (its RANK); never a check before the start
 *   ND_FAULT_LOG=FILE        gets a line for each call: number, call, result, path
 *   ND_FAULT_KILL=K          SIGKILL in the place of call K (the first is 1)
 *   ND_FAULT_FAIL=CALL:ERRNO:FIRST:COUNT   of the calls with this name, those from FIRST on fail
 *   ND_FAULT_SLOW=CALL:MS:FIRST:COUNT      those take so many milliseconds longer
 *   ND_FAULT_MOVE=FROM:TO    renames FROM before the first call, as another process would
 *
 * A call counts when its path is the run folder or has "checkpoint-" in it below that folder. Once
 * a save has begun, the main thread's calls for the run folder itself do not count: they are for
 * its other files, and come at any time. What the C library opens for itself (opendir) is not seen:
 * it changes nothing.
 */
#include "tests/e2e/watched_calls.h"

#include <stdatomic.h>
#include <time.h>

/* Some of the calls with a name, and what is done to them. */
typedef struct fault {
    char call[32];
    int value; /* errno, or milliseconds */
    long first, count, seen;
} fault;

static char move_from[PATH_BYTES], move_to[PATH_BYTES];
static long kill_at;
static fault fails, slows;

static void read_fault(const char *name, fault *f)
{
    const char *text = getenv(name);
    if (text) {
        sscanf(text, "%31[^:]:%d:%ld:%ld", f->call, &f->value, &f->first, &f->count);
    }
}

/* With the lock: whether the fault is for this call. */
static bool is_hit(fault *f, const char *name)
{
    if (!f->call[0] || strcmp(name, f->call) != 0) {
        return false;
    }
    f->seen++;
    return f->seen >= f->first && f->seen < f->first + f->count;
}

static bool is_check(void)
{
    char line[PATH_BYTES];
    int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    long n = syscall(SYS_read, fd, line, sizeof line - 1);
    syscall(SYS_close, fd);
    line[n > 0 ? n : 0] = '\0';
    const char *verb = line + strlen(line) + 1;
    return n < 0 || verb >= line + n || strcmp(verb, "train") != 0;
}

__attribute__((constructor)) static void begin(void)
{
    const char *rank = getenv("RANK"), *wanted = getenv("ND_FAULT_RANK");
    const char *move = getenv("ND_FAULT_MOVE");
    if (!rank || !wanted || strcmp(rank, wanted) != 0 || is_check()) {
        return;
    }
    watch("ND_FAULT_FOLDER", "ND_FAULT_LOG");
    kill_at = number("ND_FAULT_KILL");
    read_fault("ND_FAULT_FAIL", &fails);
    read_fault("ND_FAULT_SLOW", &slows);
    if (move) {
        sscanf(move, "%4095[^:]:%4095s", move_from, move_to);
    }
}

typedef struct call {
    const char *name;
    char path[PATH_BYTES];
    long number; /* 0: it does not count */
    bool fails;
} call;

static bool counts(const char *path)
{
    static atomic_bool saves;
    size_t n = strlen(folder);
    if (!is_watched(path)) {
        return false;
    }
    if (path[n] == '\0') {
        return !saves || syscall(SYS_gettid) != getpid();
    }
    bool is_save = strstr(path + n, "checkpoint-") != NULL;
    saves = saves || is_save;
    return is_save;
}

static call enter(const char *name, int fd, const char *at)
{
    call c = {.name = name};
    int saved = errno;
    if (!folder[0]) {
        return c;
    }
    path_at(fd, at, c.path);
    if (counts(c.path)) {
        pthread_mutex_lock(&lock);
        c.number = ++count;
        if (count == 1 && move_from[0]) {
            syscall(SYS_renameat2, AT_FDCWD, move_from, AT_FDCWD, move_to, 0);
        }
        c.fails = is_hit(&fails, name);
        bool slow = is_hit(&slows, name);
        if (c.number == kill_at) {
            die();
        }
        pthread_mutex_unlock(&lock);
        if (slow) {
            const struct timespec t = {slows.value / 1000, slows.value % 1000 * 1000000L};
            nanosleep(&t, NULL);
        }
    }
    errno = saved;
    return c;
}

/* The result of the call, or -1 and the wanted errno when it was not made. */
static long leave(const call *c, long result)
{
    int code = errno;
    if (c->fails) {
        result = -1;
        code = fails.value;
    }
    if (c->number > 0) {
        log_line("%ld %s %d %s\n", c->number, c->name, result < 0 ? -code : 0, c->path);
    }
    errno = code;
    return result;
}

/* NAME is what the log says, FD and AT say which file, and SYSTEM_CALL makes the call. */
#define CALL(NAME, FD, AT, SYSTEM_CALL)                                                            \
    const call c = enter(NAME, FD, AT);                                                            \
    return leave(&c, c.fails ? -1 : (SYSTEM_CALL))

static int open_file(int dir, const char *path, int flags, mode_t mode)
{
    CALL("openat", dir, path, syscall(SYS_openat, dir, path, flags, mode));
}

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode)
{
    CALL("mkdir", AT_FDCWD, path, syscall(SYS_mkdir, path, mode));
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
    CALL("pwrite64", fd, NULL, syscall(SYS_pwrite64, fd, data, bytes, offset));
}

int fallocate64(int fd, int mode, off64_t offset, off64_t bytes)
{
    CALL("fallocate", fd, NULL, syscall(SYS_fallocate, fd, mode, offset, bytes));
}

int ftruncate64(int fd, off64_t bytes)
{
    CALL("ftruncate", fd, NULL, syscall(SYS_ftruncate, fd, bytes));
}

int fsync(int fd)
{
    CALL("fsync", fd, NULL, syscall(SYS_fsync, fd));
}

int fdatasync(int fd)
{
    CALL("fdatasync", fd, NULL, syscall(SYS_fdatasync, fd));
}

int sync_file_range(int fd, off64_t offset, off64_t bytes, unsigned flags)
{
    CALL("sync_file_range", fd, NULL, syscall(SYS_sync_file_range, fd, offset, bytes, flags));
}

int rename(const char *from, const char *to)
{
    CALL("rename", AT_FDCWD, from, syscall(SYS_rename, from, to));
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    CALL("renameat2", from_dir, from, syscall(SYS_renameat2, from_dir, from, to_dir, to, flags));
}

int unlink(const char *path)
{
    CALL("unlink", AT_FDCWD, path, syscall(SYS_unlink, path));
}

int unlinkat(int dir, const char *path, int flags)
{
    CALL("unlinkat", dir, path, syscall(SYS_unlinkat, dir, path, flags));
}

int rmdir(const char *path)
{
    CALL("rmdir", AT_FDCWD, path, syscall(SYS_rmdir, path));
}

/* A descriptor is closed also when the call reports an error. */
int close(int fd)
{
    const call c = enter("close", fd, NULL);
    return (int)leave(&c, syscall(SYS_close, fd));
}
