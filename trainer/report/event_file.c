// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/event_file.h"

#include <fcntl.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 }; /* wire types of protobuf */

enum { HEAD = 12, TAIL = 4, LENGTH_BYTES = 4, OPEN_MAX = 8 };

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

struct nd_event_file {
    nd_writer *writer; /* borrowed */
    int file;
    proto record;
    uint8_t frame[HEAD + ND_EVENT_BYTES_MAX + TAIL];
};

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

uint32_t nd_crc32c(const void *bytes, size_t count)
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

uint32_t nd_crc32c_masked(const void *bytes, size_t count)
{
    uint32_t crc = nd_crc32c(bytes, count);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

void nd_event_begin(nd_event_file *file, int64_t step)
{
    struct timespec now;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &now);
    const double seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    memcpy(&bits, &seconds, sizeof bits);
    file->record = (proto){.data = file->frame + HEAD, .capacity = ND_EVENT_BYTES_MAX};
    put_key(&file->record, EVENT_TIME, FIXED64);
    put_fixed(&file->record, bits, sizeof bits);
    put_field_varint(&file->record, EVENT_STEP, (uint64_t)step);
}

/* All values of a record are in one message, which the end of the record ends. */
static void begin_value(nd_event_file *file, const char *tag)
{
    if (file->record.depth == 0) {
        begin_message(&file->record, EVENT_SUMMARY);
    }
    begin_message(&file->record, SUMMARY_VALUE);
    put_field_bytes(&file->record, VALUE_TAG, tag, strlen(tag));
}

void nd_event_scalar(nd_event_file *file, const char *tag, double value)
{
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    begin_value(file, tag);
    put_key(&file->record, VALUE_SCALAR, FIXED32);
    put_fixed(&file->record, bits, sizeof bits);
    end_message(&file->record);
}

void nd_event_text(nd_event_file *file, const char *tag, const char *text)
{
    proto *p = &file->record;
    begin_value(file, tag);
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
static nd_status end_record(nd_event_file *file, int64_t weight)
{
    proto *p = &file->record;
    while (p->depth > 0) {
        end_message(p);
    }
    if (p->full) {
        return nd_fail(ND_ERR_DATA, "a record is longer than %d bytes", ND_EVENT_BYTES_MAX);
    }
    proto head = {.data = file->frame, .capacity = HEAD};
    proto tail = {.data = p->data + p->size, .capacity = TAIL};
    put_fixed(&head, p->size, 8);
    put_fixed(&head, nd_crc32c_masked(file->frame, 8), 4);
    put_fixed(&tail, nd_crc32c_masked(p->data, p->size), TAIL);
    nd_writer_put(file->writer, file->file, file->frame, HEAD + p->size + TAIL, weight);
    return ND_OK;
}

nd_status nd_event_end(nd_event_file *file)
{
    return end_record(file, 1);
}

nd_status nd_event_restart(nd_event_file *file, int64_t step)
{
    nd_event_begin(file, step);
    begin_message(&file->record, EVENT_SESSION);
    put_field_varint(&file->record, SESSION_STATUS, STATUS_START);
    return end_record(file, 0); /* curves would be double without it */
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

/* Creates the file and gives it to the writer. */
static nd_status create(const char *folder, nd_event_file *file)
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
        fd >= 0 ? nd_writer_add(file->writer, "TensorBoard", path, fd, false, &file->file)
                : nd_fail(ND_ERR_CANTCREATE, "%s cannot be created: %s", path, nd_fs_reason(errno));
    free(path);
    return status;
}

nd_status nd_event_file_open(const char *folder, nd_writer *writer, int *number,
                             nd_event_file **out)
{
    nd_event_file *file = NULL;
    ND_TRY(ND_ALLOC(1, &file));
    file->writer = writer;
    nd_status status = create(folder, file);
    if (status != ND_OK) {
        free(file);
        return status;
    }
    nd_event_begin(file, 0);
    put_field_bytes(&file->record, EVENT_VERSION, "brain.Event:2", strlen("brain.Event:2"));
    *number = file->file;
    *out = file;
    return nd_event_end(file);
}

void nd_event_file_close(nd_event_file *file)
{
    free(file);
}
