// SPDX-License-Identifier: Apache-2.0
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"

nd_status nd_fs_sync_close(int fd, const char *path)
{
    int sync_code = fsync(fd) == 0 ? 0 : errno;
    int close_code = close(fd) == 0 ? 0 : errno;
    nd_fs_beat();
    if (sync_code || close_code) {
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" could not be made durable: %s", path,
                       strerror(sync_code ? sync_code : close_code));
    }
    return ND_OK;
}

nd_status nd_fs_sync_file(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    return fd >= 0 ? nd_fs_sync_close(fd, path)
                   : nd_fail(ND_ERR_CANTCREATE, "cannot open \"%s\" to make it durable: %s", path,
                             strerror(errno));
}

nd_status nd_fs_sync_folder(const char *folder)
{
    int fd = nd_fs_open_folder(folder);
    if (fd < 0) {
        return nd_fail(ND_ERR_CANTCREATE, "cannot open folder \"%s\": %s", folder, strerror(errno));
    }
    /* Some file systems have no fsync of folders and say EINVAL. */
    int code = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    nd_fs_beat();
    if (code) {
        return nd_fail(ND_ERR_CANTCREATE, "folder \"%s\" could not be made durable: %s", folder,
                       strerror(code));
    }
    return ND_OK;
}

nd_status nd_fs_sync_parent(const char *path)
{
    char *parent = NULL;
    ND_TRY(nd_fs_parent(path, &parent));
    nd_status status = nd_fs_sync_folder(parent);
    free(parent);
    return status;
}

static nd_status fail_write(const char *path, int code)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(code));
}

/* *code is the errno of the rename; 0 where that was not tried. */
static nd_status rename_durably(const char *from, const char *to, bool replaces, int *code)
{
    char *parent = NULL;
    *code = 0;
    ND_TRY(nd_fs_parent(to, &parent)); /* a lack of memory leaves the names as they were */
    *code = !replaces ? nd_fs_rename_new(from, to) : rename(from, to) == 0 ? 0 : errno;
    nd_status status = *code == 0 ? nd_fs_sync_folder(parent)
                                  : nd_fail(ND_ERR_CANTCREATE, "cannot rename \"%s\" to \"%s\": %s",
                                            from, to, strerror(*code));
    if (*code == 0 && status != ND_OK && !replaces) {
        (void)rename(to, from);
    }
    free(parent);
    return status;
}

nd_status nd_fs_draft_open(nd_fs_draft *draft, const char *path, mode_t mode)
{
    ND_TRY(nd_fs_format(&draft->path, "%s", path));
    ND_TRY(nd_fs_temporary(path, &draft->temporary));
    draft->stream = nd_fs_stream_new(draft->temporary, mode);
    return draft->stream ? ND_OK : fail_write(path, errno);
}

nd_status nd_fs_draft_check(const nd_fs_draft *draft)
{
    errno = 0; /* an earlier failure of the stream has left none */
    const bool good = fflush(draft->stream) == 0 && !ferror(draft->stream);
    return good ? ND_OK : fail_write(draft->path, errno ? errno : EIO);
}

static nd_status commit(const nd_fs_draft *draft)
{
    int code;
    ND_TRY(nd_fs_draft_check(draft));
    const int fd = fcntl(fileno(draft->stream), F_DUPFD_CLOEXEC, 0);
    ND_TRY(fd < 0 ? fail_write(draft->path, errno) : nd_fs_sync_close(fd, draft->path));
    nd_status status = rename_durably(draft->temporary, draft->path, !draft->is_new, &code);
    return code == 0 ? status : fail_write(draft->path, code);
}

nd_status nd_fs_draft_close(nd_fs_draft *draft, nd_status status)
{
    if (draft->stream) {
        status = status == ND_OK ? commit(draft) : status;
        fclose(draft->stream);
        if (status != ND_OK) {
            unlink(draft->temporary);
        }
    }
    free(draft->temporary);
    free(draft->path);
    *draft = (nd_fs_draft){0};
    return status;
}

nd_status nd_fs_write_atomic(const char *path, const void *data, size_t size)
{
    return nd_fs_write_atomic_as(path, 0666, data, size);
}

nd_status nd_fs_write_atomic_as(const char *path, mode_t mode, const void *data, size_t size)
{
    nd_fs_draft draft = {0};
    nd_status status = nd_fs_draft_open(&draft, path, mode);
    status = status == ND_OK ? nd_fs_pwrite(fileno(draft.stream), path, data, size, 0) : status;
    return nd_fs_draft_close(&draft, status);
}

nd_status nd_fs_temporary(const char *path, char **out)
{
    return nd_fs_format(out, "%s.tmp-%d-%016llx", path, (int)getpid(),
                        (unsigned long long)nd_clock_ns());
}

/* NAME.tmp-PID-CLOCK with 16 digits of the clock. */
size_t nd_fs_temporary_of(const char *name)
{
    static const char mark[] = ".tmp-", digits[] = "0123456789", hex[] = "0123456789abcdef";
    const char *at = NULL;
    for (const char *p = name; (p = strstr(p, mark)); p++) {
        at = p + sizeof mark - 1;
    }
    const size_t pid = at ? strspn(at, digits) : 0;
    return pid > 0 && at[pid] == '-' && strspn(at + pid + 1, hex) == 16 && !at[pid + 17]
               ? (size_t)(at - name) - (sizeof mark - 1)
               : 0;
}

static nd_status remove_one(const char *path)
{
    bool stays = false;
    nd_fs_remove_tree(path);
    ND_TRY(nd_fs_exists(path, &stays));
    if (stays) {
        nd_log_warning("%s, which a process left that did not end, cannot be removed; remove it",
                       path);
    } else {
        nd_log_info("removed %s, which a process left that did not end", path);
    }
    return ND_OK;
}

nd_status nd_fs_remove_left(const char *folder, bool (*is_left)(const char *name))
{
    nd_fs_names names;
    ND_TRY(nd_fs_list(folder, &names));
    nd_status status = ND_OK;
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        char *path = NULL;
        if (!is_left(names.list[i])) {
            continue;
        }
        status = nd_fs_format(&path, "%s/%s", folder, names.list[i]);
        status = status == ND_OK ? remove_one(path) : status;
        free(path);
    }
    nd_fs_names_fini(&names);
    return status;
}

char *nd_file_bytes_format(char *text, size_t size, double bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    int unit = 0;
    for (; unit < 4 && bytes >= 999.5; unit++) {
        bytes /= 1000;
    }
    const int decimals = unit == 0 ? 0 : bytes < 9.995 ? 2 : 1;
    snprintf(text, size, "%.*f %s", decimals, bytes, units[unit]);
    return text;
}

/* The free space is measured first: what is written meanwhile is then counted twice, not lost. */
nd_status nd_fs_check_space_left(const char *folder, const char *begun, uint64_t bytes,
                                 const char *purpose)
{
    struct statvfs fs;
    if (statvfs(folder, &fs) != 0) {
        if (errno == ENOENT) {
            return nd_fail(ND_ERR_CANTCREATE,
                           "%s needs room in \"%s\", but there is no such folder; make it, or "
                           "write elsewhere",
                           purpose, folder);
        }
        return nd_fail(ND_ERR_IO, "%s needs room in \"%s\", but that folder cannot be examined: %s",
                       purpose, folder, strerror(errno));
    }
    if (fs.f_blocks == 0 && bytes > 0) { /* as /proc and /sys have it */
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s cannot be written in \"%s\", whose file system stores no files; write "
                       "elsewhere",
                       purpose, folder);
    }
    uint64_t begun_bytes = 0;
    ND_TRY(begun ? nd_fs_tree_bytes(begun, true, &begun_bytes) : ND_OK);
    const uint64_t available = (uint64_t)fs.f_bavail * fs.f_frsize + begun_bytes;
    if (available < bytes) {
        char needed[32], left[32];
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s needs %s in \"%s\", but only %s are free there; free space, or write "
                       "elsewhere",
                       purpose, nd_file_bytes_format(needed, sizeof needed, (double)bytes), folder,
                       nd_file_bytes_format(left, sizeof left, (double)available));
    }
    return ND_OK;
}

nd_status nd_fs_check_space(const char *folder, uint64_t bytes, const char *purpose)
{
    return nd_fs_check_space_left(folder, NULL, bytes, purpose);
}

static nd_status fail_make(nd_status status, const char *what, const char *path, const char *why,
                           const char *advice)
{
    return nd_fail(status, "%s %s cannot be created: %s; %s", what, path, why, advice);
}

/* The longest beginning of the path that is there, or "."; owned by the caller. */
static nd_status find_existing(const char *path, char **out)
{
    size_t length = strlen(path);
    bool there = false;
    while (length > 1 && path[length - 1] == '/') { /* which would follow a link */
        length--;
    }
    ND_TRY(nd_fs_format(out, "%.*s", (int)length, path));
    ND_TRY(nd_fs_exists(*out, &there));
    while (!there && strcmp(*out, ".") != 0 && strcmp(*out, "/") != 0) {
        char *above = NULL;
        ND_TRY(nd_fs_parent(*out, &above));
        free(*out);
        *out = above;
        ND_TRY(nd_fs_exists(*out, &there));
    }
    return ND_OK;
}

/* The reason why folders of these names cannot be made in one that is there; NULL: they can. */
static const char *find_bad_name(const char *names, const char *there)
{
    const long most = pathconf(there, _PC_NAME_MAX); /* -1: no limit */
    while (*(names += strspn(names, "/"))) {
        const size_t length = strcspn(names, "/");
        if (length == 2 && memcmp(names, "..", 2) == 0) {
            return "its .. follows a folder that does not exist";
        }
        if (most >= 0 && length > (size_t)most) {
            return strerror(ENAMETOOLONG);
        }
        names += length;
    }
    return NULL;
}

static nd_status check_missing(const char *path, const char *there, const char *what,
                               const char *advice)
{
    const size_t length = strlen(there);
    const bool begins = strncmp(path, there, length) == 0 && strchr("/", path[length]);
    const char *missing = begins ? path + length : path;
    const char *why = find_bad_name(missing, there);
    if (why) {
        return fail_make(ND_ERR_CANTCREATE, what, path, why, advice);
    }
    if (missing[strspn(missing, "/")] && access(there, W_OK | X_OK) != 0) {
        const int code = errno;
        return fail_make(nd_fs_blame_write(code), what, path, strerror(code), advice);
    }
    return ND_OK;
}

nd_status nd_fs_check_folders(const char *path, const char *what, const char *advice, char **out)
{
    enum { LENGTH_MAX = PATH_MAX - NAME_MAX - 1 }; /* with room for the name of a file there */
    char *there = NULL, *why = NULL;
    nd_fs_kind kind;
    nd_status status = ND_OK;
    if (strlen(path) >= LENGTH_MAX) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "the path of %s has %zu characters; at most %d are possible. %s", what,
                       strlen(path), LENGTH_MAX - 1, advice);
    }
    ND_TRY_OUT(find_existing(path, &there));
    ND_TRY_OUT(nd_fs_look(there, &kind, NULL));
    if (kind != ND_FS_FOLDER) {
        ND_TRY_OUT(nd_fs_format(&why, "%s is a file, not a folder", there));
        ND_TRY_OUT(fail_make(ND_ERR_CANTCREATE, what, path, why, advice));
    }
    ND_TRY_OUT(check_missing(path, there, what, advice));
    if (out) {
        *out = there;
        there = NULL;
    }
out:
    free(there);
    free(why);
    return status;
}

nd_status nd_fs_make_folders(const char *path, const char *what, const char *advice)
{
    char part[PATH_MAX];
    ND_TRY(nd_fs_check_folders(path, what, advice, NULL));
    const size_t length = strlen(path);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') {
            continue;
        }
        memcpy(part, path, i);
        part[i] = '\0';
        /* A parent may exist in a place where nothing can be made: only the last one's answer
         * counts. */
        if (mkdir(part, 0777) == 0) {
            ND_TRY(nd_fs_sync_parent(part));
        } else if (errno != EEXIST && i == length) {
            return fail_make(ND_ERR_CANTCREATE, what, path, strerror(errno), advice);
        }
    }
    return ND_OK;
}

nd_status nd_fs_make_own_folder(const char *path)
{
    int code = mkdir(path, 0777) == 0 ? 0 : errno;
    if (code == EEXIST) {
        nd_fs_kind kind;
        ND_TRY(nd_fs_look_at_link(path, &kind, NULL));
        code = kind == ND_FS_FOLDER ? 0 : kind == ND_FS_LINK ? ELOOP : ENOTDIR;
    }
    return code == 0 ? ND_OK
                     : nd_fail(ND_ERR_CANTCREATE, "cannot make folder \"%s\": %s", path,
                               nd_fs_reason(code));
}

/* Trees. */

enum { TREE_DEPTH = 8 };

static nd_status add_bytes(const char *path, bool occupied, int depth, uint64_t *bytes)
{
    nd_fs_names names;
    ND_TRY(nd_fs_list(path, &names));
    nd_status status = ND_OK;
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        char *inside = NULL;
        nd_fs_kind kind = ND_FS_ABSENT;
        struct stat st;
        status = nd_fs_format(&inside, "%s/%s", path, names.list[i]);
        status = status == ND_OK ? nd_fs_look_at_link(inside, &kind, &st) : status;
        if (kind == ND_FS_FILE) {
            *bytes += occupied ? (uint64_t)st.st_blocks * 512 : (uint64_t)st.st_size;
        } else if (kind == ND_FS_FOLDER && depth > 0) {
            status = add_bytes(inside, occupied, depth - 1, bytes);
        }
        free(inside);
    }
    nd_fs_names_fini(&names);
    return status;
}

nd_status nd_fs_tree_bytes(const char *folder, bool occupied, uint64_t *bytes)
{
    *bytes = 0;
    return add_bytes(folder, occupied, TREE_DEPTH, bytes);
}

/* By descriptors, so that a link that another process puts in a folder's place is not followed. */
static void remove_folder(int parent, const char *name, int depth)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) {
            continue;
        }
        if (unlinkat(fd, entry->d_name, 0) != 0 && depth > 0) {
            remove_folder(fd, entry->d_name, depth - 1);
        }
        nd_fs_beat();
    }
    closedir(dir);
    unlinkat(parent, name, AT_REMOVEDIR);
}

void nd_fs_remove_tree(const char *path)
{
    nd_fs_kind kind = ND_FS_ABSENT;
    (void)nd_fs_look_at_link(path, &kind, NULL);
    if (kind == ND_FS_FOLDER) {
        remove_folder(AT_FDCWD, path, TREE_DEPTH);
    } else if (kind != ND_FS_ABSENT) {
        unlink(path);
    }
}

/* Renaming. */

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

nd_status nd_fs_rename(const char *from, const char *to)
{
    int code;
    return rename_durably(from, to, false, &code);
}

int nd_fs_exchange(const char *a, const char *b)
{
    return renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0 ? 0 : errno;
}

nd_status nd_fs_set_aside(const char *from, const char *path, const char *suffix, char **out)
{
    enum { NAMES_MAX = 1000000 };
    char *aside = NULL;
    int code = EEXIST;
    nd_status status = ND_OK;
    for (int n = 1; code == EEXIST && n < NAMES_MAX; n++) {
        free(aside);
        aside = NULL;
        ND_TRY_OUT(n == 1 ? nd_fs_format(&aside, "%s.%s", path, suffix)
                          : nd_fs_format(&aside, "%s.%s-%d", path, suffix, n));
        status = rename_durably(from, aside, false, &code);
    }
    if (status == ND_OK && out) {
        *out = aside;
        aside = NULL;
    }
out:
    free(aside);
    return status;
}
