// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STRANGERS_H
#define ND_RDZV_STRANGERS_H
/*
 * The connections that have not joined the job yet, by age, and which of them makes room for a new
 * one. Pure data, for the engine of server.h.
 *
 * Anybody can connect without the key, so places are few, and a connection that says nothing must
 * not keep a worker out: silent strangers go first, after 20 ms, and of those that have begun to
 * speak only one that is not done within 250 ms. The oldest goes first, but an origin (the host it
 * comes from) with more than a quarter of all places makes room before the others.
 */
#include <stdbool.h>
#include <stdint.h>

enum {
    ND_STRANGERS_LEAST = 64, /* places, whatever the limit of open files */
    ND_STRANGERS_MOST = 1024,
    ND_STRANGER_ORIGINS = 256
};

typedef struct nd_stranger {
    struct nd_stranger *older, *newer; /* in the queue */
    void *owner;
    int64_t since; /* nd_clock_ns of the connection */
    uint8_t origin;
    bool speaks;
} nd_stranger;

typedef struct nd_stranger_queue {
    nd_stranger *oldest, *newest;
} nd_stranger_queue;

typedef struct nd_strangers {
    nd_stranger_queue silent, speaking;
    int count;
    uint16_t of_origin[ND_STRANGER_ORIGINS];
} nd_strangers;

/* Places in a process that may open `files` files and needs some for `world` workers and `nodes`
 * nodes. */
int nd_strangers_places(int64_t files, int64_t world, int64_t nodes);

/* origin: a hash of the address without the port; two hosts with the same one share their part. */
void nd_strangers_add(nd_strangers *all, nd_stranger *stranger, void *owner, int64_t now,
                      uint32_t origin);
void nd_strangers_remove(nd_strangers *all, nd_stranger *stranger);
/* Its first bytes have come. */
void nd_strangers_speaks(nd_strangers *all, nd_stranger *stranger);

/* The one that makes room where `places` are taken; NULL: none has been here for long enough. */
nd_stranger *nd_strangers_leaving(const nd_strangers *all, int places, int64_t now);

#endif
