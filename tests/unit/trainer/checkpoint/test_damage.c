// SPDX-License-Identifier: Apache-2.0
/* A byte that flips anywhere in a checkpoint is noticed. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/math.h"
#include "runtime/base/text.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

static void setup(void)
{
    fake_setup();
    fake_write_golden(fake_run.path);
}

TestSuite(damage, .init = setup, .fini = fake_teardown, .timeout = 250);

/* How many bytes of a file are looked at one by one: a header without the blanks behind it, or all.
 */
static off_t dense_bytes(int fd, bool is_tensors, off_t size)
{
    uint8_t length[8], last = ' ';
    if (!is_tensors) {
        return size;
    }
    cr_assert_eq(pread(fd, length, sizeof length, 0), 8);
    off_t end = 8 + length[0] + 256 * length[1];
    while (last == ' ') {
        cr_assert_eq(pread(fd, &last, 1, --end), 1);
    }
    cr_assert_eq(last, '}');
    return end + 1;
}

/* Flips one bit in each of the first `most` bytes of a header, in each byte of a file without data,
 * and in every stride-th one of the other bytes. */
static void flip(const char *checkpoint, const char *file, off_t most, off_t stride)
{
    const bool is_tensors = nd_ends_with(file, ".safetensors");
    struct stat st;
    int fd = open(file, O_RDWR);
    cr_assert(fd >= 0 && fstat(fd, &st) == 0, "%s", file);
    const off_t dense =
        nd_min(dense_bytes(fd, is_tensors, st.st_size), is_tensors ? most : st.st_size);
    for (off_t at = 0; at < st.st_size; at += at < dense ? 1 : stride) {
        uint8_t byte, other;
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        other = byte ^ (uint8_t)(1 << (at % 8));
        cr_assert_eq(pwrite(fd, &other, 1, at), 1);
        cr_assert_eq(fake_load_all(checkpoint), ND_ERR_DATA, "%s, byte %ld", file, (long)at);
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
}

static void flip_all(int64_t step, off_t most, off_t stride)
{
    char file[PATH_MAX];
    int tensors = 0, hashes = 0;
    nd_fs_names names;
    fake_saved s = fake_open(fake_run.path, step);
    assert_ok(nd_fs_path(file, "%s/manifest.json", s.path));
    flip(s.path, file, most, stride);
    assert_ok(nd_fs_path(file, "%s/state", s.path));
    assert_ok(nd_fs_list(file, &names));
    for (int i = 0; i < names.count; i++) {
        assert_ok(nd_fs_path(file, "%s/state/%s", s.path, names.list[i]));
        tensors += nd_ends_with(file, ".safetensors");
        hashes += nd_ends_with(file, ".hashes");
        flip(s.path, file, most, stride);
    }
    assert_ok(fake_load_all(s.path));
    cr_assert(hashes >= 1 && tensors >= hashes && tensors + hashes == names.count,
              "%d and %d files", hashes, tensors);
    nd_fs_names_fini(&names);
    fake_forget(&s);
}

enum { WHOLE_HEADER = 1 << 16 }; /* the longest one has 15,066 bytes */

Test(damage, every_byte_of_a_sharded_checkpoint_is_guarded)
{
    flip_all(FAKE_GOLDEN_SHARDED, WHOLE_HEADER, 37);
}

Test(damage, every_byte_of_a_checkpoint_with_sha256_is_guarded)
{
    flip_all(FAKE_GOLDEN_SINGLE, WHOLE_HEADER, 37);
}

/* The file has 12 MB, which are three chunks. */
Test(damage, every_chunk_of_a_file_is_guarded)
{
    nd_shape shape = fake_shape(false);
    shape.vocab = 60000;
    fake_write(fake_run.path, &shape, &fake_one, 1, 3, false, ND_CHECKSUM_XXH3);
    flip_all(3, 16, 1 << 20);
}

/* Each of two files is whole, and stands where the other belongs. */
Test(damage, files_that_change_places_are_refused)
{
#define STATE "checkpoint-12/state/"
    static const char *const names[][2] = {{STATE "shard-00001.hashes", STATE "shard-00002.hashes"},
                                           {STATE "shard-00003-model-00001-of-00002.safetensors",
                                            STATE "shard-00004-model-00001-of-00002.safetensors"}};
    for (int i = 0; i < 4; i++) { /* each pair there and back */
        fake_move(names[i / 2][0], "kept");
        fake_move(names[i / 2][1], names[i / 2][0]);
        fake_move("kept", names[i / 2][1]);
        cr_assert_eq(fake_load_all(fake_path("checkpoint-12")), i % 2 ? ND_OK : ND_ERR_DATA, "%s",
                     names[i / 2][0]);
    }
}

Test(damage, a_state_folder_that_is_a_link_is_refused)
{
    fake_move("checkpoint-5/state", "aside");
    cr_assert_eq(symlink("../aside", fake_path("checkpoint-5/state")), 0);
    assert_fails(fake_load_all(fake_path("checkpoint-5")), ND_ERR_DATA, "missing or no folder");
}
