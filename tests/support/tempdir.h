// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_TEMPDIR_H
#define ND_TESTS_SUPPORT_TEMPDIR_H
/* A folder of one test, with the files that the test writes. For Criterion: each test is a process
 * of its own. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/status.h"

typedef struct tempdir {
    char path[64];
    char name[PATH_MAX]; /* of the last tempdir_file */
} tempdir;

static inline void tempdir_make(tempdir *dir)
{
    snprintf(dir->path, sizeof dir->path, "/tmp/nd_test_XXXXXX");
    cr_assert_not_null(mkdtemp(dir->path));
}

static inline int tempdir_remove_one(const char *path, const struct stat *st, int kind,
                                     struct FTW *place)
{
    return remove(path);
}

/* A file, or a folder and all below it; what is not there is no error. */
static inline void tempdir_remove_tree(const char *path)
{
    nftw(path, tempdir_remove_one, 16, FTW_DEPTH | FTW_PHYS);
    cr_assert(access(path, F_OK) != 0, "%s cannot be removed", path);
}

static inline void tempdir_remove(const tempdir *dir)
{
    tempdir_remove_tree(dir->path);
}

static inline void tempdir_leave_empty(void)
{
}

/* A suite whose tests have `dir` as their folder, in which setup() has written what they share.
 * What follows is for Criterion's TestSuite. */
#define TEMPDIR_SUITE(suite, setup, ...)                                                           \
    static void suite##_begin(void)                                                                \
    {                                                                                              \
        tempdir_make(&dir);                                                                        \
        setup();                                                                                   \
    }                                                                                              \
    static void suite##_end(void)                                                                  \
    {                                                                                              \
        tempdir_remove(&dir);                                                                      \
    }                                                                                              \
    TestSuite(suite, .init = suite##_begin, .fini = suite##_end, ##__VA_ARGS__)

/* Returns whether something has this name, be it a link to nowhere. */
static inline bool tempdir_has_path(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static inline const char *tempdir_file(tempdir *dir, const char *name)
{
    snprintf(dir->name, sizeof dir->name, "%s/%s", dir->path, name);
    return dir->name;
}

/* The program's stderr is the file `stderr` of the folder from here on. */
static inline void tempdir_catch_stderr(tempdir *dir)
{
    int fd = open(tempdir_file(dir, "stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(dup2(fd, STDERR_FILENO), STDERR_FILENO);
    close(fd);
}

/* Writes a file and returns its path, valid until the next call. */
static inline const char *tempdir_write(tempdir *dir, const char *name, const void *data,
                                        size_t size)
{
    const char *path = tempdir_file(dir, name);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fwrite(data, 1, size, f), size);
    cr_assert_eq(fclose(f), 0);
    return path;
}

/* The expression fails with this status, and its sentence holds these words. */
#define assert_fails(expr, expected, words)                                                        \
    do {                                                                                           \
        nd_error_clear();                                                                          \
        nd_status got_ = (expr);                                                                   \
        cr_assert_eq(got_, (expected), "%s gave %d: %s", #expr, got_, nd_error_last()->message);   \
        cr_assert_eq(nd_error_last()->status, got_);                                               \
        cr_assert_not_null(strstr(nd_error_last()->message, (words)), "no \"%s\" in: %s", (words), \
                           nd_error_last()->message);                                              \
    } while (0)

#define assert_ok(expr)                                                                            \
    do {                                                                                           \
        nd_status got_ = (expr);                                                                   \
        cr_assert_eq(got_, ND_OK, "%s gave %d: %s", #expr, got_, nd_error_last()->message);        \
    } while (0)

/* Returns what the file `stderr` has by now, valid until the next call. */
static inline char *tempdir_said(tempdir *dir)
{
    static char *text;
    size_t size;
    free(text);
    assert_ok(nd_fs_read(tempdir_file(dir, "stderr"), 1 << 20, ND_ERR_IO, &text, &size));
    return text;
}

/* How often a text has these words. */
static inline int times_in(const char *text, const char *words)
{
    int count = 0;
    for (; (text = strstr(text, words)); text++) {
        count++;
    }
    return count;
}

#endif
