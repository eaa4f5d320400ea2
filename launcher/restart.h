// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_RESTART_H
#define ND_LAUNCHER_RESTART_H
/*
 * Whether a job whose workers failed is started again, and what the user reads about it: pure
 * functions of exit code, steps and times. Node 0 decides for all nodes.
 *
 * A restart needs progress, so that the loop of restarts ends: the first one a completed step, each
 * further one a checkpoint that is newer than the one from which the failed start went on. So none
 * follows a restart that failed before its first step.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
/* How long workers may take to end after a failure, so that a restart follows soon: those of a
 * worker that died of a signal know nothing about it, and others have at most their messages left
 * to write. */
int nd_restart_patience_ms(int code);

/* What a node's workers tell beside their exit code. A lost peer (74) and a deadline (124) may be
 * due to another node. */
typedef enum nd_blame {
    ND_BLAME_NOTHING = 0,
    ND_BLAME_OWN,    /* the first failure is surely one of this node, whatever its code */
    ND_BLAME_SILENT, /* a worker reached no deadline itself, and did not end when it was asked to */
} nd_blame;

/* Where the first failure of a start was. */
typedef struct nd_restart_culprit {
    int node; /* -1: nowhere */
    int code;
    bool lost; /* the node itself was lost */
    bool sure; /* it is surely this node's, although the code may come from another one's */
} nd_restart_culprit;

/*
 * Whether a fault keeps coming from one node, so that a spare node should take its place: the first
 * failure of two consecutive starts was there. A deadline (124) and a lost peer (74) count only
 * where the fault is surely this node's, because workers of another node report them. Node 0 is
 * never taken out, because the store is there.
 */
bool nd_restart_takes_out(const nd_restart_culprit *before, const nd_restart_culprit *now);

/* Moments of a restart, CLOCK_MONOTONIC in ns, and its steps. */
typedef struct nd_restart_times {
    int64_t occurred, seen; /* the failure: when it happened, when ndlaunch saw it */
    int64_t ended;          /* the last worker of the failed start had ended */
    int64_t started;        /* the first worker of the new start began */
    int64_t joined, loaded, first_step;
    int64_t steps_before; /* completed when the job failed */
    int64_t steps_from;   /* completed in the checkpoint from which it goes on */
} nd_restart_times;

/* "6 steps lost; 2.31 s: detect 0.00, stop 0.05, wait 1.00, start 0.80, load 0.21, first step
 * 0.25" */
void nd_restart_text(const nd_restart_times *times, char *out, size_t capacity);
/* The run id of a start: the job's name, with ".EPOCH" from the first restart on. */
void nd_restart_run_id(const char *job, int64_t epoch, char *out, size_t capacity);

#endif
