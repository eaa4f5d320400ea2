// SPDX-License-Identifier: Apache-2.0
/*
 * A preloaded library that numbers the calls by which a process changes the files of a folder, and
 * from one of them on finds the disk full, or kills the process in its place.
 *
 *   ND_DISK_FOLDER=PATH   absolute; files in it count, and the folder itself
 *   ND_DISK_LOG=FILE      gets a line for each call: number, name, path
 *   ND_DISK_FULL=K        from call K on (the first is 1), what needs room fails with ENOSPC
 *   ND_DISK_KILL=K        SIGKILL in the place of call K
 *
 * Room is needed to make a file and to write, and a full disk may say so as late as in a sync.
 */
#include "tests/e2e/watched_calls.h"

static long full_at, kill_at;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("ND_DISK_FOLDER"), *log = getenv("ND_DISK_LOG");
    if (!path) {
        return;
    }
    watch(path, log);
    full_at = number("ND_DISK_FULL");
    kill_at = number("ND_DISK_KILL");
}

/* The path of a name, or of a descriptor when there is none. */
static void path_of(int fd, const char *name, char out[PATH_BYTES])
{
    char link[64];
    snprintf(out, PATH_BYTES, "%s", name ? name : "");
    if (!name) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        long n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_BYTES - 1);
        out[n > 0 ? n : 0] = '\0';
    }
}

/* Whether the call fails. */
static bool enter(const char *name, int fd, const char *at, bool needs_room)
{
    char path[PATH_BYTES], line[PATH_BYTES + 64];
    const int saved = errno;
    bool fails = false;
    if (!folder[0]) {
        return false;
    }
    path_of(fd, at, path);
    if (is_watched(path)) {
        pthread_mutex_lock(&lock);
        count++;
        if (log_fd >= 0) {
            int size = snprintf(line, sizeof line, "%ld %s %s\n", count, name, path);
            syscall(SYS_write, log_fd, line, (size_t)size);
        }
        if (count == kill_at) {
            die();
        }
        fails = needs_room && full_at > 0 && count >= full_at;
        pthread_mutex_unlock(&lock);
    }
    errno = fails ? ENOSPC : saved;
    return fails;
}

#define CALL(NAME, FD, AT, ROOM, SYSTEM_CALL)                                                      \
    return enter(NAME, FD, AT, ROOM) ? -1 : (int)(SYSTEM_CALL)

static int open_file(int dir, const char *path, int flags, mode_t mode)
{
    struct stat st;
    if (!(flags & O_CREAT)) {
        return (int)syscall(SYS_openat, dir, path, flags, mode);
    }
    CALL("open", dir, path, syscall(SYS_newfstatat, dir, path, &st, 0) != 0,
         syscall(SYS_openat, dir, path, flags, mode));
}

#define OPEN(NAME)                                                                                 \
    int NAME(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        va_list args;                                                                              \
        va_start(args, flags);                                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;                    \
        va_end(args);                                                                              \
        return open_file(AT_FDCWD, path, flags, mode);                                             \
    }
OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode)
{
    CALL("mkdir", -1, path, true, syscall(SYS_mkdir, path, mode));
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
    return enter("pwrite", fd, NULL, true) ? -1 : syscall(SYS_pwrite64, fd, data, bytes, offset);
}

ssize_t write(int fd, const void *data, size_t bytes)
{
    return enter("write", fd, NULL, true) ? -1 : syscall(SYS_write, fd, data, bytes);
}

int ftruncate64(int fd, off64_t bytes)
{
    CALL("ftruncate", fd, NULL, false, syscall(SYS_ftruncate, fd, bytes));
}

int fsync(int fd)
{
    CALL("fsync", fd, NULL, true, syscall(SYS_fsync, fd));
}

int sync_file_range(int fd, off64_t offset, off64_t bytes, unsigned flags)
{
    CALL("sync_file_range", fd, NULL, true, syscall(SYS_sync_file_range, fd, offset, bytes, flags));
}

int rename(const char *from, const char *to)
{
    CALL("rename", -1, from, true, syscall(SYS_rename, from, to));
}

int unlink(const char *path)
{
    CALL("unlink", -1, path, false, syscall(SYS_unlink, path));
}
