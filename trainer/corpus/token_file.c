// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/token_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/corpus/token_cache.h"

enum {
    SMALL_VOCAB = 65500,
    IDX_HEADER_BYTES = 34,
    CODE_I32 = 4,
    CODE_U16 = 8,
    HEADER_BYTES = ND_TOKEN_CACHE_HEADER_BYTES,
    CHUNK_BYTES = ND_TOKEN_CACHE_CHUNK_BYTES,
    WRITE_BACK_BYTES = 64 << 20,
    STALL_SECONDS = 300,
    POLL_MS = 20,
    POLL_MS_MAX = 1000,
    WORD_SECONDS = 10,
    MASK_VERSION = 2,
    MASK_HEADER_BYTES = ND_LOSS_MASK_HEADER_BYTES,
    DIGEST_BYTES = ND_LOSS_MASK_DIGEST_BYTES,
    SPAN_BYTES = 16,
    PIECES = 256,
    PIECE_BYTES = 64 << 10
};

/* One file. */

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

/* With sharing, waits for the process that has the file locked as long as it gets on: the file
 * grows then. Each pause is longer, or many ranks would load the folder. */
static nd_status lock_part(const nd_token_output *out, const nd_token_sharing *sharing,
                           nd_fs_locked *locked)
{
    const double stall =
        sharing && sharing->stall_seconds > 0 ? sharing->stall_seconds : STALL_SECONDS;
    double changed = 0, said = 0;
    struct stat st = {.st_size = -1}; /* not looked at yet */
    for (long pause = POLL_MS;; pause = nd_min(pause * 3 / 2, POLL_MS_MAX)) {
        const off_t bytes = st.st_size;
        const double now = nd_clock_seconds();
        ND_TRY(nd_fs_lock(out->fd, out->part, locked));
        if (*locked != ND_FS_LOCKED_BY_ANOTHER || !sharing) {
            return ND_OK;
        }
        if (sharing->stop && atomic_load(sharing->stop)) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
        }
        (void)fstat(out->fd, &st);
        changed = changed == 0 || st.st_size != bytes ? now : changed;
        if (now - changed > stall) {
            return nd_fail(ND_ERR_HANG,
                           "another process, which encodes the text into \"%s\", made no progress "
                           "for %.0f s; end it, or set data.cache_dir to another folder",
                           out->path, stall);
        }
        if (said == 0 || now - said >= WORD_SECONDS) {
            said = now;
            nd_log_info("waiting for another process, which encodes the text into %s: %.1f MB so "
                        "far",
                        out->path, (double)st.st_size * 1e-6);
        }
        nanosleep(&(struct timespec){.tv_sec = pause / 1000, .tv_nsec = pause % 1000 * 1000000L},
                  NULL);
    }
}

/* *taken: this process has the file of this name locked, or has made it (`is_new`) where there are
 * no locks; it is empty then. */
static nd_status take_part(const nd_token_output *out, const nd_token_sharing *sharing, bool is_new,
                           bool *taken)
{
    struct stat held, named;
    nd_fs_kind kind;
    nd_fs_locked locked;
    ND_TRY(lock_part(out, sharing, &locked));
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

static nd_status open_output(const char *path, const char *suffix, const nd_token_sharing *sharing,
                             nd_token_output *out)
{
    nd_token_output made = {.fd = -1};
    bool is_new;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&made.path, "%s%s", path, suffix));
    ND_TRY_OUT(nd_fs_format(&made.part, "%s.part", made.path));
    for (bool taken = false; !taken;) {
        ND_TRY_OUT(open_part(&made, sharing, &is_new));
        status = take_part(&made, sharing, is_new, &taken);
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

/* Writes the chunk that is held back, and keeps its checksum. From time to time what was written is
 * sent to the disk, so that all but the last bytes are there when the file is made durable:
 * processes that wait see no progress then. Some file systems cannot do that. An error of the disk
 * is told here, and fsync does not tell it again. */
static nd_status write_chunk(nd_token_output *out)
{
    const unsigned flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE;
    const nd_bytes *chunk = &out->chunk;
    ND_TRY(nd_fs_pwrite(out->fd, out->part, chunk->data, chunk->count, (int64_t)out->bytes));
    ND_TRY(nd_u64s_add(&out->sums, nd_hash_64(chunk->data, chunk->count)));
    out->bytes += chunk->count;
    out->chunk.count = 0;
    if (out->bytes - out->sent < WRITE_BACK_BYTES) {
        return ND_OK;
    }
    const int code = sync_file_range(out->fd, 0, 0, flags) != 0 ? errno : 0;
    out->sent = out->bytes;
    return code == 0 || code == EINVAL || code == ENOSYS || code == ESPIPE
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "\"%s\" could not be made durable: %s", out->part,
                         strerror(code));
}

static nd_status append(nd_token_output *out, const void *data, size_t size)
{
    for (size_t at = 0, n; at < size; at += n) {
        n = CHUNK_BYTES - out->chunk.count < size - at ? CHUNK_BYTES - out->chunk.count : size - at;
        ND_TRY(nd_bytes_add(&out->chunk, (const uint8_t *)data + at, n));
        ND_TRY(out->chunk.count == CHUNK_BYTES ? write_chunk(out) : ND_OK);
    }
    return ND_OK;
}

/* The file stays locked until it is renamed. */
static nd_status sync_output(nd_token_output *out)
{
    ND_TRY(out->chunk.count > 0 ? write_chunk(out) : ND_OK);
    return nd_fs_sync_close(dup(out->fd), out->part);
}

/* After sync. The file has its name for good, or none once *out is finished. */
static nd_status rename_output(nd_token_output *out)
{
    if (rename(out->part, out->path) != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be renamed to \"%s\": %s", out->part,
                       out->path, strerror(errno));
    }
    free(out->part);
    out->part = NULL;
    const nd_status status = nd_fs_sync_parent(out->path);
    if (status != ND_OK) {
        unlink(out->path); /* it might be there or not after a power failure */
    }
    return status;
}

/* Removes what was not renamed; an all-zero one is legal. */
static void fini_output(nd_token_output *out)
{
    if (out->part) {
        unlink(out->part);
    }
    if (out->path) {
        close(out->fd);
    }
    free(out->part);
    free(out->path);
    free(out->chunk.data);
    free(out->sums.data);
}

/* Pieces. */

nd_status nd_token_files_open(const char *path, int32_t vocab, const nd_token_sharing *sharing,
                              nd_token_files *out)
{
    static const char *const suffixes[] = {".bin", ".idx", ".mask"};
    nd_token_output *const files[] = {&out->tokens, &out->idx, &out->mask};
    *out = (nd_token_files){
        .is_cache = sharing != NULL, .vocab = vocab, .width = vocab < SMALL_VOCAB ? 2 : 4};
    if (sharing) {
        ND_TRY(open_output(path, "", sharing, &out->tokens));
        out->tokens.bytes = HEADER_BYTES;
        return ND_OK;
    }
    for (int i = 0; i < 3; i++) {
        ND_TRY(open_output(path, suffixes[i], NULL, files[i]));
    }
    return ND_OK;
}

nd_status nd_token_files_write(nd_token_files *f, const nd_corpus_piece *piece)
{
    const nd_ids *ids = &piece->ids;
    const uint64_t before = f->count;
    const bool small = f->width == 2;
    ND_TRY(nd_bytes_reserve(&f->buffer, ids->count * f->width));
    for (size_t i = 0; small && i < ids->count; i++) {
        const uint16_t id = (uint16_t)ids->data[i];
        memcpy(f->buffer.data + 2 * i, &id, sizeof id);
    }
    ND_TRY(append(&f->tokens, small ? f->buffer.data : (const void *)ids->data,
                  ids->count * f->width));
    f->count += ids->count;
    for (size_t i = 0; i < piece->ends.count; i++) {
        const uint64_t end = before + (uint64_t)piece->ends.data[i];
        const uint64_t length = end - (f->ends.count > 0 ? f->ends.data[f->ends.count - 1] : 0);
        if (!f->is_cache && length > INT32_MAX) {
            return nd_fail(ND_ERR_DATA,
                           "a document has %llu tokens, but Megatron's index counts at most "
                           "2,147,483,647; split it",
                           (unsigned long long)length);
        }
        ND_TRY(nd_u64s_add(&f->ends, end));
    }
    for (size_t i = 0; i < piece->spans.count; i++) {
        ND_TRY(nd_u64s_add(&f->spans, before + (uint64_t)piece->spans.data[i]));
    }
    return ND_OK;
}

/* The cache. */

static nd_status commit_cache(nd_token_files *f)
{
    uint8_t begin[HEADER_BYTES] = {0};
    nd_token_output *file = &f->tokens;
    struct stat st;
    nd_token_cache_header h = {.version = ND_TOKEN_CACHE_VERSION,
                               .width = (uint32_t)f->width,
                               .tokens = f->count,
                               .documents = f->ends.count,
                               .spans = f->spans.count / 2,
                               .vocab = (uint64_t)f->vocab};
    memcpy(h.magic, ND_TOKEN_CACHE_MAGIC, sizeof h.magic);
    ND_TRY(append(file, begin, (size_t)(-file->chunk.count & 7)));
    ND_TRY(append(file, f->ends.data, f->ends.count * 8));
    ND_TRY(append(file, f->spans.data, f->spans.count * 8));
    ND_TRY(file->chunk.count > 0 ? write_chunk(file) : ND_OK);
    const nd_u64s *sums = &file->sums;
    ND_TRY(nd_fs_pwrite(file->fd, file->part, sums->data, sums->count * 8, (int64_t)file->bytes));
    h.sums_sum = nd_hash_64(sums->data, sums->count * 8);
    h.file_bytes = file->bytes + sums->count * 8;
    h.header_sum = nd_hash_64(&h, offsetof(nd_token_cache_header, header_sum));
    memcpy(begin, &h, sizeof h);
    ND_TRY(nd_fs_pwrite(file->fd, file->part, begin, sizeof begin, 0));
    if (fstat(file->fd, &st) == 0) { /* others may have had to write it, if this process died */
        (void)!fchmod(file->fd, st.st_mode & 0755);
    }
    ND_TRY(sync_output(file));
    return rename_output(file);
}

/* The loss mask. */

static const char mask_magic[8] = "NDMASK\0";

typedef struct mask_header {
    char magic[8];
    uint32_t version, zero;
    uint64_t tokens, spans, ignored;
    char index_sha256[DIGEST_BYTES];
    char bin_sha256[DIGEST_BYTES];
} mask_header;

_Static_assert(sizeof(mask_header) == MASK_HEADER_BYTES, "the header has no holes");

/* Every message about a mask begins with its name and ends alike. */
#define ADVICE            "; write the token files and their mask again"
#define FAIL(format, ...) nd_fail(ND_ERR_DATA, "the loss mask \"%s\"" format ADVICE, __VA_ARGS__)

static nd_status check_header(const uint8_t *data, size_t size, const char *name, mask_header *h)
{
    const size_t least = MASK_HEADER_BYTES + DIGEST_BYTES;
    char hex[DIGEST_BYTES + 1];
    if (size < least) {
        return FAIL(" has %zu bytes, less than the %zu of one without spans: it is truncated", name,
                    size, least);
    }
    memcpy(h, data, sizeof *h);
    if (memcmp(h->magic, mask_magic, sizeof mask_magic) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" lies beside token files as their loss mask, but does not begin with "
                       "NDMASK" ADVICE ", or rename it",
                       name);
    }
    if (h->version != MASK_VERSION || h->zero != 0) {
        return FAIL(" has version %u; version %d is read", name, h->version, MASK_VERSION);
    }
    if (h->spans != (size - least) / SPAN_BYTES || (size - least) % SPAN_BYTES != 0) {
        return FAIL(
            " has %zu bytes, which does not match its %llu spans: it is truncated or damaged", name,
            size, (unsigned long long)h->spans);
    }
    ND_TRY(nd_sha256(data, size - DIGEST_BYTES, hex));
    return memcmp(hex, data + size - DIGEST_BYTES, DIGEST_BYTES) == 0
               ? ND_OK
               : FAIL(" is damaged: its bytes do not have the SHA-256 that stands at its end",
                      name);
}

static nd_status check_spans(const mask_header *h, const uint8_t *pairs, const char *name)
{
    uint64_t before = 0, ignored = 0;
    for (uint64_t i = 0; i < h->spans; i++) {
        uint64_t span[2];
        memcpy(span, pairs + i * SPAN_BYTES, sizeof span);
        if (span[0] < before || span[1] <= span[0] || span[1] > h->tokens) {
            return FAIL(": span %llu is %llu to %llu behind %llu, of %llu tokens", name,
                        (unsigned long long)i, (unsigned long long)span[0],
                        (unsigned long long)span[1], (unsigned long long)before,
                        (unsigned long long)h->tokens);
        }
        before = span[1];
        ignored += span[1] - span[0];
    }
    return ignored == h->ignored
               ? ND_OK
               : FAIL(" states %llu tokens in its spans, which have %llu", name,
                      (unsigned long long)h->ignored, (unsigned long long)ignored);
}

nd_status nd_loss_mask_parse(const uint8_t *data, size_t size, const char *name,
                             nd_loss_mask_view *out)
{
    mask_header h;
    ND_TRY(check_header(data, size, name, &h));
    ND_TRY(check_spans(&h, data + MASK_HEADER_BYTES, name));
    if (h.ignored == h.tokens && h.tokens > 0) {
        return nd_fail(ND_ERR_DATA,
                       "by the loss mask \"%s\" none of the %llu tokens counts in the loss; "
                       "completions, or turns of the assistant, are missing",
                       name, (unsigned long long)h.tokens);
    }
    *out = (nd_loss_mask_view){.tokens = h.tokens,
                               .spans = h.spans,
                               .ignored = h.ignored,
                               .pairs = data + MASK_HEADER_BYTES,
                               .digest = (const char *)data + size - DIGEST_BYTES};
    return ND_OK;
}

nd_status nd_samples_add(void *context)
{
    const nd_samples *s = context;
    const size_t count = s->size <= s->bytes ? 1 : s->bytes / s->sample;
    const size_t each = count > 1 ? s->sample : s->size, last = s->size - each;
    for (size_t i = 0; i < count; i++) {
        const size_t at = i + 1 < count ? last / (count - 1) * i : last;
        ND_TRY(nd_hash_add(s->hash, s->data + at, each));
    }
    return ND_OK;
}

/* Fills the SHA-256 of the pair: that of the .idx, and of a .bin of up to 16 MiB, or of samples of
 * a larger one. */
static nd_status hash_pair(const char *bin, const char *idx, mask_header *h)
{
    char hex[DIGEST_BYTES + 1];
    nd_fs_map map = {0};
    nd_samples samples = {.bytes = (size_t)PIECES * PIECE_BYTES, .sample = PIECE_BYTES};
    nd_status status = ND_OK;
    ND_TRY(nd_sha256_file(idx, hex));
    memcpy(h->index_sha256, hex, DIGEST_BYTES);
    ND_TRY_OUT(nd_fs_map_open(bin, ND_ERR_DATA, &map));
    samples.data = map.data;
    samples.size = map.size;
    ND_TRY_OUT(nd_hash_create(ND_HASH_SHA256, &samples.hash));
    ND_TRY_OUT(nd_hash_begin(samples.hash));
    ND_TRY_OUT(nd_fs_map_guard(&map, bin, nd_samples_add, &samples));
    ND_TRY_OUT(nd_hash_end_text(samples.hash, hex));
    memcpy(h->bin_sha256, hex, DIGEST_BYTES);
out:
    nd_hash_destroy(samples.hash);
    nd_fs_map_close(&map);
    return status;
}

static nd_status check_pair(const mask_header *h, const char *name, const char *bin,
                            const char *idx, int64_t tokens)
{
    mask_header now;
    if (h->tokens != (uint64_t)tokens) {
        return FAIL(" is for %llu tokens, but \"%s\" has %lld: it belongs to other token files",
                    name, (unsigned long long)h->tokens, bin, (long long)tokens);
    }
    ND_TRY(hash_pair(bin, idx, &now));
    if (memcmp(h->index_sha256, now.index_sha256, DIGEST_BYTES) != 0) {
        return FAIL(" was made for another index than \"%s\": it belongs to other token files",
                    name, idx);
    }
    return memcmp(h->bin_sha256, now.bin_sha256, DIGEST_BYTES) == 0
               ? ND_OK
               : FAIL(" was made for other tokens than those of \"%s\": it belongs to other token "
                      "files, or the tokens changed since",
                      name, bin);
}

nd_status nd_loss_mask_read(const char *path, const char *bin, const char *idx, int64_t tokens,
                            uint8_t **data, nd_loss_mask_view *out)
{
    /* No two spans touch that the writers make; others may. */
    const size_t most = MASK_HEADER_BYTES + SPAN_BYTES * (size_t)tokens + DIGEST_BYTES;
    char *text;
    size_t size;
    mask_header h;
    bool there = false; /* a link to nowhere is no reason to count all tokens */
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_read(path, most, ND_ERR_DATA, &text, &size));
    *data = (uint8_t *)text;
    ND_TRY(nd_loss_mask_parse(*data, size, path, out));
    memcpy(&h, *data, sizeof h);
    return check_pair(&h, path, bin, idx, tokens);
}

nd_status nd_loss_mask_make(const nd_u64s *spans, const char *bin, const char *idx, int64_t tokens,
                            nd_bytes *out)
{
    mask_header h = {.version = MASK_VERSION, .tokens = (uint64_t)tokens};
    char hex[DIGEST_BYTES + 1];
    memcpy(h.magic, mask_magic, sizeof mask_magic);
    ND_TRY(hash_pair(bin, idx, &h));
    ND_TRY(nd_bytes_add(out, &h, sizeof h));
    for (size_t i = 0; i < spans->count; i += 2) {
        const uint64_t *span = &spans->data[i];
        h.ignored += span[1] - span[0];
        if (i > 0 && span[-1] == span[0]) {
            memcpy(out->data + out->count - sizeof *span, &span[1], sizeof *span);
        } else {
            ND_TRY(nd_bytes_add(out, span, SPAN_BYTES));
            h.spans++;
        }
    }
    memcpy(out->data, &h, sizeof h);
    ND_TRY(nd_sha256(out->data, out->count, hex));
    return nd_bytes_add(out, hex, DIGEST_BYTES);
}

/* Megatron. */

/* The arrays behind the header are not aligned. */
static nd_status write_index(nd_token_files *f)
{
    const uint64_t count = f->ends.count, borders = count + 1;
    uint8_t header[IDX_HEADER_BYTES] = "MMIDIDX\0\0\1"; /* version 1 */
    header[17] = f->width == 2 ? CODE_U16 : CODE_I32;
    memcpy(header + 18, &count, sizeof count);
    memcpy(header + 26, &borders, sizeof borders);
    ND_TRY(append(&f->idx, header, sizeof header));
    for (uint64_t i = 0; i < count; i++) {
        const int32_t length = (int32_t)(f->ends.data[i] - (i > 0 ? f->ends.data[i - 1] : 0));
        ND_TRY(append(&f->idx, &length, sizeof length));
    }
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t place = i > 0 ? f->ends.data[i - 1] * f->width : 0;
        ND_TRY(append(&f->idx, &place, sizeof place));
    }
    for (uint64_t i = 0; i < borders; i++) {
        ND_TRY(append(&f->idx, &i, sizeof i));
    }
    return sync_output(&f->idx);
}

/* An index or a mask that is there belongs to another .bin: it goes first, and for good. */
static nd_status remove_old(const char *path)
{
    if (unlink(path) == 0) {
        return nd_fs_sync_parent(path);
    }
    return errno == ENOENT
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be replaced: %s", path, strerror(errno));
}

/* All get their names, or none. */
static nd_status commit_megatron(nd_token_files *f)
{
    ND_TRY(sync_output(&f->tokens));
    ND_TRY(write_index(f));
    if (f->spans.count > 0) {
        f->buffer.count = 0;
        ND_TRY(nd_loss_mask_make(&f->spans, f->tokens.part, f->idx.part, (int64_t)f->count,
                                 &f->buffer));
        ND_TRY(append(&f->mask, f->buffer.data, f->buffer.count));
        ND_TRY(sync_output(&f->mask));
    }
    ND_TRY(remove_old(f->idx.path));
    ND_TRY(remove_old(f->mask.path));
    nd_status status = rename_output(&f->tokens);
    status = status == ND_OK && f->mask.bytes > 0 ? rename_output(&f->mask) : status;
    status = status == ND_OK ? rename_output(&f->idx) : status;
    if (status != ND_OK && !f->tokens.part) {
        unlink(f->idx.path);
        unlink(f->mask.path);
        unlink(f->tokens.path);
    }
    return status;
}

nd_status nd_token_files_commit(nd_token_files *files)
{
    return files->is_cache ? commit_cache(files) : commit_megatron(files);
}

void nd_token_files_fini(nd_token_files *files)
{
    fini_output(&files->tokens);
    fini_output(&files->idx);
    fini_output(&files->mask);
    free(files->ends.data);
    free(files->spans.data);
    free(files->buffer.data);
    *files = (nd_token_files){0};
}
