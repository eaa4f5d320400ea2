// SPDX-License-Identifier: Apache-2.0
/* Records on their way to files: their order, full disks, and writes that do not return. */
#include "trainer/report/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include "tests/unit/trainer/report/report_files.h"

enum { ROOM = 1 << 16, LINE = 64 };

static char why[ND_WRITER_WHY_BYTES];
static nd_writer *w;

static void make(void)
{
    tempdir_catch_stderr(&dir);
}

TEMPDIR_SUITE(writer, make, .timeout = 60);

static int add(const char *name, bool required)
{
    const char *path = tempdir_file(&dir, name);
    const int fd = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
    int file = -1;
    cr_assert_geq(fd, 0);
    assert_ok(nd_writer_add(w, name, path, fd, required, &file));
    return file;
}

/* A writer with patience enough for any disk, and its file "a", which is required. */
static int begin(void)
{
    assert_ok(nd_writer_open(1e6, ROOM, &w));
    return add("a", true);
}

/* A line of LINE bytes with a number. */
static void put(int file, int number, int64_t weight)
{
    char line[LINE + 1];
    snprintf(line, sizeof line, "%0*d\n", LINE - 1, number);
    nd_writer_put(w, file, line, LINE, weight);
}

/* The numbers of a file's lines are these, up to -1. */
static void expect_lines(const char *name, const int *numbers)
{
    char *text = read_file(name);
    size_t lines = 0;
    for (; numbers[lines] >= 0; lines++) {
        cr_assert_geq(strlen(text), (lines + 1) * LINE, "%s", text);
        cr_expect_eq(atoi(text + lines * LINE), numbers[lines], "line %zu of %s:\n%s", lines, name,
                     text);
    }
    cr_expect_eq(strlen(text), lines * LINE, "%s", text);
    free(text);
}

Test(writer, records_go_to_their_files_in_order)
{
    enum { COUNT = 5000 }; /* more than the queue holds */
    static int numbers[COUNT + 1];
    const int a = begin(), b = add("b", false);
    for (int i = 0; i < COUNT; i++) {
        put(a, i, 1);
        put(b, i, 1);
        numbers[i] = i;
    }
    numbers[COUNT] = -1;
    assert_ok(nd_writer_flush(w));
    cr_expect_eq(nd_writer_bytes(w, a), COUNT * LINE);
    expect_lines("a", numbers);
    expect_lines("b", numbers);
    cr_expect_eq(nd_writer_take_lost(w, a, why), 0);
    nd_writer_finish(w);
    nd_writer_close(w);
    said(0, "warning");
}

/* The full disk takes a part of a record. */
Test(writer, a_full_disk_costs_records_and_keeps_those_of_weight_0)
{
    const int a = begin();
    put(a, 1, 1);
    assert_ok(nd_writer_flush(w));
    set_file_limit(LINE + 20);
    put(a, 2, 1);
    put(a, 3, 0);
    put(a, 4, 5);
    put(a, 5, 0);
    assert_ok(nd_writer_flush(w));
    expect_lines("a", (int[]){1, -1});
    cr_expect_eq(nd_writer_take_lost(w, a, why), 0, "it still loses records");
    set_file_limit(RLIM_INFINITY);
    put(a, 6, 1);
    assert_ok(nd_writer_flush(w));
    expect_lines("a", (int[]){1, 3, 5, 6, -1});
    cr_expect_eq(nd_writer_take_lost(w, a, why), 6);
    cr_expect_not_null(strstr(why, "File too large"), "%s", why);
    cr_expect_eq(nd_writer_take_lost(w, a, why), 0, "they are told once");
    cr_expect_eq(nd_writer_bytes(w, a), 4 * LINE);
    nd_writer_close(w);
    said(1, "warning: a loses records of this run, which goes on");
}

/* 16 KiB of such records are kept; those beyond are lost, and counted. */
Test(writer, a_full_disk_keeps_some_records_of_weight_0)
{
    enum { KEPT = (16 << 10) / LINE, COUNT = KEPT + 44 };
    static int numbers[KEPT + 2];
    const int a = begin();
    set_file_limit(10);
    for (int i = 0; i < COUNT; i++) {
        put(a, i, 0);
        numbers[i < KEPT ? i : KEPT] = i;
    }
    assert_ok(nd_writer_flush(w));
    set_file_limit(RLIM_INFINITY);
    put(a, COUNT - 1, 1);
    assert_ok(nd_writer_flush(w));
    numbers[KEPT + 1] = -1;
    expect_lines("a", numbers);
    cr_expect_eq(nd_writer_take_lost(w, a, why), COUNT - KEPT);
    nd_writer_close(w);
}

Test(writer, a_deleted_file_is_an_error_when_it_is_required)
{
    const int a = begin(), b = add("b", false);
    cr_assert_eq(unlink(tempdir_file(&dir, "b")), 0);
    put(b, 1, 1);
    assert_ok(nd_writer_flush(w));
    said(1, "warning: b loses records of this run");
    cr_assert_eq(unlink(tempdir_file(&dir, "a")), 0);
    put(a, 1, 1);
    assert_fails(nd_writer_flush(w), ND_ERR_CANTCREATE, "was deleted during the run");
    put(a, 2, 1);
    assert_fails(nd_writer_flush(w), ND_ERR_CANTCREATE, "was deleted during the run");
    nd_writer_finish(w);
    cr_expect_eq(nd_writer_take_lost(w, b, why), 1);
    nd_writer_close(w);
}

/* The writer has a pipe that nobody reads, already full: a write to it does not return. */
static int begin_with_full_pipe(double patience, int *reader)
{
    int ends[2], file = -1;
    char bytes[1 << 12] = {0};
    assert_ok(nd_writer_open(patience, ROOM, &w));
    cr_assert_eq(pipe2(ends, O_NONBLOCK), 0);
    while (write(ends[1], bytes, sizeof bytes) > 0) {
    }
    cr_assert_eq(fcntl(ends[1], F_SETFL, 0), 0);
    assert_ok(nd_writer_add(w, "metrics", "the pipe", ends[1], true, &file));
    *reader = ends[0];
    return file;
}

/* Empties the pipe. Returns the number of the last line; `last` where there is none. */
static int read_all(int reader, int last)
{
    char lines[1 << 12], *line;
    for (ssize_t n; (n = read(reader, lines, sizeof lines)) > 0;) {
        cr_assert_eq(n % LINE, 0);
        line = lines + n - LINE;
        last = *line ? atoi(line) : last;
    }
    return last;
}

/* The run waits once, what finds no room is counted, and it goes on when the write returns. What
 * must not be lost comes behind all that found room. */
Test(writer, a_write_that_hangs_holds_up_nothing)
{
    enum { COUNT = 2000, KEPT = 400 }; /* more than two batches, and than 16 KiB, hold */
    int reader;
    const int a = begin_with_full_pipe(0.1, &reader);
    for (int i = 0; i < COUNT + KEPT; i++) {
        put(a, i < COUNT ? i : COUNT, i < COUNT);
    }
    put(a, COUNT, 1);
    assert_ok(nd_writer_flush(w));
    said(1, "warning: metrics does not answer, and the run goes on");
    cr_expect_eq(nd_writer_take_lost(w, a, why), 0, "it is not written again yet");
    int64_t lost = 0;
    int last = -1;
    while (lost == 0) {
        usleep(1000);
        lost = nd_writer_take_lost(w, a, why);
        last = read_all(reader, last);
    }
    cr_expect(lost > 0 && lost < COUNT, "%lld", (long long)lost);
    cr_expect_str_eq(why, "a write has not returned");
    cr_expect_eq(last, COUNT);
    const int64_t before = nd_writer_bytes(w, a);
    cr_expect_eq(before, (COUNT + KEPT + 1 - lost) * LINE);
    put(a, COUNT + 1, 1);
    while (nd_writer_bytes(w, a) == before) {
        usleep(1000);
    }
    cr_expect_eq(nd_writer_bytes(w, a), before + LINE);
    nd_writer_close(w);
    close(reader);
}

/* Each round, in which records find no room, takes patience: when there is none, the disk is slow
 * before a write is found to hang. */
Test(writer, a_disk_that_is_slower_than_the_run_is_told_once)
{
    int reader, slow = 0;
    const int a = begin_with_full_pipe(0.2, &reader);
    while (slow < 2) {
        for (int k = 0; k < 2000; k++) { /* more than two batches and a pipe hold */
            put(a, k, 1);
        }
        while (nd_writer_take_lost(w, a, why) == 0) {
            read_all(reader, -1);
            usleep(1000);
        }
        slow += strcmp(why, "it is slower than the run") == 0;
    }
    said(1, "warning: metrics loses records of this run, which goes on: it is slower than the run");
    nd_writer_close(w);
    close(reader);
}

/* Three hangs would take all patience; each is found out by a wait. */
Test(writer, patience_comes_back_with_the_disk)
{
    int reader;
    const int a = begin_with_full_pipe(0.3, &reader);
    cr_assert_eq(read_all(reader, -1), -1);
    const int pages = fcntl(reader, F_SETPIPE_SZ, 1 << 12), lines = pages / LINE + 8;
    cr_assert_gt(pages, 0);
    for (int i = 1; i <= 3; i++) {
        for (int k = 0; k < lines; k++) {
            put(a, k, 1);
        }
        assert_ok(nd_writer_flush(w));
        said(i, "warning: metrics does not answer");
        while (nd_writer_bytes(w, a) < (int64_t)i * lines * LINE) {
            read_all(reader, -1);
            usleep(1000);
        }
        assert_ok(nd_writer_flush(w));
        read_all(reader, -1);
    }
    nd_writer_close(w);
    close(reader);
}

/* Lines that wait are counted, and nobody waits for them; the reason is that of the first that was
 * lost. The thread outlives the test. */
Test(writer, a_run_ends_while_a_write_hangs)
{
    enum { COUNT = 2000 }; /* more than two batches hold */
    int reader;
    const int a = begin_with_full_pipe(0.1, &reader), b = add("b", false);
    put(a, 0, 1);
    put(b, 0, 1);
    for (int i = 1; i < COUNT; i++) {
        put(a, i, 1);
    }
    nd_writer_finish(w);
    cr_expect_eq(nd_writer_take_lost(w, a, why), COUNT);
    cr_expect_str_eq(why, "a write has not returned");
    cr_expect_eq(nd_writer_take_lost(w, b, why), 1);
    cr_expect_str_eq(why, "it was not written at the end of the run");
    put(a, 9, 1);
    assert_ok(nd_writer_flush(w));
    nd_writer_close(w);
    said(1, "warning: metrics does not answer");
}
