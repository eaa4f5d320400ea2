// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_REPORT_FILES_H
#define ND_TESTS_REPORT_FILES_H
/* The folder of a test of reports, what its files say, and disks that are full. */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>

#include "tests/support/tempdir.h"

static tempdir dir;

static char *read_file(const char *name)
{
    char *text = NULL;
    size_t size;
    assert_ok(nd_fs_read(tempdir_file(&dir, name), 1 << 22, ND_ERR_DATA, &text, &size));
    return text;
}

/* How often a part is in a file. */
static inline void expect_in(const char *name, int times, const char *part)
{
    char *text = read_file(name);
    const int n = times_in(text, part);
    cr_expect_eq(n, times, "\"%s\" is %d times in %s, not %d:\n%s", part, n, name, times, text);
    free(text);
}
#define said(times, part) expect_in("stderr", times, part)

/* A full disk, played by a limit on the size of files. */
static inline void set_file_limit(rlim_t bytes)
{
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

#endif
