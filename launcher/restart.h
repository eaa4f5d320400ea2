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

/* The run id of a start: the job's name, with ".EPOCH" from the first restart on. */
void nd_restart_run_id(const char *job, int64_t epoch, char *out, size_t capacity);

#endif
