// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/event_file.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "tests/support/tempdir.h"

static tempdir dir;

TEMPDIR_SUITE(event_file, tempdir_leave_empty);

static nd_writer *writer;

static nd_event_file *open_file(void)
{
    nd_event_file *file = NULL;
    int number = -1;
    assert_ok(nd_writer_open(1e6, 4 * ND_EVENT_BYTES_MAX, &writer));
    assert_ok(nd_event_file_open(dir.path, writer, &number, &file));
    cr_assert_eq(number, 0);
    return file;
}

static void close_file(nd_event_file *file)
{
    assert_ok(nd_writer_flush(writer));
    nd_writer_close(writer);
    nd_event_file_close(file);
}

/* The only event file of the folder; with several, the last one by name. */
static const char *newest_file(void)
{
    static char path[512];
    char best[256] = "";
    DIR *d = opendir(dir.path);
    cr_assert_not_null(d);
    for (struct dirent *e = readdir(d); e; e = readdir(d)) {
        if (strstr(e->d_name, "tfevents") && strcmp(e->d_name, best) > 0) {
            snprintf(best, sizeof best, "%s", e->d_name);
        }
    }
    closedir(d);
    snprintf(path, sizeof path, "%s/%s", dir.path, best);
    return path;
}

typedef struct content {
    char *bytes;
    size_t size;
} content;

static content read_content(const char *path)
{
    content c = {0};
    assert_ok(nd_fs_read(path, 1 << 22, ND_ERR_DATA, &c.bytes, &c.size));
    return c;
}

static uint64_t le(const char *at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)(uint8_t)at[i] << (8 * i);
    }
    return value;
}

/* Checks the frame at *at and moves past it; returns the message and its length. */
static const char *next_record(const content *c, size_t *at, size_t *length)
{
    cr_assert_geq(c->size - *at, 16);
    const char *frame = c->bytes + *at;
    *length = le(frame, 8);
    cr_assert_eq(le(frame + 8, 4), nd_crc32c_masked(frame, 8));
    cr_assert_geq(c->size - *at, 16 + *length);
    cr_assert_eq(le(frame + 12 + *length, 4), nd_crc32c_masked(frame + 12, *length));
    *at += 16 + *length;
    return frame + 12;
}

/* Where a field of a message begins, behind its key and length; NULL: not there. */
static const char *field(const char *message, size_t length, uint32_t wanted, size_t *bytes)
{
    const char *at = message, *end = message + length;
    while (at < end) {
        uint64_t parts[2] = {0};
        for (int part = 0, shift = 0; part < 2; part++, shift = 0) {
            do {
                cr_assert_lt(at, end);
                parts[part] |= (uint64_t)(*at & 127) << shift;
                shift += 7;
            } while (*at++ & 128);
            if (part == 0 && (parts[0] & 7) != 2) { /* no length follows */
                uint32_t type = (uint32_t)(parts[0] & 7);
                cr_assert(type == 0 || type == 1 || type == 5, "wire type %u", type);
                const char *value = at;
                if (type == 0) {
                    while (*at++ & 128) {
                    }
                } else {
                    at += type == 1 ? 8 : 4;
                }
                *bytes = (size_t)(at - value);
                if (parts[0] >> 3 == wanted) {
                    return value;
                }
                break;
            }
            if (part == 1) {
                *bytes = (size_t)parts[1];
                cr_assert_leq(parts[1], (uint64_t)(end - at));
                if (parts[0] >> 3 == wanted) {
                    return at;
                }
                at += parts[1];
            }
        }
    }
    return NULL;
}

/* RFC 3720 B.4, and the check value of the polynomial. */
Test(event_file, checksums_are_those_of_the_standard)
{
    char bytes[32];
    cr_assert_eq(nd_crc32c("123456789", 9), 0xe3069283u);
    memset(bytes, 0, sizeof bytes);
    cr_assert_eq(nd_crc32c(bytes, sizeof bytes), 0x8a9136aau);
    memset(bytes, 0xff, sizeof bytes);
    cr_assert_eq(nd_crc32c(bytes, sizeof bytes), 0x62a8ab43u);
    for (int i = 0; i < 32; i++) {
        bytes[i] = (char)i;
    }
    cr_assert_eq(nd_crc32c(bytes, sizeof bytes), 0x46dd794eu);
    cr_assert_eq(nd_crc32c(NULL, 0), 0);
}

Test(event_file, a_record_has_the_step_and_all_its_values)
{
    nd_event_file *file = open_file();
    nd_event_begin(file, 300);
    nd_event_scalar(file, "train/loss", 1.5);
    nd_event_scalar(file, "eval/loss", 2.5);
    assert_ok(nd_event_end(file));
    close_file(file);
    content c = read_content(newest_file());
    size_t at = 0, length, bytes;
    const char *version = next_record(&c, &at, &length);
    const char *text = field(version, length, 3, &bytes);
    cr_assert_eq(bytes, strlen("brain.Event:2"));
    cr_assert_eq(memcmp(text, "brain.Event:2", bytes), 0);
    const char *event = next_record(&c, &at, &length);
    cr_assert_eq(at, c.size, "there are no more records");
    const char *step = field(event, length, 2, &bytes);
    cr_assert_eq(bytes, 2);
    cr_assert_eq((step[0] & 127) | step[1] << 7, 300);
    size_t summary_bytes;
    const char *summary = field(event, length, 5, &summary_bytes);
    const char *first = field(summary, summary_bytes, 1, &bytes);
    size_t tag_bytes, value_bytes;
    const char *tag = field(first, bytes, 1, &tag_bytes);
    cr_assert_eq(strncmp(tag, "train/loss", tag_bytes), 0);
    float value;
    memcpy(&value, field(first, bytes, 2, &value_bytes), sizeof value);
    cr_assert_eq(value, 1.5f);
    const char *rest = first + bytes; /* the second value has a key of its own */
    const char *second = field(rest, (size_t)(summary + summary_bytes - rest), 1, &bytes);
    memcpy(&value, field(second, bytes, 2, &value_bytes), sizeof value);
    cr_assert_eq(value, 2.5f);
    free(c.bytes);
}

/* Readers take the files of a folder by name and never go back. */
Test(event_file, a_later_file_has_a_later_name)
{
    char names[3][512];
    for (int i = 0; i < 3; i++) {
        close_file(open_file());
        snprintf(names[i], sizeof names[i], "%s", newest_file());
        cr_assert(i == 0 || strcmp(names[i], names[i - 1]) > 0, "%s", names[i]);
    }
    tempdir_write(&dir, "events.out.tfevents.3000000000.zz.1.0", "", 0);
    close_file(open_file());
    cr_assert_not_null(strstr(newest_file(), "tfevents.3000000001."));
}

Test(event_file, a_record_that_is_too_long_is_refused)
{
    nd_event_file *file = open_file();
    char *text = malloc(ND_EVENT_BYTES_MAX + 1);
    memset(text, 'x', ND_EVENT_BYTES_MAX);
    text[ND_EVENT_BYTES_MAX] = '\0';
    nd_event_begin(file, 1);
    nd_event_text(file, "text", text);
    assert_fails(nd_event_end(file), ND_ERR_DATA, "longer than 262144 bytes");
    nd_event_begin(file, 2); /* the next record is not touched by it */
    nd_event_scalar(file, "loss", 1);
    assert_ok(nd_event_end(file));
    close_file(file);
    free(text);
    content c = read_content(newest_file());
    size_t at = 0, length;
    next_record(&c, &at, &length);
    next_record(&c, &at, &length);
    cr_assert_eq(at, c.size);
    free(c.bytes);
}
