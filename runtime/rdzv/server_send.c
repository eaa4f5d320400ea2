// SPDX-License-Identifier: Apache-2.0
/* What goes to a peer, and what a peer waits for. */
#include "runtime/rdzv/server_internal.h"

void nd_server_drop(nd_server *server, nd_peer *peer)
{
    if (!peer->dropped) {
        peer->dropped = true;
        server->hooks.drop(server->hooks.context, peer);
    }
}

void nd_server_flush(nd_server *server, nd_peer *peer)
{
    if (nd_wire_end(&server->out) == ND_OK) {
        server->hooks.send(server->hooks.context, peer, server->out.data, server->out.size);
    } else {
        nd_server_drop(server, peer);
    }
    server->out.size = 0;
    server->out.failed = false;
}

void nd_server_error(nd_server *server, nd_peer *peer, uint32_t request, nd_status status,
                     const char *message)
{
    nd_wire_begin(&server->out, ND_WIRE_ERROR);
    nd_wire_put_u32(&server->out, request);
    nd_wire_put_u32(&server->out, (uint32_t)status);
    nd_wire_put_text(&server->out, message);
    nd_server_flush(server, peer);
}

void nd_server_send(nd_server *server, nd_peer *peer, const void *frames, size_t count)
{
    if (!peer->dropped) {
        server->hooks.send(server->hooks.context, peer, frames, count);
    }
}

void nd_server_refuse(nd_server *server, nd_peer *peer, nd_status status, const char *message)
{
    if (!peer->dropped) {
        nd_server_error(server, peer, 0, status, message);
        nd_server_drop(server, peer);
    }
}

void nd_server_begin_wait(nd_peer *peer, nd_wait wait, uint32_t request, uint64_t timeout_ms,
                          int64_t now)
{
    const uint64_t year_ms = 366ull * 24 * 3600 * 1000;
    peer->wait = wait;
    peer->request = request;
    peer->wait_since = peer->noticed = now;
    peer->deadline = now + (int64_t)(timeout_ms < year_ms ? timeout_ms : year_ms) * 1000000;
}
