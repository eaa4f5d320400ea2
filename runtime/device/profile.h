// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_PROFILE_H
#define ND_DEVICE_PROFILE_H
/*
 * A record of the calls of one rank in some steps, with their times: ops, collectives, waits. While
 * a trace (trace.h) has a profile, each call that it times is also kept here, with the collective
 * that it entered. On a GPU these are times of the host, which only enqueues.
 *
 * One thread writes it. All memory is taken at init; calls that do not fit are counted.
 */
#include <stdint.h>

#include "runtime/base/progress.h"
#include "runtime/base/status.h"

typedef struct nd_profile_event {
    const char *name; /* static: an op's name, or a call as it stands in the source */
    int64_t begin_ns, end_ns;
    int64_t sequence, bytes; /* of the collective that the call entered; 0: it entered none */
    int32_t kind;            /* nd_trace_kind; -1: a whole step, whose number is `sequence` */
    int32_t group, op;       /* of the collective */
} nd_profile_event;

typedef struct nd_profile {
    const nd_progress_slot *slot; /* of this rank, borrowed; NULL: collectives stay unnamed */
    nd_profile_event *events;     /* owned */
    int64_t count, room, dropped;
    int64_t seen_sequence; /* of the slot, when the last call was kept */
    int32_t seen_group;
    int64_t origin_ns; /* the moment that all ranks call 0 */
} nd_profile;

static inline nd_status nd_profile_init(nd_profile *p, const nd_progress_slot *slot, int64_t room)
{
    *p = (nd_profile){.slot = slot, .room = room};
    return ND_ALLOC(room, &p->events);
}

/* Takes what the slot has as seen. True: a collective was entered since the last look. */
static inline int nd_profile_look(nd_profile *p)
{
    if (!p->slot) {
        return 0;
    }
    int64_t sequence = atomic_load_explicit(&p->slot->sequence, memory_order_relaxed);
    int32_t group = atomic_load_explicit(&p->slot->group, memory_order_relaxed);
    int changed = sequence != p->seen_sequence || group != p->seen_group;
    p->seen_sequence = sequence;
    p->seen_group = group;
    return changed;
}

/* Keeps a call; when the slot has changed since the last one, the call has entered a collective. */
static inline void nd_profile_add(nd_profile *p, int32_t kind, const char *name, int64_t begin_ns,
                                  int64_t end_ns)
{
    nd_profile_event event = {
        .name = name, .begin_ns = begin_ns, .end_ns = end_ns, .kind = kind, .group = -1};
    if (nd_profile_look(p)) {
        event.sequence = p->seen_sequence;
        event.group = p->seen_group;
        event.op = atomic_load_explicit(&p->slot->op, memory_order_relaxed);
        event.bytes = atomic_load_explicit(&p->slot->bytes, memory_order_relaxed);
    }
    if (p->count == p->room) {
        p->dropped++;
        return;
    }
    p->events[p->count++] = event;
}

#endif
