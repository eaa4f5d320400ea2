// SPDX-License-Identifier: Apache-2.0
/* A large file on a disk that keeps count: how much of it waits to be written. The calls below take
 * the place of the C library's in this executable, and pass everything on unless a disk is
 * there. */
#undef _FILE_OFFSET_BITS /* else the headers rename what is defined here */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/math.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

typedef struct disk {
    bool there;
    off64_t reserved, written; /* bytes; written from front to back */
    off64_t started, durable;  /* writeback was asked for up to here; was waited for up to here */
    off64_t most_dirty, most_idle; /* the largest written - durable, written - started */
    int wait_code;                 /* of waits that fail; 0: none does */
} disk;

static disk the_disk;

int fallocate64(int fd, int mode, off64_t offset, off64_t bytes)
{
    if (!the_disk.there) {
        return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    }
    cr_assert_eq(the_disk.reserved, 0, "it is the only file");
    the_disk.reserved = bytes;
    return 0;
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
    disk *d = &the_disk;
    if (!d->there || d->written == d->reserved) { /* the hash file, or none of it */
        return syscall(SYS_pwrite64, fd, data, bytes, offset);
    }
    cr_assert_eq(offset, d->written);
    d->written += (off64_t)bytes;
    cr_assert_leq(d->written, d->reserved, "not reserved first");
    d->most_dirty = nd_max(d->most_dirty, d->written - d->durable);
    d->most_idle = nd_max(d->most_idle, d->written - d->started);
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
        errno = d->wait_code;
        return d->wait_code ? -1 : 0;
    } else {
        cr_assert_eq(offset, d->started);
        d->started += bytes;
    }
    return 0;
}

static const float *zeros(void *context, int piece, nd_state_kind array)
{
    return context;
}

/* A file of 1.5 GiB: writeback begins after 32 MiB, and no more than 512 MiB wait for the disk,
 * with what is written until the next look. */
Test(shard_write, pages_that_wait_for_the_disk_are_bounded)
{
    const off64_t mib = 1 << 20, size = 1536 * mib;
    nd_shape shape = fake_shape(true);
    nd_shard_plan plan;
    nd_shard_record record;
    shape.hidden = 1024;
    shape.vocab = size / 4 / shape.hidden;
    nd_layout *layout = fake_layout(&shape, &fake_one, 0, false);
    const nd_shard_plan_options options = {.layout = layout, .mesh = &fake_one, .arrays = 1};
    void *memory = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const nd_shard_data data = {fake_any_unit, zeros, NULL, memory};
    cr_assert_neq(memory, MAP_FAILED);
    assert_ok(nd_shard_plan_init(&plan, &options));
    fake_setup();
    the_disk = (disk){.there = true};
    assert_ok(nd_shard_write(&plan, fake_run.path, 0, &data, &record));
    cr_assert_eq(the_disk.written, (off64_t)plan.files[ND_PIECE_BODY].bytes);
    cr_assert_gt(the_disk.written, size);
    cr_assert_leq(the_disk.most_idle, 33 * mib);
    cr_assert_leq(the_disk.most_dirty, (512 + 33) * mib);
    cr_assert_gt(the_disk.most_dirty, 400 * mib, "it waits for no reason");
    /* fsync does not tell again what a wait has told. */
    the_disk = (disk){.there = true, .wait_code = EIO};
    cr_assert_eq(unlink(fake_path("shard-00001.hashes")), 0);
    cr_assert_eq(unlink(fake_path(plan.files[ND_PIECE_BODY].name)), 0);
    assert_fails(nd_shard_write(&plan, fake_run.path, 0, &data, &record), ND_ERR_CANTCREATE,
                 strerror(EIO));
    cr_assert_eq(the_disk.durable, 32 * mib);
    the_disk.there = false;
    munmap(memory, (size_t)size);
    nd_shard_plan_fini(&plan);
    nd_layout_destroy(layout);
    fake_teardown();
}
