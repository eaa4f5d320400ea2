// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_HOST_H
#define ND_RDZV_HOST_H
/*
 * The store on a socket: one listening address, TLS per connection, the engine of server.h behind
 * it, on the caller's libuv loop. ndlaunch runs it on its own loop; rank 0 of a torchrun-like start
 * runs it in a thread (hosting.h).
 */
#include <uv.h>

#include "runtime/rdzv/address.h"
#include "runtime/rdzv/server.h"
#include "runtime/rdzv/tls.h"

typedef struct nd_host nd_host;

typedef struct nd_host_options {
    uv_loop_t *loop;
    nd_address address; /* with the port; port 0: the system chooses */
    uint8_t key[ND_KEY_BYTES];
    nd_server_options server;
    nd_server_hooks
        hooks; /* context, notice, joined, left, node_frame; send and drop are the host's */
} nd_host_options;

/* Binds once and keeps the socket. ND_ERR_IO naming the port that is in use; ND_ERR_CONFIG for a
 * foreign address. */
nd_status nd_host_open(const nd_host_options *options, nd_host **out);
/* Stops listening and closes everything; the loop must run once more until its handles are closed,
 * which frees it. */
void nd_host_close(nd_host *host);

nd_server *nd_host_server(nd_host *host);
int nd_host_port(const nd_host *host);
const char *nd_host_address(const nd_host *host); /* numeric */

#endif
