// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_SINK_THREAD_H
#define ND_REPORT_SINK_THREAD_H
/*
 * The thread of one sink. The run's thread copies records into a queue; the sink's thread writes
 * them in their order. So a disk, a terminal or a pipe that takes long delays neither the run nor
 * the other sinks.
 *
 * A call of the sink that lasts longer than the deadline hangs, which is said once. A sink that is
 * not required is dropped then, and closed when its call returns. One that is required keeps its
 * records in the queue and loses those for which there is no room; when the call returns it goes
 * on, with an event "records lost" where the gap is, before which a record "resumed" is made up
 * for.
 *
 * The run waits for room in a queue and for flushes, but in all of them together no longer than
 * two deadlines. It calls all functions from one thread; nothing is allocated between create and
 * destroy.
 */
#include "trainer/report/report.h"

/* One of the records of report.h. */
typedef struct nd_record {
    enum { ND_RECORD_STEP = 0, ND_RECORD_VALIDATION, ND_RECORD_HEALTH, ND_RECORD_EVENT } kind;
    int64_t step;
    const void *of; /* nd_step_record, nd_validation_record, ...; lent */
} nd_record;

/* True for a step and a validation, which count among the records that a dropped sink lacks. */
bool nd_record_counts(const nd_record *record);

/* Records on their way from the run's thread to that of a sink, with copies of everything that they
 * point to: a ring of bytes that is allocated once. It has no lock; its owner has one. */
typedef struct nd_record_queue {
    uint8_t *bytes; /* (capacity) owned */
    size_t capacity;
    size_t begin, end; /* of the first record, behind the last one */
    size_t wrap;       /* where the upper part ends, while records lie on both sides; else 0 */
    int64_t count;
} nd_record_queue; /* all zero: none */

nd_status nd_record_queue_init(nd_record_queue *queue, size_t capacity);
void nd_record_queue_fini(nd_record_queue *queue);
/* Copies it behind the others. False: there is no room. */
bool nd_record_queue_push(nd_record_queue *queue, const nd_record *record);
/* The oldest record; NULL: there is none. Lent until it is popped; pushes do not move it. */
const nd_record *nd_record_queue_first(const nd_record_queue *queue);
void nd_record_queue_pop(nd_record_queue *queue); /* there is one */

/* Takes the sink over, also when it fails. The deadline is that of one call of the sink. A sink
 * without `self` is dropped from the start, for the reason that the thread's error has. */
nd_status nd_sink_thread_create(const nd_sink *sink, double deadline_seconds, size_t queue_bytes,
                                nd_sink_thread **out);

/* Gives a record to the sink, if it takes such. Fails with what a required sink failed with, at an
 * earlier record or at this one. */
nd_status nd_sink_thread_put(nd_sink_thread *thread, const nd_record *record);

/* Waits until all records are written, as long as the sink does not hang. Fails like put. */
nd_status nd_sink_thread_flush(nd_sink_thread *thread);

/* The end of the run: the same with a deadline of its own, after which records that are not
 * written are lost. Returns all records that the sink did not take. Records that are put later are
 * tried once. */
nd_sink_loss nd_sink_thread_finish(nd_sink_thread *thread);

const char *nd_sink_thread_name(const nd_sink_thread *thread);
/* Records that the sink has not taken so far. */
nd_sink_loss nd_sink_thread_loss(nd_sink_thread *thread);
/* nd_sink.bytes of a required sink before its end; -1: it has none. */
int64_t nd_sink_thread_bytes(const nd_sink_thread *thread);

/* Closes the sink and ends its thread. Where the sink does not return before the deadline, or hangs
 * already, both are left to the end of the process. NULL is legal. */
void nd_sink_thread_destroy(nd_sink_thread *thread);

#endif
