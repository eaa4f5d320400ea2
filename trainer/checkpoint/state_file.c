// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/state_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"

enum {
    SLICE_BYTES = 1 << 20,       /* hashed, then written while it is still in the cache */
    WRITEBACK_BYTES = 32 << 20,  /* writeback of this much is started at once */
    MAX_DIRTY_BYTES = 512 << 20, /* what may wait for the disk */
};

struct nd_state_file {
    int fd;
    char *path;
    char name[ND_HASHED_NAME_MAX];
    uint64_t bytes, written;
    uint64_t started; /* writeback was started up to here */
    uint64_t waited;  /* and is known to be complete up to here */
    nd_chunk_hasher *hasher;
};

static void free_file(nd_state_file *file)
{
    nd_chunk_hasher_destroy(file->hasher);
    free(file->path);
    free(file);
}

void nd_state_file_abandon(nd_state_file *file)
{
    if (file) {
        if (file->fd >= 0) {
            close(file->fd);
        }
        free_file(file);
    }
}

static nd_status fail_write(const char *path, int code)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(code));
}

static nd_status reserve(const nd_state_file *file)
{
    int code = fallocate(file->fd, 0, 0, (off_t)file->bytes) == 0 ? 0 : errno;
    if (code == EOPNOTSUPP || code == ENOSYS) { /* the file system cannot reserve */
        code = ftruncate(file->fd, (off_t)file->bytes) == 0 ? 0 : errno;
    }
    return code == 0 ? ND_OK : fail_write(file->path, code);
}

nd_status nd_state_file_create(const char *folder, const char *name, uint64_t bytes,
                               nd_checksum kind, nd_state_file **out)
{
    nd_state_file *file = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(bytes > 0 && strlen(name) < ND_HASHED_NAME_MAX);
    ND_TRY(ND_ALLOC(1, &file));
    file->fd = -1;
    file->bytes = bytes;
    snprintf(file->name, sizeof file->name, "%s", name);
    ND_TRY_OUT(nd_fs_format(&file->path, "%s/%s", folder, name));
    ND_TRY_OUT(nd_chunk_hasher_create(kind, bytes, &file->hasher));
    file->fd = nd_fs_create(file->path, 0666);
    if (file->fd < 0) {
        status = fail_write(file->path, errno);
        goto out;
    }
    ND_TRY_OUT(reserve(file));
    *out = file;
    file = NULL;
out:
    nd_state_file_abandon(file);
    return status;
}

/* File systems without sync_file_range have only the fsync at the end. */
static nd_status bound_dirty_pages(nd_state_file *file)
{
    if (file->written - file->started >= WRITEBACK_BYTES) {
        (void)sync_file_range(file->fd, (off_t)file->started,
                              (off_t)(file->written - file->started), SYNC_FILE_RANGE_WRITE);
        file->started = file->written;
    }
    if (file->started - file->waited < MAX_DIRTY_BYTES) {
        return ND_OK;
    }
    const unsigned wait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    int code = sync_file_range(file->fd, (off_t)file->waited, WRITEBACK_BYTES, wait) ? errno : 0;
    file->waited += WRITEBACK_BYTES;
    return code == 0 || code == ENOSYS || code == EINVAL || code == ESPIPE
               ? ND_OK
               : fail_write(file->path, code);
}

nd_status nd_state_file_append(nd_state_file *file, const void *data, size_t bytes)
{
    const char *at = data;
    ND_ASSERT(bytes <= file->bytes - file->written);
    while (bytes > 0) {
        size_t n = bytes < SLICE_BYTES ? bytes : SLICE_BYTES;
        ND_TRY(nd_chunk_hasher_add(file->hasher, at, n));
        ND_TRY(nd_fs_pwrite(file->fd, file->path, at, n, (int64_t)file->written));
        file->written += n;
        at += n;
        bytes -= n;
        ND_TRY(bound_dirty_pages(file));
    }
    return ND_OK;
}

nd_status nd_state_file_finish(nd_state_file *file, nd_hashed_file *out)
{
    ND_ASSERT(file->written == file->bytes);
    int fd = file->fd;
    file->fd = -1;
    nd_hashed_file hashed = {0};
    nd_status status = nd_fs_sync_close(fd, file->path);
    if (status == ND_OK) {
        status = nd_chunk_hasher_finish(file->hasher, &hashed);
    }
    if (status == ND_OK) {
        snprintf(hashed.name, sizeof hashed.name, "%s", file->name);
        *out = hashed;
    }
    free_file(file);
    return status;
}

nd_status nd_state_file_put(const char *folder, const char *name, const void *data, size_t bytes)
{
    char *path = NULL;
    ND_TRY(nd_fs_format(&path, "%s/%s", folder, name));
    nd_status status = ND_OK;
    int fd = nd_fs_create(path, 0666);
    if (fd < 0) {
        status = fail_write(path, errno);
        goto out;
    }
    status = nd_fs_pwrite(fd, path, data, bytes, 0);
    if (status == ND_OK) {
        status = nd_fs_sync_close(fd, path);
    } else {
        close(fd);
    }
out:
    free(path);
    return status;
}
