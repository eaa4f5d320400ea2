// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_HOST_INTERNAL_H
#define ND_RDZV_HOST_INTERNAL_H
/* What host.c (listening, deadlines) and host_connection.c, on which it stands, share. */
#include "runtime/rdzv/host.h"

enum { ND_HOST_CIPHER_BYTES = 17 << 10 }; /* one TLS record with its overhead */

typedef struct nd_connection {
    struct nd_connection *next, *previous;
    nd_host *host;
    uv_tcp_t tcp;
    nd_tls *tls;
    nd_peer *peer; /* NULL once the engine knows that it is gone */
    int writes;    /* in flight */
    bool dropping;
    int64_t dropping_since;
} nd_connection;

struct nd_host {
    uv_loop_t *loop;
    uv_tcp_t listener;
    uv_timer_t tick;
    nd_tls_context *tls;
    nd_server *server;
    nd_server_hooks hooks;
    nd_connection *connections;
    bool waiting; /* a connection was not accepted for want of room */
    bool dropping, closing;
    bool told_full; /* that no file can be opened any more */
    int handles;    /* not yet closed: listener, tick, connections */
    int port;
    char address[ND_ADDRESS_TEXT_MAX];
    char received[64 << 10], plain[ND_HOST_CIPHER_BYTES];
};

/* host_connection.c */
void nd_host_release(nd_host *host); /* one handle less; the last one frees it */
void nd_host_accept(nd_host *host);  /* a waiting connection, where there is room */
void nd_host_close_connection(nd_connection *c);
/* Closes what the engine dropped, once its last bytes are out. */
void nd_host_reap(nd_host *host);
/* Hooks of the engine. */
void nd_host_send_to_peer(void *context, nd_peer *peer, const void *bytes, size_t count);
void nd_host_drop_peer(void *context, nd_peer *peer);

#endif
