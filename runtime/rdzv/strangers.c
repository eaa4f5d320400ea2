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

static void append(nd_strangers *all, nd_stranger *s)
{
    s->older = all->newest;
    s->newer = NULL;
    *(s->older ? &s->older->newer : &all->oldest) = s;
    all->newest = s;
    all->count++;
}

void nd_strangers_add(nd_strangers *all, nd_stranger *s, void *owner, int64_t now)
{
    *s = (nd_stranger){.owner = owner, .came = now, .since = now};
    append(all, s);
}

void nd_strangers_remove(nd_strangers *all, nd_stranger *s)
{
    *(s->older ? &s->older->newer : &all->oldest) = s->newer;
    *(s->newer ? &s->newer->older : &all->newest) = s->older;
    all->count--;
}

bool nd_strangers_sign(nd_strangers *all, nd_stranger *s, int64_t now)
{
    if (s->signs == ND_STRANGER_SIGNS) {
        return false;
    }
    nd_strangers_remove(all, s);
    s->signs++;
    s->since = now;
    append(all, s);
    return true;
}

nd_stranger *nd_strangers_leaving(const nd_strangers *all, int64_t now)
{
    for (nd_stranger *s = all->oldest; s && s->since <= now - silent_ns; s = s->newer) {
        if (s->signs == 0) {
            return s;
        }
    }
    return all->oldest && all->oldest->since <= now - speaking_ns ? all->oldest : NULL;
}
