// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_NODES_INTERNAL_H
#define ND_LAUNCHER_NODES_INTERNAL_H
/* Node 0 of several: what nodes_gather.c (until all are there) and nodes_host.c (while workers run)
 * share. */
#include "launcher/nodes.h"

typedef struct nd_node {
    nd_peer *peer; /* NULL: not connected */
    bool joined, lost, ended;
    int64_t heard_ns;
    int code;
    int64_t failed_ns; /* when its first failure arrived here, 0: none */
    char host[ND_WIRE_TEXT_MAX];
    char *screen; /* owned */
} nd_node;

struct nd_nodes {
    uv_timer_t pulse;
    int count;
    nd_node *all; /* [count]; 0 is this one */
    nd_status refused;
    int turned_away; /* nodes that were told so when they came */
    char refusal[ND_ERROR_MESSAGE_MAX];
    bool running, stop_sent, released;
    int64_t stop_ns, release_ns, beat_ns;
    int code;
};

/* Nothing is sent to a node that is not connected. */
void nd_nodes_send(nd_job *job, int index, int type, const uint32_t *numbers, int count,
                   const char *text);
/* A node's first frame: its settings are compared. */
nd_status nd_nodes_take_join(nd_job *job, nd_peer *peer, int index, nd_wire_cursor *cursor);
/* Or the code with which its check failed. */
nd_status nd_nodes_take_failed_check(nd_nodes *nodes, const nd_peer *peer, int index, int code);

#endif
