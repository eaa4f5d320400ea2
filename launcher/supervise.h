// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_SUPERVISE_H
#define ND_LAUNCHER_SUPERVISE_H
/*
 * The attempts of a job on this node, one after the other: starts each with an epoch of its own,
 * and knows what the last one has reached. On node 0 it chooses whether a further one follows and
 * prints the lines about it. When that one begins, and on which nodes, is up to the job.
 */
#include "launcher/launcher.h"
#include "launcher/nodes.h"

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

/*
 * Whether a job whose workers failed is started again, and what the user reads about it: pure
 * functions of exit code, steps and times. Node 0 decides for all nodes.
 *
 * A restart needs progress, so that the loop of restarts ends: the first one a completed step, each
 * further one a checkpoint that is newer than the one from which the failed start went on. So none
 * follows a restart that failed before its first step.
 */

typedef enum nd_restart {
    ND_RESTART_YES = 0,
    ND_RESTART_OFF,         /* launch.max_restarts is 0, or the job ended without a failure */
    ND_RESTART_ASKED,       /* a signal asked the job to end */
    ND_RESTART_NOT_WORTH,   /* this exit code would come again */
    ND_RESTART_NO_STEP,     /* the first start completed no step */
    ND_RESTART_NO_START,    /* the last restart completed no step */
    ND_RESTART_NO_PROGRESS, /* no newer checkpoint since the last restart */
    ND_RESTART_ALL_USED,
    ND_RESTART_LEFT_BEHIND, /* a killed worker did not end */
} nd_restart;

typedef struct nd_restart_case {
    int code;         /* of the failure: a worker's exit code or 128 + its signal */
    bool asked;       /* ndlaunch received a signal that ends the job */
    bool left_behind; /* a killed worker did not end, on whatever node */
    int64_t epoch, max_restarts;
    bool stepped;     /* this start completed a step */
    int64_t began_at; /* steps that were done when this start's loop began */
    int64_t durable;  /* step of the newest durable checkpoint, -1: none */
    double seconds;   /* from this start's first completed step to the failure */
    int brief;        /* how many starts before this one failed soon, in a row */
} nd_restart_case;

typedef struct nd_restart_choice {
    nd_restart verdict;
    double wait_seconds; /* before the next start */
    int brief;           /* for the next case */
} nd_restart_choice;

nd_restart_choice nd_restart_decide(const nd_restart_case *c);
/* Why a job with launch.max_restarts is not started again; NULL where there is nothing to say. */
const char *nd_restart_reason(nd_restart verdict);

/* The run id of a start: the job's name, with ".EPOCH" from the first restart on. */
void nd_restart_run_id(const char *job, int64_t epoch, char *out, size_t capacity);

#endif
