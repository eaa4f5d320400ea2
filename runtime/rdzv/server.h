// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_SERVER_H
#define ND_RDZV_SERVER_H
/*
 * The store's engine, without I/O and without a clock of its own: plaintext bytes of each peer go
 * in, frames come out through hooks, and `now` (nd_clock_ns) is an argument. store_server.h gives
 * it sockets and TLS; tests give it strings.
 *
 * A peer is a stranger until its hello (version, run id, epoch, index) is accepted: 64 to 1,024
 * strangers (server_state.h), five seconds each, frames of 512 bytes. Members are workers, whose
 * requests the engine answers, and nodes (other launchers), whose frames it hands to a hook.
 * Everything runs in one thread; hooks may not call back into the engine.
 */
#include <stdint.h>

#include "runtime/rdzv/wire.h"

typedef struct nd_server nd_server;
typedef struct nd_peer nd_peer;

typedef struct nd_server_hooks {
    void *context;
    /* Plaintext frames for the peer of this transport; the bytes are borrowed for the call. */
    void (*send)(void *transport, const void *bytes, size_t count);
    /* Close the connection after what was sent. The peer is freed when the host calls
     * nd_server_gone. */
    void (*drop)(void *transport);
    /* Bytes of this stranger have arrived that the engine was not given yet. May be NULL. */
    bool (*unread)(void *transport);
    /* A line for the user: which ranks are missing, which connection was refused. */
    void (*notice)(void *context, const char *line);
    /* A worker or node left; clean: it said goodbye. May be NULL. */
    void (*left)(void *context, nd_peer *peer, nd_wire_role role, int index, bool clean);
    /* A frame of a node (types ND_WIRE_NODE_*). ND_OK, or the peer is dropped with the error. May
     * be NULL. */
    nd_status (*node_frame)(void *context, nd_peer *peer, int node, const nd_wire_frame *frame);
} nd_server_hooks;

typedef struct nd_server_options {
    const char *version, *run_id; /* copied */
    uint32_t epoch;               /* of the first start, which run_id names */
    int world_size;
    int nnodes;           /* nodes 1 .. nnodes - 1 may join */
    int64_t files;        /* that this process may open; it bounds the number of strangers */
    double hello_seconds; /* for a stranger; 0: 5 */
} nd_server_options;

nd_status nd_server_create(const nd_server_options *options, const nd_server_hooks *hooks,
                           nd_server **out);
void nd_server_destroy(nd_server *server); /* frees the peers that are left, without hooks */
/*
 * A new start of the job, with a larger epoch, a run id of its own, and at most as many workers as
 * the first one. Workers that are still connected are refused, and nothing of theirs is left:
 * values, exchanges, places of ranks. From here on a hello of another epoch is refused. Nodes stay.
 */
void nd_server_restart(nd_server *server, const char *run_id, uint32_t epoch, int world_size);

/*
 * True when one more stranger may come in. Else *leaving is the transport of the one that makes
 * room: the host closes its connection, and asks again. NULL: all have come or spoken only now, so
 * ask later.
 */
bool nd_server_has_room(nd_server *server, int64_t now, void **leaving);

/* A new connection; `transport` is the host's pointer, and `name` (address) is copied, for
 * messages. */
nd_status nd_server_connect(nd_server *server, void *transport, const char *name, int64_t now,
                            nd_peer **out);
/* Bytes of the peer; the engine drops the peer itself where they are wrong. None: only the
 * channel's own bytes have come, or were answered, which is a sign of a stranger (server_state.h).
 */
void nd_server_receive(nd_server *server, nd_peer *peer, const void *bytes, size_t count,
                       int64_t now);
/* All bytes for the peer have left: sends the next part of a long answer, if there is one. */
void nd_server_drained(nd_server *server, nd_peer *peer);
/* The connection is closed; frees the peer. */
void nd_server_gone(nd_server *server, nd_peer *peer);
/* Deadlines and notices; to be called every 0.1 s or so. */
void nd_server_tick(nd_server *server, int64_t now);

/* Whole frames for a member, as for nodes; nothing when it is being dropped. */
void nd_server_send(nd_server *server, nd_peer *peer, const void *frames, size_t count);
/* Sends an ERROR frame of request 0 to the peer and drops it. */
void nd_server_refuse(nd_server *server, nd_peer *peer, nd_status status, const char *message);

/* Tells the user about a connection that did not become a member, at most a few lines in ten
 * seconds. */
void nd_server_note_refused(nd_server *server, const char *name, const char *why, int64_t now);

const char *nd_peer_name(const nd_peer *peer); /* "rank 3 (host)", "node 1 (host)" or the address */
const char *nd_peer_host(const nd_peer *peer); /* from its hello */
int nd_server_members(const nd_server *server, nd_wire_role role); /* connected now */

#endif
