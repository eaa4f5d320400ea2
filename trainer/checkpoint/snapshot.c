// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/snapshot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/device/staging.h"

enum { DIGEST_BYTES = ND_ALIKE_COUNT * sizeof(uint64_t) };

nd_status nd_snapshot_pinned_bytes(const nd_trainer *trainer, size_t *bytes)
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

static nd_status detach(nd_snapshot *s)
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

typedef struct listing {
    int arrays, extra_count;
    nd_state_array list[ND_STATE_KINDS + ND_STATE_EXTRAS_MAX]; /* arrays, then extras */
} listing;

static nd_status collect(void *context, const nd_state_array *array)
{
    listing *l = context;
    ND_ASSERT(array->dtype == ND_DTYPE_F32);
    ND_ASSERT(array->sharded ? l->arrays < ND_STATE_KINDS && l->extra_count == 0
                             : l->extra_count < ND_STATE_EXTRAS_MAX);
    l->list[l->arrays + l->extra_count] = *array;
    l->arrays += array->sharded;
    l->extra_count += !array->sharded;
    return ND_OK;
}

nd_status nd_snapshot_init(nd_snapshot *s, nd_trainer *trainer, nd_checksum checksum,
                           nd_status (*unit)(void *context, int unit), void *context)
{
    const nd_rank *r = trainer->rank;
    nd_state_extra extras[ND_STATE_EXTRAS_MAX];
    listing l = {0};
    nd_status status = ND_OK;
    *s = (nd_snapshot){.trainer = trainer, .unit = unit, .context = context};
    ND_TRY_OUT(nd_trainer_each_state(trainer, collect, &l));
    for (int a = 0; a < l.arrays; a++) {
        s->live[a] = l.list[a].data;
    }
    for (int i = 0; i < l.extra_count; i++) {
        const nd_state_array *array = &l.list[l.arrays + i];
        snprintf(extras[i].name, sizeof extras[i].name, "%s", array->name);
        extras[i].count = array->count;
        s->live_extras[i] = array->data;
    }
    const nd_shard_plan_options plan = {.layout = trainer->model->layout,
                                        .mesh = &r->mesh,
                                        .rank = r->rank,
                                        .arrays = l.arrays,
                                        .extras = extras,
                                        .extra_count = l.extra_count,
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
        nd_snapshot_fini(s);
    }
    return status;
}

void nd_snapshot_fini(nd_snapshot *s)
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
    *s = (nd_snapshot){0};
}

/* Where the writer finds a piece. */
static const float *piece_of(void *context, int piece, nd_state_kind array)
{
    const nd_snapshot *s = context;
    const nd_piece *p = &s->plan.pieces[piece];
    return s->detached ? s->memory + p->before + array * nd_span_elements(&p->span)
                       : s->live[array] + p->span.begin;
}

static nd_status copy_unit(nd_snapshot *s, int unit)
{
    for (int i = s->plan.first_piece[unit]; i < s->plan.first_piece[unit + 1]; i++) {
        const nd_piece *piece = &s->plan.pieces[i];
        size_t bytes = (size_t)nd_span_elements(&piece->span) * sizeof(float);
        for (int a = 0; a < s->plan.arrays; a++) {
            ND_TRY(nd_copy(&s->stream, (void *)(uintptr_t)piece_of(s, i, a),
                           s->live[a] + piece->span.begin, bytes));
        }
    }
    return s->stream.device->table->event_record(&s->copied[unit], &s->stream);
}

/* Of `count` elements from `first` on of each state array. */
static nd_status add_range(const nd_snapshot *s, nd_stream *stream, int64_t first, int64_t count,
                           uint64_t *out)
{
    for (int a = 0; a < s->plan.arrays; a++) {
        ND_TRY(ND_CALL(s->trainer->rank->ops, stream, digest, .out = out, .x = s->live[a] + first,
                       .count = count));
    }
    return ND_OK;
}

/* Of the parameters of a unit that are alike in one way. */
static nd_status add_alike(const nd_snapshot *s, nd_stream *stream, int unit, nd_alike what,
                           uint64_t *out)
{
    const nd_layout *layout = s->plan.layout;
    const nd_unit *u = &layout->units[unit];
    for (int i = u->first_param; i < u->first_param + u->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const nd_flat_range held = nd_layout_shard_range(layout, p);
        if (nd_param_is_alike(p, what) && held.begin < held.end) {
            ND_TRY(add_range(s, stream, held.begin, held.end - held.begin, out));
        }
    }
    return ND_OK;
}

/* Adds those of a unit to the digests, which lie where the device writes. */
static nd_status add_digests(const nd_snapshot *s, nd_stream *stream, int unit, uint64_t *digests)
{
    const nd_unit *u = &s->plan.layout->units[unit];
    if (s->alike[ND_ALIKE_SHARDS]) {
        ND_TRY(add_range(s, stream, u->shard_offset, u->shard_count, &digests[ND_ALIKE_SHARDS]));
    }
    for (int k = ND_ALIKE_UNSPLIT; k < ND_ALIKE_COUNT; k++) {
        ND_TRY(s->alike[k] ? add_alike(s, stream, unit, k, &digests[k]) : ND_OK);
    }
    return ND_OK;
}

/* On a GPU the gradients' memory, free between steps, holds them until they are copied. */
static nd_status enqueue_digests(nd_snapshot *s)
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

nd_status nd_snapshot_begin(nd_snapshot *s)
{
    nd_stream *stream = &s->trainer->rank->stream;
    atomic_store(&s->cancelled, false);
    memset(s->digests, 0, DIGEST_BYTES);
    for (int i = 0; i < s->plan.extra_count; i++) {
        ND_TRY(nd_copy(stream, s->extras[i], s->live_extras[i],
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

static nd_status wait_copied(nd_snapshot *s, int unit)
{
    bool done = !s->detached;
    while (!done && !atomic_load(&s->cancelled)) {
        nd_device *device = s->trainer->rank->device;
        ND_TRY(device->table->event_query(device, &s->copied[unit], &done));
        if (!done) {
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
    }
    return ND_OK;
}

/* As nd_shard_data says. */
static nd_status begin_unit(void *context, int unit)
{
    nd_snapshot *s = context;
    if (unit > 0 && !s->detached) {
        ND_TRY(add_digests(s, &s->trainer->rank->stream, unit - 1, s->digests));
    }
    ND_TRY(s->unit(s->context, unit));
    return unit < s->plan.layout->unit_count ? wait_copied(s, unit) : ND_OK;
}

nd_status nd_snapshot_write(nd_snapshot *s, const char *folder, int64_t updates,
                            nd_shard_record *out)
{
    const nd_shard_data data = {begin_unit, piece_of, (const float *const *)s->extras, s};
    ND_TRY(nd_shard_write(&s->plan, folder, updates, &data, out));
    memcpy(out->alike, s->digests, sizeof out->alike);
    return ND_OK;
}
