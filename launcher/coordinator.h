// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_COORDINATOR_H
#define ND_LAUNCHER_COORDINATOR_H
/*
 * What the two files of a job's node 0 share. gather.c: nodes join, or are refused, before the
 * first start and later. coordinator.c: each start and its end.
 */
#include "launcher/nodes.h"
#include "launcher/roster.h"

enum { ND_NODES_NOTICE_MS = 10000 }; /* between lines about missing nodes */

typedef enum nd_coordinator_state {
    ND_NODES_BETWEEN =
        0,            /* before the first start, or all have ended; there may be a further one */
    ND_NODES_RUNNING, /* workers run on some node */
    ND_NODES_RELEASED,
} nd_coordinator_state;

struct nd_coordinator {
    nd_nodes_options options;
    nd_server *server;
    uv_timer_t pulse;
    nd_roster roster;
    nd_status refused;
    int refused_count; /* nodes that were refused when they joined */
    char refusal[ND_ERROR_MESSAGE_MAX];
    nd_coordinator_state state;
    int64_t epoch, next_epoch; /* epoch: -1 before the first start */
    bool asked;                /* a signal to a launcher asked the job to end */
    bool left_behind;          /* a killed worker of this start did not end */
    bool stop_sent;
    bool restarts; /* ND_NODES_BETWEEN: the nodes are gathered for start next_epoch */
    bool fewer;    /* and it does not wait for nodes that are not here */
    int64_t stop_ns, release_ns, beat_ns, gather_ns, noticed_ns;
    int64_t enough_ns; /* before the first start: when each place had a node; 0: not yet */
    char run_folder[ND_RUN_FOLDER_MAX];
    nd_nodes_end own, end; /* of this node, of all: how the last start ended */
    int code;
};

/* gather.c */

/* A node's first frame: compares its settings with those of this node. */
nd_status nd_gather_join(nd_coordinator *coordinator, nd_peer *peer, int index,
                         nd_wire_cursor *cursor);
/* A node whose check failed sends the code instead. */
nd_status nd_gather_failed_check(nd_coordinator *coordinator, const nd_peer *peer, int index,
                                 int code);
/* Before the first start: all nodes are here, or each place has a node and the spare nodes had
 * their time. */
bool nd_gather_is_complete(nd_coordinator *coordinator, int64_t now);
/* Before the first start, after so many seconds: a node was refused, or this one cannot start. The
 * reason is the thread's error then. */
bool nd_gather_is_refused(const nd_coordinator *coordinator, double waited);
/* Which nodes are missing: a warning, and at the deadline the error. */
void nd_gather_warn_missing(const nd_coordinator *coordinator, double seconds);
nd_status nd_gather_fail_missing(const nd_coordinator *coordinator, double seconds);
/* The most nodes out of those that are here with which a start may go on (launch.min_nodes); 0:
 * none. The last reason why a number does not do is the thread's error then. */
int nd_gather_fitting(const nd_coordinator *coordinator);

#endif
