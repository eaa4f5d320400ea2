// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/token_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/log.h"

enum {
    SMALL_VOCAB = 65500,
    IDX_HEADER_BYTES = 34,
    CODE_I32 = 4,
    CODE_U16 = 8,
    INDEX_PIECE = 4096,
    STALL_SECONDS = 300,
    POLL_MS = 20,
    POLL_MS_MAX = 1000,
    WORD_SECONDS = 10,
};

/* The .part, as it lies there, or new: *is_new. One that this process makes for others too gets the
 * folder's permissions. Somebody who can write to the folder may have put anything under this
 * name. */
static nd_status open_part(nd_token_output *out, bool shared, bool *is_new)
{
    struct stat folder;
    nd_fs_kind kind = ND_FS_ABSENT;
    char *parent;
    ND_TRY(nd_fs_parent(out->path, &parent));
    nd_status status = shared ? nd_fs_look(parent, &kind, &folder) : ND_OK;
    free(parent);
    ND_TRY(status);
    out->fd = nd_fs_create(out->part, 0666);
    *is_new = out->fd >= 0;
    if (*is_new && kind == ND_FS_FOLDER) {
        (void)!fchmod(out->fd, folder.st_mode & 0666);
    }
    out->fd = *is_new ? out->fd : nd_fs_update(out->part, 0);
    return out->fd >= 0 ? ND_OK
                        : nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be created: %s", out->part,
                                  nd_fs_reason(errno));
}

typedef struct waiting {
    off_t bytes;          /* of the .part, which grows as long as its writer gets on */
    long pause_ms;        /* the next one: each is longer, or many ranks would load the folder */
    double changed, said; /* when the bytes changed, when this process said so; 0: not yet */
} waiting;

static nd_status wait_for_writer(const nd_token_output *out, const nd_token_sharing *sharing,
                                 waiting *w)
{
    const struct timespec pause = {.tv_sec = w->pause_ms / 1000,
                                   .tv_nsec = w->pause_ms % 1000 * 1000000L};
    const double stall = sharing->stall_seconds > 0 ? sharing->stall_seconds : STALL_SECONDS;
    const double now = nd_clock_seconds();
    struct stat st = {.st_size = w->bytes};
    (void)fstat(out->fd, &st);
    if (sharing->stop && atomic_load(sharing->stop)) {
        return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
    }
    if (w->changed == 0 || st.st_size != w->bytes) {
        w->bytes = st.st_size;
        w->changed = now;
    }
    if (now - w->changed > stall) {
        return nd_fail(ND_ERR_HANG,
                       "another process, which encodes the text into \"%s\", made no progress for "
                       "%.0f s; end it, or set data.cache_dir to another folder",
                       out->path, stall);
    }
    if (w->said == 0 || now - w->said >= WORD_SECONDS) {
        w->said = now;
        nd_log_info("waiting for another process, which encodes the text into %s: %.1f MB so far",
                    out->path, (double)w->bytes * 1e-6);
    }
    nanosleep(&pause, NULL);
    w->pause_ms = w->pause_ms * 3 / 2 < POLL_MS_MAX ? w->pause_ms * 3 / 2 : POLL_MS_MAX;
    return ND_OK;
}

/* *taken: this process has the file of this name locked, or has made it (`is_new`) where there are
 * no locks; it is empty then. */
static nd_status take_part(const nd_token_output *out, const nd_token_sharing *sharing, bool is_new,
                           waiting *wait, bool *taken)
{
    struct stat held, named;
    nd_fs_kind kind;
    nd_fs_locked locked;
    ND_TRY(nd_fs_lock(out->fd, out->part, &locked));
    while (locked == ND_FS_LOCKED_BY_ANOTHER && sharing) {
        ND_TRY(wait_for_writer(out, sharing, wait));
        ND_TRY(nd_fs_lock(out->fd, out->part, &locked));
    }
    if (locked == ND_FS_LOCKED_BY_ANOTHER) {
        return nd_fail(ND_ERR_CANTCREATE, "another process writes \"%s\"; wait for its end",
                       out->part);
    }
    if (locked == ND_FS_NO_LOCKS && sharing) {
        if (is_new) {
            unlink(out->part);
        }
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be locked: its file system has no locks",
                       out->part);
    }
    if (locked == ND_FS_NO_LOCKS && !is_new) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "\"%s\" is there, and its file system has no locks, which would say whether "
                       "another process writes it; remove it when none does",
                       out->part);
    }
    /* The process that had it locked may have given it another name, or removed it. */
    ND_TRY(nd_fs_look_at_link(out->part, &kind, &named));
    if (fstat(out->fd, &held) != 0) {
        return nd_fail(ND_ERR_IO, "cannot examine \"%s\": %s", out->part, strerror(errno));
    }
    *taken = kind == ND_FS_FILE && held.st_dev == named.st_dev && held.st_ino == named.st_ino;
    return !*taken || ftruncate(out->fd, 0) == 0 /* what a process left that was killed */
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be emptied: %s", out->part,
                         strerror(errno));
}

nd_status nd_token_output_open(const char *path, int32_t vocab, uint64_t offset,
                               const nd_token_sharing *sharing, nd_token_output *out)
{
    nd_token_output made = {.fd = -1, .width = vocab < SMALL_VOCAB ? 2 : 4, .bytes = offset};
    waiting wait = {.pause_ms = POLL_MS};
    bool is_new;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&made.path, "%s", path));
    ND_TRY_OUT(nd_fs_format(&made.part, "%s.part", path));
    for (bool taken = false; !taken;) {
        ND_TRY_OUT(open_part(&made, sharing, &is_new));
        status = take_part(&made, sharing, is_new, &wait, &taken);
        if (!taken || status != ND_OK) {
            close(made.fd);
        }
        ND_TRY_OUT(status);
    }
    *out = made;
    made = (nd_token_output){0};
out:
    free(made.part);
    free(made.path);
    return status;
}

nd_status nd_token_output_append(nd_token_output *out, const void *data, size_t size)
{
    ND_TRY(nd_fs_pwrite(out->fd, out->part, data, size, (int64_t)out->bytes));
    out->bytes += size;
    return ND_OK;
}

nd_status nd_token_output_add(nd_token_output *out, const nd_ids *ids)
{
    ND_TRY(nd_bytes_reserve(&out->buffer, ids->count * out->width));
    out->buffer.count = ids->count * out->width;
    if (out->width == 4 && ids->count > 0) {
        memcpy(out->buffer.data, ids->data, out->buffer.count);
    }
    for (size_t i = 0; out->width == 2 && i < ids->count; i++) {
        uint16_t id = (uint16_t)ids->data[i];
        memcpy(out->buffer.data + 2 * i, &id, sizeof id);
    }
    out->tokens += ids->count;
    return nd_token_output_append(out, out->buffer.data, out->buffer.count);
}

/* The file stays locked until it is renamed. */
nd_status nd_token_output_sync(const nd_token_output *out)
{
    return nd_fs_sync_close(dup(out->fd), out->part);
}

nd_status nd_token_output_rename(nd_token_output *out)
{
    char *folder = NULL;
    if (rename(out->part, out->path) != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be renamed to \"%s\": %s", out->part,
                       out->path, strerror(errno));
    }
    free(out->part);
    out->part = NULL;
    nd_status status = nd_fs_parent(out->path, &folder);
    status = status == ND_OK ? nd_fs_sync_folder(folder) : status;
    if (status != ND_OK) {
        unlink(out->path); /* it might be there or not after a power failure */
    }
    free(folder);
    return status;
}

void nd_token_output_fini(nd_token_output *out)
{
    if (out->part) {
        unlink(out->part);
    }
    if (out->path) {
        close(out->fd);
    }
    free(out->part);
    free(out->path);
    free(out->buffer.data);
    *out = (nd_token_output){0};
}

/* Megatron. */

nd_status nd_megatron_output_open(const char *prefix, int32_t vocab, nd_megatron_output *out)
{
    static const char *const suffixes[] = {".bin", ".idx", ".mask"};
    nd_token_output *const files[] = {&out->bin, &out->idx, &out->mask};
    *out = (nd_megatron_output){0};
    for (int i = 0; i < 3; i++) {
        char *path;
        ND_TRY(nd_fs_format(&path, "%s%s", prefix, suffixes[i]));
        nd_status status = nd_token_output_open(path, vocab, 0, NULL, files[i]);
        free(path);
        ND_TRY(status);
    }
    return ND_OK;
}

nd_status nd_megatron_output_write(nd_megatron_output *out, const nd_corpus_piece *piece)
{
    const uint64_t before = out->bin.tokens;
    int32_t begin = 0;
    ND_TRY(nd_token_output_add(&out->bin, &piece->ids));
    for (size_t i = 0; i < piece->spans.count; i += 2) {
        const int32_t *span = &piece->spans.data[i];
        ND_TRY(nd_loss_mask_add(&out->loss_mask, before + (uint64_t)span[0],
                                before + (uint64_t)span[1]));
    }
    for (size_t i = 0; i < piece->ends.count; i++) {
        uint64_t length = out->open + (uint64_t)(piece->ends.data[i] - begin);
        if (length > INT32_MAX) {
            return nd_fail(ND_ERR_DATA,
                           "a document has %llu tokens, but Megatron's index counts at most "
                           "2,147,483,647; split it",
                           (unsigned long long)length);
        }
        int32_t entry = (int32_t)length;
        ND_TRY(nd_ids_add(&out->lengths, &entry, 1));
        begin = piece->ends.data[i];
        out->open = 0;
    }
    out->open += piece->ids.count - (size_t)begin;
    return ND_OK;
}

/* Appends `count` numbers: where each document begins in the .bin, or the number of each. They are
 * made in pieces: the index of many documents is larger than the memory that encodes them. */
static nd_status append_numbers(nd_megatron_output *out, bool places, size_t count)
{
    uint64_t numbers[INDEX_PIECE], at = 0;
    for (size_t i = 0; i < count;) {
        size_t n = 0;
        for (; n < INDEX_PIECE && i < count; n++, i++) {
            numbers[n] = places ? at : i;
            at += places ? (uint64_t)out->lengths.data[i] * out->bin.width : 0;
        }
        ND_TRY(nd_token_output_append(&out->idx, numbers, n * sizeof *numbers));
    }
    return ND_OK;
}

/* The arrays behind the header are not aligned. */
static nd_status write_index(nd_megatron_output *out)
{
    const size_t count = out->lengths.count;
    uint8_t header[IDX_HEADER_BYTES] = "MMIDIDX\0\0\1"; /* version 1 */
    header[17] = out->bin.width == 2 ? CODE_U16 : CODE_I32;
    memcpy(header + 18, &(uint64_t){count}, sizeof(uint64_t));
    memcpy(header + 26, &(uint64_t){count + 1}, sizeof(uint64_t));
    ND_TRY(nd_token_output_append(&out->idx, header, sizeof header));
    ND_TRY(nd_token_output_append(&out->idx, out->lengths.data, 4 * count));
    ND_TRY(append_numbers(out, true, count));
    ND_TRY(append_numbers(out, false, count + 1));
    return nd_token_output_sync(&out->idx);
}

/* An index or a mask that is there belongs to another .bin: it goes first, and for good. */
static nd_status remove_old(const char *path)
{
    char *folder = NULL;
    if (unlink(path) != 0) {
        return errno == ENOENT ? ND_OK
                               : nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be replaced: %s", path,
                                         strerror(errno));
    }
    ND_TRY(nd_fs_parent(path, &folder));
    nd_status status = nd_fs_sync_folder(folder);
    free(folder);
    return status;
}

static nd_status write_mask(nd_megatron_output *out)
{
    char index_sha256[65], bin_sha256[65];
    const nd_loss_mask_pair pair = {.bin = out->bin.path,
                                    .idx = out->idx.path,
                                    .tokens = out->bin.tokens,
                                    .index_sha256 = index_sha256,
                                    .bin_sha256 = bin_sha256};
    nd_bytes file = {0};
    nd_status status = ND_OK;
    ND_TRY(nd_sha256_file(out->idx.part, index_sha256));
    ND_TRY(nd_loss_mask_bin_sha256(out->bin.part, bin_sha256));
    ND_TRY_OUT(nd_loss_mask_make(&out->loss_mask, &pair, &file));
    ND_TRY_OUT(nd_token_output_append(&out->mask, file.data, file.count));
    ND_TRY_OUT(nd_token_output_sync(&out->mask));
out:
    free(file.data);
    return status;
}

/* All get their names, or none. */
static nd_status rename_all(nd_megatron_output *out)
{
    ND_TRY(remove_old(out->idx.path));
    ND_TRY(remove_old(out->mask.path));
    nd_status status = nd_token_output_rename(&out->bin);
    status = status == ND_OK && out->mask.bytes > 0 ? nd_token_output_rename(&out->mask) : status;
    status = status == ND_OK ? nd_token_output_rename(&out->idx) : status;
    if (status != ND_OK && !out->bin.part) {
        unlink(out->idx.path);
        unlink(out->mask.path);
        unlink(out->bin.path);
    }
    return status;
}

nd_status nd_megatron_output_commit(nd_megatron_output *out)
{
    ND_TRY(write_index(out));
    ND_TRY(out->loss_mask.spans.count > 0 ? write_mask(out) : ND_OK);
    ND_TRY(nd_token_output_sync(&out->bin));
    return rename_all(out);
}

void nd_megatron_output_fini(nd_megatron_output *out)
{
    nd_token_output_fini(&out->bin);
    nd_token_output_fini(&out->idx);
    nd_token_output_fini(&out->mask);
    free(out->lengths.data);
    free(out->loss_mask.spans.data);
    *out = (nd_megatron_output){0};
}
