// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/token_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"

enum {
    SMALL_VOCAB = 65500,
    IDX_HEADER_BYTES = 34,
    CODE_I32 = 4,
    CODE_U16 = 8,
    VERSION = 1,
    INDEX_PIECE = 4096
};

/* Temporary names: ".tmp-HOST-PID-N" behind the path. The process that writes such a file has it
 * locked, so a process of the same host sees whether it is left over. */

static const char *host_name(char name[65])
{
    if (gethostname(name, 65) != 0) {
        strcpy(name, "host");
    }
    name[64] = '\0';
    for (char *p = name; *p; p++) {
        *p = *p == '/' ? '_' : *p;
    }
    return name;
}

static void remove_if_left(const char *path)
{
    nd_fs_locked locked;
    const int fd = nd_fs_update_existing(path);
    if (fd >= 0) {
        if (nd_fs_lock(fd, path, &locked) == ND_OK && locked == ND_FS_LOCKED) {
            unlink(path);
        }
        close(fd);
    }
}

void nd_token_output_remove_left(const char *path)
{
    char host[65], *folder = NULL, *prefix = NULL;
    const char *slash = strrchr(path, '/');
    nd_fs_names names = {0};
    if (nd_fs_parent(path, &folder) == ND_OK &&
        nd_fs_format(&prefix, "%s.tmp-%s-", slash ? slash + 1 : path, host_name(host)) == ND_OK) {
        (void)nd_fs_list(folder, &names);
    }
    for (int i = 0; i < names.count; i++) {
        char *left = NULL;
        if (strncmp(names.list[i], prefix, strlen(prefix)) == 0 &&
            nd_fs_format(&left, "%s/%s", folder, names.list[i]) == ND_OK) {
            remove_if_left(left);
        }
        free(left);
    }
    nd_error_clear(); /* it stays */
    nd_fs_names_fini(&names);
    free(prefix);
    free(folder);
}

/* Tries the next name; out->fd is -1 when that is taken. */
static nd_status create(nd_token_output *out, int number)
{
    char host[65];
    struct stat st;
    free(out->temporary);
    out->temporary = NULL;
    ND_TRY(nd_fs_format(&out->temporary, "%s.tmp-%s-%ld-%d", out->path, host_name(host),
                        (long)getpid(), number));
    out->fd = nd_fs_create(out->temporary, 0666);
    if (out->fd < 0) {
        nd_status status = errno == EEXIST
                               ? ND_OK
                               : nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be created: %s",
                                         out->temporary, strerror(errno));
        free(out->temporary); /* it is not this process's to remove */
        out->temporary = NULL;
        return status;
    }
    /* Another process may take the file for one that is left, and lock it first: it is about to
     * remove it, or has done so. Where there are no locks nobody removes files. */
    nd_fs_locked locked;
    ND_TRY(nd_fs_lock(out->fd, out->temporary, &locked));
    if (locked == ND_FS_LOCKED_BY_ANOTHER || (fstat(out->fd, &st) == 0 && st.st_nlink == 0)) {
        close(out->fd);
        out->fd = -1;
        free(out->temporary); /* the name is the other process's to remove */
        out->temporary = NULL;
    }
    return ND_OK;
}

nd_status nd_token_output_open(const char *path, int32_t vocab, uint64_t offset,
                               nd_token_output *out)
{
    *out = (nd_token_output){.fd = -1, .width = vocab < SMALL_VOCAB ? 2 : 4, .bytes = offset};
    ND_TRY(nd_fs_format(&out->path, "%s", path));
    for (int i = 0; out->fd < 0; i++) {
        ND_TRY(create(out, i));
    }
    return ND_OK;
}

nd_status nd_token_output_append(nd_token_output *out, const void *data, size_t size)
{
    ND_TRY(nd_fs_pwrite(out->fd, out->temporary, data, size, (int64_t)out->bytes));
    out->bytes += size;
    return ND_OK;
}

nd_status nd_token_output_add(nd_token_output *out, const nd_ids *ids)
{
    void *place = out->buffer.data;
    nd_status status = nd_array_reserve(&place, &out->buffer.room, ids->count * out->width, 1);
    out->buffer.data = place;
    ND_TRY(status);
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

nd_status nd_token_output_sync(nd_token_output *out)
{
    int fd = out->fd;
    out->fd = -1;
    return nd_fs_sync_close(fd, out->temporary);
}

nd_status nd_token_output_set_path(nd_token_output *out, const char *path)
{
    free(out->path);
    out->path = NULL;
    return nd_fs_format(&out->path, "%s", path);
}

nd_status nd_token_output_rename(nd_token_output *out)
{
    char *folder = NULL;
    if (rename(out->temporary, out->path) != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "\"%s\" cannot be renamed to \"%s\": %s", out->temporary,
                       out->path, strerror(errno));
    }
    free(out->temporary);
    out->temporary = NULL;
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
    if (out->path && out->fd >= 0) {
        close(out->fd);
    }
    if (out->temporary) {
        unlink(out->temporary);
    }
    free(out->temporary);
    free(out->path);
    free(out->buffer.data);
    *out = (nd_token_output){0};
}

/* Megatron. */

nd_status nd_megatron_output_open(const char *prefix, int32_t vocab, nd_megatron_output *out)
{
    char *path = NULL;
    *out = (nd_megatron_output){0};
    ND_TRY(nd_fs_format(&out->idx, "%s.idx", prefix));
    ND_TRY(nd_fs_format(&out->mask_path, "%s.mask", prefix));
    ND_TRY(nd_fs_format(&path, "%s.bin", prefix));
    nd_token_output_remove_left(path);
    nd_token_output_remove_left(out->idx);
    nd_token_output_remove_left(out->mask_path);
    nd_status status = nd_token_output_open(path, vocab, 0, &out->bin);
    free(path);
    return status;
}

nd_status nd_megatron_output_write(nd_megatron_output *out, const nd_corpus_piece *piece)
{
    const uint64_t before = out->bin.tokens;
    int32_t begin = 0;
    ND_TRY(nd_token_output_add(&out->bin, &piece->ids));
    for (size_t i = 0; i < piece->spans.count; i += 2) {
        const int32_t *span = &piece->spans.data[i];
        ND_TRY(
            nd_loss_mask_add(&out->mask, before + (uint64_t)span[0], before + (uint64_t)span[1]));
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

static void put_u64(uint8_t *p, uint64_t x)
{
    memcpy(p, &x, sizeof x); /* machines that this program runs on are little-endian */
}

/* Appends `count` numbers: where each document begins in the .bin, or the number of each. They are
 * made in pieces: the index of many documents is larger than the memory that encodes them. */
static nd_status append_numbers(const nd_megatron_output *out, bool places, size_t count,
                                nd_token_output *idx)
{
    uint64_t numbers[INDEX_PIECE], at = 0;
    for (size_t i = 0; i < count;) {
        size_t n = 0;
        for (; n < INDEX_PIECE && i < count; n++, i++) {
            numbers[n] = places ? at : i;
            at += places ? (uint64_t)out->lengths.data[i] * out->bin.width : 0;
        }
        ND_TRY(nd_token_output_append(idx, numbers, n * sizeof *numbers));
    }
    return ND_OK;
}

/* The arrays behind the header are not aligned. The file keeps its temporary name. */
static nd_status write_index(const nd_megatron_output *out, nd_token_output *idx)
{
    const size_t count = out->lengths.count;
    uint8_t header[IDX_HEADER_BYTES] = "MMIDIDX";
    put_u64(header + 9, VERSION);
    header[17] = out->bin.width == 2 ? CODE_U16 : CODE_I32;
    put_u64(header + 18, count);
    put_u64(header + 26, count + 1);
    ND_TRY(nd_token_output_open(out->idx, 0, 0, idx));
    ND_TRY(nd_token_output_append(idx, header, sizeof header));
    ND_TRY(nd_token_output_append(idx, out->lengths.data, 4 * count));
    ND_TRY(append_numbers(out, true, count, idx));
    ND_TRY(append_numbers(out, false, count + 1, idx));
    return nd_token_output_sync(idx);
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

/* Writes a whole file under its temporary name. */
static nd_status write_file(const char *path, const uint8_t *data, size_t size,
                            nd_token_output *out)
{
    ND_TRY(nd_token_output_open(path, 0, 0, out));
    ND_TRY(nd_token_output_append(out, data, size));
    return nd_token_output_sync(out);
}

typedef struct bin_read {
    nd_fs_map map;
    char *hex;
} bin_read;

/* The .bin that was written, by what the mask knows of it. */
static nd_status digest_bin(void *context)
{
    bin_read *r = context;
    return nd_loss_mask_bin_sha256(r->map.data, r->map.size, r->hex);
}

static nd_status read_bin(const char *path, char hex[65])
{
    bin_read read = {.hex = hex};
    ND_TRY(nd_fs_map_open(path, ND_ERR_IO, &read.map));
    nd_status status = nd_fs_map_guard(&read.map, path, digest_bin, &read);
    nd_fs_map_close(&read.map);
    return status;
}

static nd_status write_mask(const nd_megatron_output *out, const nd_token_output *idx,
                            nd_token_output *mask)
{
    char index_sha256[65], bin_sha256[65];
    const nd_loss_mask_pair pair = {.bin = out->bin.path,
                                    .idx = out->idx,
                                    .tokens = out->bin.tokens,
                                    .index_sha256 = index_sha256,
                                    .bin_sha256 = bin_sha256};
    uint8_t *data = NULL;
    size_t size = 0;
    if (out->mask.spans.count == 0) {
        return ND_OK;
    }
    ND_TRY(nd_sha256_file(idx->temporary, index_sha256));
    ND_TRY(read_bin(out->bin.temporary, bin_sha256));
    ND_TRY(nd_loss_mask_make(&out->mask, &pair, &data, &size));
    nd_status status = write_file(out->mask_path, data, size, mask);
    free(data);
    return status;
}

/* All get their names, or none. */
static nd_status rename_all(nd_megatron_output *out, nd_token_output *mask, nd_token_output *idx)
{
    ND_TRY(remove_old(out->idx));
    ND_TRY(remove_old(out->mask_path));
    nd_status status = nd_token_output_rename(&out->bin);
    status = status == ND_OK && mask->temporary ? nd_token_output_rename(mask) : status;
    status = status == ND_OK ? nd_token_output_rename(idx) : status;
    if (status != ND_OK && !out->bin.temporary) {
        unlink(out->idx);
        unlink(out->mask_path);
        unlink(out->bin.path);
    }
    return status;
}

nd_status nd_megatron_output_commit(nd_megatron_output *out)
{
    nd_token_output idx = {0}, mask = {0};
    nd_status status = ND_OK;
    if (out->mask.ignored > 0 && out->mask.ignored == out->bin.tokens) {
        return nd_fail(ND_ERR_DATA,
                       "none of the %llu tokens counts in the loss; completions, or turns of the "
                       "assistant, are missing",
                       (unsigned long long)out->bin.tokens);
    }
    ND_TRY_OUT(write_index(out, &idx));
    ND_TRY_OUT(write_mask(out, &idx, &mask));
    ND_TRY_OUT(nd_token_output_sync(&out->bin));
    ND_TRY_OUT(rename_all(out, &mask, &idx));
out:
    nd_token_output_fini(&mask);
    nd_token_output_fini(&idx);
    return status;
}

void nd_megatron_output_fini(nd_megatron_output *out)
{
    nd_token_output_fini(&out->bin);
    free(out->idx);
    free(out->mask_path);
    free(out->lengths.data);
    free(out->mask.spans.data);
    *out = (nd_megatron_output){0};
}
