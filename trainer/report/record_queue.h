// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_RECORD_QUEUE_H
#define ND_REPORT_RECORD_QUEUE_H
/*
 * Records on their way from the run's thread to the thread of a sink: a queue of bytes that is
 * allocated once, with everything that a record points to copied behind it. It has no lock; its
 * owner has one.
 */
#include "trainer/report/report.h"

/* One of the records of report.h. */
typedef struct nd_record {
    enum {
        ND_RECORD_STEP = 0,
        ND_RECORD_VALIDATION,
        ND_RECORD_HEALTH,
        ND_RECORD_EVENT,
        ND_RECORD_HISTOGRAM
    } kind;
    int64_t step;
    const void *of; /* nd_step_record, nd_validation_record, ...; lent */
} nd_record;

/* True for a step and a validation, which count among the records that a dropped sink lacks. */
bool nd_record_counts(const nd_record *record);

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

#endif
