// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "tests/support/printed.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/report/report.h"

static tempdir dir;

TEMPDIR_SUITE(tensorboard, tempdir_leave_empty);

static const nd_shape shape = {SIZES(256, 64, 128, 2, 4, 2, 16)};

static const nd_source_loss sources[] = {{"web", 3.5, 60}, {"code", 4.25, 4}};

/* Opens the sink, resumes before a step, writes the step with sources and a validation with sets,
 * and closes it. */
static void write_step(int64_t step, double loss)
{
    nd_config config;
    nd_sink sink;
    assert_ok(nd_config_init(&config));
    nd_report_options options = {.config = &config,
                                 .shape = &shape,
                                 .dir = dir.path,
                                 .world_size = 2,
                                 .tokens_per_step = 1024};
    assert_ok(nd_writer_open(1e6, 1 << 20, &options.writer));
    assert_ok(nd_tensorboard_sink_open(&options, &sink));
    assert_ok(sink.event(sink.self, &(nd_run_event){ND_RUN_EVENT_RESUMED, step - 1}));
    assert_ok(sink.step(sink.self, &(nd_step_record){.step = step,
                                                     .loss = loss,
                                                     .grad_norm = 2.5,
                                                     .lr = 0.25,
                                                     .tokens = 1000,
                                                     .tokens_seen = 3000,
                                                     .step_seconds = 2,
                                                     .data_wait_seconds = 0.5,
                                                     .peak_memory_bytes = 3 << 29,
                                                     .wire_bytes = {1 << 20, 1 << 19},
                                                     .skipped = true,
                                                     .sources = sources,
                                                     .source_count = 2}));
    assert_ok(sink.validation(
        sink.self, &(nd_validation_record){
                       .step = step, .loss = 3, .seconds = 1.5, .sets = sources, .set_count = 2}));
    assert_ok(nd_writer_flush(options.writer));
    sink.close(sink.self);
    nd_writer_close(options.writer);
    nd_config_fini(&config);
}

/* The event file whose name is the last one. */
static const char *newest_file(void)
{
    static char path[512];
    nd_fs_names names;
    assert_ok(nd_fs_list(tempdir_file(&dir, "tensorboard"), &names));
    snprintf(path, sizeof path, "%s/tensorboard/", dir.path);
    const size_t folder = strlen(path);
    for (int i = 0; i < names.count; i++) {
        if (strcmp(names.list[i], path + folder) > 0) {
            snprintf(path + folder, sizeof path - folder, "%s", names.list[i]);
        }
    }
    nd_fs_names_fini(&names);
    return path;
}

static char *content; /* of a file, of which the records before `at` were read */
static size_t size, at;

/* The lowest byte comes first, as on all hosts that there is a backend for. */
static uint64_t le(const char *from, size_t bytes)
{
    uint64_t value = 0;
    memcpy(&value, from, bytes);
    return value;
}

/* CRC-32C bit by bit (RFC 3720 B.4), as TFRecord masks it. */
static uint32_t masked_crc(const char *bytes, size_t count)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < 8 * count; i++) {
        crc ^= i % 8 == 0 ? (uint8_t)bytes[i / 8] : 0u;
        crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Checks the next frame and moves past it; returns the message and its length. */
static const char *next_record(size_t *length)
{
    cr_assert_geq(size - at, 16);
    const char *frame = content + at;
    *length = le(frame, 8);
    cr_assert_eq(le(frame + 8, 4), masked_crc(frame, 8));
    cr_assert_geq(size - at, 16 + *length);
    cr_assert_eq(le(frame + 12 + *length, 4), masked_crc(frame + 12, *length));
    at += 16 + *length;
    return frame + 12;
}

/* A number with seven bits in each byte; moves past it. */
static uint64_t varint(const char **from, const char *end)
{
    uint64_t value = 0;
    for (int shift = 0, more = 128; more; shift += 7) {
        cr_assert_lt(*from, end);
        more = **from & 128;
        value |= (uint64_t)(*(*from)++ & 127) << shift;
    }
    return value;
}

/* Where a field of a message begins, behind its key and length; NULL: not there. */
static const char *field(const char *message, size_t length, uint32_t wanted, size_t *bytes)
{
    const char *from = message, *end = message + length;
    while (from < end) {
        const uint64_t key = varint(&from, end);
        const uint32_t type = key & 7;
        const char *value = from;
        if (type == 0) {
            varint(&from, end);
        } else if (type == 2) {
            const uint64_t count = varint(&from, end);
            cr_assert_leq(count, (uint64_t)(end - from));
            value = from;
            from += count;
        } else {
            cr_assert(type == 1 || type == 5, "wire type %u", type);
            from += type == 1 ? 8 : 4;
        }
        *bytes = (size_t)(from - value);
        if (key >> 3 == wanted) {
            return value;
        }
    }
    return NULL;
}

/* The values of an event: NAME=VALUE, one a line. */
static void read_values(const char *event, size_t length, char *text, size_t room)
{
    size_t rest, used = 0, bytes, tag_bytes, value_bytes;
    const char *value = field(event, length, 5, &rest), *end = value + rest;
    while (value < end) { /* each value has a key of its own */
        float got;
        value = field(value, (size_t)(end - value), 1, &bytes);
        const char *tag = field(value, bytes, 1, &tag_bytes);
        memcpy(&got, field(value, bytes, 2, &value_bytes), sizeof got);
        used += (size_t)snprintf(text + used, room - used, "%.*s=%g\n", (int)tag_bytes, tag, got);
        cr_assert_lt(used, room);
        value += bytes;
    }
}

Test(tensorboard, a_record_has_the_step_and_all_its_values)
{
    write_step(300, 1.5);
    size_t length, bytes;
    char values[1024];
    assert_ok(nd_fs_read(newest_file(), 1 << 22, ND_ERR_DATA, &content, &size));
    const char *version = next_record(&length);
    const char *text = field(version, length, 3, &bytes);
    cr_assert_eq(bytes, strlen("brain.Event:2"));
    cr_assert_eq(memcmp(text, "brain.Event:2", bytes), 0);
    const char *event = next_record(&length); /* the configuration, with blanks before each line */
    cr_expect_not_null(memmem(event, length, "\n      steps: ", 14));
    for (int marks = 2; marks >= 0; marks--) { /* of a resume, then the step itself */
        event = next_record(&length);
        const char *step = field(event, length, 2, &bytes);
        cr_assert_eq(varint(&step, step + bytes), 300);
        cr_assert_eq(field(event, length, 7, &bytes) != NULL, marks > 0);
    }
    read_values(event, length, values, sizeof values);
    cr_expect_str_eq(values,
                     printed("train/loss=1.5\ntrain/grad_norm=2.5\ntrain/learning_rate=0.25\n"
                             "train/num_input_tokens_seen=3000\ntrain/train_tokens_per_second=512\n"
                             "train/tflops_per_worker=%g\ntrain/step_ms=2000\n"
                             "train/data_wait_ms=500\ntrain/sent_mib=1.5\n"
                             "train/peak_memory_gib=1.5\ntrain/skipped=1\ntrain/loss/web=3.5\n"
                             "train/loss/code=4.25\n",
                             256e-12 * nd_flops_per_token_causal(&shape, 1024)),
                     "%s", values);
    event = next_record(&length);
    read_values(event, length, values, sizeof values);
    cr_expect_str_eq(values,
                     "eval/loss=3\neval/runtime=1.5\neval/loss/web=3.5\neval/loss/code=4.25\n");
    cr_assert_eq(at, size, "there are no more records");
    free(content);
}

/* Readers take the files of a folder by name and never go back. */
Test(tensorboard, a_later_file_has_a_later_name)
{
    char names[3][512];
    for (int i = 0; i < 3; i++) {
        write_step(1, 1);
        snprintf(names[i], sizeof names[i], "%s", newest_file());
        cr_assert(i == 0 || strcmp(names[i], names[i - 1]) > 0, "%s", names[i]);
    }
    tempdir_write(&dir, "tensorboard/events.out.tfevents.3000000000.zz.1.0", "", 0);
    write_step(1, 1);
    cr_assert_not_null(strstr(newest_file(), "tfevents.3000000001."));
}
