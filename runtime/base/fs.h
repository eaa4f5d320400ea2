// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_FS_H
#define ND_BASE_FS_H
/*
 * The file system. Every file of the program is looked for, listed, opened and made here; .ci/files
 * finds calls of open, stat, opendir and the like anywhere else.
 *
 * - Only "no such file or directory" and "not a directory" mean that something is absent, and a
 *   name that is too long to exist. Every other failure of a question is ND_ERR_IO with the path
 *   and the reason, so that an I/O error is never read as an empty folder.
 * - A file is opened without waiting for a FIFO, and must be a regular one.
 * - A user's own data may be reached through links (nd_fs_open). What the program wrote is not:
 *   another user may have put a link in its place (nd_fs_open_own, nd_fs_create, nd_fs_update).
 *
 * `blame` is the status that a missing or wrong file means to the caller (ND_ERR_CONFIG for a
 * YAML file, ND_ERR_DATA for data); a file that cannot be opened although it may be good, or a
 * device that fails while reading, is ND_ERR_IO, a file that cannot be written or a full disk is
 * ND_ERR_CANTCREATE. All functions are blocking and may be called from any thread.
 */
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>

#include "runtime/base/status.h"

/*
 * For a thread whose work another one waits for: from now on each call of this header that has
 * read, written or synced something in the calling thread stores nd_clock_ns() in *beat, and so
 * does nd_fs_beat. A file system that does not answer shows as a time that stands still. NULL ends
 * it.
 */
void nd_fs_set_beat(atomic_llong *beat);
void nd_fs_beat(void);

/* Looking. */

typedef enum nd_fs_kind {
    ND_FS_ABSENT = 0,
    ND_FS_FILE,
    ND_FS_FOLDER,
    ND_FS_LINK, /* only from nd_fs_look_at_link */
    ND_FS_OTHER /* a device, pipe or socket */
} nd_fs_kind;

/* Finds out what has this name. A link is followed; one that leads nowhere is absent. *st is filled
 * unless it is NULL or nothing is there. ND_ERR_IO: it cannot be known. */
nd_status nd_fs_look(const char *path, nd_fs_kind *kind, struct stat *st);
/* Like nd_fs_look, but a link is not followed: its kind is ND_FS_LINK. */
nd_status nd_fs_look_at_link(const char *path, nd_fs_kind *kind, struct stat *st);
/* Sets *out to whether something has this name, be it a link to nowhere. */
nd_status nd_fs_exists(const char *path, bool *out);
/* Like nd_fs_exists, for FOLDER/NAME. */
nd_status nd_fs_has(const char *folder, const char *name, bool *out);
/* Sets *out to whether the path is a folder, or a link to one. */
nd_status nd_fs_is_folder(const char *path, bool *out);

/* The names in a folder without "." and "..", in the order of strverscmp. */
typedef struct nd_fs_names {
    char **list;
    int count;
    bool there; /* the folder is */
} nd_fs_names;

/* All names or an error, never a part of them. No folder is no error: `there` is false. */
nd_status nd_fs_list(const char *folder, nd_fs_names *out);
/* The paths that a pattern of the shell names, in no order; none is no error. One part of it may be
 * "**", which stands for any number of folders, also none: ND_ERR_CONFIG for a second one. */
nd_status nd_fs_glob(const char *pattern, nd_fs_names *out);
void nd_fs_names_fini(nd_fs_names *names); /* all-zero ones are legal */

/* Returns the status for the errno of an open: `blame` when the path itself is wrong (nothing is
 * there, a link, a part that is no folder), else ND_ERR_IO, since the next attempt may succeed. */
nd_status nd_fs_blame(int code, nd_status blame);
/* Returns the status for the errno of a file or folder that cannot be made or written: ND_ERR_IO
 * where a device fails or descriptors are used up, and so nothing is known of the place; else
 * ND_ERR_CANTCREATE. */
nd_status nd_fs_blame_write(int code);

/* Opening. The descriptors are the caller's. */

/* A regular file, to be read. A link is followed, and a pointer of Git LFS is refused. *st may be
 * NULL. */
nd_status nd_fs_open(const char *path, nd_status blame, int *fd, struct stat *st);
/* Like nd_fs_open, but for a file that this program wrote: refuses links, accepts LFS pointers. */
nd_status nd_fs_open_own(const char *path, nd_status blame, int *fd, struct stat *st);
/* nd_fs_open_own as a stream. */
nd_status nd_fs_stream_own(const char *path, nd_status blame, FILE **out);
/* A new file, to be read and written; -1 and errno, EEXIST where the name is taken, by whatever. */
int nd_fs_create(const char *path, mode_t mode);
/* Like nd_fs_create, but opens a stream to be written; NULL and errno. */
FILE *nd_fs_stream_new(const char *path, mode_t mode);
/* A file that this program may have made before, to be read and written, created where it is
 * missing. `flags` is 0, or any of O_APPEND and O_EXCL (EEXIST where the name is taken). -1 and
 * errno: ELOOP for a link, ENXIO for what is no file, EMLINK for a file that has other names. */
int nd_fs_update(const char *path, int flags);
/* strerror, with the reasons of nd_fs_update in words. */
const char *nd_fs_reason(int code);
/* A folder, or a link to one; -1 and errno. */
int nd_fs_open_folder(const char *path);
/* A file of the kernel, in /proc, /sys or /dev, to be read. -1 and errno, or NULL. */
int nd_fs_open_kernel(const char *path);
FILE *nd_fs_stream_kernel(const char *path);
/* The first size - 1 bytes of such a file as a text, "" where it cannot be read. A FILE would
 * allocate, and how often this process allocates must not depend on others. */
void nd_fs_read_kernel(const char *path, char *text, size_t size);

/* Locking. */

typedef enum nd_fs_locked {
    ND_FS_LOCKED = 0, /* until the descriptor is closed */
    ND_FS_LOCKED_BY_ANOTHER,
    ND_FS_NO_LOCKS /* the file system has none */
} nd_fs_locked;

/* Locks an open file for this descriptor alone, without waiting; it must be open for writing, or a
 * network file system refuses. ND_ERR_IO: whether another process has it locked is not known. */
nd_status nd_fs_lock(int fd, const char *path, nd_fs_locked *out);

/* Reading. */

/* The whole file, without the byte order mark of UTF-8 that some editors put before a text, and a
 * terminating NUL that is not counted in *size; refuses more than max_bytes. Owned by the
 * caller. */
nd_status nd_fs_read(const char *path, size_t max_bytes, nd_status blame, char **out, size_t *size);
/* Like nd_fs_read, but also gets the file's mode, from the same open. */
nd_status nd_fs_read_mode(const char *path, size_t max_bytes, nd_status blame, char **out,
                          size_t *size, mode_t *mode);

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

/* Writing and renaming. */

/* fsync and close in one; closes on failure too. */
nd_status nd_fs_sync_close(int fd, const char *path);
/* Makes what was written to an existing file durable, through whatever descriptor. */
nd_status nd_fs_sync_file(const char *path);
/* Makes a rename or a new file in the folder durable. */
nd_status nd_fs_sync_folder(const char *folder);
/* Like nd_fs_sync_folder, for the folder that holds `path`. */
nd_status nd_fs_sync_parent(const char *path);

/* A file that is written under a temporary name in the folder of `path`. */
typedef struct nd_fs_draft {
    char *path, *temporary; /* owned */
    FILE *stream;           /* its descriptor may be written to as well */
    bool is_new;            /* a file at `path` is an error, and is not replaced */
} nd_fs_draft;

/* Begins the file of a draft that is all zero but for is_new, with these permissions less those of
 * the umask. The draft is to be closed after a failure, too. */
nd_status nd_fs_draft_open(nd_fs_draft *draft, const char *path, mode_t mode);
/* ND_ERR_CANTCREATE: not all that went to the stream could be written. */
nd_status nd_fs_draft_check(const nd_fs_draft *draft);
/* With ND_OK, makes the file durable and renames it to `path`. With the failure of a caller, or
 * after its own, removes it. Returns the failure. An all-zero draft is legal. */
nd_status nd_fs_draft_close(nd_fs_draft *draft, nd_status status);
/* Replaces `path` by these bytes, as a draft does, or leaves it as it was. After a failure to make
 * its folder durable the new bytes are there. */
nd_status nd_fs_write_atomic(const char *path, const void *data, size_t size);
/* Like nd_fs_write_atomic, but the new file gets these permissions, less those of the umask. */
nd_status nd_fs_write_atomic_as(const char *path, mode_t mode, const void *data, size_t size);

/* A name beside `path` that no other process has, PATH.tmp-PID-CLOCK; owned by the caller. */
nd_status nd_fs_temporary(const char *path, char **out);
/* The length of the path that a temporary name was made for; 0: it is no such name. */
size_t nd_fs_temporary_of(const char *name);
/* Removes what killed processes left in a folder: whatever has a name for which `is_left` is true.
 * The caller knows that no live process works under that name. Each is named in the log, also one
 * that cannot be removed. */
nd_status nd_fs_remove_left(const char *folder, bool (*is_left)(const char *name));

/* Renames to a name that nothing has yet: 0 or an errno, EEXIST when `to` exists. */
int nd_fs_rename_new(const char *from, const char *to);
/* Like nd_fs_rename_new, but within one folder, and durable: a rename that is not known to be
 * durable is taken back. ND_ERR_CANTCREATE, also when `to` exists. */
nd_status nd_fs_rename(const char *from, const char *to);
/* nd_fs_rename from `from`, which may be `path` itself, to `path`.`suffix`, or, where that exists,
 * to `path`.`suffix`-2, -3, ... The new path is owned by the caller; out may be NULL. */
nd_status nd_fs_set_aside(const char *from, const char *path, const char *suffix, char **out);
/* Two names change places at once: 0 or an errno; EINVAL, ENOSYS or EOPNOTSUPP where the file
 * system cannot do that. */
int nd_fs_exchange(const char *a, const char *b);

/* "999 B", "1.25 kB", "12.3 GB"; returns text. */
char *nd_file_bytes_format(char *text, size_t size, double bytes);
/* ND_ERR_CANTCREATE with both numbers when the file system of `folder` has less than `bytes` free
 * for this user. */
nd_status nd_fs_check_space(const char *folder, uint64_t bytes, const char *purpose);
/* Like nd_fs_check_space, but the folder `begun`, which others may be filling, holds a part of the
 * bytes already. A folder that does not exist holds none. */
nd_status nd_fs_check_space_left(const char *folder, const char *begun, uint64_t bytes,
                                 const char *purpose);

/* Folders. */

/*
 * mkdir -p. ND_ERR_CANTCREATE: "<what> <path> cannot be created: <why>; <advice>", where something
 * else than a folder is in the way, a name is too long, a .. follows what does not exist, or this
 * user may not. What was made outlives a power failure.
 */
nd_status nd_fs_make_folders(const char *path, const char *what, const char *advice);
/* Gives the answer of nd_fs_make_folders, which begins with it, without making anything, as far as
 * the answer can be known. *out, which may be NULL: the longest beginning of the path that is
 * there, or "."; owned by the caller. */
nd_status nd_fs_check_folders(const char *path, const char *what, const char *advice, char **out);
/* A folder that this program makes inside a folder of its own. One that exists is no error, but a
 * link is, to whatever it leads. ND_ERR_CANTCREATE. */
nd_status nd_fs_make_own_folder(const char *path);
/* Bytes of the regular files in a folder and below it, or the bytes that they occupy on the disk.
 * Links are not followed; what disappears meanwhile does not count. */
nd_status nd_fs_tree_bytes(const char *folder, bool occupied, uint64_t *bytes);
/* Removes a file, or a folder and all below it, a few folders deep. Links are removed, and not
 * followed. What cannot be removed stays; what is not there is no error. */
void nd_fs_remove_tree(const char *path);

/* Paths. */

/* "a/b/c" -> "a/b"; "c" -> "."; "/c" -> "/"; trailing slashes do not count. Owned by the caller. */
nd_status nd_fs_parent(const char *path, char **out);

/* snprintf into fresh memory. Owned by the caller. */
nd_status nd_fs_format(char **out, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Like nd_fs_format, but without an allocation. ND_ERR_DATA: no file can have so long a path; also
 * where a file is to be written. */
nd_status nd_fs_path(char out[PATH_MAX], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
