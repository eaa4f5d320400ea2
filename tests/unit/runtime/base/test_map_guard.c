// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/tempdir.h"

enum { PAGES = 16 };

typedef struct reading {
    nd_fs_map map;
    int64_t sum;
} reading;

static nd_status add_up(void *context)
{
    reading *r = context;
    for (size_t i = 0; i < r->map.size; i++) {
        r->sum += r->map.data[i];
    }
    return ND_OK;
}

static nd_status refuse(void *context)
{
    return nd_fail(ND_ERR_DATA, "the content is wrong");
}

static reading open_ones(tempdir *dir, const char **path)
{
    static uint8_t ones[PAGES * 4096];
    reading r = {0};
    tempdir_make(dir);
    memset(ones, 1, sizeof ones);
    *path = tempdir_write(dir, "data.bin", ones, sizeof ones);
    assert_ok(nd_fs_map_open(*path, ND_ERR_DATA, &r.map));
    return r;
}

static void close_ones(tempdir *dir, reading *r)
{
    nd_fs_map_close(&r->map);
    tempdir_remove(dir);
}

Test(map_guard, gives_back_what_the_reader_says)
{
    tempdir dir;
    const char *path;
    reading r = open_ones(&dir, &path);
    assert_ok(nd_fs_map_guard(&r.map, path, add_up, &r));
    cr_assert_eq(r.sum, PAGES * 4096);
    assert_fails(nd_fs_map_guard(&r.map, path, refuse, &r), ND_ERR_DATA, "the content is wrong");
    close_ones(&dir, &r);
}

/* Pages that are gone raise SIGBUS; the rest of the last page would read as zeros. */
Test(map_guard, names_a_file_that_became_shorter)
{
    static const long sizes[] = {0, 4096 + 7, PAGES * 4096 - 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        tempdir dir;
        const char *path;
        reading r = open_ones(&dir, &path);
        cr_assert_eq(truncate(path, sizes[i]), 0);
        assert_fails(nd_fs_map_guard(&r.map, path, add_up, &r), ND_ERR_IO, "became shorter");
        assert_fails(nd_fs_map_guard(&r.map, path, add_up, &r), ND_ERR_IO, "65536 bytes");
        close_ones(&dir, &r);
    }
}

static void touch_gone_page(const nd_fs_map *map)
{
    volatile uint8_t value = map->data[map->size - 1];
    (void)value;
}

Test(map_guard, leaves_other_faults_alone, .signal = SIGBUS)
{
    tempdir dir;
    const char *path;
    reading r = open_ones(&dir, &path);
    assert_ok(nd_fs_map_guard(&r.map, path, add_up, &r));
    cr_assert_eq(truncate(path, 0), 0);
    tempdir_remove(&dir);
    touch_gone_page(&r.map);
}

/* A signal that a process sends is not a fault of the reading. */
static nd_status send_fault(void *context)
{
    raise(SIGBUS);
    return ND_OK;
}

Test(map_guard, a_fault_that_is_sent_ends_the_process, .signal = SIGBUS)
{
    tempdir dir;
    const char *path;
    reading r = open_ones(&dir, &path);
    tempdir_remove(&dir);
    (void)nd_fs_map_guard(&r.map, path, send_fault, NULL);
}

Test(map_guard, a_fault_sent_outside_of_a_reading_ends_the_process, .signal = SIGBUS)
{
    tempdir dir;
    const char *path;
    reading r = open_ones(&dir, &path);
    assert_ok(nd_fs_map_guard(&r.map, path, add_up, &r));
    tempdir_remove(&dir);
    raise(SIGBUS);
}

/* A guard inside of a guard leaves the outer one in place. */
typedef struct nested {
    reading outer, inner;
    const char *inner_path;
} nested;

static nd_status read_both(void *context)
{
    nested *n = context;
    assert_fails(nd_fs_map_guard(&n->inner.map, n->inner_path, add_up, &n->inner), ND_ERR_IO,
                 "became shorter");
    return add_up(&n->outer);
}

Test(map_guard, nests)
{
    tempdir dirs[2];
    const char *path;
    nested n;
    char kept[256];
    n.inner = open_ones(&dirs[0], &path);
    snprintf(kept, sizeof kept, "%s", path);
    n.inner_path = kept;
    n.outer = open_ones(&dirs[1], &path);
    cr_assert_eq(truncate(kept, 0), 0);
    cr_assert_eq(truncate(path, 0), 0);
    assert_fails(nd_fs_map_guard(&n.outer.map, path, read_both, &n), ND_ERR_IO, "became shorter");
    close_ones(&dirs[0], &n.inner);
    close_ones(&dirs[1], &n.outer);
}
