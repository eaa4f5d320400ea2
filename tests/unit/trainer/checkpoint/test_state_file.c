// SPDX-License-Identifier: Apache-2.0
/* A large file on a disk that keeps count: how much of it waits to be written. The calls below take
 * the place of the C library's in this executable, and pass everything on unless a disk is
 * there. */
#undef _FILE_OFFSET_BITS /* else the headers rename what is defined here */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/support/tempdir.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/state_file.h"

typedef struct disk {
    bool there;
    off64_t reserved, written; /* bytes; written from front to back */
    off64_t started, durable;  /* writeback was asked for up to here; was waited for up to here */
    off64_t most_dirty, most_idle; /* the largest written - durable, written - started */
} disk;

static disk the_disk;

static off64_t larger(off64_t a, off64_t b)
{
    return a > b ? a : b;
}

int fallocate64(int fd, int mode, off64_t offset, off64_t bytes)
{
    if (!the_disk.there) {
        return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    }
    the_disk.reserved = bytes;
    return 0;
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
    disk *d = &the_disk;
    if (!d->there) {
        return syscall(SYS_pwrite64, fd, data, bytes, offset);
    }
    cr_assert_eq(offset, d->written);
    d->written += (off64_t)bytes;
    cr_assert_leq(d->written, d->reserved, "not reserved first");
    d->most_dirty = larger(d->most_dirty, d->written - d->durable);
    d->most_idle = larger(d->most_idle, d->written - d->started);
    return (ssize_t)bytes;
}

int sync_file_range(int fd, off64_t offset, off64_t bytes, unsigned flags)
{
    disk *d = &the_disk;
    if (!d->there) {
        return (int)syscall(SYS_sync_file_range, fd, offset, bytes, flags);
    }
    if (flags & SYNC_FILE_RANGE_WAIT_AFTER) {
        cr_assert_eq(offset, d->durable);
        d->durable += bytes;
    } else {
        cr_assert_eq(offset, d->started);
        d->started += bytes;
    }
    return 0;
}

/* A file of 1.5 GiB: writeback begins after 32 MiB, and no more than 512 MiB wait for the disk,
 * with what is written until the next look. */
Test(state_file, pages_that_wait_for_the_disk_are_bounded)
{
    enum { PART = 3 << 20, PARTS = 512 };
    tempdir dir;
    nd_state_file *file = NULL;
    static uint8_t digests[ND_HASH_MAX * ((size_t)PART * PARTS / ND_CHUNK_BYTES)];
    const off64_t mib = 1 << 20;
    char *data = calloc(1, PART);
    tempdir_make(&dir);
    the_disk = (disk){.there = true};
    assert_ok(nd_state_file_create(dir.path, "large", (uint64_t)PART * PARTS, ND_CHECKSUM_XXH3,
                                   digests, &file));
    for (int i = 0; i < PARTS; i++) {
        assert_ok(nd_state_file_append(file, data, PART));
    }
    assert_ok(nd_state_file_finish(file));
    cr_assert_eq(the_disk.written, (off64_t)PART * PARTS);
    cr_assert_leq(the_disk.most_idle, 33 * mib);
    cr_assert_leq(the_disk.most_dirty, (512 + 33) * mib);
    cr_assert_gt(the_disk.most_dirty, 400 * mib, "it waits for no reason");
    the_disk.there = false;
    free(data);
    nd_fs_remove_tree(dir.path);
}

/* Three chunks, the last one short. */
enum { FILE_BYTES = 2 * ND_CHUNK_BYTES + 12345 };

/* Appended in pieces of any size, chunks have the digests that they have alone. */
static void check_chunks(nd_checksum kind, const uint8_t *data)
{
    static const size_t pieces[] = {4096, ND_CHUNK_BYTES - 1, ND_CHUNK_BYTES + 7, FILE_BYTES};
    const size_t width = (size_t)nd_hash_bytes(nd_checksums[kind].chunk);
    uint8_t digests[3 * ND_HASH_MAX], alone[ND_HASH_MAX];
    nd_hash *hash = NULL;
    tempdir dir;
    tempdir_make(&dir);
    assert_ok(nd_hash_create(nd_checksums[kind].chunk, &hash));
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        nd_state_file *file = NULL;
        char name[] = {(char)('a' + p), '\0'};
        memset(digests, 0, sizeof digests);
        assert_ok(nd_state_file_create(dir.path, name, FILE_BYTES, kind, digests, &file));
        for (size_t at = 0, n = 1; at < FILE_BYTES; at += n, n = pieces[p]) { /* a byte first */
            n = FILE_BYTES - at < n ? FILE_BYTES - at : n;
            assert_ok(nd_state_file_append(file, data + at, n));
        }
        assert_ok(nd_state_file_finish(file));
        for (size_t c = 0; c < 3; c++) {
            const size_t begin = c * ND_CHUNK_BYTES, left = FILE_BYTES - begin;
            assert_ok(nd_hash_begin(hash));
            assert_ok(
                nd_hash_add(hash, data + begin, left < ND_CHUNK_BYTES ? left : ND_CHUNK_BYTES));
            assert_ok(nd_hash_end(hash, alone));
            cr_assert_arr_eq(digests + c * width, alone, width);
        }
    }
    nd_hash_destroy(hash);
    nd_fs_remove_tree(dir.path);
}

Test(state_file, chunks_have_the_same_digest_however_they_are_appended)
{
    static uint8_t data[FILE_BYTES];
    for (size_t i = 0; i < FILE_BYTES; i++) {
        data[i] = (uint8_t)(i * i >> 7);
    }
    check_chunks(ND_CHECKSUM_XXH3, data);
    check_chunks(ND_CHECKSUM_SHA256, data);
}

Test(state_file, digests_are_those_of_the_public_functions)
{
    char text[ND_DIGEST_TEXT_MAX], hex[ND_HASH_HEX_MAX];
    assert_ok(nd_digest_text(ND_CHECKSUM_XXH3, "", 0, text));
    cr_assert_str_eq(text, "xxh3:99aa06d3014798d86001c324468d497f"); /* of xxhsum -H2 */
    cr_assert(nd_digest_text_is_valid(ND_CHECKSUM_XXH3, text));
    cr_assert_not(nd_digest_text_is_valid(ND_CHECKSUM_SHA256, text));
    text[36] = 'G';
    cr_assert_not(nd_digest_text_is_valid(ND_CHECKSUM_XXH3, text));
    text[36] = '\0';
    cr_assert_not(nd_digest_text_is_valid(ND_CHECKSUM_XXH3, text));
    assert_ok(nd_digest_text(ND_CHECKSUM_SHA256, "abc", 3, text));
    assert_ok(nd_sha256("abc", 3, hex));
    cr_assert_str_eq(text + 7, hex);
    cr_assert(nd_digest_text_is_valid(ND_CHECKSUM_SHA256, text));
}
