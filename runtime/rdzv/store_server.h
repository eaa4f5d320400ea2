// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_STORE_SERVER_H
#define ND_RDZV_STORE_SERVER_H
/*
 * The store on a socket: one listening address, TLS per connection, the engine of server.h behind
 * it, on the caller's libuv loop. ndlaunch runs it on its own loop; rank 0 of a torchrun-like start
 * runs it in a thread (store.c).
 */
#include <uv.h>

#include "runtime/rdzv/address.h"
#include "runtime/rdzv/server.h"
#include "runtime/rdzv/tls.h"

typedef struct nd_store_server nd_store_server;

typedef struct nd_store_server_options {
    uv_loop_t *loop;
    nd_address address; /* with the port; port 0: the system chooses */
    uint8_t key[ND_KEY_BYTES];
    nd_server_options server;
    nd_server_hooks hooks; /* context, notice, left, node_frame; the others are set here */
} nd_store_server_options;

/* Binds once and keeps the socket. ND_ERR_IO names a port that is in use; ND_ERR_CONFIG: the
 * address is not one of this host. */
nd_status nd_store_server_open(const nd_store_server_options *options, nd_store_server **out);
/* Stops listening and closes everything; the loop must run once more until its handles are closed,
 * which frees it. */
void nd_store_server_close(nd_store_server *store);

nd_server *nd_store_server_engine(nd_store_server *store);
int nd_store_server_port(const nd_store_server *store);
const char *nd_store_server_address(const nd_store_server *store); /* numeric */

#endif
