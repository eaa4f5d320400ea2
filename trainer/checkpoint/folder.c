// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "trainer/checkpoint/state_file.h"

static const char prefix[] = "checkpoint-", temporary_prefix[] = ".tmp-checkpoint-",
                  deleted_prefix[] = ".del-checkpoint-";

/* Lock. */

nd_status nd_run_lock_acquire(const char *run, nd_run_lock *out)
{
    char *path = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_format(&path, "%s/.lock", run));
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    int code = fd < 0 ? errno : flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (fd < 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(code));
    } else if (code == EWOULDBLOCK) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "another process trains in \"%s\" at this moment, or deletes checkpoints "
                         "there; wait until it has ended",
                         run);
        close(fd);
        fd = -1;
    } else if (code != 0) {
        nd_log_warning("the file system of \"%s\" has no locks (%s); no second run may use this "
                       "folder",
                       run, strerror(code));
    }
    free(path);
    out->fd = fd;
    return status;
}

void nd_run_lock_release(nd_run_lock *lock)
{
    if (lock->fd >= 0) {
        close(lock->fd);
        lock->fd = -1;
    }
}

/* All marks have the same size in the file, so that a newer one hides an older one. */
static void pad_mark(const char *mark, char out[ND_RUN_MARK_MAX])
{
    memset(out, ' ', ND_RUN_MARK_MAX);
    memcpy(out, mark, strnlen(mark, ND_RUN_MARK_MAX - 1));
    out[ND_RUN_MARK_MAX - 1] = '\n';
}

nd_status nd_run_lock_mark(const nd_run_lock *lock, const char *run, const char *mark)
{
    char *path = NULL, line[ND_RUN_MARK_MAX];
    ND_TRY(nd_fs_format(&path, "%s/.lock", run));
    pad_mark(mark, line);
    nd_status status = nd_fs_pwrite(lock->fd, path, line, sizeof line, 0);
    if (status == ND_OK && fsync(lock->fd) != 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(errno));
    }
    free(path);
    return status;
}

/* Opens the folders on the way first, since an open makes a network file system ask its server. */
bool nd_run_lock_has_mark(const char *run, const char *mark)
{
    char line[ND_RUN_MARK_MAX], wanted[ND_RUN_MARK_MAX], *parent = NULL;
    if (nd_fs_parent(run, &parent) != ND_OK) {
        return false;
    }
    int above = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int folder = open(run, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int fd = folder < 0 ? -1 : openat(folder, ".lock", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    pad_mark(mark, wanted);
    bool has = fd >= 0 && pread(fd, line, sizeof line, 0) == (ssize_t)sizeof line &&
               memcmp(line, wanted, sizeof line) == 0;
    const int all[] = {fd, folder, above};
    for (int i = 0; i < 3; i++) {
        if (all[i] >= 0) {
            close(all[i]);
        }
    }
    free(parent);
    return has;
}

/* Names. */

nd_status nd_checkpoint_path(const char *run, int64_t step, char **out)
{
    return nd_fs_format(out, "%s/%s%lld", run, prefix, (long long)step);
}

/* The number behind "checkpoint-", without sign, blanks or leading zeros; -1: another name. */
static int64_t step_of_name(const char *name)
{
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) {
        return -1;
    }
    const char *digits = name + sizeof prefix - 1;
    size_t length = strlen(digits);
    if (length == 0 || length > 18 || strspn(digits, "0123456789") != length ||
        (digits[0] == '0' && length > 1)) {
        return -1;
    }
    return strtoll(digits, NULL, 10);
}

static int by_step(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static bool is_folder_at(int dir, const char *name)
{
    struct stat st;
    return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

/* *out is NULL where there is no such folder. */
static nd_status open_run(const char *run, DIR **out)
{
    *out = opendir(run);
    return *out || errno == ENOENT
               ? ND_OK
               : nd_fail(ND_ERR_IO, "cannot read folder \"%s\": %s", run, strerror(errno));
}

nd_status nd_checkpoint_list(const char *run, int64_t **steps, int *count)
{
    int64_t *list = NULL;
    int n = 0, capacity = 0;
    DIR *dir = NULL;
    *steps = NULL;
    *count = 0;
    nd_status status = open_run(run, &dir);
    if (!dir) {
        return status;
    }
    for (struct dirent *entry = readdir(dir); entry && status == ND_OK; entry = readdir(dir)) {
        int64_t step = step_of_name(entry->d_name);
        if (step < 0 || !is_folder_at(dirfd(dir), entry->d_name)) {
            continue;
        }
        if (n == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            void *more = realloc(list, (size_t)capacity * sizeof *list);
            if (!more) {
                status = nd_fail_memory("a list of checkpoints");
                break;
            }
            list = more;
        }
        list[n++] = step;
    }
    closedir(dir);
    if (status != ND_OK) {
        free(list);
        return status;
    }
    if (n > 0) {
        qsort(list, (size_t)n, sizeof *list, by_step);
    }
    *steps = list;
    *count = n;
    return ND_OK;
}

bool nd_checkpoint_is_ours(const char *path)
{
    struct stat st;
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) {
        return nd_fs_blame(errno, ND_ERR_DATA) == ND_ERR_IO;
    }
    bool has = fstatat(dir, ND_MANIFEST_NAME, &st, AT_SYMLINK_NOFOLLOW) == 0 ||
               is_folder_at(dir, ND_STATE_FOLDER);
    close(dir);
    return has;
}

/* One to another program's folder is no concern of ours. */
static bool is_link(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && S_ISLNK(st.st_mode) &&
           (stat(path, &st) != 0 || nd_checkpoint_is_ours(path));
}

nd_status nd_checkpoint_newest_link(const char *run, int64_t *step)
{
    DIR *dir = NULL;
    *step = -1;
    nd_status status = open_run(run, &dir);
    if (!dir) {
        return status;
    }
    for (struct dirent *entry = readdir(dir); entry && status == ND_OK; entry = readdir(dir)) {
        int64_t found = step_of_name(entry->d_name);
        char *path = NULL;
        if (found <= *step) {
            continue;
        }
        status = nd_fs_format(&path, "%s/%s", run, entry->d_name);
        if (status == ND_OK && is_link(path)) {
            *step = found;
        }
        free(path);
    }
    closedir(dir);
    return status;
}

/* Deletion. Folders of ours are two deep; links are removed, not followed. */

static void remove_inside(int parent, const char *name, int depth)
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
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0 && depth > 0) {
            remove_inside(dirfd(dir), entry->d_name, depth - 1);
        }
        nd_fs_beat();
    }
    closedir(dir);
    unlinkat(parent, name, AT_REMOVEDIR);
}

static void remove_folder(const char *path)
{
    enum { DEPTH = 3 };
    remove_inside(AT_FDCWD, path, DEPTH);
}

void nd_checkpoint_abandon(const char *temporary)
{
    remove_folder(temporary);
}

nd_status nd_checkpoint_sweep(const char *run)
{
    DIR *dir = opendir(run);
    if (!dir) {
        return nd_fail(ND_ERR_CANTCREATE, "cannot read folder \"%s\": %s", run, strerror(errno));
    }
    nd_status status = ND_OK;
    for (struct dirent *entry = readdir(dir); entry && status == ND_OK; entry = readdir(dir)) {
        const char *name = entry->d_name;
        bool left = strncmp(name, temporary_prefix, sizeof temporary_prefix - 1) == 0 ||
                    strncmp(name, deleted_prefix, sizeof deleted_prefix - 1) == 0;
        char *path = NULL;
        if (left && is_folder_at(dirfd(dir), name)) {
            status = nd_fs_format(&path, "%s/%s", run, name);
            if (status == ND_OK) {
                remove_folder(path);
                nd_log_info("removed %s, which a save or a deletion left that did not end", path);
            }
            free(path);
        }
    }
    closedir(dir);
    return status;
}

/* Save. */

nd_status nd_checkpoint_temporary(const char *run, int64_t step, const char *run_id, char **out)
{
    return nd_fs_format(out, "%s/%s%lld-%s", run, temporary_prefix, (long long)step, run_id);
}

static nd_status make_folder(const char *path)
{
    return mkdir(path, 0777) == 0 || errno == EEXIST
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "cannot make folder \"%s\": %s", path, strerror(errno));
}

nd_status nd_checkpoint_make(const char *temporary, const char *state)
{
    ND_TRY(make_folder(temporary));
    return make_folder(state);
}

static nd_status write_manifest(const char *temporary, const nd_manifest *manifest)
{
    char *text = NULL;
    size_t bytes = 0;
    ND_TRY(nd_manifest_format(manifest, &text, &bytes));
    nd_status status = nd_state_file_put(temporary, ND_MANIFEST_NAME, text, bytes);
    free(text);
    return status;
}

nd_status nd_checkpoint_set_aside(const char *run, int64_t step, const char *suffix, char **out)
{
    char *path = NULL;
    ND_TRY(nd_checkpoint_path(run, step, &path));
    nd_status status = nd_fs_set_aside(path, suffix, out);
    free(path);
    return status;
}

/* The manifest as it can be read again, before anything depends on it. */
static nd_status check_manifest(const char *temporary)
{
    nd_manifest again = {0};
    nd_status status = nd_manifest_read(temporary, &again);
    nd_manifest_fini(&again);
    return status;
}

/* This host sees what each rank has written: a hash file of each, and their data. It would not
 * where the folder of some rank is that of another disk. */
static nd_status check_parts(const char *state, const nd_manifest *manifest)
{
    uint64_t wanted = 0, found = 0;
    nd_status status = ND_OK;
    DIR *dir = opendir(state);
    if (!dir) {
        return nd_fail(ND_ERR_CANTCREATE, "cannot read folder \"%s\": %s", state, strerror(errno));
    }
    for (int rank = 0; rank < manifest->writer_count && status == ND_OK; rank++) {
        char name[ND_HASH_FILE_NAME_MAX];
        struct stat st;
        nd_hash_file_name(name, rank);
        wanted += manifest->writers[rank].bytes;
        if (fstatat(dirfd(dir), name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            status = nd_fail(ND_ERR_CANTCREATE,
                             "rank %d has written its part, but \"%s/%s\" is not there (%s); all "
                             "hosts must see the run folder",
                             rank, state, name, strerror(errno));
        }
        nd_fs_beat();
    }
    for (struct dirent *e = readdir(dir); e && status == ND_OK; e = readdir(dir)) {
        struct stat st;
        bool counts = nd_ends_with(e->d_name, ".safetensors") &&
                      fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0;
        found += counts ? (uint64_t)st.st_size : 0;
        nd_fs_beat();
    }
    closedir(dir);
    if (status == ND_OK && found != wanted) {
        status =
            nd_fail(ND_ERR_CANTCREATE, "\"%s\" has %llu bytes of tensors; the ranks wrote %llu",
                    state, (unsigned long long)found, (unsigned long long)wanted);
    }
    return status;
}

/* The new checkpoint takes the name of an older one at once, so that a process that dies in between
 * leaves one of them under it. *taken: the file system can do that. */
static nd_status exchange_names(const char *temporary, const char *path, bool *taken)
{
    int code = nd_fs_exchange(temporary, path);
    *taken = code == 0;
    if (code != 0) {
        return code == EINVAL || code == ENOSYS || code == EOPNOTSUPP
                   ? ND_OK
                   : nd_fail(ND_ERR_CANTCREATE, "cannot exchange \"%s\" and \"%s\": %s", temporary,
                             path, strerror(code));
    }
    nd_status status = nd_fs_set_aside_from(temporary, path, "old", NULL);
    if (status != ND_OK) {
        (void)nd_fs_exchange(temporary, path);
    }
    return status;
}

/* A failure leaves the names as they were. */
static nd_status take_name(const char *run, const char *temporary, int64_t step)
{
    char *path = NULL, *aside = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_checkpoint_path(run, step, &path));
    if (nd_fs_exists(path)) {
        bool taken = false;
        ND_TRY_OUT(exchange_names(temporary, path, &taken));
        if (taken) {
            goto out;
        }
        ND_TRY_OUT(nd_fs_set_aside(path, "old", &aside));
    }
    status = nd_fs_rename(temporary, path);
    if (status != ND_OK && aside) {
        (void)rename(aside, path);
    }
out:
    free(aside);
    free(path);
    return status;
}

nd_status nd_checkpoint_commit(const char *run, const char *temporary, const nd_manifest *manifest,
                               nd_commit_gate gate)
{
    char *state = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&state, "%s/" ND_STATE_FOLDER, temporary));
    ND_TRY_OUT(nd_fs_sync_folder(state));
    ND_TRY_OUT(check_parts(state, manifest));
    ND_TRY_OUT(write_manifest(temporary, manifest));
    ND_TRY_OUT(check_manifest(temporary));
    ND_TRY_OUT(nd_fs_sync_folder(temporary));
    ND_TRY_OUT(gate.pass ? gate.pass(gate.context) : ND_OK);
    ND_TRY_OUT(take_name(run, temporary, manifest->position.step));
out:
    free(state);
    return status;
}
