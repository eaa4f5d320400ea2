// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/saver.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/base/version.h"

/* The reports of ranks on a save; the largest value of all ranks counts. */
enum { FLAG_IDLE = 0, FLAG_DONE, FLAG_BUSY, FLAG_FAILED };

typedef enum phase { PHASE_IDLE = 0, PHASE_WRITING, PHASE_COMMITTING } phase;
typedef enum job { JOB_NONE = 0, JOB_WRITE, JOB_COMMIT } job;

enum { DIGEST_BYTES = ND_ALIKE_COUNT * sizeof(uint64_t) };

/* The state of this rank as the writer's thread reads it. */
typedef struct snapshot {
    nd_trainer *trainer; /* borrowed */
    nd_shard_plan plan;
    nd_trainer_state state;             /* live, on the device */
    float *extras[ND_STATE_EXTRAS_MAX]; /* host copies, of those in the plan */
    bool alike[ND_ALIKE_COUNT];         /* other ranks hold the same */
    uint64_t *digests;                  /* [ND_ALIKE_COUNT]; pinned where detached */
    /* On a GPU it is detached: */
    bool detached;
    float *memory;    /* pinned; all pieces of all arrays, in the order of writing */
    nd_stream stream; /* of the copies */
    nd_event updated; /* the last update is complete */
    nd_event *copied; /* [unit_count]: the copy of the unit is complete */
} snapshot;

struct nd_saver {
    nd_saver_options options;
    nd_trainer *trainer;
    snapshot snapshot;
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
    nd_error error;     /* of the thread; ND_OK: none */
    int64_t best;       /* nd_saver_keep_best */
    int deleted;

    atomic_bool cancelled; /* the save in flight is given up, and waits for no copy */
};

/* The snapshot. */

nd_status nd_saver_pinned_bytes(const nd_trainer *trainer, size_t *bytes)
{
    const nd_rank *r = trainer->rank;
    const nd_shard_plan_options options = {
        .layout = trainer->model->layout,
        .mesh = &r->mesh,
        .rank = r->rank,
        .arrays = r->config->optimizer.name == ND_OPTIMIZER_ADAMW ? ND_STATE_KINDS : 1};
    nd_shard_plan plan;
    ND_TRY(nd_shard_plan_init(&plan, &options));
    *bytes = (size_t)plan.elements * sizeof(float) + DIGEST_BYTES;
    nd_shard_plan_fini(&plan);
    return ND_OK;
}

static nd_status detach(snapshot *s)
{
    nd_device *device = s->trainer->rank->device;
    void *memory = NULL, *digests = NULL;
    s->detached = true;
    ND_TRY(ND_ALLOC(s->plan.layout->unit_count, &s->copied));
    ND_TRY(nd_host_alloc(device, (size_t)s->plan.elements * sizeof(float), &memory));
    s->memory = memory;
    ND_TRY(nd_host_alloc(device, DIGEST_BYTES, &digests));
    s->digests = digests;
    ND_TRY(device->table->stream_init(device, &s->stream));
    ND_TRY(device->table->event_init(device, &s->updated));
    for (int u = 0; u < s->plan.layout->unit_count; u++) {
        ND_TRY(device->table->event_init(device, &s->copied[u]));
    }
    return ND_OK;
}

static void close_snapshot(snapshot *s)
{
    if (s->detached) {
        nd_device *device = s->trainer->rank->device;
        for (int u = 0; s->copied && u < s->plan.layout->unit_count; u++) {
            device->table->event_fini(&s->copied[u]);
        }
        device->table->event_fini(&s->updated);
        device->table->stream_fini(&s->stream);
        nd_host_free(device, s->memory);
        nd_host_free(device, s->digests);
    } else {
        free(s->digests);
    }
    for (int i = 0; i < s->plan.extra_count; i++) {
        free(s->extras[i]);
    }
    free(s->copied);
    nd_shard_plan_fini(&s->plan);
    *s = (snapshot){0};
}

static nd_status open_snapshot(snapshot *s, nd_trainer *trainer, nd_checksum checksum)
{
    const nd_rank *r = trainer->rank;
    const nd_trainer_state state = nd_trainer_state_of(trainer);
    nd_state_extra extras[ND_STATE_EXTRAS_MAX];
    nd_status status = ND_OK;
    *s = (snapshot){.trainer = trainer, .state = state};
    for (int i = 0; i < state.scale_count; i++) {
        snprintf(extras[i].name, sizeof extras[i].name, "%s", state.scales[i].name);
        extras[i].count = state.scales[i].count;
    }
    const nd_shard_plan_options plan = {.layout = trainer->model->layout,
                                        .mesh = &r->mesh,
                                        .rank = r->rank,
                                        .arrays = state.shard_count,
                                        .extras = extras,
                                        .extra_count = state.scale_count,
                                        .checksum = checksum};
    ND_TRY_OUT(nd_shard_plan_init(&s->plan, &plan));
    for (int i = 0; i < s->plan.extra_count; i++) {
        ND_TRY_OUT(ND_ALLOC(s->plan.extras[i].count, &s->extras[i]));
    }
    for (int k = 0; k < ND_ALIKE_COUNT; k++) {
        s->alike[k] = nd_mesh_group_size(&r->mesh, nd_alike_group(k)) > 1;
    }
    status = r->device->kind == ND_DEVICE_CUDA ? detach(s)
                                               : nd_alloc(1, DIGEST_BYTES, (void **)&s->digests);
out:
    if (status != ND_OK) {
        close_snapshot(s);
    }
    return status;
}

/* The elements of a piece, as the writer finds them. */
static const float *piece_of(const snapshot *s, int piece, nd_state_kind array)
{
    const nd_piece *p = &s->plan.pieces[piece];
    return s->detached ? s->memory + p->before + array * nd_span_elements(&p->span)
                       : s->state.shards[array] + p->span.begin;
}

static nd_status copy_unit(snapshot *s, int unit)
{
    for (int i = s->plan.first_piece[unit]; i < s->plan.first_piece[unit + 1]; i++) {
        const nd_piece *piece = &s->plan.pieces[i];
        size_t bytes = (size_t)nd_span_elements(&piece->span) * sizeof(float);
        for (int a = 0; a < s->plan.arrays; a++) {
            ND_TRY(nd_copy(&s->stream, (void *)(uintptr_t)piece_of(s, i, a),
                           s->state.shards[a] + piece->span.begin, bytes));
        }
    }
    return s->stream.device->table->event_record(&s->copied[unit], &s->stream);
}

/*
 * Adds a unit to the digests, which lie where the device writes: of what other ranks hold alike of
 * all state arrays. They stay 0 where there are no such ranks.
 */
static nd_status add_digests(const snapshot *s, nd_stream *stream, int unit, uint64_t *digests)
{
    const nd_layout *layout = s->plan.layout;
    const nd_unit *u = &layout->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const nd_flat_range held = nd_layout_shard_range(layout, p);
        for (int k = 0; k < ND_ALIKE_COUNT; k++) {
            const bool adds = s->alike[k] && nd_param_is_alike(p, k) && held.begin < held.end;
            for (int a = 0; a < s->plan.arrays && adds; a++) {
                ND_TRY(ND_CALL(s->trainer->rank->ops, stream, digest, .out = &digests[k],
                               .x = s->state.shards[a] + held.begin,
                               .count = held.end - held.begin));
            }
        }
    }
    return ND_OK;
}

/* On a GPU the gradients' memory, free between steps, holds them until they are copied. */
static nd_status enqueue_digests(snapshot *s)
{
    nd_stream *stream = &s->trainer->rank->stream;
    uint64_t *landing = (uint64_t *)(void *)s->trainer->model->fsdp.grad;
    if (!s->alike[ND_ALIKE_SHARDS] && !s->alike[ND_ALIKE_UNSPLIT]) { /* nor copies */
        return ND_OK;
    }
    if (DIGEST_BYTES > (size_t)s->plan.layout->shard_total * sizeof(float)) {
        return nd_fail(ND_ERR_INTERNAL, "a shard is too small for its digests");
    }
    ND_TRY(nd_copy(stream, landing, s->digests, DIGEST_BYTES));
    for (int u = 0; u < s->plan.layout->unit_count; u++) {
        ND_TRY(add_digests(s, stream, u, landing));
    }
    return nd_copy(stream, s->digests, landing, DIGEST_BYTES);
}

static nd_status begin_snapshot(snapshot *s)
{
    nd_stream *stream = &s->trainer->rank->stream;
    memset(s->digests, 0, DIGEST_BYTES);
    for (int i = 0; i < s->plan.extra_count; i++) {
        ND_TRY(nd_copy(stream, s->extras[i], s->state.scales[i].data,
                       (size_t)s->plan.extras[i].count * sizeof(float)));
    }
    ND_TRY(s->plan.extra_count > 0 ? nd_stream_sync(stream) : ND_OK);
    if (!s->detached) {
        return ND_OK;
    }
    ND_TRY(enqueue_digests(s));
    ND_TRY(stream->device->table->event_record(&s->updated, stream));
    ND_TRY(nd_stream_wait(&s->stream, &s->updated));
    for (int u = 0; u < s->plan.layout->unit_count; u++) {
        ND_TRY(copy_unit(s, u));
    }
    return ND_OK;
}

/* The writer's thread. */

static void pass_units(nd_saver *s, int units)
{
    nd_monitor_lock(&s->monitor);
    s->units_copied = units;
    nd_monitor_tell(&s->monitor);
    nd_monitor_unlock(&s->monitor);
}

static nd_status wait_copied(nd_saver *s, int unit)
{
    bool done = !s->snapshot.detached;
    while (!done && !atomic_load(&s->cancelled)) {
        nd_device *device = s->trainer->rank->device;
        ND_TRY(device->table->event_query(device, &s->snapshot.copied[unit], &done));
        if (!done) {
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
    }
    return ND_OK;
}

/* Before a unit is written, and once behind the last. On a CPU the digests of a unit are added
 * before the unit may change. */
static nd_status begin_unit(void *context, int unit)
{
    nd_saver *s = context;
    if (unit > 0 && !s->snapshot.detached) {
        ND_TRY(add_digests(&s->snapshot, &s->trainer->rank->stream, unit - 1, s->snapshot.digests));
    }
    pass_units(s, unit);
    if (unit == s->snapshot.plan.layout->unit_count) {
        return ND_OK;
    }
    if (s->options.before_unit) {
        s->options.before_unit(s->options.context, unit);
    }
    nd_fs_beat();
    return atomic_load(&s->cancelled) ? nd_fail(ND_ERR_CANTCREATE, "the save was given up")
                                      : wait_copied(s, unit);
}

static const float *find_piece(void *context, int piece, nd_state_kind array)
{
    const nd_saver *s = context;
    return piece_of(&s->snapshot, piece, array);
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
    const nd_shard_data data = {begin_unit, find_piece, (const float *const *)s->snapshot.extras,
                                s};
    ND_TRY(nd_shard_write(&s->snapshot.plan, s->state, s->updates, &data, &s->record));
    memcpy(s->record.alike, s->snapshot.digests, DIGEST_BYTES);
    return ND_OK;
}

static nd_status commit(nd_saver *s)
{
    const nd_saver_options *o = &s->options;
    if (o->extra) {
        ND_TRY(o->extra(o->context, s->temporary, &s->manifest));
    }
    ND_TRY(nd_checkpoint_commit(o->run, s->temporary, &s->manifest, o->gate, o->context));
    if (o->committed) {
        o->committed(o->context, s->step);
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
    ND_TRY_OUT(open_snapshot(&s->snapshot, trainer, options->checksum));
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
    atomic_store(&s->cancelled, true);
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
    close_snapshot(&s->snapshot);
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
    m->identity = json_incref(s->options.identity);
    m->config = json_incref(s->options.config);
    ND_TRY(nd_manifest_layout(&m->shape, s->trainer->model->layout, NULL, (nd_coord){{0}},
                              &m->layout));
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
    ND_TRY(begin_snapshot(&s->snapshot));
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
