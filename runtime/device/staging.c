// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/staging.h"

#include "runtime/base/math.h"

nd_status nd_host_alloc(nd_device *device, size_t bytes, void **out)
{
    return device->table->host_alloc(device, bytes, out);
}

void nd_host_free(nd_device *device, void *p)
{
    if (device) {
        device->table->host_free(device, p);
    }
}

nd_status nd_staging_init(nd_staging *s, nd_device *device, size_t slot_bytes, int64_t slots)
{
    void *memory = NULL;
    *s = (nd_staging){.device = device, .slot_bytes = nd_round_up_bytes(slot_bytes, 256)};
    s->slots = (int)nd_min(slots, ND_STAGING_SLOTS);
    ND_TRY(nd_host_alloc(device, s->slot_bytes * (size_t)s->slots, &memory));
    s->memory = memory;
    for (int i = 0; i < s->slots; i++) {
        ND_TRY(device->table->event_init(device, &s->copied[i]));
    }
    return ND_OK;
}

void nd_staging_fini(nd_staging *s)
{
    for (int i = 0; i < s->slots && s->memory; i++) {
        s->device->table->event_fini(&s->copied[i]);
    }
    nd_host_free(s->device, s->memory);
    *s = (nd_staging){0};
}

nd_status nd_staging_begin(nd_staging *s, void **slot)
{
    ND_TRY(s->device->table->event_sync(s->device, &s->copied[s->next]));
    *slot = s->memory + s->slot_bytes * (size_t)s->next;
    return ND_OK;
}

nd_status nd_staging_end(nd_staging *s, nd_stream *stream, nd_event **copied)
{
    ND_TRY(s->device->table->event_record(&s->copied[s->next], stream));
    *copied = &s->copied[s->next];
    s->next = (s->next + 1) % s->slots;
    return ND_OK;
}
