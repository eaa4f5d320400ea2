// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/strangers.h"

#include <stddef.h>

static const int64_t silent_ns = 20000000, speaking_ns = 250000000;

int nd_strangers_places(int64_t files, int64_t world, int64_t nodes)
{
    /* At most six files for each worker (preflight.c of ndlaunch), one for each node, and some for
     * libraries. */
    int64_t left = files - 6 * world - nodes - 128;
    return left < ND_STRANGERS_LEAST  ? ND_STRANGERS_LEAST
           : left > ND_STRANGERS_MOST ? ND_STRANGERS_MOST
                                      : (int)left;
}

static nd_stranger_queue *queue_of(nd_strangers *all, const nd_stranger *stranger)
{
    return stranger->speaks ? &all->speaking : &all->silent;
}

static void unlink_from(nd_stranger_queue *queue, nd_stranger *s)
{
    *(s->older ? &s->older->newer : &queue->oldest) = s->newer;
    *(s->newer ? &s->newer->older : &queue->newest) = s->older;
}

/* Each queue is ordered by `since`, which is now. */
static void append(nd_stranger_queue *queue, nd_stranger *s)
{
    s->older = queue->newest;
    s->newer = NULL;
    *(s->older ? &s->older->newer : &queue->oldest) = s;
    queue->newest = s;
}

void nd_strangers_add(nd_strangers *all, nd_stranger *s, void *owner, int64_t now, uint32_t origin)
{
    *s = (nd_stranger){.owner = owner,
                       .came = now,
                       .since = now,
                       .origin = (uint8_t)(origin % ND_STRANGER_ORIGINS)};
    append(&all->silent, s);
    all->of_origin[s->origin]++;
    all->count++;
}

void nd_strangers_remove(nd_strangers *all, nd_stranger *s)
{
    unlink_from(queue_of(all, s), s);
    all->of_origin[s->origin]--;
    all->count--;
}

bool nd_strangers_sign(nd_strangers *all, nd_stranger *s, int64_t now)
{
    if (s->signs == ND_STRANGER_SIGNS) {
        return false;
    }
    unlink_from(queue_of(all, s), s);
    s->speaks = true;
    s->signs++;
    s->since = now;
    append(&all->speaking, s);
    return true;
}

/* The oldest of an origin with more than its part, else the oldest; NULL: none is old enough. */
static nd_stranger *leaving_from(const nd_strangers *all, const nd_stranger_queue *queue, int part,
                                 int64_t since)
{
    for (nd_stranger *s = queue->oldest; s && s->since <= since; s = s->newer) {
        if (all->of_origin[s->origin] > part) {
            return s;
        }
    }
    return queue->oldest && queue->oldest->since <= since ? queue->oldest : NULL;
}

nd_stranger *nd_strangers_leaving(const nd_strangers *all, int places, int64_t now)
{
    nd_stranger *silent = leaving_from(all, &all->silent, places / 4, now - silent_ns);
    return silent ? silent : leaving_from(all, &all->speaking, places / 4, now - speaking_ns);
}
