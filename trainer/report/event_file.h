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
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

/* CRC-32C (Castagnoli, RFC 3720 B.4) of bytes, and the form that TFRecord stores:
 * ((crc >> 15) | (crc << 17)) + 0xa282ead8. */
uint32_t nd_crc32c(const void *bytes, size_t count);
uint32_t nd_crc32c_masked(const void *bytes, size_t count);

typedef struct nd_event_file nd_event_file;

enum {
    ND_EVENT_BYTES_MAX = 1 << 20 /* of one record */
};

typedef enum nd_session_mark { /* SessionLog.SessionStatus */
                               ND_SESSION_START = 1,
                               ND_SESSION_STOP = 2,
                               ND_SESSION_CHECKPOINT = 3
} nd_session_mark;

/* Creates folder/events.out.tfevents.<seconds>.<host>.<pid>.0, whose name is above those of all
 * event files there, and writes the record of its version. ND_ERR_CANTCREATE. */
nd_status nd_event_file_open(const char *folder, nd_event_file **out);
void nd_event_file_close(nd_event_file *file); /* NULL is legal */

/*
 * A record is begun with its step, gets values, and is ended, which appends it with one write.
 * Nothing is allocated. ND_ERR_CANTCREATE: the disk takes no more, the folder is gone, or the
 * record is longer than ND_EVENT_BYTES_MAX; what was written of the record is removed again.
 */
void nd_event_begin(nd_event_file *file, int64_t step);
void nd_event_scalar(nd_event_file *file, const char *tag, double value);
/* One text, shown as Markdown. */
void nd_event_text(nd_event_file *file, const char *tag, const char *text);
/* The settings of the run for the page of hyperparameters, one call for each between begin and
 * end. A text that is a number, true or false is kept as such. */
void nd_event_settings_begin(nd_event_file *file);
void nd_event_setting(nd_event_file *file, const char *key, const char *text);
void nd_event_settings_end(nd_event_file *file);
/* That page shows the run as finished from now on. Readers keep the first word on it in all files
 * of a folder, so a run that may go on must not say how a start of it ended. */
void nd_event_finished(nd_event_file *file);
nd_status nd_event_end(nd_event_file *file);

/* A record of its own. After START readers forget what older files say of this step and later
 * ones. `path` is of a checkpoint; NULL: none. */
nd_status nd_event_session(nd_event_file *file, int64_t step, nd_session_mark mark,
                           const char *path);

#endif
