// SPDX-License-Identifier: Apache-2.0
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/report/sink_thread.h"

enum { ALIGNMENT = 16 };

/* Lies before what it copies. */
struct nd_queued_record {
    nd_queued_record *next; /* NULL: the newest */
    size_t bytes;           /* of all of it */
    nd_record record;
};

/* A member of a record that points to something, which is copied behind the record. */
typedef struct pointer {
    enum { NOTHING = 0, TEXT, MESH, HISTOGRAM, SOURCES } to;
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
    [ND_RECORD_HISTOGRAM] = {sizeof(nd_histogram_record),
                             {{TEXT, AT(histogram_record, tag)},
                              {HISTOGRAM, AT(histogram_record, histogram)}}},
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
    case HISTOGRAM:
        return pack(p, target, sizeof(nd_histogram));
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
    const nd_queued_record head = {.record = *record};
    nd_queued_record *queued = pack(p, &head, sizeof head);
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

bool nd_record_queue_push(nd_record_queue *queue, const nd_record *record)
{
    packer counting = {0}, copying = {0};
    pack_record(&counting, record);
    if (counting.used > queue->capacity - queue->used) {
        return false;
    }
    nd_queued_record *queued = malloc(counting.used);
    if (!queued) {
        return false;
    }
    copying.at = (uint8_t *)queued;
    pack_record(&copying, record);
    *(queue->count > 0 ? &queue->last->next : &queue->first) = queued;
    queue->last = queued;
    queue->used += queued->bytes;
    queue->count++;
    return true;
}

const nd_record *nd_record_queue_first(const nd_record_queue *queue)
{
    return queue->count > 0 ? &queue->first->record : NULL;
}

void nd_record_queue_pop(nd_record_queue *queue)
{
    nd_queued_record *first = queue->first;
    ND_ASSERT(queue->count > 0);
    queue->first = first->next;
    queue->used -= first->bytes;
    queue->count--;
    free(first);
}

void nd_record_queue_fini(nd_record_queue *queue)
{
    while (queue->count > 0) {
        nd_record_queue_pop(queue);
    }
}
