// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_WRITER_H
#define ND_REPORT_WRITER_H
/*
 * Appends records to the files of a run, each one whole. The run's thread copies a record into a
 * queue, and the writer's thread writes it, in the order of the calls. So a disk that is slow, full
 * or gone holds up no step.
 *
 * A record that the disk does not take, or for which the queue has no room, is lost and counted,
 * and the next one is tried again. A write that lasts longer than the deadline hangs: this is said
 * once, and nobody waits for the writer until the write returns. The run waits for room and for
 * flushes, but no longer than two deadlines in all of them together, until a flush finds all
 * written.
 *
 * All calls come from one thread. Nothing is allocated between the last add and close.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_writer nd_writer;

enum { ND_WRITER_FILES_MAX = 2, ND_WRITER_WHY_BYTES = 400 };

/* Starts the thread. `room` is the size of the queue: no record may be longer than a half of it. */
nd_status nd_writer_open(double deadline_seconds, size_t room, nd_writer **out);

/*
 * Takes over a file that is open for appending, and gives it a number. `name` names it in messages
 * and is static; `path` is copied. Deleting a required file is an error of all later calls that
 * return a status (ND_ERR_CANTCREATE); other files lose their records then. Closes the file when it
 * fails.
 */
nd_status nd_writer_add(nd_writer *writer, const char *name, const char *path, int fd,
                        bool required, int *file);

/*
 * Queues a copy of a record. `weight` is what it counts when it is lost. 0: it must not be lost:
 * the queue has 16 KiB of its own for such records, and up to 16 KiB that the disk did not take are
 * kept, and written before the next record of their file.
 */
void nd_writer_put(nd_writer *writer, int file, const void *record, size_t bytes, int64_t weight);

/* Waits until everything is written, unless a write hangs. Fails when the run must end. */
nd_status nd_writer_flush(nd_writer *writer);

/* Says how many records a file has lost when it takes records again, and counts from 0 again. `why`
 * gets the reason of the first loss. 0: none, or it still loses them. */
int64_t nd_writer_take_lost(nd_writer *writer, int file, char why[ND_WRITER_WHY_BYTES]);

/* The end of the run: a flush with two deadlines of its own. What is not written by then counts as
 * lost, and is given up; nd_writer_take_lost gives all from now on. */
void nd_writer_finish(nd_writer *writer);

/* Length of a file, whole records only, without a look at the disk. */
int64_t nd_writer_bytes(nd_writer *writer, int file);

/* Closes the files and ends the thread; one whose write hangs is left to the end of the process.
 * NULL is legal. */
void nd_writer_close(nd_writer *writer);

#endif
