// SPDX-License-Identifier: Apache-2.0
/*
 * A preloaded library that numbers the calls by which a process asks about the files of a folder,
 * and lets one of them fail as a broken disk or a full table of files would.
 *
 *   ND_QUESTION_FOLDER=PATH   absolute; names in it count, and the folder itself
 *   ND_QUESTION_LOG=FILE      gets a line for each call: number, name, path; and, without a number,
 *                             "0 rename PATH" or "0 remove PATH" for each change of a name
 *   ND_QUESTION_FAIL=K        call K (the first is 1) fails
 *   ND_QUESTION_ERRNO=E       with this number
 *
 * Questions are stat and its kin, open without O_CREAT, opendir, readdir, realpath, statvfs and
 * flock.
 */
#include "tests/e2e/watched_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/statvfs.h>

static int fail_errno;
static long fail_at;

__attribute__((constructor)) static void begin(void)
{
    const char *code = getenv("ND_QUESTION_ERRNO");
    watch("ND_QUESTION_FOLDER", "ND_QUESTION_LOG");
    fail_at = number("ND_QUESTION_FAIL");
    fail_errno = code ? atoi(code) : EIO;
}

/* Numbers and writes down a call; a change of a name has number 0. True: it fails. */
static bool enter(const char *name, int fd, const char *at, bool question)
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
        const long of_call = question ? ++count : 0;
        log_line("%ld %s %s\n", of_call, name, path);
        fails = question && of_call == fail_at;
        pthread_mutex_unlock(&lock);
    }
    errno = fails ? fail_errno : saved;
    return fails;
}

/* *real becomes the C library's function. ISO C has no cast to it from what dlsym returns. */
static void find_real(const char *name, void *real)
{
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(real, &found, sizeof found);
}

static int open_file(int dir, const char *path, int flags, mode_t mode)
{
    if (!(flags & O_CREAT) && enter("open", dir, path, true)) {
        return -1;
    }
    return (int)syscall(SYS_openat, dir, path, flags, mode);
}

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define STAT(NAME, TYPE)                                                                           \
    int NAME(const char *path, TYPE *st)                                                           \
    {                                                                                              \
        int (*real)(const char *, TYPE *);                                                         \
        find_real(#NAME, &real);                                                                   \
        return enter("stat", AT_FDCWD, path, true) ? -1 : real(path, st);                          \
    }
#define STATAT(NAME, TYPE)                                                                         \
    int NAME(int dir, const char *path, TYPE *st, int flags)                                       \
    {                                                                                              \
        int (*real)(int, const char *, TYPE *, int);                                               \
        find_real(#NAME, &real);                                                                   \
        return enter("stat", dir, path, true) ? -1 : real(dir, path, st, flags);                   \
    }
STAT(stat, struct stat)
STAT(lstat, struct stat)
STAT(stat64, struct stat64)
STAT(lstat64, struct stat64)
STATAT(fstatat, struct stat)
STATAT(fstatat64, struct stat64)
STAT(statvfs, struct statvfs)
STAT(statvfs64, struct statvfs64)

DIR *opendir(const char *path)
{
    DIR *(*real)(const char *);
    find_real("opendir", &real);
    return enter("opendir", AT_FDCWD, path, true) ? NULL : real(path);
}

#define READDIR(NAME, TYPE)                                                                        \
    TYPE *NAME(DIR *dir)                                                                           \
    {                                                                                              \
        TYPE *(*real)(DIR *);                                                                      \
        find_real(#NAME, &real);                                                                   \
        return enter("readdir", dirfd(dir), NULL, true) ? NULL : real(dir);                        \
    }
READDIR(readdir, struct dirent)
READDIR(readdir64, struct dirent64)

int access(const char *path, int mode)
{
    return enter("access", AT_FDCWD, path, true) ? -1 : faccessat(AT_FDCWD, path, mode, 0);
}

int flock(int fd, int operation)
{
    return enter("flock", fd, NULL, true) ? -1 : (int)syscall(SYS_flock, fd, operation);
}

char *realpath(const char *path, char *out)
{
    char *(*real)(const char *, char *);
    find_real("realpath", &real);
    return enter("realpath", AT_FDCWD, path, true) ? NULL : real(path, out);
}

int rename(const char *from, const char *to)
{
    (void)enter("rename", AT_FDCWD, from, false);
    return (int)syscall(SYS_rename, from, to);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    (void)enter("rename", from_dir, from, false);
    return (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
}

int unlink(const char *path)
{
    (void)enter("remove", AT_FDCWD, path, false);
    return (int)syscall(SYS_unlink, path);
}

int unlinkat(int dir, const char *path, int flags)
{
    (void)enter("remove", dir, path, false);
    return (int)syscall(SYS_unlinkat, dir, path, flags);
}

int rmdir(const char *path)
{
    (void)enter("remove", AT_FDCWD, path, false);
    return (int)syscall(SYS_rmdir, path);
}
