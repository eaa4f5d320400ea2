// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_SUPERVISE_H
#define ND_LAUNCHER_SUPERVISE_H
/*
 * The attempts of a job on this node, one after the other: starts each with an epoch of its own,
 * and knows what the last one has reached. On node 0 it chooses whether a further one follows
 * (restart.h) and prints the lines about it. When that one begins, and on which nodes, is up to the
 * job.
 */
#include "launcher/launcher.h"
#include "launcher/nodes.h"
#include "launcher/restart.h"

typedef struct nd_supervisor {
    nd_attempt_options options; /* of the current attempt; the texts of one start are these: */
    char run_id[96];
    char log_folder[4096];              /* below launch.log_dir, or "" */
    char run_folder[ND_RUN_FOLDER_MAX]; /* that the first start began, or "" */
    const char *job;                    /* its name */
    nd_attempt *attempt;                /* the current one, or the last; without workers at first */
    nd_attempt *former;                 /* of which the loop may still have handles */
    int64_t epoch;                      /* of the current attempt */
    nd_status start_failed;             /* its workers could not be started */
    bool asked;                         /* a signal asked the job to end */
    int brief;                          /* nd_restart_case */
} nd_supervisor;

/* Before the first nd_supervisor_start it has an attempt without workers. */
nd_status nd_supervisor_create(nd_supervisor **out);
/* After the loop has run out; NULL is legal. */
void nd_supervisor_destroy(nd_supervisor *supervisor);

/* Before the first start. The options are copied, without the texts of a start; `job` and what they
 * point to is borrowed. */
void nd_supervisor_init(nd_supervisor *supervisor, const nd_attempt_options *options,
                        const char *job);
/*
 * Starts an attempt: the first one, which may be of a later epoch where this node came back, or the
 * next one after the workers of the last one have ended; `options` have its configuration and world
 * size. One that cannot be started, or could not be `prepared`, which is the thread's last error
 * then, ends as a failure of its own: its workers, if any, are killed, and options.ended is called.
 */
void nd_supervisor_start(nd_supervisor *supervisor, const nd_nodes_start *next, nd_status prepared);

/* Node 0: the patience after a failure with this code, which is short where a restart follows. */
int nd_supervisor_patience_ms(const nd_supervisor *supervisor, int code);
/* Node 0: all workers of the attempt have ended, on all nodes. True: a restart follows after
 * *wait_seconds. Prints which, or why not. */
bool nd_supervisor_restarts(nd_supervisor *supervisor, const nd_nodes_end *end,
                            double *wait_seconds);

#endif
