// SPDX-License-Identifier: Apache-2.0
/* One peer: its name, the frames that it is sent, and its end. */
#include <stdio.h>

#include "runtime/rdzv/server_state.h"

void *nd_peer_transport(const nd_peer *peer)
{
    return peer->transport;
}

const char *nd_peer_name(const nd_peer *peer)
{
    return peer->name;
}

const char *nd_peer_host(const nd_peer *peer)
{
    return peer->host;
}

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

void nd_server_note_refused(nd_server *server, const char *name, const char *why, int64_t now)
{
    enum { SHOWN = 3 };
    const int64_t ten_seconds_ns = 10000000000;
    char line[512];
    if (server->refused_since == 0 || now - server->refused_since > ten_seconds_ns) {
        server->refused = 0;
        server->refused_since = now;
    }
    if (server->refused++ < SHOWN) {
        snprintf(line, sizeof line, "a connection from %s to the store was refused: %s", name, why);
        server->hooks.notice(server->hooks.context, line);
    }
}
