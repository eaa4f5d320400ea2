// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/server.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/rdzv/server_state.h"

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

const char *nd_peer_name(const nd_peer *peer)
{
    return peer->name;
}

const char *nd_peer_host(const nd_peer *peer)
{
    return peer->host;
}

void nd_server_send(nd_server *server, nd_peer *peer, const void *frames, size_t count)
{
    if (!peer->dropped) {
        server->hooks.send(peer->transport, frames, count);
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

nd_status nd_server_create(const nd_server_options *options, const nd_server_hooks *hooks,
                           nd_server **out)
{
    nd_server *server;
    ND_TRY(ND_ALLOC(1, &server));
    server->hooks = *hooks;
    snprintf(server->version, sizeof server->version, "%s", options->version);
    snprintf(server->run_id, sizeof server->run_id, "%s", options->run_id);
    snprintf(server->job, sizeof server->job, "%s", options->run_id);
    server->epoch = options->epoch;
    server->world_size = server->most_ranks = options->world_size;
    server->nnodes = options->nnodes;
    server->files = options->files;
    double hello = options->hello_seconds > 0 ? options->hello_seconds : 5;
    server->hello_ns = (int64_t)(hello * 1e9);
    nd_status status = ND_ALLOC(options->nnodes, &server->places[ND_WIRE_NODE]);
    status =
        status == ND_OK ? ND_ALLOC(options->world_size, &server->places[ND_WIRE_WORKER]) : status;
    if (status != ND_OK) {
        nd_server_destroy(server);
        return status;
    }
    *out = server;
    return ND_OK;
}

void nd_server_restart(nd_server *server, const char *run_id, uint32_t epoch, int world_size)
{
    ND_ASSERT(epoch > server->epoch && world_size > 0 && world_size <= server->most_ranks);
    snprintf(server->run_id, sizeof server->run_id, "%s", run_id);
    server->epoch = epoch;
    nd_server_store_end(server);
    for (nd_peer *peer = server->peers; peer; peer = peer->next) {
        if (peer->member && peer->role == ND_WIRE_WORKER) {
            nd_server_refuse(server, peer, ND_ERR_IO,
                             "this start of the job has ended; ndlaunch starts all workers again");
        }
    }
    server->world_size = world_size;
    memset(server->places[ND_WIRE_WORKER], ND_SERVER_PLACE_NEVER, (size_t)server->most_ranks);
    server->left = 0;
}

static void free_peer(nd_peer *peer)
{
    nd_wire_parser_fini(&peer->parser);
    free(peer);
}

void nd_server_destroy(nd_server *server)
{
    if (!server) {
        return;
    }
    nd_server_store_end(server);
    while (server->peers) {
        nd_peer *peer = server->peers;
        server->peers = peer->next;
        free_peer(peer);
    }
    nd_wire_buffer_fini(&server->out);
    free(server->places[ND_WIRE_WORKER]);
    free(server->places[ND_WIRE_NODE]);
    free(server);
}

int nd_server_members(const nd_server *server, nd_wire_role role)
{
    return server->members[role];
}

/* A stranger's first bytes have come, it was answered, or has bytes that wait unread
 * (server_state.h). False: it has to leave all the same. */
static bool take_sign(nd_server *server, nd_peer *peer, int64_t now)
{
    return !peer->member && !peer->dropped &&
           nd_strangers_sign(&server->strangers, &peer->stranger, now);
}

bool nd_server_has_room(nd_server *server, int64_t now, void **leaving)
{
    const nd_server_hooks *hooks = &server->hooks;
    nd_peer *peer;
    *leaving = NULL;
    if (server->strangers.count <
        nd_strangers_places(server->files, server->world_size, server->nnodes)) {
        return true;
    }
    do { /* one with unread bytes stays, and another one is looked for */
        nd_stranger *s = nd_strangers_leaving(&server->strangers, now);
        peer = s ? s->owner : NULL;
    } while (peer && hooks->unread && hooks->unread(peer->transport) &&
             take_sign(server, peer, now));
    *leaving = peer ? peer->transport : NULL;
    if (peer && !peer->dropped) {
        nd_server_note_refused(server, peer->name,
                               peer->stranger.signs > 0
                                   ? "it had not identified itself while others waited"
                                   : "it said nothing while others waited",
                               now);
    }
    return false;
}

nd_status nd_server_connect(nd_server *server, void *transport, const char *name, int64_t now,
                            nd_peer **out)
{
    nd_peer *peer;
    ND_TRY(ND_ALLOC(1, &peer));
    peer->server = server;
    peer->transport = transport;
    snprintf(peer->name, sizeof peer->name, "%s", name);
    nd_wire_parser_init(&peer->parser, ND_WIRE_LIMIT_STRANGER);
    peer->index = -1;
    peer->next = server->peers;
    if (server->peers) {
        server->peers->previous = peer;
    }
    server->peers = peer;
    nd_strangers_add(&server->strangers, &peer->stranger, peer, now);
    *out = peer;
    return ND_OK;
}

typedef struct hello {
    uint32_t epoch, role, index;
    char run_id[ND_WIRE_TEXT_MAX], host[ND_WIRE_TEXT_MAX];
} hello;

/* Protocol and version are judged first: the rest of the body differs between versions. */
static nd_status read_hello(const nd_server *server, const nd_wire_frame *frame, hello *out)
{
    char version[ND_WIRE_TEXT_MAX];
    nd_wire_cursor cursor = nd_wire_body(frame);
    uint32_t protocol = nd_wire_get_u32(&cursor);
    nd_wire_get_text(&cursor, version, sizeof version);
    if (frame->type == ND_WIRE_HELLO && !cursor.bad &&
        (protocol != ND_WIRE_PROTOCOL || strcmp(version, server->version) != 0)) {
        return nd_fail(ND_ERR_CONFIG,
                       "a member has version %s (protocol %u), the store has %s (protocol %d); "
                       "install the same version on all nodes",
                       version, protocol, server->version, ND_WIRE_PROTOCOL);
    }
    nd_wire_get_text(&cursor, out->run_id, sizeof out->run_id);
    out->epoch = nd_wire_get_u32(&cursor);
    out->role = nd_wire_get_u32(&cursor);
    out->index = nd_wire_get_u32(&cursor);
    nd_wire_get_text(&cursor, out->host, sizeof out->host);
    if (frame->type != ND_WIRE_HELLO || !nd_wire_finished(&cursor) || out->role > ND_WIRE_NODE) {
        return nd_fail(ND_ERR_IO, "the first message was not a hello");
    }
    return ND_OK;
}

/* Job, epoch and the place that the peer wants. */
static nd_status judge_hello(const nd_server *server, const hello *h)
{
    const char *who = h->role == ND_WIRE_NODE ? "node" : "rank";
    /* A node that comes for the first time, or comes back, learns run id and epoch here; a worker
     * has them from its own launcher. */
    bool learns = h->role == ND_WIRE_NODE && !h->run_id[0];
    if (!learns && (h->epoch != server->epoch || strcmp(h->run_id, server->run_id) != 0)) {
        const size_t n = strlen(server->job);
        const bool same_job = strncmp(h->run_id, server->job, n) == 0 &&
                              (h->run_id[n] == '\0' || h->run_id[n] == '.');
        return nd_fail(ND_ERR_CONFIG,
                       "%s %u on %s belongs to start %u of job %s, this store to start %u of job "
                       "%s%s",
                       who, h->index, h->host, h->epoch, h->run_id, server->epoch, server->run_id,
                       same_job ? "" : "; others are refused, so give each job a port of its own");
    }
    if (h->role == ND_WIRE_NODE && (h->index == 0 || h->index >= (uint32_t)server->nnodes)) {
        return nd_fail(ND_ERR_CONFIG,
                       "node rank %u of %s is outside of 1 to %d; this job has %d node%s", h->index,
                       h->host, server->nnodes - 1, server->nnodes, server->nnodes == 1 ? "" : "s");
    }
    if (h->role == ND_WIRE_WORKER && h->index >= (uint32_t)server->world_size) {
        return nd_fail(ND_ERR_CONFIG, "rank %u of %s is outside of a world of %d", h->index,
                       h->host, server->world_size);
    }
    const uint8_t place = server->places[h->role][h->index];
    if (place == ND_SERVER_PLACE_HERE || place == ND_SERVER_PLACE_LOST) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s %u, claimed by %s, is taken; give each member a number of its own%s",
                       who, h->index, h->host, h->role == ND_WIRE_NODE ? " (--node-rank)" : "");
    }
    return ND_OK;
}

static nd_status accept_hello(nd_server *server, nd_peer *peer, const nd_wire_frame *frame)
{
    hello h;
    ND_TRY(read_hello(server, frame, &h));
    ND_TRY(judge_hello(server, &h));
    peer->member = true;
    peer->role = (nd_wire_role)h.role;
    peer->index = (int)h.index;
    peer->epoch = server->epoch;
    peer->parser.limit = ND_WIRE_LIMIT_MEMBER;
    snprintf(peer->host, sizeof peer->host, "%s", h.host);
    snprintf(peer->name, sizeof peer->name, "%s %u (%s)", h.role == ND_WIRE_NODE ? "node" : "rank",
             h.index, h.host);
    nd_strangers_remove(&server->strangers, &peer->stranger);
    server->members[peer->role]++;
    uint8_t *place = &server->places[peer->role][peer->index];
    server->left -= *place == ND_SERVER_PLACE_LEFT;
    *place = ND_SERVER_PLACE_HERE;
    nd_wire_begin(&server->out, ND_WIRE_WELCOME);
    nd_wire_put_text(&server->out, peer->role == ND_WIRE_NODE ? server->job : server->run_id);
    nd_wire_put_u32(&server->out, (uint32_t)server->world_size);
    nd_server_flush(server, peer);
    return ND_OK;
}

static nd_status take_frame(nd_server *server, nd_peer *peer, const nd_wire_frame *frame,
                            int64_t now)
{
    if (!peer->member) {
        return accept_hello(server, peer, frame);
    }
    if (frame->type == ND_WIRE_BYE) {
        peer->goodbye = true;
        nd_server_drop(server, peer);
        return ND_OK;
    }
    if (peer->role == ND_WIRE_WORKER) {
        return nd_server_request(server, peer, frame, now);
    }
    if (frame->type >= ND_WIRE_NODE_FIRST && frame->type <= ND_WIRE_NODE_LAST &&
        server->hooks.node_frame) {
        return server->hooks.node_frame(server->hooks.context, peer, peer->index, frame);
    }
    return nd_fail(ND_ERR_IO, "a message of unknown type %d", (int)frame->type);
}

void nd_server_receive(nd_server *server, nd_peer *peer, const void *bytes, size_t count,
                       int64_t now)
{
    if (count == 0) {
        (void)take_sign(server, peer, now);
        return;
    }
    nd_status status = peer->dropped ? ND_OK : nd_wire_feed(&peer->parser, bytes, count);
    while (status == ND_OK && !peer->dropped) {
        nd_wire_frame frame;
        status = nd_wire_next(&peer->parser, &frame);
        if (status == ND_OK && frame.type == ND_WIRE_NONE) {
            return;
        }
        if (status == ND_OK) {
            status = take_frame(server, peer, &frame, now);
        }
    }
    if (status != ND_OK && !peer->dropped) {
        char why[ND_ERROR_MESSAGE_MAX];
        snprintf(why, sizeof why, "%s", nd_error_last()->message);
        nd_server_note_refused(server, peer->name, why, now);
        nd_server_refuse(server, peer, status, why);
    }
}

void nd_server_gone(nd_server *server, nd_peer *peer)
{
    *(peer->previous ? &peer->previous->next : &server->peers) = peer->next;
    if (peer->next) {
        peer->next->previous = peer->previous;
    }
    if (!peer->member) {
        nd_strangers_remove(&server->strangers, &peer->stranger);
    } else {
        server->members[peer->role]--;
        if (peer->role == ND_WIRE_NODE) {
            server->places[ND_WIRE_NODE][peer->index] = ND_SERVER_PLACE_NEVER;
        } else {
            nd_server_worker_left(server, peer);
        }
        if (server->hooks.left) {
            server->hooks.left(server->hooks.context, peer, peer->role, peer->index, peer->goodbye);
        }
    }
    free_peer(peer);
}

void nd_server_tick(nd_server *server, int64_t now)
{
    /* Strangers are ordered by the last sign, not by age. */
    for (nd_stranger *s = server->strangers.oldest; s; s = s->newer) {
        nd_peer *peer = s->owner;
        char why[96];
        if (peer->dropped || now - s->came <= server->hello_ns) {
            continue;
        }
        snprintf(why, sizeof why, "it did not identify itself within %.3g s",
                 (double)server->hello_ns * 1e-9);
        nd_server_note_refused(server, peer->name, why, now);
        nd_server_drop(server, peer);
    }
    nd_server_exchange_tick(server, now);
}
