// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_CHANNEL_H
#define ND_RDZV_CHANNEL_H
/*
 * The client's end of a connection to the store: a socket, TLS, frames. Blocking with deadlines
 * (nd_clock_ns); used by workers (store.c) and by the launchers of further nodes, which also poll
 * it from their event loop.
 */
#include <stdint.h>

#include "runtime/rdzv/address.h"
#include "runtime/rdzv/tls.h"
#include "runtime/rdzv/wire.h"

typedef struct nd_channel nd_channel;

/*
 * Connects and proves the key, trying each address in turn until the deadline (a line every 10 s).
 * ND_ERR_CONFIG: the key differs. ND_ERR_HANG with the last reason: no store answered until the
 * deadline.
 */
nd_status nd_channel_open(const char *host, int port, const uint8_t key[ND_KEY_BYTES],
                          double timeout_seconds, nd_channel **out);
void nd_channel_close(nd_channel *channel); /* NULL is legal */

/* Sends whole frames. */
nd_status nd_channel_send(nd_channel *channel, const nd_wire_buffer *frames, int64_t deadline);
/* The next frame, valid until the next receive. With a deadline in the past it returns only what
 * has arrived, or type NONE. */
nd_status nd_channel_receive(nd_channel *channel, int64_t deadline, nd_wire_frame *frame);

int nd_channel_fd(const nd_channel *channel);
/* nd_store_network */
nd_status nd_channel_network(const nd_channel *channel, nd_address *own, nd_tls_context **client,
                             nd_tls_context **server);
const char *
nd_channel_peer(const nd_channel *channel); /* numeric address, for others to connect to */

typedef struct nd_hello {
    const char *version, *run_id, *host;
    uint32_t epoch;
    nd_wire_role role;
    int index;
} nd_hello;
/* Sends hello and waits for the welcome; run_id receives the store's. A refusal returns the status
 * and sentence of the store. */
nd_status nd_channel_hello(nd_channel *channel, const nd_hello *hello, int64_t deadline,
                           char *run_id, size_t capacity, int *world_size);
/* The error that an ND_WIRE_ERROR frame carries, as this thread's error. */
nd_status nd_channel_error(const nd_wire_frame *frame);

#endif
