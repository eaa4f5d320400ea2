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
    watch("ND_DISK_FOLDER", "ND_DISK_LOG");
    full_at = number("ND_DISK_FULL");
    kill_at = number("ND_DISK_KILL");
}

/* Counts and logs the call, and may kill the process; returns true when the call must fail. */
static bool enter(const char *name, int fd, const char *at, bool needs_room)
{
    char path[PATH_BYTES];
    const int saved = errno;
    bool fails = false;
    if (!folder[0]) {
        return false;
    }
    path_at(fd, at, path);
    if (is_watched(path)) {
        pthread_mutex_lock(&lock);
        log_line("%ld %s %s\n", ++count, name, path);
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

OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode)
{
    CALL("mkdir", AT_FDCWD, path, true, syscall(SYS_mkdir, path, mode));
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
    CALL("rename", AT_FDCWD, from, true, syscall(SYS_rename, from, to));
}

int unlink(const char *path)
{
    CALL("unlink", AT_FDCWD, path, false, syscall(SYS_unlink, path));
}
