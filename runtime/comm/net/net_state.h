// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_NET_NET_STATE_H
#define ND_COMM_NET_NET_STATE_H
/* What a net consists of: its frames, connections and messages. See net.h. */
#include "runtime/comm/net/link.h"
#include "runtime/comm/net/net.h"

enum {
    NET_EAGER_BYTES = 32 << 10, /* the largest message that leaves before it is asked for */
    NET_WELCOME = 'W',          /* answers a hello */
};

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

/* What is to be written to a peer: a head, and the bytes of `request` for EAGER and DATA. */
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

/* net_messages.c */
void nd_net_serve_peer(nd_net *net, net_peer *peer); /* after an event of its link */
void nd_net_retry(nd_net *net);
void nd_net_serve_source(nd_net *net, net_source *source); /* after an event of its link */
void nd_net_end_source(nd_net *net, net_source *source);

#endif
