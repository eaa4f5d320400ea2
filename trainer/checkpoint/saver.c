// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/saver.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/base/version.h"
#include "trainer/checkpoint/snapshot.h"

/* What a rank reports; the largest value wins. */
enum { FLAG_IDLE = 0, FLAG_DONE, FLAG_BUSY, FLAG_FAILED };

typedef enum phase { PHASE_IDLE = 0, PHASE_WRITING, PHASE_COMMITTING } phase;
typedef enum job { JOB_NONE = 0, JOB_WRITE, JOB_COMMIT } job;

struct nd_saver {
    nd_saver_options options;
    nd_trainer *trainer;
    nd_snapshot snapshot;
    nd_manifest manifest;             /* rank 0: of the save in flight */
    nd_shard_record record, *records; /* records: [ranks] */
    char *temporary, *state;          /* folders of the save in flight */

    phase phase;
    double begin_seconds, blocked_seconds;
    int64_t step, updates;
    char reason[16];

    nd_thread thread;   /* its beat: when it last got on with its job */
    nd_monitor monitor; /* of all below */
    job job;            /* being done; JOB_NONE: the thread is idle */
    int units_copied;   /* the update may pass these */
    bool cancelled;
    nd_error error; /* of the thread; ND_OK: none */
    int64_t best;   /* nd_saver_keep_best */
    int deleted;
};

/* The writer's thread. */

static void pass_units(nd_saver *s, int units)
{
    nd_monitor_lock(&s->monitor);
    s->units_copied = units;
    nd_monitor_tell(&s->monitor);
    nd_monitor_unlock(&s->monitor);
}

/* Before a unit is written, and once behind the last. */
static nd_status begin_unit(void *context, int unit)
{
    nd_saver *s = context;
    pass_units(s, unit);
    if (unit == s->snapshot.plan.layout->unit_count) {
        return ND_OK;
    }
    if (s->options.before_unit) {
        s->options.before_unit(s->options.before_context, unit);
    }
    nd_monitor_lock(&s->monitor);
    const bool cancelled = s->cancelled;
    nd_monitor_unlock(&s->monitor);
    nd_fs_beat();
    return cancelled ? nd_fail(ND_ERR_CANTCREATE, "the save was given up") : ND_OK;
}

static nd_status write_all(nd_saver *s)
{
    if (s->trainer->rank->rank == 0) {
        /* Other ranks may have written parts of it already. */
        ND_TRY(nd_fs_check_space_left(s->options.run, s->state, s->options.bytes, "a checkpoint"));
    }
    /* Every rank that writes makes the folders, so that none waits for another's. */
    ND_TRY(nd_fs_make_own_folder(s->temporary));
    ND_TRY(nd_fs_make_own_folder(s->state));
    return nd_snapshot_write(&s->snapshot, s->state, s->updates, &s->record);
}

static nd_status commit(nd_saver *s)
{
    const nd_saver_options *o = &s->options;
    if (o->extra) {
        ND_TRY(o->extra(o->extra_context, s->temporary, &s->manifest));
    }
    ND_TRY(nd_checkpoint_commit(o->run, s->temporary, &s->manifest, o->gate));
    if (o->committed) {
        o->committed(o->extra_context, s->step);
    }
    nd_monitor_lock(&s->monitor);
    const nd_prune_options prune = {o->keep_last, o->keep_every, s->step, s->best};
    nd_monitor_unlock(&s->monitor);
    if (nd_checkpoint_prune(o->run, &prune, &s->deleted) != ND_OK) {
        nd_log_warning("checkpoint %lld is saved, but an older one is not deleted: %s",
                       (long long)s->step, nd_error_last()->message);
    }
    return ND_OK;
}

static void end_job(nd_saver *s, nd_status status)
{
    if (status != ND_OK && s->job == JOB_WRITE) {
        pass_units(s, s->snapshot.plan.layout->unit_count);
    }
    nd_monitor_lock(&s->monitor);
    s->job = JOB_NONE;
    if (status != ND_OK) {
        s->error = *nd_error_last();
    }
    nd_trainer_report_save(s->trainer, status == ND_OK ? FLAG_DONE : FLAG_FAILED);
    nd_monitor_tell(&s->monitor);
    nd_monitor_unlock(&s->monitor);
}

/* The writer gives way to the threads that compute. */
static void write_jobs(void *context)
{
    nd_saver *s = context;
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 10);
    nd_fs_set_beat(&s->thread.beat);
    nd_monitor_lock(&s->monitor);
    while (!s->thread.stop) {
        const job next = s->job;
        if (next == JOB_NONE) {
            nd_monitor_wait(&s->monitor, ND_CLOCK_NEVER);
            continue;
        }
        nd_monitor_unlock(&s->monitor);
        end_job(s, next == JOB_WRITE ? write_all(s) : commit(s));
        nd_monitor_lock(&s->monitor);
    }
    nd_monitor_unlock(&s->monitor);
}

/* The rank's thread. */

static void start_job(nd_saver *s, job next)
{
    nd_trainer_report_save(s->trainer, FLAG_BUSY);
    nd_thread_beat(&s->thread);
    nd_monitor_lock(&s->monitor);
    s->job = next;
    nd_monitor_tell(&s->monitor);
    nd_monitor_unlock(&s->monitor);
}

/* The deadline of a collective, since the other ranks wait in one meanwhile. */
static double patience_of(const nd_saver *s)
{
    return s->trainer->rank->config->launch.comm_timeout_seconds;
}

static nd_status fail_silent_disk(const nd_saver *s)
{
    return nd_fail(ND_ERR_HANG,
                   "the writer of checkpoint %lld has made no progress for %g s "
                   "(launch.comm_timeout_seconds); the file system of %s does not answer",
                   (long long)s->step, patience_of(s), s->options.run);
}

/* Until the thread at work counts as one that hangs; 0: it does. */
static double seconds_left(const nd_saver *s)
{
    double left = patience_of(s) - nd_thread_silence(&s->thread);
    return left > 0 ? left : 0;
}

/* With the lock: waits until the thread tells something, at most so long. False: it hangs. */
static bool wait_change(nd_saver *s, double seconds)
{
    double left = seconds_left(s);
    if (left > 0) {
        nd_monitor_wait(&s->monitor, nd_clock_after(left < seconds ? left : seconds));
    }
    return left > 0;
}

/* Waits for the thread to become idle, at most so long and no longer than until it hangs. */
static bool wait_idle(nd_saver *s, double seconds)
{
    double end = nd_clock_seconds() + seconds, left = seconds;
    nd_monitor_lock(&s->monitor);
    while (s->job != JOB_NONE && left > 0 && wait_change(s, left)) {
        left = end - nd_clock_seconds();
    }
    bool idle = s->job == JOB_NONE;
    nd_monitor_unlock(&s->monitor);
    return idle;
}

static nd_status wait_unit(void *context, int unit)
{
    nd_saver *s = context;
    if (s->snapshot.detached) {
        return nd_stream_wait(&s->trainer->rank->stream, &s->snapshot.copied[unit]);
    }
    nd_monitor_lock(&s->monitor);
    if (s->units_copied <= unit) {
        double begin = nd_clock_seconds();
        while (s->units_copied <= unit && wait_change(s, patience_of(s))) {
        }
        s->blocked_seconds += nd_clock_seconds() - begin;
    }
    bool copied = s->units_copied > unit;
    nd_monitor_unlock(&s->monitor);
    return copied ? ND_OK : fail_silent_disk(s);
}

nd_status nd_saver_create(const nd_saver_options *options, nd_saver **out)
{
    nd_trainer *trainer = options->trainer;
    nd_saver *s = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &s));
    s->monitor = (nd_monitor)ND_MONITOR_INIT;
    s->options = *options;
    s->trainer = trainer;
    ND_TRY_OUT(ND_ALLOC(trainer->rank->world_size, &s->records));
    ND_TRY_OUT(nd_snapshot_init(&s->snapshot, trainer, options->checksum, begin_unit, s));
    ND_TRY_OUT(nd_thread_start(&s->thread, &s->monitor, "the thread of the checkpoint writer",
                               write_jobs, s));
    trainer->gate = (nd_update_gate){0};
    *out = s;
    s = NULL;
out:
    (void)nd_saver_destroy(s);
    return status;
}

static void forget_save(nd_saver *s)
{
    s->manifest.identity = s->manifest.config = (nd_manifest_pairs){0}; /* the options' */
    nd_manifest_fini(&s->manifest);
    free(s->temporary);
    free(s->state);
    s->temporary = s->state = NULL;
    s->phase = PHASE_IDLE;
    s->trainer->gate = (nd_update_gate){0};
    nd_trainer_report_save(s->trainer, FLAG_IDLE);
}

/* False: the writer is still at work. */
static bool cancel_and_wait(nd_saver *s)
{
    nd_monitor_lock(&s->monitor);
    s->cancelled = true;
    nd_monitor_unlock(&s->monitor);
    atomic_store(&s->snapshot.cancelled, true);
    return wait_idle(s, patience_of(s));
}

bool nd_saver_destroy(nd_saver *s)
{
    if (!s) {
        return true;
    }
    if (s->thread.started && !cancel_and_wait(s)) {
        return false;
    }
    nd_thread_join(&s->thread, INFINITY);
    if (s->temporary && s->trainer->rank->rank == 0) {
        nd_fs_remove_tree(s->temporary);
    }
    forget_save(s);
    nd_snapshot_fini(&s->snapshot);
    free(s->records);
    nd_monitor_fini(&s->monitor);
    free(s);
    return true;
}

void nd_saver_keep_best(nd_saver *s, int64_t step)
{
    nd_monitor_lock(&s->monitor);
    s->best = step;
    nd_monitor_unlock(&s->monitor);
}

bool nd_saver_is_busy(const nd_saver *s)
{
    return s->phase != PHASE_IDLE;
}

static nd_status make_manifest(nd_saver *s, int64_t metrics_bytes)
{
    const nd_rank *r = s->trainer->rank;
    nd_manifest *m = &s->manifest;
    m->restart_epoch = s->options.restart_epoch;
    m->position = s->trainer->position;
    m->samples_seen = m->position.step * s->options.batch_samples + m->position.samples_ahead;
    m->metrics_bytes = metrics_bytes;
    m->mesh = r->mesh;
    m->shape = r->shape;
    m->arrays = s->snapshot.plan.arrays;
    m->extra_count = s->snapshot.plan.extra_count;
    memcpy(m->extras, s->snapshot.plan.extras, sizeof m->extras);
    m->checksum = s->options.checksum;
    m->writer_count = r->world_size;
    snprintf(m->program, sizeof m->program, "ndtrain " ND_VERSION);
    snprintf(m->host, sizeof m->host, "%s", s->options.host);
    snprintf(m->run_id, sizeof m->run_id, "%s", s->options.run_id);
    snprintf(m->reason, sizeof m->reason, "%s", s->reason);
    snprintf(m->optimizer, sizeof m->optimizer, "%s", m->arrays > 1 ? "adamw" : "sgd");
    nd_clock_utc((int64_t)time(NULL), m->time);
    m->identity = *s->options.identity;
    m->config = *s->options.config;
    ND_TRY(nd_manifest_set_layout(m, s->trainer->model->layout));
    return ND_ALLOC(r->world_size, &m->writers);
}

nd_status nd_saver_begin(nd_saver *s, const char *reason, int64_t metrics_bytes)
{
    const nd_run_position *position = &s->trainer->position;
    ND_ASSERT(s->phase == PHASE_IDLE && s->job == JOB_NONE);
    s->begin_seconds = nd_clock_seconds();
    s->blocked_seconds = 0;
    s->step = position->step;
    s->updates = position->step - position->skipped;
    s->units_copied = 0;
    s->cancelled = false;
    s->deleted = 0;
    s->error = (nd_error){0};
    snprintf(s->reason, sizeof s->reason, "%s", reason);
    ND_TRY(nd_checkpoint_temporary(s->options.run, s->step, s->options.run_id, &s->temporary));
    ND_TRY(nd_fs_format(&s->state, "%s/" ND_STATE_FOLDER, s->temporary));
    if (s->trainer->rank->rank == 0) {
        ND_TRY(make_manifest(s, metrics_bytes));
    }
    ND_TRY(nd_snapshot_begin(&s->snapshot));
    s->phase = PHASE_WRITING;
    s->trainer->gate = (nd_update_gate){wait_unit, s};
    start_job(s, JOB_WRITE);
    if (s->options.waits) {
        ND_TRY(wait_unit(s, s->snapshot.plan.layout->unit_count - 1));
        ND_TRY(s->snapshot.detached ? nd_stream_sync(&s->snapshot.stream) : ND_OK);
    }
    s->blocked_seconds = nd_clock_seconds() - s->begin_seconds; /* with what wait_unit has added */
    return ND_OK;
}

/* Every rank gets the records of all. On a GPU they go through the gradients, which are free
 * between steps. */
static nd_status gather_records(nd_saver *s)
{
    const nd_rank *r = s->trainer->rank;
    nd_stream *stream = &s->trainer->rank->stream;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_WORLD];
    const size_t one = sizeof s->record, all = (size_t)comm->size * one;
    nd_comm_args args = {.send = &s->record,
                         .recv = s->records,
                         .count = (int64_t)(one / sizeof(int64_t)),
                         .dtype = ND_DTYPE_I64};
    if (!nd_rank_is_gpu(r)) {
        return nd_comm_all_gather(comm, stream, &args, NULL);
    }
    char *landing = (char *)(void *)s->trainer->model->fsdp.grad;
    if (all + one > (size_t)s->snapshot.plan.layout->shard_total * sizeof(float)) {
        return nd_fail(ND_ERR_INTERNAL, "the model is too small for the records of %d ranks",
                       comm->size);
    }
    ND_TRY(nd_copy(stream, landing + all, &s->record, one));
    args.send = landing + all;
    args.recv = landing;
    ND_TRY(nd_comm_all_gather(comm, stream, &args, NULL));
    ND_TRY(nd_copy(stream, s->records, landing, all));
    return nd_stream_sync(stream);
}

/* *differ: ranks that should hold the same do not. All have the same records, and the same answer.
 * Fails on each rank whose state is another than that of the first of its group. */
static nd_status compare_ranks(const nd_saver *s, bool *differ)
{
    static const char *const why[] = {
        [ND_ALIKE_SHARDS] = "although both are replicas",
        [ND_ALIKE_UNSPLIT] = "in tensors that tensor parallelism does not split",
        [ND_ALIKE_KV_COPIES] = "in KV heads of which both have copies",
    };
    const nd_rank *r = s->trainer->rank;
    nd_status status = ND_OK;
    *differ = false;
    for (int rank = 0; rank < r->world_size; rank++) {
        for (int k = 0; k < ND_ALIKE_COUNT; k++) {
            const int first = nd_mesh_group_member(&r->mesh, nd_alike_group(k), rank, 0);
            if (s->records[rank].alike[k] == s->records[first].alike[k]) {
                continue;
            }
            *differ = true;
            if (rank == r->rank && status == ND_OK) {
                status = nd_fail(ND_ERR_DATA,
                                 "rank %d holds other values than rank %d, %s; memory was damaged, "
                                 "or they have gone apart",
                                 rank, first, why[k]);
            }
        }
    }
    return status;
}

static void fill_report(nd_saver *s, bool good, nd_save_report *report)
{
    *report = (nd_save_report){.ended = true,
                               .good = good,
                               .step = s->step,
                               .blocked_seconds = s->blocked_seconds,
                               .seconds = nd_clock_seconds() - s->begin_seconds,
                               .deleted = s->deleted};
    snprintf(report->reason, sizeof report->reason, "%s", s->reason);
    for (int i = 0; i < s->manifest.writer_count && s->manifest.writers; i++) {
        report->bytes += s->manifest.writers[i].bytes;
    }
    if (!good && s->error.status != ND_OK && !s->cancelled) {
        snprintf(report->why, sizeof report->why, "%.500s", s->error.message);
        report->is_wrong = s->error.status == ND_ERR_DATA;
    }
}

/* Some rank failed: no rank writes any more when the folder is removed. */
static nd_status give_up(nd_saver *s, nd_save_report *report)
{
    const nd_rank *r = s->trainer->rank;
    nd_monitor_lock(&s->monitor);
    bool own = s->job == JOB_NONE && s->error.status != ND_OK;
    nd_monitor_unlock(&s->monitor);
    if (!own && !cancel_and_wait(s)) {
        return fail_silent_disk(s);
    }
    s->cancelled = !own;
    ND_TRY(nd_comm_barrier(r->groups.by_kind[ND_GROUP_WORLD]));
    if (r->rank == 0) {
        nd_fs_remove_tree(s->temporary);
    }
    fill_report(s, false, report);
    forget_save(s);
    return ND_OK;
}

static nd_status begin_commit(nd_saver *s, nd_save_report *report)
{
    bool differ = false;
    ND_TRY(gather_records(s));
    const nd_status own = compare_ranks(s, &differ);
    if (differ) {
        s->error = own == ND_OK ? (nd_error){0} : *nd_error_last();
        return give_up(s, report);
    }
    s->phase = PHASE_COMMITTING;
    s->trainer->gate = (nd_update_gate){0}; /* every unit was copied */
    if (s->trainer->rank->rank == 0) {
        memcpy(s->manifest.writers, s->records,
               (size_t)s->manifest.writer_count * sizeof *s->records);
        start_job(s, JOB_COMMIT);
    }
    return ND_OK;
}

nd_status nd_saver_advance(nd_saver *s, int64_t flag, nd_save_report *report)
{
    const double begin = nd_clock_seconds();
    nd_status status = ND_OK;
    *report = (nd_save_report){0};
    if (s->phase == PHASE_IDLE || flag == FLAG_BUSY) {
        return ND_OK;
    }
    /* The flag of a job's end is set under the lock, after all that the writer's thread has left
     * for the rank's: a thread that has seen the flag and then had the lock sees that too. */
    nd_monitor_lock(&s->monitor);
    nd_monitor_unlock(&s->monitor);
    if (flag == FLAG_FAILED) {
        status = give_up(s, report);
    } else if (s->phase == PHASE_WRITING) {
        status = begin_commit(s, report);
    } else {
        fill_report(s, true, report);
        forget_save(s);
    }
    s->blocked_seconds += nd_clock_seconds() - begin;
    return status;
}

/* Short of the deadline of a collective, all ranks tell each other that they are still writing. */
nd_status nd_saver_finish(nd_saver *s, nd_save_report *report)
{
    const nd_rank *r = s->trainer->rank;
    double patience = patience_of(s) / 4;
    *report = (nd_save_report){0};
    while (s->phase != PHASE_IDLE) {
        double begin = nd_clock_seconds();
        if (!wait_idle(s, patience < 60 ? patience : 60) && seconds_left(s) == 0) {
            return fail_silent_disk(s);
        }
        nd_monitor_lock(&s->monitor);
        int64_t flag = s->job != JOB_NONE         ? FLAG_BUSY
                       : s->error.status != ND_OK ? FLAG_FAILED
                                                  : FLAG_DONE;
        nd_monitor_unlock(&s->monitor);
        ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &s->trainer->rank->stream,
                                  &flag, 1, ND_DTYPE_I64, ND_REDOP_MAX, NULL));
        s->blocked_seconds += nd_clock_seconds() - begin;
        ND_TRY(nd_saver_advance(s, flag, report));
    }
    return ND_OK;
}
