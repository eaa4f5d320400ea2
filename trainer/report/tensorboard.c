// SPDX-License-Identifier: Apache-2.0
/*
 * The sink that writes event files for TensorBoard, with the tags of transformers' Trainer where it
 * has one. An event file has records of TFRecord (length, masked CRC-32C of the length, message,
 * masked CRC-32C of the message; all little-endian), each a message Event of protobuf
 * (tensorflow/core/util/event.proto and framework/summary.proto of TensorFlow).
 *
 * Records are appended whole; a reader that follows the file waits for the rest of a cut record.
 * One writer at a time for one folder: readers take its files by name and do not go back.
 */
#include "trainer/report/report.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/printable.h"

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 }; /* wire types of protobuf */

enum { HEAD = 12, TAIL = 4, LENGTH_BYTES = 4, OPEN_MAX = 8 };

/* The most bytes of one record, and of a text, around which stands the rest of its record. */
enum { RECORD_BYTES = 1 << 18, TEXT_BYTES = RECORD_BYTES - 1024 };

/* Fields of Event, Summary, Summary.Value and what a text has, by their numbers. */
enum { EVENT_TIME = 1, EVENT_STEP = 2, EVENT_VERSION = 3, EVENT_SUMMARY = 5, EVENT_SESSION = 7 };
enum { SUMMARY_VALUE = 1, VALUE_TAG = 1, VALUE_SCALAR = 2, VALUE_TENSOR = 8, VALUE_METADATA = 9 };
enum { METADATA_PLUGIN = 1, PLUGIN_NAME = 1, METADATA_CLASS = 4, CLASS_TENSOR = 2 };
enum { TENSOR_DTYPE = 1, DTYPE_STRING = 7, TENSOR_SHAPE = 2, SHAPE_DIM = 2, DIM_SIZE = 1 };
enum { TENSOR_STRING = 8 };
enum { SESSION_STATUS = 1, STATUS_START = 1 };

/* The bytes of one message of protobuf, in memory of the caller; what does not fit sets `full`. */
typedef struct proto {
    uint8_t *data;
    size_t size, capacity;
    bool full;
    size_t open[OPEN_MAX]; /* where the messages that are begun begin */
    int depth;
} proto;

typedef struct tensorboard {
    nd_report_options options;
    int file; /* of the writer */
    proto record;
    uint8_t frame[HEAD + RECORD_BYTES + TAIL];
} tensorboard;

static void put_byte(proto *p, uint8_t byte)
{
    if (p->size == p->capacity) {
        p->full = true;
        return;
    }
    p->data[p->size++] = byte;
}

static void put_raw(proto *p, uint64_t value)
{
    for (; value >= 128; value >>= 7) {
        put_byte(p, (uint8_t)(value | 128));
    }
    put_byte(p, (uint8_t)value);
}

static void put_fixed(proto *p, uint64_t bits, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        put_byte(p, (uint8_t)(bits >> (8 * i)));
    }
}

static void put_key(proto *p, int field, int type)
{
    put_raw(p, (uint64_t)field << 3 | (uint64_t)type);
}

static void put_field_varint(proto *p, int field, uint64_t value)
{
    put_key(p, field, VARINT);
    put_raw(p, value);
}

static void put_field_bytes(proto *p, int field, const void *bytes, size_t count)
{
    put_key(p, field, LENGTH);
    put_raw(p, count);
    if (p->capacity - p->size < count) {
        p->full = true;
        return;
    }
    if (count > 0) {
        memcpy(p->data + p->size, bytes, count);
        p->size += count;
    }
}

/* The length is not known yet: it gets four bytes, which a varint may have whatever its value. */
static void begin_message(proto *p, int field)
{
    put_key(p, field, LENGTH);
    for (int i = 0; i < LENGTH_BYTES; i++) {
        put_byte(p, 0);
    }
    ND_ASSERT(p->depth < OPEN_MAX);
    p->open[p->depth++] = p->size;
}

/* Ends the message that was begun last. */
static void end_message(proto *p)
{
    const size_t begin = p->open[--p->depth], length = p->size - begin;
    if (p->full) {
        return;
    }
    ND_ASSERT(length < (size_t)1 << (7 * LENGTH_BYTES));
    for (int i = 0; i < LENGTH_BYTES; i++) {
        uint8_t more = i + 1 < LENGTH_BYTES ? 128 : 0;
        p->data[begin - LENGTH_BYTES + (size_t)i] = (uint8_t)((length >> (7 * i)) & 127) | more;
    }
}

/* CRC-32C (Castagnoli, RFC 3720 B.4). */
static uint32_t crc32c(const void *bytes, size_t count)
{
    /* The remainders of four bits by the polynomial 0x1edc6f41 with its bits reversed. */
    static const uint32_t table[16] = {0x00000000u, 0x105ec76fu, 0x20bd8edeu, 0x30e349b1u,
                                       0x417b1dbcu, 0x5125dad3u, 0x61c69362u, 0x7198540du,
                                       0x82f63b78u, 0x92a8fc17u, 0xa24bb5a6u, 0xb21572c9u,
                                       0xc38d26c4u, 0xd3d3e1abu, 0xe330a81au, 0xf36e6f75u};
    const uint8_t *b = bytes;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < count; i++) {
        crc ^= b[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

/* The form that TFRecord stores. */
static uint32_t masked_crc(const void *bytes, size_t count)
{
    uint32_t crc = crc32c(bytes, count);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* A record is begun with its step, gets values, and is ended, which gives it to the writer. Nothing
 * is allocated. */
static void begin_event(tensorboard *s, int64_t step)
{
    struct timespec now;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &now);
    const double seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    memcpy(&bits, &seconds, sizeof bits);
    s->record = (proto){.data = s->frame + HEAD, .capacity = RECORD_BYTES};
    put_key(&s->record, EVENT_TIME, FIXED64);
    put_fixed(&s->record, bits, sizeof bits);
    put_field_varint(&s->record, EVENT_STEP, (uint64_t)step);
}

/* All values of a record are in one message, which the end of the record ends. */
static void begin_value(tensorboard *s, const char *tag)
{
    if (s->record.depth == 0) {
        begin_message(&s->record, EVENT_SUMMARY);
    }
    begin_message(&s->record, SUMMARY_VALUE);
    put_field_bytes(&s->record, VALUE_TAG, tag, strlen(tag));
}

static void put_scalar(tensorboard *s, const char *tag, double value)
{
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    begin_value(s, tag);
    put_key(&s->record, VALUE_SCALAR, FIXED32);
    put_fixed(&s->record, bits, sizeof bits);
    end_message(&s->record);
}

/* One text, shown as Markdown. */
static void put_text(tensorboard *s, const char *tag, const char *text)
{
    proto *p = &s->record;
    begin_value(s, tag);
    begin_message(p, VALUE_METADATA);
    begin_message(p, METADATA_PLUGIN);
    put_field_bytes(p, PLUGIN_NAME, "text", strlen("text"));
    end_message(p);
    put_field_varint(p, METADATA_CLASS, CLASS_TENSOR);
    end_message(p);
    begin_message(p, VALUE_TENSOR);
    put_field_varint(p, TENSOR_DTYPE, DTYPE_STRING);
    begin_message(p, TENSOR_SHAPE);
    begin_message(p, SHAPE_DIM);
    put_field_varint(p, DIM_SIZE, 1);
    end_message(p);
    end_message(p);
    put_field_bytes(p, TENSOR_STRING, text, strlen(text));
    end_message(p);
    end_message(p);
}

/* The weight is that of nd_writer_put. */
static nd_status end_record(tensorboard *s, int64_t weight)
{
    proto *p = &s->record;
    while (p->depth > 0) {
        end_message(p);
    }
    if (p->full) {
        return nd_fail(ND_ERR_DATA, "a record is longer than %d bytes", RECORD_BYTES);
    }
    proto head = {.data = s->frame, .capacity = HEAD};
    proto tail = {.data = p->data + p->size, .capacity = TAIL};
    put_fixed(&head, p->size, 8);
    put_fixed(&head, masked_crc(s->frame, 8), 4);
    put_fixed(&tail, masked_crc(p->data, p->size), TAIL);
    nd_writer_put(s->options.writer, s->file, s->frame, HEAD + p->size + TAIL, weight);
    return ND_OK;
}

/* A record of its own: readers forget what older files say of this step and later ones. */
static nd_status put_restart(tensorboard *s, int64_t step)
{
    begin_event(s, step);
    begin_message(&s->record, EVENT_SESSION);
    put_field_varint(&s->record, SESSION_STATUS, STATUS_START);
    return end_record(s, 0); /* curves would be double without it */
}

static const char prefix[] = "events.out.tfevents.";

/* Now, in seconds since 1970, or later by one than the newest event file of the folder. */
static nd_status stamp_for(const char *folder, long long *stamp)
{
    nd_fs_names names;
    ND_TRY(nd_fs_list(folder, &names));
    *stamp = (long long)time(NULL);
    for (int i = 0; i < names.count; i++) {
        if (strncmp(names.list[i], prefix, sizeof prefix - 1) == 0) {
            long long other = atoll(names.list[i] + sizeof prefix - 1);
            *stamp = other >= *stamp && other < 9999999999 ? other + 1 : *stamp;
        }
    }
    nd_fs_names_fini(&names);
    return ND_OK;
}

/* Creates the file and gives it to the writer: its name is above those of all event files there. */
static nd_status create(const char *folder, tensorboard *s)
{
    char host[256] = "localhost", *path = NULL;
    long long stamp = 0;
    ND_TRY(nd_fs_make_own_folder(folder));
    gethostname(host, sizeof host - 1);
    ND_TRY(stamp_for(folder, &stamp));
    ND_TRY(nd_fs_format(&path, "%s/%s%010lld.%s.%lld.0", folder, prefix, stamp, host,
                        (long long)getpid()));
    const int fd = nd_fs_update(path, O_EXCL | O_APPEND);
    const nd_status status =
        fd >= 0 ? nd_writer_add(s->options.writer, "TensorBoard", path, fd, false, &s->file)
                : nd_fail(ND_ERR_CANTCREATE, "%s cannot be created: %s", path, nd_fs_reason(errno));
    free(path);
    ND_TRY(status);
    begin_event(s, 0);
    put_field_bytes(&s->record, EVENT_VERSION, "brain.Event:2", strlen("brain.Event:2"));
    return end_record(s, 1);
}

/* "train/loss/web": a curve of each source. */
static void write_sources(tensorboard *s, const char *tag, const nd_source_loss *list, int count)
{
    char name[80];
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%s/%s", tag, list[i].name);
        put_scalar(s, name, list[i].loss);
    }
}

static nd_status write_step(void *self, const nd_step_record *r)
{
    tensorboard *s = self;
    nd_speed speed = nd_speed_of(&s->options, r->step_seconds);
    double sent = 0;
    for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
        sent += (double)r->wire_bytes[k];
    }
    const struct {
        const char *tag;
        double value;
    } values[] = {
        {"train/loss", r->loss},
        {"train/grad_norm", r->grad_norm},
        {"train/learning_rate", r->lr},
        {"train/num_input_tokens_seen", (double)r->tokens_seen},
        {"train/train_tokens_per_second", speed.tokens_per_second},
        {"train/tflops_per_worker", speed.tflops_causal},
        {"train/step_ms", r->step_seconds * 1e3},
        {"train/data_wait_ms", r->data_wait_seconds * 1e3},
        {"train/sent_mib", sent / 1048576.0},
        {"train/peak_memory_gib", r->peak_memory_bytes / 1073741824.0},
        {"train/skipped", r->skipped},
    };
    begin_event(s, r->step);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        put_scalar(s, values[i].tag, values[i].value);
    }
    write_sources(s, "train/loss", r->sources, r->source_count);
    return end_record(s, 1);
}

static nd_status write_validation(void *self, const nd_validation_record *r)
{
    tensorboard *s = self;
    begin_event(s, r->step);
    put_scalar(s, "eval/loss", r->loss);
    put_scalar(s, "eval/runtime", r->seconds);
    write_sources(s, "eval/loss", r->sets, r->set_count);
    return end_record(s, 1);
}

/* A text as Markdown: lines that begin with four blanks are shown as they are. One that is too long
 * for a record is cut. */
static nd_status indented(const char *text, char **out)
{
    const size_t size = strlen(text);
    size_t used = 0, at = 0;
    ND_TRY(nd_alloc(TEXT_BYTES, 1, (void **)out));
    while (at < size && used < TEXT_BYTES - 16) {
        unsigned code;
        const int n = nd_utf8_decode(text + at, size - at, &code);
        const size_t bytes = n > 0 ? (size_t)n : 1;
        if (at == 0 || text[at - 1] == '\n') {
            used += (size_t)sprintf(*out + used, "    ");
        }
        memcpy(*out + used, text + at, bytes);
        used += bytes;
        at += bytes;
    }
    strcpy(*out + used, at < size ? "..." : "");
    return ND_OK;
}

static nd_status write_event(void *self, const nd_run_event *e)
{
    tensorboard *s = self;
    if (e->kind == ND_RUN_EVENT_SAMPLE) {
        /* A text of each prompt, with a slider over the steps. */
        char tag[96], prompt[80], *text = NULL;
        nd_escape(prompt, sizeof prompt, e->path, "");
        snprintf(tag, sizeof tag, "samples/%s", prompt);
        ND_TRY(indented(e->reason, &text));
        begin_event(s, e->step);
        put_text(s, tag, text);
        free(text);
        return end_record(s, 1);
    }
    if (e->kind == ND_RUN_EVENT_RESUMED) {
        /* `tensorboard --load_fast=false` takes the first mark of a folder for the start of the
         * run, and forgets nothing there. */
        ND_TRY(put_restart(s, e->step + 1));
        return put_restart(s, e->step + 1);
    }
    return ND_OK;
}

static nd_status write_settings(tensorboard *s)
{
    char *yaml = NULL, *text = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_to_yaml(s->options.config, false, &yaml));
    ND_TRY_OUT(indented(yaml, &text));
    begin_event(s, 0);
    put_text(s, "configuration", text);
    status = end_record(s, 1);
out:
    free(yaml);
    free(text);
    return status;
}

nd_status nd_tensorboard_sink_open(const nd_report_options *options, nd_sink *out)
{
    tensorboard *s = NULL;
    char *folder = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &s));
    s->options = *options;
    ND_TRY_OUT(nd_fs_format(&folder, "%s/tensorboard", options->dir));
    ND_TRY_OUT(create(folder, s));
    ND_TRY_OUT(write_settings(s));
    *out = (nd_sink){.name = "TensorBoard",
                     .self = s,
                     .has_file = true,
                     .file = s->file,
                     .step = write_step,
                     .validation = write_validation,
                     .event = write_event,
                     .close = free};
    s = NULL;
out:
    free(folder);
    free(s);
    return status;
}
