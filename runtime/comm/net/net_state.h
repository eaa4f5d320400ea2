// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_NET_NET_STATE_H
#define ND_COMM_NET_NET_STATE_H
/* The parts of a net: its frames, connections and messages. See net.h. */
#include "runtime/comm/net/net.h"

enum { ND_LINK_CHUNK = 32 << 10 }; /* most plaintext that is encrypted at once */

/* One encrypted connection: a non-blocking socket and its TLS session, which also holds the
 * ciphertext that the socket has not taken yet. It belongs to an epoll, where its data is the link
 * itself. */
typedef struct nd_link {
    int fd, epoll;
    nd_tls *tls;
    bool connecting, wants_out;
} nd_link;

enum {
    NET_EAGER_BYTES = 32 << 10, /* the largest message that leaves before it is asked for */
    NET_WELCOME = 'W',          /* answers a hello */
    ND_NET_TOKEN_BYTES = 16,
};

/* The data that a rank publishes: where it listens, and the token that a hello to it must hold. */
typedef struct nd_net_card {
    nd_address address;
    uint8_t token[ND_NET_TOKEN_BYTES];
} nd_net_card;

typedef enum net_kind { NET_EAGER = 1, NET_OFFER, NET_READY, NET_DATA } net_kind;

typedef struct net_head {
    nd_tag tag;
    uint64_t bytes; /* of the message, whether they follow or not */
    uint32_t kind, unused;
} net_head;

typedef struct net_hello {
    uint8_t token[ND_NET_TOKEN_BYTES]; /* the receiver's */
    int32_t rank;                      /* the sender's */
    uint8_t unused[sizeof(net_head) - ND_NET_TOKEN_BYTES - sizeof(int32_t)];
} net_hello;

/* A frame to be written to a peer: a head, and the bytes of `request` for EAGER and DATA. */
typedef struct net_frame {
    struct net_frame *next;
    net_head head;
    nd_p2p_request *request; /* ends with the frame; NULL for OFFER and READY */
    size_t done;             /* bytes of head and payload that are encrypted */
} net_frame;

typedef struct net_peer {
    nd_net_card card;
    nd_link *link;    /* to it; NULL: none */
    bool said_hello;  /* on the link */
    bool welcome;     /* the peer has answered the hello */
    bool known, gone; /* it has said hello; it has ended */
    double retry_at;
    net_frame *queue;
} net_peer;

/* A connection from another rank, which is reading a head or what follows one. */
typedef struct net_source {
    struct net_source *next;
    nd_link *link;
    int rank; /* -1: no hello yet */
    double since;
    size_t filled; /* of the head or hello */
    union {
        net_head head;
        net_hello hello;
        unsigned char bytes[sizeof(net_head)];
    } in;
    char *to;    /* where the next byte of the payload goes */
    size_t left; /* of the payload */
    nd_p2p_request *request;
    struct net_arrival *arrival;
} net_source;

/* A message that nobody has asked for yet. */
typedef struct net_arrival {
    struct net_arrival *next;
    int rank;
    nd_tag tag;
    size_t bytes;
    bool offer, complete;
    nd_p2p_request *request; /* asked for while its bytes arrive */
    char data[NET_EAGER_BYTES];
} net_arrival;

struct nd_net {
    int rank, size, listener, epoll;
    nd_tls_context *client, *server;
    uint8_t token[ND_NET_TOKEN_BYTES];
    net_peer *peers;                /* [size] */
    net_source *sources;            /* newest first */
    int strangers;                  /* sources without a hello */
    double deaf_until;              /* connections are not accepted before; 0: they are */
    int retries;                    /* peers whose connection is to be made again */
    nd_p2p_request *held;           /* sends that were offered */
    nd_p2p_request *posted, *ready; /* receives: nothing has come; waiting for DATA */
    net_arrival *arrivals;
    net_frame *spare_frames; /* kept for later */
    net_arrival *spare_arrivals;
    nd_error failed; /* of this rank itself, the first */
    bool stopped;    /* after a fault: nothing moves, and connections stay open until the end */
    char plain[ND_LINK_CHUNK];
};

static inline nd_status net_failure(const nd_net *net)
{
    if (net->failed.status != ND_OK) {
        nd_error_restore(&net->failed);
    }
    return net->failed.status;
}

static inline void net_finish(nd_p2p_request *request, bool good)
{
    request->native = NULL;
    atomic_store_explicit(&request->state, good ? ND_REQUEST_DONE : ND_REQUEST_FAILED,
                          memory_order_release);
}

static inline void net_append(nd_p2p_request **list, nd_p2p_request *request)
{
    while (*list) {
        list = &(*list)->next;
    }
    request->next = NULL;
    *list = request;
}

/* net.c */

/* From connect or accept on. ND_ERR_IO when the address cannot be reached at all; ND_ERR_RESOURCE
 * when this process has no descriptor or memory for it. The same holds below: ND_ERR_IO and
 * ND_ERR_CONFIG are the other side's, ND_ERR_RESOURCE and ND_ERR_INTERNAL are this one's. */
nd_status nd_link_connect(const nd_address *to, nd_tls_context *client, int epoll, nd_link **out);
/* Takes the descriptor in every case. */
nd_status nd_link_accept(int fd, nd_tls_context *server, int epoll, nd_link **out);
void nd_link_close(nd_link *link); /* NULL is legal */

/* Sends ciphertext, the handshake's too; *idle: the socket has taken all of it. */
nd_status nd_link_flush(nd_link *link, bool *idle);
/* At most ND_LINK_CHUNK bytes, when established, with a flush. ND_ERR_IO when it was not idle. */
nd_status nd_link_write(nd_link *link, const void *bytes, size_t count, bool *idle);
/* Plaintext that is there now, after one look at the socket where there is none; *count 0: none.
 * ND_ERR_IO at its end, too. */
nd_status nd_link_read(nd_link *link, void *out, size_t capacity, size_t *count);

/* net_messages.c, which sends nothing. True: the receive takes an offer, which READY answers. */
bool nd_net_match(nd_net *net, nd_p2p_request *request);
/* A head has come from another rank. *answered: the message that READY answers to an OFFER, and
 * DATA to a READY; NULL: none. */
nd_status nd_net_take_head(nd_net *net, net_source *source, nd_p2p_request **answered);
/* All bytes of a message have come. */
void nd_net_end_payload(nd_net *net, net_source *source);

#endif
