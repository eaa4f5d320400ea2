// SPDX-License-Identifier: Apache-2.0
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/report/sink_thread.h"

enum { ALIGNMENT = 16 };

/* Lies before what it copies. */
typedef struct queued_record {
    size_t bytes; /* of all of it */
    nd_record record;
} queued_record;

/* A member of a record that points to something, which is copied behind the record. */
typedef struct pointer {
    enum { NOTHING = 0, TEXT, MESH, SOURCES } to;
    size_t at, count_at; /* offsets of the member, and of how many sources there are */
} pointer;

#define AT(type, member) offsetof(nd_##type, member)
static const struct {
    size_t bytes;
    pointer pointers[6]; /* ends with NOTHING */
} kinds[] = {
    [ND_RECORD_STEP] = {sizeof(nd_step_record),
                        {{SOURCES, AT(step_record, sources), AT(step_record, source_count)}}},
    [ND_RECORD_VALIDATION] = {sizeof(nd_validation_record),
                              {{SOURCES, AT(validation_record, sets),
                                AT(validation_record, set_count)}}},
    [ND_RECORD_HEALTH] = {sizeof(nd_health_record), {{NOTHING}}},
    [ND_RECORD_EVENT] = {sizeof(nd_run_event),
                         {{TEXT, AT(run_event, path)},
                          {TEXT, AT(run_event, reason)},
                          {TEXT, AT(run_event, sink)},
                          {MESH, AT(run_event, mesh)},
                          {MESH, AT(run_event, mesh_was)}}},
};
#undef AT

/* Copies parts one behind the other, or only counts their bytes. */
typedef struct packer {
    uint8_t *at; /* NULL: counts */
    size_t used;
} packer;

static void *pack(packer *p, const void *part, size_t bytes)
{
    uint8_t *place = p->at ? p->at + p->used : NULL;
    if (place && bytes > 0) {
        memcpy(place, part, bytes);
    }
    p->used += nd_round_up_bytes(bytes, ALIGNMENT);
    return place;
}

static void *pack_sources(packer *p, const nd_source_loss *list, int count)
{
    nd_source_loss *copy = pack(p, list, (size_t)count * sizeof *list);
    for (int i = 0; i < count; i++) {
        const char *name = pack(p, list[i].name, strlen(list[i].name) + 1);
        if (copy) {
            copy[i].name = name;
        }
    }
    return copy;
}

static void *pack_target(packer *p, const pointer *from, const void *record, const void *target)
{
    int count = 0;
    switch (from->to) {
    case TEXT:
        return pack(p, target, strlen(target) + 1);
    case MESH:
        return pack(p, target, sizeof(nd_mesh));
    case SOURCES:
        memcpy(&count, (const uint8_t *)record + from->count_at, sizeof count);
        return pack_sources(p, target, count);
    case NOTHING:
        break;
    }
    return NULL;
}

static void pack_record(packer *p, const nd_record *record)
{
    const queued_record head = {.record = *record};
    queued_record *queued = pack(p, &head, sizeof head);
    uint8_t *copy = pack(p, record->of, kinds[record->kind].bytes);
    for (const pointer *one = kinds[record->kind].pointers; one->to != NOTHING; one++) {
        const void *target, *moved;
        memcpy(&target, (const uint8_t *)record->of + one->at, sizeof target);
        moved = target ? pack_target(p, one, record->of, target) : NULL;
        if (copy) {
            memcpy(copy + one->at, &moved, sizeof moved);
        }
    }
    if (queued) {
        queued->bytes = p->used;
        queued->record.of = copy;
    }
}

bool nd_record_counts(const nd_record *record)
{
    return record->kind == ND_RECORD_STEP || record->kind == ND_RECORD_VALIDATION;
}

nd_status nd_record_queue_init(nd_record_queue *queue, size_t capacity)
{
    *queue = (nd_record_queue){0};
    ND_TRY(nd_alloc(capacity, 1, (void **)&queue->bytes));
    queue->capacity = capacity;
    return ND_OK;
}

void nd_record_queue_fini(nd_record_queue *queue)
{
    free(queue->bytes);
    *queue = (nd_record_queue){0};
}

/* Where so many bytes fit in one piece; SIZE_MAX: nowhere. */
static size_t place_for(nd_record_queue *q, size_t bytes)
{
    if (q->count == 0) { /* the same few pages are used as long as the sink keeps up */
        q->begin = q->end = q->wrap = 0;
    }
    if (q->wrap > 0) {
        return q->begin - q->end >= bytes ? q->end : SIZE_MAX;
    }
    if (q->capacity - q->end >= bytes) {
        return q->end;
    }
    if (q->begin >= bytes) {
        q->wrap = q->end;
        return 0;
    }
    return SIZE_MAX;
}

bool nd_record_queue_push(nd_record_queue *queue, const nd_record *record)
{
    packer counting = {0}, copying = {0};
    pack_record(&counting, record);
    const size_t place = place_for(queue, counting.used);
    if (place == SIZE_MAX) {
        return false;
    }
    copying.at = queue->bytes + place;
    pack_record(&copying, record);
    queue->end = place + copying.used;
    queue->count++;
    return true;
}

static const queued_record *first_of(const nd_record_queue *queue)
{
    return (const queued_record *)(const void *)(queue->bytes + queue->begin);
}

const nd_record *nd_record_queue_first(const nd_record_queue *queue)
{
    return queue->count > 0 ? &first_of(queue)->record : NULL;
}

void nd_record_queue_pop(nd_record_queue *queue)
{
    ND_ASSERT(queue->count > 0);
    queue->begin += first_of(queue)->bytes;
    queue->count--;
    if (queue->wrap > 0 && queue->begin == queue->wrap) {
        queue->begin = queue->wrap = 0;
    }
}
