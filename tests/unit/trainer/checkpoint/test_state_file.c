// SPDX-License-Identifier: Apache-2.0
/* A large file on a disk that keeps count: how much of it waits to be written. The calls below take
 * the place of the C library's in this executable, and pass everything on unless a disk is
 * there. */
#undef _FILE_OFFSET_BITS /* else the headers rename what is defined here */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
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
    nd_hashed_file hashed = {0};
    const off64_t mib = 1 << 20;
    char *data = calloc(1, PART);
    tempdir_make(&dir);
    the_disk = (disk){.there = true};
    assert_ok(
        nd_state_file_create(dir.path, "large", (uint64_t)PART * PARTS, ND_CHECKSUM_XXH3, &file));
    for (int i = 0; i < PARTS; i++) {
        assert_ok(nd_state_file_append(file, data, PART));
    }
    assert_ok(nd_state_file_finish(file, &hashed));
    cr_assert_eq(the_disk.written, (off64_t)PART * PARTS);
    cr_assert_eq(hashed.bytes, (uint64_t)the_disk.written);
    cr_assert_leq(the_disk.most_idle, 33 * mib);
    cr_assert_leq(the_disk.most_dirty, (512 + 33) * mib);
    cr_assert_gt(the_disk.most_dirty, 400 * mib, "it waits for no reason");
    the_disk.there = false;
    free(hashed.digests);
    free(data);
    nd_fs_remove_tree(dir.path);
}
