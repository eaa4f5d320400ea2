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

const nd_checksum_hashes nd_checksums[ND_CHECKSUM_COUNT] = {
    [ND_CHECKSUM_XXH3] = {"xxh3", ND_HASH_XXH3_64, ND_HASH_XXH3_128},
    [ND_CHECKSUM_SHA256] = {"sha256", ND_HASH_SHA256, ND_HASH_SHA256},
};

nd_status nd_digest_text(nd_checksum kind, const void *data, size_t bytes,
                         char out[ND_DIGEST_TEXT_MAX])
{
    char hex[ND_HASH_HEX_MAX];
    ND_TRY(nd_hash_text(nd_checksums[kind].whole, data, bytes, hex));
    snprintf(out, ND_DIGEST_TEXT_MAX, "%s:%s", nd_checksums[kind].name, hex);
    return ND_OK;
}

bool nd_digest_text_is_valid(nd_checksum kind, const char *text)
{
    const nd_checksum_hashes *hashes = &nd_checksums[kind];
    const size_t prefix = strlen(hashes->name);
    const char *hex = text + prefix + 1;
    return strncmp(text, hashes->name, prefix) == 0 && text[prefix] == ':' &&
           strlen(hex) == 2 * (size_t)nd_hash_bytes(hashes->whole) &&
           strspn(hex, "0123456789abcdef") == strlen(hex);
}

struct nd_state_file {
    int fd;
    char *path;
    uint64_t bytes, written;
    uint64_t started; /* writeback was started up to here */
    uint64_t waited;  /* and is known to be complete up to here */
    nd_hash *hash;    /* of the current chunk */
    size_t width;     /* bytes of a digest */
    uint8_t *digests; /* where that of the current chunk goes */
};

void nd_state_file_abandon(nd_state_file *file)
{
    if (file) {
        if (file->fd >= 0) {
            close(file->fd);
        }
        nd_hash_destroy(file->hash);
        free(file->path);
        free(file);
    }
}

static nd_status fail_write(const char *path, int code)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(code));
}

nd_status nd_state_file_create(const char *folder, const char *name, uint64_t bytes,
                               nd_checksum kind, uint8_t *digests, nd_state_file **out)
{
    nd_state_file *file = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &file));
    file->fd = -1;
    file->bytes = bytes;
    file->digests = digests;
    file->width = (size_t)nd_hash_bytes(nd_checksums[kind].chunk);
    ND_TRY_OUT(nd_fs_format(&file->path, "%s/%s", folder, name));
    ND_TRY_OUT(nd_hash_create(nd_checksums[kind].chunk, &file->hash));
    file->fd = nd_fs_create(file->path, 0666);
    if (file->fd < 0) {
        status = fail_write(file->path, errno);
        goto out;
    }
    int code = fallocate(file->fd, 0, 0, (off_t)bytes) == 0 ? 0 : errno;
    if (code == EOPNOTSUPP || code == ENOSYS) { /* the file system cannot reserve */
        code = ftruncate(file->fd, (off_t)bytes) == 0 ? 0 : errno;
    }
    if (code != 0) {
        status = fail_write(file->path, code);
        goto out;
    }
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
    uint8_t digest[ND_HASH_MAX];
    ND_ASSERT(bytes <= file->bytes - file->written);
    while (bytes > 0) {
        const size_t room = ND_CHUNK_BYTES - file->written % ND_CHUNK_BYTES;
        size_t n = bytes < SLICE_BYTES ? bytes : SLICE_BYTES;
        n = n < room ? n : room;
        ND_TRY(room == ND_CHUNK_BYTES ? nd_hash_begin(file->hash) : ND_OK);
        ND_TRY(nd_hash_add(file->hash, at, n));
        ND_TRY(nd_fs_pwrite(file->fd, file->path, at, n, (int64_t)file->written));
        file->written += n;
        at += n;
        bytes -= n;
        if (n == room || file->written == file->bytes) {
            ND_TRY(nd_hash_end(file->hash, digest));
            memcpy(file->digests, digest, file->width);
            file->digests += file->width;
        }
        ND_TRY(bound_dirty_pages(file));
    }
    return ND_OK;
}

nd_status nd_state_file_finish(nd_state_file *file)
{
    ND_ASSERT(file->written == file->bytes);
    nd_status status = nd_fs_sync_close(file->fd, file->path);
    file->fd = -1;
    nd_state_file_abandon(file);
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
