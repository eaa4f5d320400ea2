// SPDX-License-Identifier: Apache-2.0
/* The writer of files (writer.h), and the sinks that give it their records. */
#include "trainer/report/report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/thread.h"

enum { KEPT_BYTES = 1 << 14, ALIGNMENT = 16 };

/* More than one, so that a wait finds out that a write hangs which has just begun. */
enum { PATIENCE_DEADLINES = 2 };

typedef struct output {
    const char *name;
    char *path; /* owned */
    bool required;
    atomic_llong bytes;
    /* Only the writer's thread uses these. */
    int fd;
    bool counts_links; /* the file system says how many names a file has */
    off_t torn;        /* where a part of a record begins that could not be removed; -1: nowhere */
    char kept[KEPT_BYTES]; /* records that go before the next one */
    size_t kept_bytes;
    /* Under the monitor. */
    bool fails;                    /* the last record was not taken, which was said */
    int64_t waiting, lost;         /* weights */
    char why[ND_WRITER_WHY_BYTES]; /* of the first that was lost */
} output;

/* Lies before the bytes of a record. */
typedef struct entry {
    output *file;
    int64_t weight;
    size_t bytes;
} entry;

/* Records one behind the other. */
typedef struct batch {
    uint8_t *bytes; /* (room / 2 + KEPT_BYTES) owned; the last of these for records of weight 0 */
    size_t used;
} batch;

struct nd_writer {
    double deadline_seconds; /* of one write */
    size_t room;             /* of each batch, for records with a weight */
    output files[ND_WRITER_FILES_MAX];
    int count;
    nd_thread thread;
    nd_monitor monitor;      /* of all below */
    batch queued, written;   /* the thread takes the first as the second */
    const output *current;   /* the file that is written to */
    int64_t begun_ns;        /* nd_clock_ns when that write began; 0: there is none */
    bool hangs;              /* it is beyond its deadline */
    double patience_seconds; /* that the run still waits, until all is written again */
    bool overflowed;         /* a record found no room; none is queued until all are written */
    bool said_slow;
    bool finished, given_up;
    nd_error fatal; /* status ND_OK: none */
};

/* A file. */

static bool has_name(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_nlink > 0;
}

/* The disk does not take a record: the run goes on without it. */
static nd_status fail_write(const output *f, const char *why)
{
    return nd_fail(ND_ERR_IO, "%s cannot be written: %s; free some space there", f->path, why);
}

/* Removes a part of a record, so that a later record does not continue it. */
static nd_status remove_torn(output *f)
{
    if (f->torn >= 0 && ftruncate(f->fd, f->torn) != 0) {
        return fail_write(f, strerror(errno));
    }
    f->torn = -1;
    return ND_OK;
}

/*
 * Writes with one call, so that a reader who follows the file sees whole records; a second call is
 * needed only when the disk takes a part, which is removed when the rest does not fit.
 */
static nd_status append(output *f, const void *record, size_t length)
{
    if (f->counts_links && !has_name(f->fd)) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s was deleted during the run; leave the run folder alone until its run "
                       "has ended",
                       f->path);
    }
    ND_TRY(remove_torn(f));
    for (size_t done = 0; done < length;) {
        ssize_t n = write(f->fd, (const char *)record + done, length - done);
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0 || errno != EINTR) {
            nd_status status = fail_write(f, n == 0 ? "nothing was taken" : strerror(errno));
            const nd_error error = *nd_error_last();
            f->torn = done > 0 ? lseek(f->fd, 0, SEEK_END) - (off_t)done : -1;
            (void)remove_torn(f);
            nd_error_restore(&error);
            return status;
        }
    }
    atomic_fetch_add(&f->bytes, (long long)length);
    return ND_OK;
}

/* Both threads, with the lock. */

static void log_warning(nd_writer *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Without the lock for as long as the log takes. */
static void log_warning(nd_writer *w, const char *format, ...)
{
    char text[ND_WRITER_WHY_BYTES + 400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    nd_monitor_unlock(&w->monitor);
    nd_log_warning("%s", text);
    nd_monitor_lock(&w->monitor);
}

static void lose(output *f, int64_t weight, const char *why)
{
    if (f->lost == 0) {
        snprintf(f->why, sizeof f->why, "%.*s", ND_WRITER_WHY_BYTES - 1, why);
    }
    f->lost += weight;
}

/* The writer's thread, with the lock. */

static void write_entry(nd_writer *w, const entry *e)
{
    output *f = e->file;
    w->current = f;
    w->begun_ns = nd_clock_ns();
    nd_monitor_unlock(&w->monitor);
    nd_status status = append(f, f->kept, f->kept_bytes);
    if (status == ND_OK) {
        f->kept_bytes = 0;
        status = append(f, e + 1, e->bytes);
    }
    const bool kept = status != ND_OK && e->weight == 0 && e->bytes <= KEPT_BYTES - f->kept_bytes;
    if (kept) {
        memcpy(f->kept + f->kept_bytes, e + 1, e->bytes);
        f->kept_bytes += e->bytes;
    }
    nd_monitor_lock(&w->monitor);
    w->begun_ns = 0;
    w->hangs = false;
    if (w->given_up) { /* it is counted already */
        return;
    }
    f->waiting -= e->weight;
    if (status == ND_OK) {
        f->fails = false;
    } else if (status != ND_ERR_IO && f->required) {
        w->fatal = *nd_error_last();
        w->fatal.status = status;
    } else {
        const bool said = f->fails;
        f->fails = true;
        lose(f, e->weight > 0 ? e->weight : !kept, nd_error_last()->message);
        if (!said) {
            log_warning(w,
                        "%s loses records of this run, which goes on, until they can be written "
                        "again: %s",
                        f->name, nd_error_last()->message);
        }
    }
    nd_error_clear();
}

static bool ends(const nd_writer *w)
{
    return w->given_up || w->fatal.status != ND_OK;
}

static void serve(void *context)
{
    nd_writer *w = context;
    nd_monitor_lock(&w->monitor);
    for (;;) {
        while (w->queued.used == 0 && !w->thread.stop && !ends(w)) {
            nd_monitor_wait(&w->monitor, ND_CLOCK_NEVER);
        }
        if (w->queued.used == 0 || ends(w)) {
            break;
        }
        const batch taken = w->queued;
        w->queued = (batch){.bytes = w->written.bytes};
        w->written = taken;
        for (size_t at = 0; at < taken.used && !ends(w);) {
            const entry *e = (const entry *)(const void *)(taken.bytes + at);
            write_entry(w, e);
            at += nd_round_up_bytes(sizeof *e + e->bytes, ALIGNMENT);
        }
        w->written.used = 0;
        nd_monitor_tell(&w->monitor);
    }
    w->begun_ns = nd_clock_ns(); /* a file may hang when it is closed, too */
    nd_monitor_unlock(&w->monitor);
    for (int i = 0; i < w->count; i++) {
        close(w->files[i].fd);
    }
    nd_monitor_lock(&w->monitor);
    w->begun_ns = 0;
    nd_monitor_tell(&w->monitor);
    nd_monitor_unlock(&w->monitor);
}

/* The run's thread. */

static void release(nd_writer *w)
{
    for (int i = 0; i < w->count; i++) {
        free(w->files[i].path);
    }
    free(w->queued.bytes);
    free(w->written.bytes);
    nd_monitor_fini(&w->monitor);
    free(w);
}

nd_status nd_writer_open(double deadline_seconds, size_t room, nd_writer **out)
{
    nd_writer *w = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &w));
    w->monitor = (nd_monitor)ND_MONITOR_INIT;
    w->deadline_seconds = deadline_seconds;
    w->patience_seconds = PATIENCE_DEADLINES * deadline_seconds;
    w->room = room / 2;
    ND_TRY_OUT(nd_alloc(w->room + KEPT_BYTES, 1, (void **)&w->queued.bytes));
    ND_TRY_OUT(nd_alloc(w->room + KEPT_BYTES, 1, (void **)&w->written.bytes));
    ND_TRY_OUT(
        nd_thread_start(&w->thread, &w->monitor, "the thread that writes reports", serve, w));
    *out = w;
    return ND_OK;
out:
    release(w);
    return status;
}

nd_status nd_writer_add(nd_writer *w, const char *name, const char *path, int fd, bool required,
                        int *file)
{
    ND_ASSERT(w->count < ND_WRITER_FILES_MAX);
    char *copy = strdup(path);
    if (!copy) {
        close(fd);
        return nd_fail_memory("the path of %s", name);
    }
    output *f = &w->files[w->count];
    *f = (output){.name = name, .path = copy, .required = required, .fd = fd, .torn = -1};
    f->counts_links = has_name(fd);
    const off_t end = lseek(fd, 0, SEEK_END);
    atomic_store(&f->bytes, end > 0 ? end : 0);
    *file = w->count;
    nd_monitor_lock(&w->monitor);
    w->count++;
    nd_monitor_unlock(&w->monitor);
    return ND_OK;
}

/* Seconds until the write that runs is beyond its deadline; the deadline when there is none. */
static double seconds_left(const nd_writer *w)
{
    return w->deadline_seconds - (w->begun_ns ? (double)(nd_clock_ns() - w->begun_ns) * 1e-9 : 0);
}

/* Finds out whether a write hangs. */
static void look(nd_writer *w)
{
    if (w->hangs || seconds_left(w) > 0) {
        return;
    }
    w->hangs = true;
    log_warning(w,
                "%s does not answer, and the run goes on: a write has not returned for %g s; "
                "records wait for it, and are lost where they are too many",
                w->current->name, w->deadline_seconds);
}

/* False: it is useless to wait, or too long already. */
static bool wait_change(nd_writer *w)
{
    look(w);
    if (w->hangs || ends(w) || w->patience_seconds <= 0) {
        return false;
    }
    const double begin = nd_clock_seconds(), left = seconds_left(w);
    nd_monitor_wait(&w->monitor,
                    nd_clock_after(left < w->patience_seconds ? left : w->patience_seconds));
    w->patience_seconds -= nd_clock_seconds() - begin;
    return true;
}

static bool is_empty(const nd_writer *w)
{
    return w->queued.used == 0 && w->written.used == 0;
}

/* After an overflow all is written first, so a disk which is always too slow leaves few gaps. */
void nd_writer_put(nd_writer *w, int file, const void *record, size_t bytes, int64_t weight)
{
    static const char slow[] = "it is slower than the run";
    const size_t size = nd_round_up_bytes(sizeof(entry) + bytes, ALIGNMENT);
    output *f = &w->files[file];
    ND_ASSERT(size <= w->room && file < w->count);
    nd_monitor_lock(&w->monitor);
    look(w);
    w->overflowed = w->overflowed && !is_empty(w);
    while (!ends(w) && !w->overflowed && w->queued.used + size > w->room) {
        w->overflowed = !wait_change(w);
    }
    const bool fits =
        !w->overflowed || (weight == 0 && w->queued.used + size <= w->room + KEPT_BYTES);
    if (!ends(w) && !fits) {
        lose(f, weight > 0 ? weight : 1, w->hangs ? "a write has not returned" : slow);
        if (!w->hangs && !w->said_slow) {
            w->said_slow = true;
            log_warning(w, "%s loses records of this run, which goes on: %s", f->name, slow);
        }
    } else if (!ends(w)) {
        entry *e = (entry *)(void *)(w->queued.bytes + w->queued.used);
        *e = (entry){f, weight, bytes};
        memcpy(e + 1, record, bytes);
        w->queued.used += size;
        f->waiting += weight;
        nd_monitor_tell(&w->monitor);
    }
    nd_monitor_unlock(&w->monitor);
}

static nd_status status_of(const nd_writer *w)
{
    if (w->fatal.status != ND_OK) {
        nd_error_restore(&w->fatal);
    }
    return w->fatal.status;
}

static void drain(nd_writer *w)
{
    while (!is_empty(w) && wait_change(w)) {
    }
    if (is_empty(w)) {
        w->patience_seconds = PATIENCE_DEADLINES * w->deadline_seconds;
    }
}

nd_status nd_writer_flush(nd_writer *w)
{
    nd_monitor_lock(&w->monitor);
    drain(w);
    nd_status status = status_of(w);
    nd_monitor_unlock(&w->monitor);
    return status;
}

int64_t nd_writer_take_lost(nd_writer *w, int file, char why[ND_WRITER_WHY_BYTES])
{
    output *f = &w->files[file];
    nd_monitor_lock(&w->monitor);
    const bool works = !f->fails && !(w->overflowed && !is_empty(w));
    const int64_t lost = works || w->finished ? f->lost : 0;
    memcpy(why, f->why, sizeof f->why);
    f->lost -= lost;
    nd_monitor_unlock(&w->monitor);
    return lost;
}

void nd_writer_finish(nd_writer *w)
{
    nd_monitor_lock(&w->monitor);
    w->patience_seconds = PATIENCE_DEADLINES * w->deadline_seconds;
    drain(w);
    w->finished = true;
    if (!is_empty(w) && !ends(w)) {
        w->given_up = true;
        for (int i = 0; i < w->count; i++) {
            lose(&w->files[i], w->files[i].waiting, "it was not written at the end of the run");
        }
        nd_monitor_tell(&w->monitor);
    }
    nd_monitor_unlock(&w->monitor);
}

int64_t nd_writer_bytes(nd_writer *w, int file)
{
    return atomic_load(&w->files[file].bytes);
}

void nd_writer_close(nd_writer *w)
{
    if (!w) {
        return;
    }
    nd_monitor_lock(&w->monitor);
    const double patience = w->hangs ? 0 : w->deadline_seconds;
    nd_monitor_unlock(&w->monitor);
    if (nd_thread_join(&w->thread, patience)) {
        release(w);
    }
}

/* The sinks. */

void nd_sinks_add(nd_sinks *sinks, nd_sink sink)
{
    ND_ASSERT(sinks->count < ND_SINKS_MAX);
    sinks->all[sinks->count++] = sink;
}

void nd_sinks_warn_of_dropped(const char *name)
{
    nd_log_warning("%s takes no more reports of this run, which goes on without it: %s", name,
                   nd_error_last()->message);
    nd_error_clear();
}

static void deliver_to_all(nd_sinks *sinks, const nd_record *r)
{
    for (int i = 0; i < sinks->count; i++) {
        nd_sink *s = &sinks->all[i];
        const nd_status status = !s->self             ? ND_OK
                                 : r->step && s->step ? s->step(s->self, r->step)
                                 : r->validation && s->validation
                                     ? s->validation(s->self, r->validation)
                                 : r->health && s->health ? s->health(s->self, r->health)
                                 : r->event && s->event   ? s->event(s->self, r->event)
                                                          : ND_OK;
        if (status != ND_OK) {
            nd_sinks_warn_of_dropped(s->name);
            s->close(s->self);
            s->self = NULL;
        }
    }
}

/* A file that takes records again, or that takes no more at the end of the run: metrics.jsonl gets
 * a line with the number of those it lacks, if it can still be written. */
static void tell_lost(nd_sinks *sinks, bool end)
{
    char why[ND_WRITER_WHY_BYTES];
    for (int i = 0; i < sinks->count; i++) {
        const nd_sink *sink = &sinks->all[i];
        const int64_t lost =
            sink->has_file ? nd_writer_take_lost(sinks->writer, sink->file, why) : 0;
        if (lost == 0) {
            continue;
        }
        if (end) {
            nd_log_warning("%lld records of this run did not go to %s", (long long)lost,
                           sink->name);
        } else {
            nd_log_warning("%s is written again, without %lld records of this run", sink->name,
                           (long long)lost);
        }
        const nd_run_event event = {.kind = ND_RUN_EVENT_RECORDS_LOST,
                                    .step = sinks->step,
                                    .reason = why,
                                    .sink = sink->name,
                                    .records = lost};
        deliver_to_all(sinks, &(nd_record){.event = &event});
    }
}

nd_status nd_sinks_put(nd_sinks *sinks, int64_t step, nd_record r)
{
    tell_lost(sinks, false);
    sinks->step = step;
    deliver_to_all(sinks, &r);
    if (!sinks->writer) {
        return ND_OK;
    }
    nd_monitor_lock(&sinks->writer->monitor);
    const nd_status status = status_of(sinks->writer);
    nd_monitor_unlock(&sinks->writer->monitor);
    return status;
}

nd_status nd_sinks_event(nd_sinks *sinks, const nd_run_event *event)
{
    ND_TRY(nd_sinks_put(sinks, event->step, (nd_record){.event = event}));
    return nd_sinks_flush(sinks);
}

nd_status nd_sinks_flush(nd_sinks *sinks)
{
    return sinks->writer ? nd_writer_flush(sinks->writer) : ND_OK;
}

int64_t nd_sinks_metrics_bytes(const nd_sinks *sinks)
{
    return sinks->writer ? nd_writer_bytes(sinks->writer, sinks->all[0].file) : 0;
}

/* The thread's error stays: the run may end with it. */
void nd_sinks_close(nd_sinks *sinks)
{
    const nd_error error = *nd_error_last();
    if (sinks->writer) {
        nd_writer_finish(sinks->writer);
        tell_lost(sinks, true);
        (void)nd_writer_flush(sinks->writer);
        nd_writer_close(sinks->writer);
    }
    for (int i = 0; i < sinks->count; i++) {
        if (sinks->all[i].self) {
            sinks->all[i].close(sinks->all[i].self);
        }
    }
    *sinks = (nd_sinks){0};
    nd_error_restore(&error);
}
