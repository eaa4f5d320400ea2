// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/shard.h"

/* A file that is written from front to back. */

enum {
    SLICE_BYTES = 1 << 20,       /* hashed, then written while it is still in the cache */
    WRITEBACK_BYTES = 32 << 20,  /* writeback of this much is started at once */
    MAX_DIRTY_BYTES = 512 << 20, /* what may wait for the disk */
};

typedef struct open_file {
    int fd;
    char *path; /* NULL: there is no such file, or it is closed */
    uint64_t bytes, written;
    uint64_t started; /* writeback was started up to here */
    uint64_t waited;  /* and is known to be complete up to here */
    nd_hash *hash;    /* of the current chunk */
    size_t width;     /* bytes of a digest */
    uint8_t *digests; /* where that of the current chunk goes */
} open_file;

static nd_status fail_write(const char *path, int code)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(code));
}

/* Its space is reserved first, so that a full disk shows before the data are sent. */
static nd_status create(const nd_shard_plan *plan, const nd_shard_file *of, const char *folder,
                        open_file *file)
{
    const nd_hash_kind kind = nd_checksums[plan->checksum].chunk;
    *file = (open_file){
        .fd = -1, .bytes = of->bytes, .width = (size_t)nd_hash_bytes(kind), .digests = of->digests};
    ND_TRY(nd_fs_format(&file->path, "%s/%s", folder, of->name));
    ND_TRY(nd_hash_create(kind, &file->hash));
    file->fd = nd_fs_create(file->path, 0666);
    if (file->fd < 0) {
        return fail_write(file->path, errno);
    }
    int code = fallocate(file->fd, 0, 0, (off_t)of->bytes) == 0 ? 0 : errno;
    if (code == EOPNOTSUPP || code == ENOSYS) { /* the file system cannot reserve */
        code = ftruncate(file->fd, (off_t)of->bytes) == 0 ? 0 : errno;
    }
    return code == 0 ? ND_OK : fail_write(file->path, code);
}

/* File systems without sync_file_range have only the fsync at the end. */
static nd_status bound_dirty_pages(open_file *file)
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

static nd_status append(open_file *file, const void *data, size_t bytes)
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

nd_status nd_shard_put(const char *folder, const char *name, const void *data, size_t bytes)
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

/* The files of a writer. */

static nd_status begin_files(const nd_shard_plan *plan, const char *folder,
                             open_file files[ND_PIECE_KINDS])
{
    for (int k = 0; k < ND_PIECE_KINDS; k++) { /* all space is reserved before any is filled */
        const nd_shard_file *of = &plan->files[k];
        ND_TRY(of->head ? create(plan, of, folder, &files[k]) : ND_OK);
    }
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        const nd_shard_file *of = &plan->files[k];
        ND_TRY(of->head ? append(&files[k], of->head, of->head_bytes) : ND_OK);
    }
    return ND_OK;
}

static nd_status write_data(const nd_shard_plan *plan, int64_t updates, const nd_shard_data *data,
                            open_file files[ND_PIECE_KINDS])
{
    const float step = (float)updates;
    open_file *body = &files[ND_PIECE_BODY];
    for (int u = 0; u < plan->layout->unit_count; u++) {
        ND_TRY(data->unit(data->context, u));
        for (int i = plan->first_piece[u]; i < plan->first_piece[u + 1]; i++) {
            const nd_piece *piece = &plan->pieces[i];
            for (int a = 0; a < plan->arrays; a++) {
                ND_TRY(append(&files[piece->kind], data->piece(data->context, i, (nd_state_kind)a),
                              (size_t)nd_span_elements(&piece->span) * sizeof(float)));
            }
        }
    }
    ND_TRY(data->unit(data->context, plan->layout->unit_count));
    for (int i = 0; i < plan->extra_count; i++) {
        ND_TRY(append(body, data->extras[i], (size_t)plan->extras[i].count * sizeof(float)));
    }
    for (int i = 0; i < plan->step_count; i++) {
        ND_TRY(append(body, &step, sizeof step));
    }
    return ND_OK;
}

nd_status nd_shard_write(nd_shard_plan *plan, const char *folder, int64_t updates,
                         const nd_shard_data *data, nd_shard_record *out)
{
    open_file files[ND_PIECE_KINDS] = {0};
    char name[ND_HASH_FILE_NAME_MAX];
    nd_shard_record record = {.bytes = plan->bytes};
    nd_status status = ND_OK;
    ND_TRY_OUT(begin_files(plan, folder, files));
    ND_TRY_OUT(write_data(plan, updates, data, files));
    for (int k = 0; k < ND_PIECE_KINDS; k++) { /* a failed fsync is a failed file, never repeated */
        const int fd = files[k].fd;
        ND_ASSERT(files[k].written == files[k].bytes);
        files[k].fd = -1;
        ND_TRY_OUT(files[k].path ? nd_fs_sync_close(fd, files[k].path) : ND_OK);
    }
    ND_TRY_OUT(nd_digest_text(plan->checksum, plan->hashes, plan->hashes_bytes, record.digest));
    nd_hash_file_name(name, plan->rank);
    ND_TRY_OUT(nd_shard_put(folder, name, plan->hashes, plan->hashes_bytes));
    ND_TRY_OUT(nd_fs_sync_folder(folder));
    *out = record;
out:
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        if (files[k].path && files[k].fd >= 0) {
            close(files[k].fd);
        }
        nd_hash_destroy(files[k].hash);
        free(files[k].path);
    }
    return status;
}
