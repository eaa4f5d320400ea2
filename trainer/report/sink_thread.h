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
#include "trainer/report/record_queue.h"

typedef struct nd_sink_thread nd_sink_thread;

typedef struct nd_sink_thread_options {
    double deadline_seconds; /* of one call of the sink */
    size_t queue_bytes;
} nd_sink_thread_options;

/* Takes the sink over, also when it fails. A sink without `self` is dropped from the start, for the
 * reason that the thread's error has. */
nd_status nd_sink_thread_create(const nd_sink *sink, const nd_sink_thread_options *options,
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
