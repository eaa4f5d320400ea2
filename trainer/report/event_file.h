// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_EVENT_FILE_H
#define ND_REPORT_EVENT_FILE_H
/*
 * A TensorBoard event file: records of TFRecord (length, masked CRC-32C of the length, message,
 * masked CRC-32C of the message; all little-endian), each a message Event of protobuf
 * (tensorflow/core/util/event.proto and framework/summary.proto of TensorFlow).
 *
 * Records are appended whole; a reader that follows the file waits for the rest of a cut record.
 * One writer at a time for one folder: readers take its files by name and do not go back.
 */
#include "trainer/report/writer.h"

/* CRC-32C (Castagnoli, RFC 3720 B.4) of bytes, and the form that TFRecord stores:
 * ((crc >> 15) | (crc << 17)) + 0xa282ead8. */
uint32_t nd_crc32c(const void *bytes, size_t count);
uint32_t nd_crc32c_masked(const void *bytes, size_t count);

typedef struct nd_event_file nd_event_file;

enum {
    ND_EVENT_BYTES_MAX = 1 << 18 /* of one record */
};

/* Creates folder/events.out.tfevents.<seconds>.<host>.<pid>.0, whose name is above those of all
 * event files there, gives it to the writer (*number), and writes the record of its version.
 * ND_ERR_CANTCREATE. */
nd_status nd_event_file_open(const char *folder, nd_writer *writer, int *number,
                             nd_event_file **out);
void nd_event_file_close(nd_event_file *file); /* NULL is legal */

/*
 * A record is begun with its step, gets values, and is ended, which gives it to the writer. Nothing
 * is allocated. ND_ERR_DATA: the record is longer than ND_EVENT_BYTES_MAX, and is left out.
 */
void nd_event_begin(nd_event_file *file, int64_t step);
void nd_event_scalar(nd_event_file *file, const char *tag, double value);
/* One text, shown as Markdown. */
void nd_event_text(nd_event_file *file, const char *tag, const char *text);
nd_status nd_event_end(nd_event_file *file);

/* A record of its own: readers forget what older files say of this step and later ones. */
nd_status nd_event_restart(nd_event_file *file, int64_t step);

#endif
