// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_NODES_H
#define ND_LAUNCHER_NODES_H
#include "launcher/launcher.h"
#include "runtime/rdzv/channel.h"

/*
 * A job of several ndlaunch processes. Node 0 hosts the store and is the collector: it compares the
 * others' configurations with its own, hands out ranks, hears of failures in the order in which
 * they arrive, tells all to stop, prints the screen of the first failure and gives its code to all.
 * The others hold one connection to it. nodes.c stands over nodes_host.c, which stands over
 * nodes_gather.c, and over nodes_join.c.
 *
 * Frames, in order of a job's life. All go over the store's connection, so from and to members
 * only.
 */

enum {
    ND_NODE_JOIN = ND_WIRE_NODE_FIRST, /* to 0: u32 local workers, blob job text */
    ND_NODE_PLAN,                      /* from 0: u32 first rank, u32 world size */
    ND_NODE_BEAT,                      /* both: -; every two seconds */
    ND_NODE_FAIL,                      /* to 0: u32 code; its first failure, seen just now */
    ND_NODE_STOP,                      /* from 0: -; end your workers */
    ND_NODE_END,                       /* to 0: u32 code, blob screen; its workers have ended */
    ND_NODE_RELEASE,                   /* from 0: u32 code of the job, blob reason */
};

enum { ND_NODE_SCREEN_MAX = 64 << 10, ND_NODE_BEAT_MS = 2000, ND_NODE_SILENT_MS = 15000 };

typedef struct nd_nodes nd_nodes;

/* Seconds for the nodes to meet: launch.rdzv_timeout_seconds, and what one's check may take longer
 * than another's. */
double nd_nodes_limit(const nd_job *job);

/* Node 0, its store open: waits for the other nodes. ND_ERR_HANG names who is missing at the
 * deadline; ND_ERR_CONFIG when a node's settings differ; another status when the check of a node
 * failed, also this one's (job->cannot_start). */
nd_status nd_nodes_gather(nd_job *job);
/* Other nodes: connects to node 0 within nd_nodes_limit, compares settings, learns ranks and run
 * id. */
nd_status nd_nodes_join(nd_job *job, const uint8_t key[ND_KEY_BYTES]);

/* The store's hooks of node 0; before nd_nodes_create has made job->nodes they must not be
 * called. */
nd_status nd_nodes_create(nd_job *job);
nd_status nd_nodes_on_frame(void *job, nd_peer *peer, int node, const nd_wire_frame *frame);
void nd_nodes_on_left(void *job, nd_peer *peer, nd_wire_role role, int index, bool clean);

/* Workers run: watches the other launchers on the job's loop. */
nd_status nd_nodes_watch(nd_job *job);
/* A first failure here. */
void nd_nodes_failed(nd_job *job, int code);
/* All workers of this node have ended; the text is the failure screen or "". nd_job_finish follows
 * when the job has. */
void nd_nodes_ended(nd_job *job, int code, const char *screen);
/* After the loop has run out. */
void nd_nodes_destroy(nd_nodes *nodes);

/* The same three for node 0, nodes_host.c. */
nd_status nd_collect_watch(nd_job *job);
void nd_collect_failed(nd_job *job, int code);
void nd_collect_ended(nd_job *job, int code, const char *screen);

/* And for the connection of another node, nodes_join.c. */
typedef struct nd_join nd_join;
nd_status nd_join_watch(nd_job *job);
void nd_join_failed(nd_job *job, int code);
void nd_join_ended(nd_job *job, int code, const char *screen);
void nd_join_destroy(nd_join *join);

/* nodes_frame.c: a frame of some numbers and one text, or none where it is NULL. */
void nd_node_frame(nd_wire_buffer *out, int type, const uint32_t *numbers, int count,
                   const char *text);

/* Node 0 of several: what nodes_gather.c (until all are there) and nodes_host.c (while workers run)
 * share. */

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
