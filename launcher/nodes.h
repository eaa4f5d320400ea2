// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_NODES_H
#define ND_LAUNCHER_NODES_H
/*
 * A job of several ndlaunch processes. Node 0, the coordinator, hosts the store. It compares the
 * members' configurations with its own, assigns ranks, records failures in the order in which they
 * arrive, tells all nodes to stop, prints the screen of the first failure and gives its code to
 * all. Each of the other nodes, the members, holds one connection to it.
 *
 * Both act on the job of their own node through two callbacks, on the job's loop.
 *
 * Frames in the order of a job's life. All use the store's connection, so they come from and go to
 * accepted members only.
 */
#include <string.h>
#include <uv.h>

#include "runtime/config/config.h"
#include "runtime/rdzv/store_server.h"

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

/* Writes a frame of some numbers and one text, or without a text where that is NULL. */
static inline void nd_node_frame(nd_wire_buffer *out, int type, const uint32_t *numbers, int count,
                                 const char *text)
{
    nd_wire_begin(out, (nd_wire_type)type);
    for (int i = 0; i < count; i++) {
        nd_wire_put_u32(out, numbers[i]);
    }
    if (text) {
        nd_wire_put_blob(out, text, strlen(text));
    }
}

/* What coordinator and member know of the job of their own node; all borrowed. */
typedef struct nd_nodes_options {
    uv_loop_t *loop;
    const nd_config *config;
    const char *host_name, *job_text;
    int local_workers, world_size;
    int cannot_start; /* 0, or the code of this node's failed check */
    void *context;
    void (*stop)(void *context);             /* end the workers of this node: one has failed */
    void (*finish)(void *context, int code); /* the job is over on all nodes */
} nd_nodes_options;

/* Seconds for the nodes to meet: launch.rdzv_timeout_seconds, and the time by which one node's
 * check may be slower than another's. */
static inline double nd_nodes_limit(const nd_config *config)
{
    return config->launch.rdzv_timeout_seconds + nd_config_data_seconds(config);
}

/* coordinator.c: node 0. */

typedef struct nd_coordinator nd_coordinator;

/* The options are copied. */
nd_status nd_coordinator_create(const nd_nodes_options *options, nd_coordinator **out);
/* The store's hooks; the coordinator is their context. Frames arrive once the store is open. */
nd_status nd_coordinator_on_frame(void *coordinator, nd_peer *peer, int node,
                                  const nd_wire_frame *frame);
void nd_coordinator_on_left(void *coordinator, nd_peer *peer, nd_wire_role role, int index,
                            bool clean);
/*
 * Waits on the loop until all nodes have joined; the server is borrowed from here on. ND_ERR_HANG
 * names the nodes that are missing at the deadline; ND_ERR_CONFIG when a node's settings differ;
 * another status when the check of a node failed, this one's included.
 */
nd_status nd_coordinator_gather(nd_coordinator *coordinator, nd_server *server);
/* Watches the other nodes from now on, while workers run. */
nd_status nd_coordinator_watch(nd_coordinator *coordinator);
/* The first failure of a worker of this node. */
void nd_coordinator_failed(nd_coordinator *coordinator, int code);
/* All workers of this node have ended; `screen` is the failure screen or "". */
void nd_coordinator_ended(nd_coordinator *coordinator, int code, const char *screen);
/* After the loop has run out; NULL is legal. */
void nd_coordinator_destroy(nd_coordinator *coordinator);

/* member.c: another node. */

typedef struct nd_member nd_member;

/* What node 0 assigns. */
typedef struct nd_member_place {
    char run_id[64];
    char master_addr[128];
    int master_port, first_rank;
} nd_member_place;

/* Connects to node 0 within nd_nodes_limit, which compares settings and answers with the place. The
 * options are copied. */
nd_status nd_member_join(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                         nd_member **out, nd_member_place *place);
/* The same calls as the coordinator's. */
nd_status nd_member_watch(nd_member *member);
void nd_member_failed(nd_member *member, int code);
void nd_member_ended(nd_member *member, int code, const char *screen);
void nd_member_destroy(nd_member *member);

#endif
