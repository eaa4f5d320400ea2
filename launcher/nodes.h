// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_NODES_H
#define ND_LAUNCHER_NODES_H
/*
 * A job of several ndlaunch processes. Node 0, the coordinator, hosts the store. It compares the
 * members' configurations with its own, assigns ranks, records failures in the order in which they
 * arrive, tells all nodes to stop, prints the screen of the first failure and gives its code to
 * all. Each of the other nodes, the members, holds one connection to it.
 *
 * When the workers of one start have ended everywhere, node 0's job decides whether there is a
 * further start. Both act on the job of their own node through callbacks, on the job's loop.
 */
#include <stdio.h>
#include <string.h>
#include <uv.h>

#include "runtime/base/progress.h"
#include "runtime/config/config.h"
#include "runtime/rdzv/store_server.h"

/* Frames in the order of a job's life. All use the store's connection, so they come from and go to
 * accepted members only. Those about workers carry the epoch of their start, and one of another
 * start is ignored. */
enum {
    ND_NODE_JOIN = ND_WIRE_NODE_FIRST, /* to 0: u32 local workers, blob job text */
    ND_NODE_PLAN,    /* from 0: u32 first rank, u32 world size, u32 epoch, blob run folder */
    ND_NODE_BEAT,    /* both: -; every two seconds */
    ND_NODE_FAIL,    /* to 0: u32 code, u32 epoch; its first failure, seen just now */
    ND_NODE_STOP,    /* from 0: u32 epoch, u32 patience in ms; end your workers */
    ND_NODE_END,     /* to 0: u32 code, u32 epoch, u32 asked, u32 left behind, u32 own, blob
                        screen; its workers have ended */
    ND_NODE_RELEASE, /* from 0: u32 code of the job, blob reason */
    ND_NODE_REST,    /* from 0: -; it has no place in this start, wait without workers */
};

enum { ND_NODE_BEAT_MS = 2000, ND_NODE_SILENT_MS = 15000 };

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

/* The run id of a start: the job's name, with ".EPOCH" from the first restart on. */
static inline void nd_restart_run_id(const char *job, int64_t epoch, char *out, size_t capacity)
{
    int used = snprintf(out, capacity, "%s", job);
    if (epoch > 0) {
        snprintf(out + used, capacity - (size_t)used, ".%lld", (long long)epoch);
    }
}

/* How the workers of one start ended, on all nodes. */
typedef struct nd_nodes_end {
    int code;         /* of the first failure, or 0 */
    int node;         /* where it was; -1: nowhere */
    bool asked;       /* a signal to one of the launchers asked the job to end */
    bool left_behind; /* a killed worker of some node did not end */
    bool own;         /* of this node: the first failure is surely one of its own, whatever its
                            code, which other nodes' failures may explain else */
    bool lacks_nodes; /* a restart waits until a lost one is back */
    char words[256];  /* "node 1 (host a) failed with code 137" */
} nd_nodes_end;

/*
 * A start, as this node sees it; texts are borrowed for the call. Before it, node 0 waits for the
 * nodes to join. Before a further one these are nodes whose launcher was lost: an ndlaunch that is
 * started there again joins as the same node.
 *
 * Each start has launch.nnodes places, and as many nodes have workers. The others are spares
 * (launch.spare_nodes): connected, without workers. Before a restart a spare takes the place, and
 * so the ranks, of a node that was lost. Node 0 always has place 0. Where no node is
 * left to take a place, a start may have fewer places (launch.min_nodes), and so fewer workers on a
 * smaller mesh; each node makes the configuration of its workers from the world size of the plan.
 */
typedef struct nd_nodes_start {
    int64_t epoch;
    int first_rank, world_size;
    const char *run_folder;
} nd_nodes_start;

/* The job, as this node was asked for it; all borrowed. */
typedef struct nd_job_options {
    const nd_config *config;
    char *const *args; /* of a worker, and whether rank 0 has input: nd_attempt_options */
    bool input;
    const char *slurm_job; /* its id, or "" */
    const char *job_text;  /* what all nodes must agree on, with digests of files */
    int config_fd;
    int local_workers, world_size;
    int cannot_start; /* 0, or the code of this node's failed check: only tells the other nodes */
} nd_job_options;

/* What the coordinator or the member knows of the job of its own node; all borrowed. */
typedef struct nd_nodes_options {
    uv_loop_t *loop;
    const nd_job_options *job;
    const char *host_name;
    void *context;
    /* Ends the workers of this node, because one has failed (nd_attempt_stop). */
    void (*stop)(void *context, int patience_ms);
    /* Starts the workers of this node, for the first time or again. */
    void (*start)(void *context, const nd_nodes_start *start);
    void (*finish)(void *context, int code); /* the job is over on all nodes */
    /* Node 0: how long workers may take to end after a failure with this code. */
    int (*patience_ms)(void *context, int code);
    /* Node 0: all workers of this start have ended. True: they are started again after
     * *wait_seconds, as soon as there are nodes for all places. */
    bool (*restarts)(void *context, const nd_nodes_end *end, double *wait_seconds);
    /* Node 0: the folder of the run, in which a restart goes on, or "". */
    const char *run_folder;
} nd_nodes_options;

/* Seconds for the nodes to meet: launch.rdzv_timeout_seconds, and the time by which one node's
 * check may be slower than another's. */
static inline double nd_nodes_limit(const nd_config *config)
{
    return config->launch.rdzv_timeout_seconds + nd_config_data_seconds(config);
}

/* This node among the others: the coordinator, or a member. */
typedef struct nd_nodes nd_nodes;

typedef struct nd_nodes_role {
    void (*failed)(nd_nodes *nodes, int code); /* the first failure of a worker of this node */
    /* All workers of this node have ended; `screen` is the failure screen or "". */
    void (*ended)(nd_nodes *nodes, const nd_nodes_end *end, const char *screen);
    /* A signal came while no worker of this node ran: node 0 is to end the job, or a member ends
     * alone if another one has taken its place. */
    void (*asked)(nd_nodes *nodes, int number);
    void (*destroy)(nd_nodes *nodes); /* after the loop has run out */
} nd_nodes_role;

struct nd_nodes {
    const nd_nodes_role *role;
    nd_nodes_options options;
    nd_store_server *store; /* node 0's; NULL: a member, or it is closed */
    /* The job's name, and where its store is. */
    char job[64];
    char master_addr[128];
    int master_port;
};

/* Ends what a node has on the loop beside timers and polls. */
static inline void nd_nodes_close_store(nd_nodes *nodes)
{
    nd_store_server_close(nodes->store);
    nodes->store = NULL;
}

/*
 * coordinator.c: node 0, also of a job that has no other. Opens the store and gathers the nodes for
 * the first start, for spare nodes a short while only, and watches them from then on. Where nodes
 * are missing at the deadline, settings differ, or the check of a node failed, this one's included,
 * it prints that and ends the job with its code; with that of the failure where a restart lacks
 * nodes. The options are copied; *out is to be destroyed also after an error.
 */
nd_status nd_coordinator_open(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                              nd_nodes **out);

/*
 * member.c: another node. Connects to node 0 within nd_nodes_limit, and sends it the settings of
 * this node, which it compares. From then on node 0 says when this node's workers start: at once,
 * or for a spare or a node that comes back when a start needs it, or that the job ends. The options
 * are copied; *out is to be destroyed also after an error.
 */
nd_status nd_member_join(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                         nd_nodes **out);

#endif
