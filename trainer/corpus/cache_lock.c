// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/cache_parts.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"

enum {
    STALL_SECONDS = 300,
    POLL_MS = 20,
    POLL_MS_MAX = 1000,
    WORD_SECONDS = 10,
    MESSAGE_BYTES = 1000
};

/* What the lock file holds. */
typedef struct lock_page {
    uint64_t bytes, all; /* read, encoded or made durable, and of all */
    int32_t status;      /* of the process that failed; 0: none did */
    char message[MESSAGE_BYTES];
} lock_page;

typedef struct wait {
    const nd_token_cache_request *request;
    const char *path;
    double stall;         /* seconds */
    uint64_t progress[2]; /* bytes, of all */
    long pause_ms;        /* the next one: each is longer, or many ranks would load the folder */
    double changed, said; /* when the progress changed, when this process said so; 0: not yet */
} wait;

static lock_page read_page(int fd)
{
    lock_page page = {0};
    (void)!pread(fd, &page, sizeof page, 0);
    page.message[MESSAGE_BYTES - 1] = '\0';
    return page;
}

/* Another process has the lock: waits a little. ND_ERR_HANG when it makes no progress. */
static nd_status wait_a_little(wait *w, int fd)
{
    const struct timespec pause = {.tv_sec = w->pause_ms / 1000,
                                   .tv_nsec = w->pause_ms % 1000 * 1000000L};
    const lock_page page = read_page(fd);
    const double now = nd_clock_seconds();
    if (w->request->stop && atomic_load(w->request->stop)) {
        return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
    }
    if (w->changed == 0 || page.bytes != w->progress[0] || page.all != w->progress[1]) {
        w->progress[0] = page.bytes;
        w->progress[1] = page.all;
        w->changed = now;
    }
    if (now - w->changed > w->stall) {
        return nd_fail(
            ND_ERR_HANG,
            "another process that has \"%s\" reads or encodes the text and made no progress for "
            "%.0f s; end it, or set data.cache_dir to another folder",
            w->path, w->stall);
    }
    if (w->said == 0 || now - w->said >= WORD_SECONDS) {
        w->said = now;
        nd_log_info(
            "waiting for another process, which has %s and reads or encodes the text: %.0f %%",
            w->path, page.all > 0 ? 100.0 * (double)page.bytes / (double)page.all : 0.0);
    }
    nanosleep(&pause, NULL);
    w->pause_ms = w->pause_ms * 3 / 2 < POLL_MS_MAX ? w->pause_ms * 3 / 2 : POLL_MS_MAX;
    return ND_OK;
}

/* What is wrong with the data, by the process that had the lock; it holds for this one too. */
static nd_status failure_of(int fd)
{
    lock_page page = read_page(fd);
    for (char *p = page.message; *p; p++) {
        *p = (unsigned char)*p < ' ' ? ' ' : *p;
    }
    return page.status == (int32_t)ND_ERR_DATA
               ? nd_fail(ND_ERR_DATA, "%s (found by another process, which encoded the text)",
                         page.message)
               : ND_OK;
}

/*
 * Opens the lock file, which other users of the folder may lock too. One that this process makes
 * gets the folder's permissions. Somebody who can write to the folder may have put anything under
 * this name.
 */
static nd_status open_lock(const nd_cache_key *key, int *fd)
{
    struct stat folder;
    nd_fs_kind kind;
    ND_TRY(nd_fs_look(key->folder, &kind, &folder));
    *fd = nd_fs_create(key->lock, 0666);
    if (*fd >= 0 && kind == ND_FS_FOLDER) {
        (void)!fchmod(*fd, folder.st_mode & 0666);
    }
    *fd = *fd >= 0 ? *fd : nd_fs_update(key->lock, 0);
    return *fd >= 0 ? ND_OK
                    : nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be created: %s; set data.cache_dir",
                              key->lock, nd_fs_reason(errno));
}

/* Whether the file that was locked is still the one of this name. */
static nd_status is_current(int fd, const char *path, bool *out)
{
    struct stat held, named;
    nd_fs_kind kind;
    ND_TRY(nd_fs_look_at_link(path, &kind, &named));
    if (fstat(fd, &held) != 0) {
        return nd_fail(ND_ERR_IO, "cannot examine \"%s\": %s", path, strerror(errno));
    }
    *out = kind == ND_FS_FILE && held.st_dev == named.st_dev && held.st_ino == named.st_ino;
    return ND_OK;
}

/* One lock file: *held when this process has it, else it is to be opened again. */
static nd_status take_one(const nd_cache_key *key, wait *w, int fd, bool *held)
{
    bool waited = false;
    nd_fs_locked locked;
    *held = false;
    ND_TRY(nd_fs_lock(fd, key->lock, &locked));
    while (locked == ND_FS_LOCKED_BY_ANOTHER) {
        waited = true;
        ND_TRY(wait_a_little(w, fd));
        ND_TRY(nd_fs_lock(fd, key->lock, &locked));
    }
    if (locked == ND_FS_NO_LOCKS) {
        unlink(key->lock);
        return nd_fail(ND_ERR_CANTCREATE,
                       "\"%s\" cannot be locked: its file system has no locks; set data.cache_dir "
                       "to a folder of one that has",
                       key->lock);
    }
    ND_TRY(waited ? failure_of(fd) : ND_OK);
    return is_current(fd, key->lock, held);
}

nd_status nd_cache_lock_take(const nd_cache_key *key, const nd_token_cache_request *request,
                             nd_cache_lock *out)
{
    wait w = {.request = request,
              .path = key->lock,
              .pause_ms = POLL_MS,
              .stall = request->stall_seconds > 0 ? request->stall_seconds : STALL_SECONDS};
    for (;;) {
        int fd;
        bool held;
        ND_TRY(open_lock(key, &fd));
        nd_status status = take_one(key, &w, fd, &held);
        if (status == ND_OK && held) {
            (void)!ftruncate(fd, 0); /* what a process left that was killed */
            *out = (nd_cache_lock){.path = key->lock, .fd = fd};
            return ND_OK;
        }
        close(fd);
        ND_TRY(status);
    }
}

void nd_cache_lock_progress(const nd_cache_lock *lock, uint64_t bytes, uint64_t all)
{
    const uint64_t progress[2] = {bytes, all};
    (void)!pwrite(lock->fd, progress, sizeof progress, 0); /* others only wait for less long */
}

void nd_cache_lock_release(nd_cache_lock *lock, nd_status status)
{
    if (status == ND_ERR_DATA) {
        lock_page page = {.status = (int32_t)status};
        snprintf(page.message, sizeof page.message, "%.900s", nd_error_last()->message);
        (void)!pwrite(lock->fd, &page, sizeof page, 0);
    }
    unlink(lock->path); /* those who have it open find another one under its name */
    close(lock->fd);
    lock->fd = -1;
}
