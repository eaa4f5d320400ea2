// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_FSIO_H
#define ND_BASE_FSIO_H
/*
 * Files: read a small one whole, map a large one, write one atomically, and the pieces larger
 * writers are made of.
 *
 * `blame` is the status that a missing or wrong file means to the caller (ND_ERR_CONFIG for a
 * YAML file, ND_ERR_DATA for data); a file that cannot be opened although it may be good, or a
 * device that fails while reading, is ND_ERR_IO, a file that cannot be written or a full disk is
 * ND_ERR_CANTCREATE. All functions are blocking and may be
 * called from any thread.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

/*
 * For a thread whose work another one waits for: from now on each call of this header that has
 * read, written or synced something in the calling thread stores nd_clock_ns() in *beat, and so
 * does nd_fs_beat. A file system that does not answer shows as a time that stands still. NULL ends
 * it.
 */
void nd_fs_set_beat(atomic_llong *beat);
void nd_fs_beat(void);

/* What the errno of an open or stat means: `blame` when the path itself is wrong (nothing is there,
 * a link, a part that is no folder), else ND_ERR_IO, since the next attempt may succeed. */
nd_status nd_fs_blame(int code, nd_status blame);

/* The whole file and a terminating NUL that is not counted in *size; refuses more than max_bytes.
 * Owned by the caller. */
nd_status nd_fs_read(const char *path, size_t max_bytes, nd_status blame, char **out, size_t *size);

/* A regular file mapped read-only. An empty file has data NULL and size 0. */
typedef struct nd_fs_map {
    const uint8_t *data;
    size_t size;
    int descriptor; /* + 1: 0 is none */
} nd_fs_map;

nd_status nd_fs_map_open(const char *path, nd_status blame, nd_fs_map *out);
void nd_fs_map_close(nd_fs_map *map); /* an all-zero map is legal */
/*
 * Runs `read`, which reads the mapped file. ND_ERR_IO, whatever it returns, when the file is
 * shorter than when it was mapped or when its device fails, instead of zeros or a SIGBUS. `read` is
 * then left in the middle: it owns nothing and holds no lock. From any thread.
 */
nd_status nd_fs_map_guard(const nd_fs_map *map, const char *path, nd_status (*read)(void *context),
                          void *context);
/* Starts reading [offset, offset + bytes) from disk without waiting for it; clipped to the map. */
void nd_fs_map_prefetch(const nd_fs_map *map, size_t offset, size_t bytes);

/* Exactly `size` bytes at `offset`; `path` is for the error's sentence. */
nd_status nd_fs_pread(int fd, const char *path, void *out, size_t size, int64_t offset);
nd_status nd_fs_pwrite(int fd, const char *path, const void *data, size_t size, int64_t offset);

/* fsync and close in one; closes on failure too. */
nd_status nd_fs_sync_close(int fd, const char *path);
/* Makes what was written to an existing file durable, through whatever descriptor. */
nd_status nd_fs_sync_file(const char *path);
/* Makes a rename or a new file in the folder durable. */
nd_status nd_fs_sync_folder(const char *folder);

/*
 * Replaces `path` by these bytes or leaves it as it was: a temporary file in the same folder,
 * fsync, rename, fsync of the folder. The temporary file is removed on failure.
 */
nd_status nd_fs_write_atomic(const char *path, const void *data, size_t size);

/* Renames to a name that nothing has yet: 0 or an errno, EEXIST when `to` exists. */
int nd_fs_rename_new(const char *from, const char *to);
/* The same within one folder, and durable: a rename that is not known to be durable is taken back.
 * ND_ERR_CANTCREATE, also when `to` exists. */
nd_status nd_fs_rename(const char *from, const char *to);
/* nd_fs_rename to `path`.`suffix`, or, where that exists, to `path`.`suffix`-2, -3, ... The new
 * path is owned by the caller; out may be NULL. */
nd_status nd_fs_set_aside(const char *path, const char *suffix, char **out);
/* The same for what lies at `from`, in the folder of `path`. */
nd_status nd_fs_set_aside_from(const char *from, const char *path, const char *suffix, char **out);
/* Two names change places at once: 0 or an errno; EINVAL, ENOSYS or EOPNOTSUPP where the file
 * system cannot do that. */
int nd_fs_exchange(const char *a, const char *b);

/* ND_ERR_CANTCREATE with both numbers when the file system of `folder` has less than `bytes` free
 * for this user. */
nd_status nd_fs_check_space(const char *folder, uint64_t bytes, const char *purpose);
/* The same when the plain files of the folder `begun`, which others may be filling, hold a part of
 * the bytes already. A folder that does not exist holds none. */
nd_status nd_fs_check_space_left(const char *folder, const char *begun, uint64_t bytes,
                                 const char *purpose);

/*
 * mkdir -p. ND_ERR_CANTCREATE: "<what> <path> cannot be created: <why>; <advice>". An existing last
 * part is no error, whatever it is. What was made outlives a power failure.
 */
nd_status nd_fs_make_folders(const char *path, const char *what, const char *advice);

/* Removes a folder and the plain files in it; it has no sub-folders. What is not there is no
 * error. */
void nd_fs_remove_flat_folder(const char *folder);

/* "a/b/c" -> "a/b"; "c" -> "."; "/c" -> "/"; trailing slashes do not count. Owned by the caller. */
nd_status nd_fs_parent(const char *path, char **out);

/* snprintf into fresh memory. Owned by the caller. */
nd_status nd_fs_format(char **out, const char *format, ...) __attribute__((format(printf, 2, 3)));

bool nd_fs_exists(const char *path);

/* SHA-256 (OpenSSL) in lower-case hex. */
nd_status nd_fs_sha256(const void *data, size_t size, char hex[65]);
/* The same of a whole file, read from end to end. */
nd_status nd_fs_sha256_file(const char *path, char hex[65]);

#endif
