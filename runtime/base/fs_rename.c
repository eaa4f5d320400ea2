// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"

int nd_fs_rename_new(const char *from, const char *to)
{
    int code = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0 ? 0 : errno;
    if (code == EINVAL || code == ENOSYS) { /* a file system without NOREPLACE */
        struct stat st;
        code = lstat(to, &st) == 0     ? EEXIST
               : errno != ENOENT       ? errno
               : rename(from, to) == 0 ? 0
                                       : errno;
    }
    return code;
}

/* *code is the errno of the rename. */
static nd_status rename_durably(const char *from, const char *to, int *code)
{
    char *parent = NULL;
    ND_TRY(nd_fs_parent(to, &parent));
    *code = nd_fs_rename_new(from, to);
    nd_status status = *code == 0 ? nd_fs_sync_folder(parent)
                                  : nd_fail(ND_ERR_CANTCREATE, "cannot rename \"%s\" to \"%s\": %s",
                                            from, to, strerror(*code));
    if (*code == 0 && status != ND_OK) {
        (void)rename(to, from);
    }
    free(parent);
    return status;
}

nd_status nd_fs_rename(const char *from, const char *to)
{
    int code;
    return rename_durably(from, to, &code);
}

int nd_fs_exchange(const char *a, const char *b)
{
    return renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0 ? 0 : errno;
}

nd_status nd_fs_set_aside(const char *path, const char *suffix, char **out)
{
    return nd_fs_set_aside_from(path, path, suffix, out);
}

nd_status nd_fs_set_aside_from(const char *from, const char *path, const char *suffix, char **out)
{
    enum { NAMES_MAX = 1000000 };
    char *aside = NULL;
    int code = EEXIST;
    nd_status status = nd_fs_format(&aside, "%s.%s", path, suffix);
    status = status == ND_OK ? rename_durably(from, aside, &code) : status;
    for (int n = 2; aside && code == EEXIST && n < NAMES_MAX; n++) {
        free(aside);
        aside = NULL;
        status = nd_fs_format(&aside, "%s.%s-%d", path, suffix, n);
        status = status == ND_OK ? rename_durably(from, aside, &code) : status;
    }
    if (status == ND_OK && out) {
        *out = aside;
        aside = NULL;
    }
    free(aside);
    return status;
}
