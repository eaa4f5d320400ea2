// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/sink_thread.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"

enum { KEPT_BYTES = 1 << 14 /* one event with a path and a reason */ };

/* More than one, so that a wait finds out that a sink hangs whose call has just begun. */
enum { PATIENCE_DEADLINES = 2 };

struct nd_sink_thread {
    nd_sink sink;            /* `self` is used by its thread alone */
    double deadline_seconds; /* of one call of the sink */
    nd_thread thread;
    nd_monitor monitor;    /* of all below */
    nd_record_queue queue; /* the first record is in the sink's hands while it is called */
    /* Records "resumed": refused ones belong before all of the queue, missed ones, which found no
     * room, behind it. */
    nd_record_queue refused, missed;
    const nd_record_queue
        *offered;            /* of which of these the first is in the sink's hands; or NULL */
    int64_t waiting;         /* sum of weight_of over the records in the queue */
    int64_t begun_ns;        /* nd_clock_ns when the call of the sink began; 0: it is not called */
    bool hangs;              /* that call is beyond its deadline */
    bool dropped;            /* the sink gets no further record */
    bool finished;           /* what it fails to take now is neither counted nor said */
    double patience_seconds; /* that the run still waits, in all */
    bool overflowed;         /* records found no room; none is put until the queue is empty */
    bool said_slow;
    nd_sink_loss loss; /* of a required sink: since it was last told that it lacks records */
    nd_error fatal;    /* of a required sink; status ND_OK: none */
};

/* Both threads, with the lock. */

/* Without the lock for as long as the log takes. */
static void say(nd_sink_thread *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say(nd_sink_thread *t, const char *format, ...)
{
    char text[ND_SINK_WHY_BYTES + 400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    nd_monitor_unlock(&t->monitor);
    nd_log_warning("%s", text);
    nd_monitor_lock(&t->monitor);
}

/* The sink gets no more; the records that wait for it are lost. */
static void drop(nd_sink_thread *t)
{
    t->loss.records += t->waiting;
    t->dropped = true;
    nd_monitor_tell(&t->monitor);
    say(t, "%s takes no more reports of this run, which goes on without it: %s", t->sink.name,
        t->loss.why);
}

static const char SLOW[] = "it is slower than the run";

static void note(nd_sink_thread *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void note(nd_sink_thread *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(t->loss.why, sizeof t->loss.why, format, args);
    va_end(args);
    t->loss.failed = true;
}

/* The calling thread's error is why. */
static void note_failure(nd_sink_thread *t)
{
    note(t, "%s", nd_error_last()->message);
    nd_error_clear();
}

static nd_run_event event_of_loss(const nd_sink_thread *t, const nd_sink_loss *loss, int64_t step)
{
    return (nd_run_event){.kind = ND_RUN_EVENT_RECORDS_LOST,
                          .step = step,
                          .reason = loss->why,
                          .sink = t->sink.name,
                          .records = loss->records};
}

static bool takes(const nd_sink *sink, const nd_record *record)
{
    switch (record->kind) {
    case ND_RECORD_STEP:
        return sink->step != NULL;
    case ND_RECORD_VALIDATION:
        return sink->validation != NULL;
    case ND_RECORD_HEALTH:
        return sink->health != NULL;
    case ND_RECORD_EVENT:
        return sink->event != NULL &&
               !(sink->events_without_line >> ((const nd_run_event *)record->of)->kind & 1);
    }
    return false;
}

/* Keeps of two records "resumed" the one that takes back more: nothing was written
 * between. */
static void keep_resumed(const nd_sink_thread *t, nd_record_queue *queue, const nd_record *record)
{
    const nd_run_event *event = record->kind == ND_RECORD_EVENT ? record->of : NULL;
    const nd_record *before = nd_record_queue_first(queue);
    if (!event || event->kind != ND_RUN_EVENT_RESUMED) {
        return;
    }
    if (before && t->offered != queue) {
        if (before->step <= record->step) {
            return;
        }
        nd_record_queue_pop(queue);
    }
    (void)nd_record_queue_push(queue, record);
}

/* The sink's thread, with the lock. */

static nd_status deliver(const nd_sink *sink, const nd_record *record)
{
    switch (record->kind) {
    case ND_RECORD_STEP:
        return sink->step(sink->self, record->of);
    case ND_RECORD_VALIDATION:
        return sink->validation(sink->self, record->of);
    case ND_RECORD_HEALTH:
        return sink->health(sink->self, record->of);
    case ND_RECORD_EVENT:
        return sink->event(sink->self, record->of);
    }
    return ND_OK;
}

static nd_status call(nd_sink_thread *t, const nd_record *record)
{
    t->begun_ns = nd_clock_ns();
    nd_monitor_unlock(&t->monitor);
    nd_status status = deliver(&t->sink, record);
    nd_monitor_lock(&t->monitor);
    t->begun_ns = 0;
    t->hangs = false;
    return status;
}

/* 1 for a record that counts when it is lost. */
static int64_t weight_of(const nd_sink_thread *t, const nd_record *record)
{
    return t->sink.required || nd_record_counts(record);
}

/* Offers the records that a queue has now until one is refused. */
static nd_status offer_again(nd_sink_thread *t, nd_record_queue *queue)
{
    nd_status status = ND_OK;
    t->offered = queue;
    for (int left = (int)queue->count; status == ND_OK && left > 0; left--) {
        status = call(t, nd_record_queue_first(queue));
        if (status == ND_OK) {
            nd_record_queue_pop(queue);
        }
    }
    t->offered = NULL;
    return status;
}

/* The sink takes records again: it is the first to know how many it has not. */
static nd_status tell_recovered(nd_sink_thread *t, int64_t step)
{
    const nd_sink_loss loss = t->loss;
    const nd_run_event event = event_of_loss(t, &loss, step);
    const nd_record record = {ND_RECORD_EVENT, step, &event};
    t->overflowed = false;
    nd_status status = offer_again(t, &t->refused);
    status = status == ND_OK ? offer_again(t, &t->missed) : status;
    if (status == ND_OK && loss.records > 0 && takes(&t->sink, &record)) {
        status = call(t, &record);
    }
    if (status == ND_OK && !t->dropped) {
        t->loss = (nd_sink_loss){.records = t->loss.records - loss.records};
        if (t->loss.records > 0) { /* found no room while it was told */
            note(t, "%s", SLOW);
        }
        if (loss.records > 0) {
            say(t, "%s is written again, without %lld records of this run", t->sink.name,
                (long long)loss.records);
        } else {
            say(t, "%s answers again", t->sink.name);
        }
    }
    return status == ND_ERR_IO ? ND_OK : status;
}

/* ND_ERR_IO means that the record is lost, and is no error of the run. */
static nd_status offer_required(nd_sink_thread *t, const nd_record *record)
{
    nd_status status = offer_again(t, &t->refused);
    status = status == ND_OK ? call(t, record) : status;
    t->waiting -= weight_of(t, record);
    if (t->dropped || t->finished || (status == ND_OK && !t->loss.failed)) {
        nd_error_clear();
        return ND_OK;
    }
    if (status == ND_OK) { /* the gap of an overflow lies behind the last record in the queue */
        return t->overflowed && t->queue.count > 1 ? ND_OK : tell_recovered(t, record->step);
    }
    if (status != ND_ERR_IO) {
        return status;
    }
    t->loss.records += weight_of(t, record);
    keep_resumed(t, &t->refused, record);
    if (!t->loss.failed) {
        note_failure(t);
        say(t, "%s loses records of this run, which goes on, until they can be written again: %s",
            t->sink.name, t->loss.why);
    }
    return ND_OK;
}

static void offer(nd_sink_thread *t, const nd_record *record)
{
    if (!t->sink.required) {
        if (call(t, record) != ND_OK && !t->dropped) {
            note_failure(t);
            drop(t);
        }
        t->waiting -= weight_of(t, record);
        return;
    }
    if (t->fatal.status != ND_OK) {
        return; /* the run ends */
    }
    nd_status status = offer_required(t, record);
    if (status != ND_OK) {
        t->fatal = *nd_error_last();
        t->fatal.status = status;
    }
}

static void serve(void *context)
{
    nd_sink_thread *t = context;
    nd_monitor_lock(&t->monitor);
    for (;;) {
        while (t->queue.count == 0 && !t->thread.stop && !t->dropped) {
            nd_monitor_wait(&t->monitor, ND_CLOCK_NEVER);
        }
        if (t->queue.count == 0 || t->dropped) {
            break;
        }
        const nd_record *record = nd_record_queue_first(&t->queue);
        offer(t, record);
        nd_record_queue_pop(&t->queue);
        nd_monitor_tell(&t->monitor);
    }
    t->begun_ns = nd_clock_ns(); /* a file may hang when it is closed, too */
    nd_monitor_unlock(&t->monitor);
    t->sink.close(t->sink.self);
    nd_monitor_lock(&t->monitor);
    t->begun_ns = 0;
    nd_monitor_tell(&t->monitor);
    nd_monitor_unlock(&t->monitor);
}

/* The run's thread. */

static void release(nd_sink_thread *t)
{
    nd_record_queue_fini(&t->queue);
    nd_record_queue_fini(&t->missed);
    nd_record_queue_fini(&t->refused);
    nd_monitor_fini(&t->monitor);
    free(t);
}

nd_status nd_sink_thread_create(const nd_sink *sink, double deadline_seconds, size_t queue_bytes,
                                nd_sink_thread **out)
{
    nd_sink_thread *t = NULL;
    char what[256];
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(1, &t));
    t->monitor = (nd_monitor)ND_MONITOR_INIT;
    t->sink = *sink;
    t->deadline_seconds = deadline_seconds;
    t->patience_seconds = PATIENCE_DEADLINES * deadline_seconds;
    if (!sink->self) {
        nd_monitor_lock(&t->monitor);
        note_failure(t);
        drop(t);
        nd_monitor_unlock(&t->monitor);
        *out = t;
        return ND_OK;
    }
    ND_TRY_OUT(nd_record_queue_init(&t->queue, queue_bytes));
    ND_TRY_OUT(nd_record_queue_init(&t->refused, KEPT_BYTES));
    ND_TRY_OUT(nd_record_queue_init(&t->missed, KEPT_BYTES));
    snprintf(what, sizeof what, "the thread of %s", t->sink.name);
    ND_TRY_OUT(nd_thread_start(&t->thread, &t->monitor, what, serve, t));
    *out = t;
    return ND_OK;
out:
    if (t) {
        release(t);
    }
    if (sink->self) {
        sink->close(sink->self);
    }
    return status;
}

/* Seconds until the call that the sink makes is beyond its deadline; the deadline when it makes
 * none. */
static double seconds_left(const nd_sink_thread *t)
{
    const double deadline = t->deadline_seconds;
    return t->begun_ns == 0 ? deadline : deadline - (double)(nd_clock_ns() - t->begun_ns) * 1e-9;
}

/* Finds out whether the sink hangs. */
static void look(nd_sink_thread *t)
{
    if (t->hangs || t->dropped || seconds_left(t) > 0) {
        return;
    }
    t->hangs = true;
    note(t, "a write has not returned for %g s", t->deadline_seconds);
    if (!t->sink.required) {
        drop(t);
    } else {
        say(t,
            "%s does not answer, and the run goes on: a write has not returned for %g s; records "
            "wait for it, and are lost where they are too many",
            t->sink.name, t->deadline_seconds);
    }
}

/* False: it is useless to wait, or too long already. */
static bool wait_change(nd_sink_thread *t, double *patience)
{
    look(t);
    if (t->hangs || t->dropped || t->fatal.status != ND_OK || *patience <= 0) {
        return false;
    }
    const double begin = nd_clock_seconds(), left = seconds_left(t);
    nd_monitor_wait(&t->monitor, nd_clock_after(left < *patience ? left : *patience));
    *patience -= nd_clock_seconds() - begin;
    return true;
}

static nd_status status_of(const nd_sink_thread *t)
{
    if (t->fatal.status != ND_OK) {
        nd_error_restore(&t->fatal);
    }
    return t->fatal.status;
}

static bool push(nd_sink_thread *t, const nd_record *record)
{
    if (!nd_record_queue_push(&t->queue, record)) {
        return false;
    }
    t->waiting += weight_of(t, record);
    nd_monitor_tell(&t->monitor);
    return true;
}

/* A record for which there is no room, and why where nothing has failed yet. */
static void lose(nd_sink_thread *t, const nd_record *record, const char *why)
{
    const bool failed = t->loss.failed;
    if (!failed) {
        note(t, "%s", why);
    }
    if (!t->dropped && !t->sink.required) {
        drop(t);
    }
    t->loss.records += weight_of(t, record);
    if (t->dropped) {
        return;
    }
    t->overflowed = true;
    keep_resumed(t, &t->missed, record);
    if (!failed && !t->said_slow) {
        t->said_slow = true;
        say(t, "%s loses records of this run, which goes on: %s", t->sink.name, t->loss.why);
    }
}

/* After an overflow the queue is emptied first, so that a sink which is always too slow has few
 * gaps. Where an empty queue does not take a record, it is useless to wait for the sink. */
static void queue_or_lose(nd_sink_thread *t, const nd_record *record)
{
    bool may_fit = !t->overflowed || t->queue.count == 0;
    const char *why = SLOW;
    while (may_fit && !push(t, record)) {
        why = t->queue.count > 0 ? SLOW : "a record is larger than their queue";
        may_fit = t->queue.count > 0 && wait_change(t, &t->patience_seconds);
    }
    if (!may_fit) {
        lose(t, record, why);
    }
}

nd_status nd_sink_thread_put(nd_sink_thread *t, const nd_record *record)
{
    nd_monitor_lock(&t->monitor);
    look(t);
    if (t->dropped) {
        t->loss.records += weight_of(t, record);
    } else if (t->fatal.status == ND_OK && takes(&t->sink, record)) {
        queue_or_lose(t, record);
    }
    nd_status status = status_of(t);
    nd_monitor_unlock(&t->monitor);
    return status;
}

static void drain(nd_sink_thread *t, double *patience)
{
    while (t->queue.count > 0 && wait_change(t, patience)) {
    }
}

nd_status nd_sink_thread_flush(nd_sink_thread *t)
{
    nd_monitor_lock(&t->monitor);
    drain(t, &t->patience_seconds);
    nd_status status = status_of(t);
    nd_monitor_unlock(&t->monitor);
    return status;
}

/* Everything that waits is lost. */
static void give_up(nd_sink_thread *t)
{
    t->loss.records += t->waiting;
    if (!t->loss.failed) {
        note(t, "it was not done %g s after the last step",
             PATIENCE_DEADLINES * t->deadline_seconds);
    }
    t->dropped = true;
    nd_monitor_tell(&t->monitor);
}

nd_sink_loss nd_sink_thread_finish(nd_sink_thread *t)
{
    double patience = PATIENCE_DEADLINES * t->deadline_seconds;
    nd_monitor_lock(&t->monitor);
    drain(t, &patience);
    if (!t->dropped && t->fatal.status == ND_OK && t->queue.count > 0) {
        give_up(t);
    }
    t->finished = true;
    const nd_sink_loss loss = t->loss;
    nd_monitor_unlock(&t->monitor);
    return loss;
}

const char *nd_sink_thread_name(const nd_sink_thread *t)
{
    return t->sink.name;
}

nd_sink_loss nd_sink_thread_loss(nd_sink_thread *t)
{
    nd_monitor_lock(&t->monitor);
    nd_sink_loss loss = t->loss;
    nd_monitor_unlock(&t->monitor);
    return loss;
}

int64_t nd_sink_thread_bytes(const nd_sink_thread *t)
{
    return t->sink.bytes ? t->sink.bytes(t->sink.self) : -1;
}

void nd_sink_thread_destroy(nd_sink_thread *t)
{
    if (!t) {
        return;
    }
    nd_monitor_lock(&t->monitor);
    const double patience = t->hangs ? 0 : t->deadline_seconds;
    nd_monitor_unlock(&t->monitor);
    if (nd_thread_join(&t->thread, patience)) {
        release(t);
    }
}
