// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_SERVER_INTERNAL_H
#define ND_RDZV_SERVER_INTERNAL_H
/*
 * The parts of the engine: server_store.c (values, exchanges, requests), server.c (peers,
 * strangers, hello, deadlines).
 */
#include "runtime/rdzv/server.h"

enum {
    /* Part of an exchange's result in one frame, which fits into one record of TLS. Thousands of
     * clients are sent one at the same time, so its size counts in the memory for each of them. */
    ND_SERVER_SLICE = 15 << 10,
    ND_SERVER_VALUES_MAX = 256 << 20, /* bytes of all keys and values */
    ND_SERVER_EXCHANGE_MAX = 1 << 30, /* bytes of one exchange's result */
    ND_SERVER_NOTICE_SECONDS = 10,    /* between lines about missing ranks */

    ND_SERVER_PLACE_NEVER = 0,
    ND_SERVER_PLACE_HERE,
    ND_SERVER_PLACE_LEFT, /* said goodbye */
    ND_SERVER_PLACE_LOST,
};

/* A key and its value, which stays as it was set until the next start of the job. */
typedef struct nd_value {
    struct nd_value *next;
    char key[ND_WIRE_TEXT_MAX];
    size_t bytes;
    uint8_t data[]; /* [bytes] */
} nd_value;

/*
 * The connections that have not joined the job yet, by the time of their last sign, and which of
 * them makes room for a new one. Pure data.
 *
 * Anybody can connect without the key, so places are few, and a connection that says nothing must
 * not keep a worker out: the oldest silent stranger goes first, after 20 ms, and of those that have
 * begun to speak only one that gave no sign for 250 ms.
 *
 * A sign is that its first bytes have come, that the store has answered, or has bytes of it that it
 * did not read yet: thousands of workers that come at once must not pay for the time that the store
 * needs. Only a few signs count, so that no connection stays by sending one byte after the other.
 */
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

typedef struct nd_exchange {
    struct nd_exchange *next; /* among the unfinished */
    char name[ND_WIRE_TEXT_MAX];
    size_t bytes; /* of one rank */
    int arrived;
    bool *here;    /* [world] */
    uint8_t *data; /* [world x bytes]; once it is complete, [size] the packed result */
    size_t size;
    int users; /* peers that wait for it or are being sent its result */
    int64_t since, noticed;
} nd_exchange;

typedef enum nd_wait { ND_WAIT_NONE = 0, ND_WAIT_KEY, ND_WAIT_EXCHANGE } nd_wait;

struct nd_peer {
    nd_peer *next, *previous;
    nd_server *server;
    void *transport;
    char name[ND_WIRE_TEXT_MAX + 32];
    char host[ND_WIRE_TEXT_MAX];
    nd_wire_parser parser;
    nd_stranger stranger; /* until it is a member */
    bool member, dropped, goodbye;
    nd_wire_role role;
    int index;
    uint32_t epoch; /* of the start of the job that it belongs to */
    nd_wait wait;   /* the one request that may be open */
    uint32_t request;
    int64_t deadline; /* of the exchange */
    char key[ND_WIRE_TEXT_MAX];
    nd_exchange *exchange; /* waited for, or being sent */
    size_t sent;
};

struct nd_server {
    nd_server_hooks hooks;
    char version[64], run_id[96];
    char job[64]; /* run id of the first start */
    uint32_t epoch;
    int world_size, nnodes;
    int most_ranks; /* that a start may have: the world of the first one */
    int64_t hello_ns;
    nd_peer *peers;
    nd_strangers strangers;
    int64_t files;
    int members[2];
    uint8_t *places[2]; /* of workers [most_ranks] and nodes [nnodes]: ND_SERVER_PLACE_* */
    int left;           /* workers that left or were lost */
    nd_value *values;   /* a few, for the start of a job */
    size_t value_bytes;
    nd_exchange *exchanges;
    nd_wire_buffer out; /* reused for every frame */
    int64_t refused_since;
    int refused;
};

/* server.c: places in a process that may open `files` files and needs some for `world` workers and
 * `nodes` nodes. */
int nd_strangers_places(int64_t files, int64_t world, int64_t nodes);

void nd_strangers_add(nd_strangers *all, nd_stranger *stranger, void *owner, int64_t now);
void nd_strangers_remove(nd_strangers *all, nd_stranger *stranger);
/* It gave a sign. False: its signs are used up. */
bool nd_strangers_sign(nd_strangers *all, nd_stranger *stranger, int64_t now);
/* The one that makes room; NULL: none has been here for long enough. */
nd_stranger *nd_strangers_leaving(const nd_strangers *all, int64_t now);

/* Sending to a peer, and dropping it. */

static inline void nd_server_drop(nd_server *server, nd_peer *peer)
{
    if (!peer->dropped) {
        peer->dropped = true;
        server->hooks.drop(peer->transport);
    }
}

/* Ends the frame in server->out, sends it, empties the buffer. */
static inline void nd_server_flush(nd_server *server, nd_peer *peer)
{
    if (nd_wire_end(&server->out) == ND_OK) {
        server->hooks.send(peer->transport, server->out.data, server->out.size);
    } else {
        nd_server_drop(server, peer);
    }
    server->out.size = 0;
    server->out.failed = false;
}

static inline void nd_server_error(nd_server *server, nd_peer *peer, uint32_t request,
                                   nd_status status, const char *message)
{
    nd_wire_begin(&server->out, ND_WIRE_ERROR);
    nd_wire_put_u32(&server->out, request);
    nd_wire_put_u32(&server->out, (uint32_t)status);
    nd_wire_put_text(&server->out, message);
    nd_server_flush(server, peer);
}

/* server_store.c */
void nd_server_exchange_tick(nd_server *server, int64_t now);
/* One request of a worker; an error drops the peer. */
nd_status nd_server_request(nd_server *server, nd_peer *peer, const nd_wire_frame *frame,
                            int64_t now);
/* A worker left: its own request ends, and others that wait for it end with an error. */
void nd_server_worker_left(nd_server *server, nd_peer *peer);
/* Ends all waits, without an answer, and removes all values; more may follow. */
void nd_server_store_end(nd_server *server);

#endif
