// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STRANGERS_H
#define ND_RDZV_STRANGERS_H
/*
 * The connections that have not joined the job yet, by the time of their last sign, and which of
 * them makes room for a new one. Pure data, for the engine of server.h.
 *
 * Anybody can connect without the key, so places are few, and a connection that says nothing must
 * not keep a worker out: the oldest silent stranger goes first, after 20 ms, and of those that have
 * begun to speak only one that gave no sign for 250 ms.
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
    ND_STRANGER_SIGNS = 5 /* that count */
};

typedef struct nd_stranger {
    struct nd_stranger *older, *newer; /* by `since` */
    void *owner;
    int64_t came;  /* nd_clock_ns of the connection */
    int64_t since; /* of its last sign, or came */
    int signs;     /* 0: it is silent */
} nd_stranger;

typedef struct nd_strangers {
    nd_stranger *oldest, *newest;
    int count;
} nd_strangers;

/* Places in a process that may open `files` files and needs some for `world` workers and `nodes`
 * nodes. */
int nd_strangers_places(int64_t files, int64_t world, int64_t nodes);

void nd_strangers_add(nd_strangers *all, nd_stranger *stranger, void *owner, int64_t now);
void nd_strangers_remove(nd_strangers *all, nd_stranger *stranger);
/* It gave a sign. False: its signs are used up. */
bool nd_strangers_sign(nd_strangers *all, nd_stranger *stranger, int64_t now);
/* The one that makes room; NULL: none has been here for long enough. */
nd_stranger *nd_strangers_leaving(const nd_strangers *all, int64_t now);

#endif
