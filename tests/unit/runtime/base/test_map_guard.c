// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/tempdir.h"

enum { PAGES = 16 };

static tempdir dir;

TEMPDIR_SUITE(map_guard, tempdir_leave_empty);

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

/* A file of ones. */
static reading open_ones(const char *name)
{
    static uint8_t ones[PAGES * 4096];
    reading r = {0};
    memset(ones, 1, sizeof ones);
    assert_ok(nd_fs_map_open(tempdir_write(&dir, name, ones, sizeof ones), ND_ERR_DATA, &r.map));
    return r;
}

static nd_status guard(reading *r, nd_status (*read)(void *context))
{
    return nd_fs_map_guard(&r->map, "the file", read, r);
}

static void shorten(const char *name, long size)
{
    cr_assert_eq(truncate(tempdir_file(&dir, name), size), 0);
}

Test(map_guard, gives_back_what_the_reader_says)
{
    reading r = open_ones("a");
    assert_ok(guard(&r, add_up));
    cr_assert_eq(r.sum, PAGES * 4096);
    assert_fails(guard(&r, refuse), ND_ERR_DATA, "the content is wrong");
    nd_fs_map_close(&r.map);
}

/* Pages that are gone raise SIGBUS; the rest of the last page would read as zeros. */
Test(map_guard, names_a_file_that_became_shorter)
{
    static const long sizes[] = {0, 4096 + 7, PAGES * 4096 - 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        reading r = open_ones("a");
        shorten("a", sizes[i]);
        assert_fails(guard(&r, add_up), ND_ERR_IO, "\"the file\" became shorter");
        cr_assert_eq(nd_error_last()->cause, ND_CAUSE_LOCAL, "no lost peer explains it");
        assert_fails(guard(&r, add_up), ND_ERR_IO, "65536 bytes");
        nd_fs_map_close(&r.map);
    }
}

static void touch_gone_page(const nd_fs_map *map)
{
    volatile uint8_t value = map->data[map->size - 1];
    (void)value;
}

Test(map_guard, leaves_other_faults_alone, .signal = SIGBUS)
{
    reading r = open_ones("a");
    assert_ok(guard(&r, add_up));
    shorten("a", 0);
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
    reading r = open_ones("a");
    tempdir_remove(&dir);
    (void)guard(&r, send_fault);
}

Test(map_guard, a_fault_sent_outside_of_a_reading_ends_the_process, .signal = SIGBUS)
{
    reading r = open_ones("a");
    assert_ok(guard(&r, add_up));
    tempdir_remove(&dir);
    raise(SIGBUS);
}

/* A guard inside of a guard leaves the outer one in place. */
static nd_status read_both(void *context)
{
    reading inner = open_ones("inner");
    shorten("inner", 0);
    assert_fails(guard(&inner, add_up), ND_ERR_IO, "became shorter");
    nd_fs_map_close(&inner.map);
    return add_up(context);
}

Test(map_guard, nests)
{
    reading outer = open_ones("outer");
    shorten("outer", 0);
    assert_fails(guard(&outer, read_both), ND_ERR_IO, "became shorter");
    nd_fs_map_close(&outer.map);
}
