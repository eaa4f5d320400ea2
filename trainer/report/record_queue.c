// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/record_queue.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

enum { ALIGNMENT = 16 };

/* Lies before what it copies. */
typedef struct entry {
    size_t bytes; /* of all of it */
    nd_record record;
} entry;

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

static const char *pack_text(packer *p, const char *text)
{
    return text ? pack(p, text, strlen(text) + 1) : NULL;
}

static const nd_source_loss *pack_sources(packer *p, const nd_source_loss *list, int count)
{
    nd_source_loss *copy = pack(p, list, (size_t)count * sizeof *list);
    for (int i = 0; i < count; i++) {
        const char *name = pack_text(p, list[i].name);
        if (copy) {
            copy[i].name = name;
        }
    }
    return copy;
}

static const nd_mesh *pack_mesh(packer *p, const nd_mesh *mesh)
{
    return mesh ? pack(p, mesh, sizeof *mesh) : NULL;
}

static void *pack_step(packer *p, const nd_step_record *r)
{
    nd_step_record *copy = pack(p, r, sizeof *r);
    const nd_source_loss *sources = pack_sources(p, r->sources, r->source_count);
    if (copy) {
        copy->sources = sources;
    }
    return copy;
}

static void *pack_validation(packer *p, const nd_validation_record *r)
{
    nd_validation_record *copy = pack(p, r, sizeof *r);
    const nd_source_loss *sets = pack_sources(p, r->sets, r->set_count);
    if (copy) {
        copy->sets = sets;
    }
    return copy;
}

static void *pack_event(packer *p, const nd_run_event *e)
{
    nd_run_event *copy = pack(p, e, sizeof *e);
    const char *path = pack_text(p, e->path), *reason = pack_text(p, e->reason);
    const char *sink = pack_text(p, e->sink);
    const nd_mesh *mesh = pack_mesh(p, e->mesh), *was = pack_mesh(p, e->mesh_was);
    if (copy) {
        copy->path = path;
        copy->reason = reason;
        copy->sink = sink;
        copy->mesh = mesh;
        copy->mesh_was = was;
    }
    return copy;
}

static void *pack_histogram(packer *p, const nd_histogram_record *r)
{
    nd_histogram_record *copy = pack(p, r, sizeof *r);
    const char *tag = pack_text(p, r->tag);
    const nd_histogram *histogram = pack(p, r->histogram, sizeof *r->histogram);
    if (copy) {
        copy->tag = tag;
        copy->histogram = histogram;
    }
    return copy;
}

static void pack_entry(packer *p, const nd_record *record)
{
    const entry head = {.record = *record};
    const void *of = NULL;
    entry *copy = pack(p, &head, sizeof head);
    switch (record->kind) {
    case ND_RECORD_STEP:
        of = pack_step(p, record->of);
        break;
    case ND_RECORD_VALIDATION:
        of = pack_validation(p, record->of);
        break;
    case ND_RECORD_HEALTH:
        of = pack(p, record->of, sizeof(nd_health_record));
        break;
    case ND_RECORD_EVENT:
        of = pack_event(p, record->of);
        break;
    case ND_RECORD_HISTOGRAM:
        of = pack_histogram(p, record->of);
        break;
    }
    if (copy) {
        copy->bytes = p->used;
        copy->record.of = of;
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

/* Bytes that a record takes of a queue. */
static size_t bytes_of(const nd_record *record)
{
    packer counting = {0};
    pack_entry(&counting, record);
    return counting.used;
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
    const size_t place = place_for(queue, bytes_of(record));
    if (place == SIZE_MAX) {
        return false;
    }
    packer copying = {.at = queue->bytes + place};
    pack_entry(&copying, record);
    queue->end = place + copying.used;
    queue->count++;
    return true;
}

static const entry *first_entry(const nd_record_queue *queue)
{
    return (const entry *)(const void *)(queue->bytes + queue->begin);
}

const nd_record *nd_record_queue_first(const nd_record_queue *queue)
{
    return queue->count > 0 ? &first_entry(queue)->record : NULL;
}

void nd_record_queue_pop(nd_record_queue *queue)
{
    ND_ASSERT(queue->count > 0);
    queue->begin += first_entry(queue)->bytes;
    queue->count--;
    if (queue->wrap > 0 && queue->begin == queue->wrap) {
        queue->begin = queue->wrap = 0;
    }
}
