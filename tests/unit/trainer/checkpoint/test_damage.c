// SPDX-License-Identifier: Apache-2.0
/* A byte that flips anywhere in a checkpoint is refused, or changes nothing that is loaded. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/text.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

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

/* Flips one bit in each byte of a header or of a file that is no data, and in some of the other
 * bytes. Returns how many flips were refused. */
static long flip(const char *checkpoint, const char *file, bool is_tensors, long *flips)
{
    struct stat st;
    long refused = 0;
    int fd = open(file, O_RDWR);
    cr_assert(fd >= 0 && fstat(fd, &st) == 0, "%s", file);
    const off_t dense = dense_bytes(fd, is_tensors, st.st_size);
    for (off_t at = 0; at < st.st_size; at += at < dense ? 1 : 37) {
        uint8_t byte, other;
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        other = byte ^ (uint8_t)(1 << (at % 8));
        cr_assert_eq(pwrite(fd, &other, 1, at), 1);
        nd_status status = fake_load_all(checkpoint);
        cr_assert(status == ND_OK || status == ND_ERR_DATA, "%s, byte %ld: %s", file, (long)at,
                  nd_error_last()->message);
        refused += status == ND_ERR_DATA;
        ++*flips;
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
    return refused;
}

static void flip_all(int64_t step)
{
    char *path = NULL, *state = NULL, *file = NULL;
    long flips = 0, refused;
    int tensors = 0, hashes = 0;
    assert_ok(nd_checkpoint_path(fake_run.path, step, &path));
    assert_ok(nd_fs_format(&file, "%s/manifest.json", path));
    refused = flip(path, file, false, &flips);
    cr_assert_eq(refused, flips, "%ld of %ld flips in the manifest", refused, flips);
    free(file);
    assert_ok(nd_fs_format(&state, "%s/state", path));
    DIR *folder = opendir(state);
    cr_assert_not_null(folder);
    for (struct dirent *e = readdir(folder); e; e = readdir(folder)) {
        bool is_tensors = nd_ends_with(e->d_name, ".safetensors");
        if (is_tensors || nd_ends_with(e->d_name, ".hashes")) {
            flips = 0;
            assert_ok(nd_fs_format(&file, "%s/%s", state, e->d_name));
            refused = flip(path, file, is_tensors, &flips);
            cr_assert_eq(refused, flips, "%ld of %ld flips in %s", refused, flips, e->d_name);
            tensors += is_tensors;
            hashes += !is_tensors;
            free(file);
        }
    }
    closedir(folder);
    assert_ok(fake_load_all(path));
    cr_assert(hashes >= 1 && tensors >= hashes, "%d and %d files", hashes, tensors);
    free(state);
    free(path);
}

Test(damage, every_byte_of_a_sharded_checkpoint_is_guarded)
{
    flip_all(FAKE_GOLDEN_SHARDED);
}

Test(damage, every_byte_of_a_checkpoint_with_sha256_is_guarded)
{
    flip_all(FAKE_GOLDEN_SINGLE);
}

static void in_state(char out[200], int64_t step, const char *name)
{
    snprintf(out, 200, "%s/checkpoint-%lld/state/%s", fake_run.path, (long long)step, name);
}

/* Each of two files is whole, and stands where the other belongs. */
Test(damage, files_that_change_places_are_refused)
{
    static const char *const names[][2] = {{"shard-00001.hashes", "shard-00002.hashes"},
                                           {"shard-00003-model-00001-of-00002.safetensors",
                                            "shard-00004-model-00001-of-00002.safetensors"}};
    char *path = NULL;
    assert_ok(nd_checkpoint_path(fake_run.path, FAKE_GOLDEN_SHARDED, &path));
    for (int i = 0; i < 2; i++) {
        char a[200], b[200];
        in_state(a, FAKE_GOLDEN_SHARDED, names[i][0]);
        in_state(b, FAKE_GOLDEN_SHARDED, names[i][1]);
        cr_assert_eq(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE), 0, "%s", a);
        cr_assert_eq(fake_load_all(path), ND_ERR_DATA, "%s", names[i][0]);
        cr_assert_eq(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE), 0);
        assert_ok(fake_load_all(path));
    }
    free(path);
}

Test(damage, a_state_folder_that_is_a_link_is_refused)
{
    char *path = NULL, state[200], aside[200];
    assert_ok(nd_checkpoint_path(fake_run.path, FAKE_GOLDEN_SINGLE, &path));
    in_state(state, FAKE_GOLDEN_SINGLE, "");
    state[strlen(state) - 1] = '\0';
    snprintf(aside, sizeof aside, "%s/aside", fake_run.path);
    cr_assert_eq(rename(state, aside), 0);
    cr_assert_eq(symlink(aside, state), 0);
    assert_fails(fake_load_all(path), ND_ERR_DATA, "missing or no folder");
    free(path);
}
