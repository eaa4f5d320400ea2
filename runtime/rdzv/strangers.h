// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STRANGERS_H
#define ND_RDZV_STRANGERS_H
/*
 * The connections that have not joined the job yet, by age, and which of them makes room for a new
 * one. Pure data, for the engine of server.h.
 *
 * Anybody can connect without the key, so places are few, and a connection that says nothing must
 * not keep a worker out: silent strangers go first, after 20 ms, and of those that have begun to
 * speak only one that gave no sign for 250 ms. The oldest goes first, but an origin (the host it
 * comes from) with more than a quarter of all places makes room before the others.
 *
 * A sign is that its first bytes have come, that the store has answered, or has bytes of it that it
 * did not read yet: thousands of workers that come at once must not pay for the time that the store
 * needs. Only a few signs count, so that no connection stays by sending one byte after the other.
 */
#include <stdbool.h>
#include <stdint.h>

enum {
    ND_STRANGERS_LEAST = 64, /* places, whatever the limit of open files */
    ND_STRANGERS_MOST = 1024,
    ND_STRANGER_ORIGINS = 256,
    ND_STRANGER_SIGNS = 5 /* that count */
};

typedef struct nd_stranger {
    struct nd_stranger *older, *newer; /* in the queue */
    void *owner;
    int64_t came;  /* nd_clock_ns of the connection */
    int64_t since; /* of its last sign, or came */
    uint8_t origin, signs;
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
/* It gave a sign, which also means that it speaks. False: its signs are used up. */
bool nd_strangers_sign(nd_strangers *all, nd_stranger *stranger, int64_t now);

/* The one that makes room where `places` are taken; NULL: none has been here for long enough. */
nd_stranger *nd_strangers_leaving(const nd_strangers *all, int places, int64_t now);

#endif
