// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_PROGRESS_H
#define ND_BASE_PROGRESS_H
/*
 * The progress page: one slot per local worker in memory shared with ndlaunch (a memfd inherited by
 * number), so that a stuck rank is named even when it is stopped or spinning. A worker writes only
 * its own slot, with relaxed atomics; readers may see two fields of different moments, which is
 * good enough for a diagnosis.
 *
 * A worker that fails records why, once. ndlaunch reads that when the worker has ended, even if it
 * was killed meanwhile. Times are CLOCK_MONOTONIC of the host, so they order its failures.
 *
 * Beside the slots, the job's part tells ndlaunch what a next start of the job needs: where the run
 * is and how far it has come. Only rank 0 writes it. What it has written stays when it is killed,
 * and the page of the next start begins empty again.
 *
 * A worker without a launcher maps a private page, which no other process reads.
 */
#include <stdatomic.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef enum nd_phase {
    ND_PHASE_START = 0,
    ND_PHASE_RENDEZVOUS,
    ND_PHASE_INIT, /* communicators, memory, weights */
    ND_PHASE_FORWARD,
    ND_PHASE_BACKWARD,
    ND_PHASE_OPTIMIZER,
    ND_PHASE_EVAL,
    ND_PHASE_SAVE,
    ND_PHASE_DONE,
    ND_PHASE_COUNT
} nd_phase;

typedef struct nd_progress_slot {
    _Atomic int32_t rank;     /* world rank, -1 until known */
    _Atomic int32_t phase;    /* nd_phase */
    _Atomic int64_t step;     /* the step being computed, 0 before the first */
    _Atomic int32_t group;    /* nd_group_kind of the collective entered last; over NCCL, which only
                              enqueues: of the one that runs, or else ended last */
    _Atomic int32_t op;       /* nd_comm_op */
    _Atomic int64_t sequence; /* of that collective in its group, from 1; 0: none yet */
    _Atomic int64_t bytes;
    _Atomic int64_t since_ns; /* CLOCK_MONOTONIC when it was entered, or began; 0 while outside */
    _Atomic int64_t heartbeat_ns; /* last sign of life */
    char pad[192 - 56];
} nd_progress_slot;

enum { ND_DEVICE_NAME_MAX = 48 };

/* A worker records its failure here, and ndlaunch shows it on the failure screen. */
typedef struct nd_failure_slot {
    _Atomic int64_t time_ns;         /* when the record was complete, written last; 0: none */
    _Atomic int32_t ready;           /* it handles the signals that ndlaunch forwards */
    int32_t status;                  /* nd_status */
    int32_t cause;                   /* nd_failure_cause */
    char device[ND_DEVICE_NAME_MAX]; /* "cuda:3" or "cpu" */
    char message[ND_ERROR_MESSAGE_MAX];
} nd_failure_slot;

enum { ND_RUN_FOLDER_MAX = 4096 }; /* bytes of a run folder's path, with its NUL */

/* The job's part. */
typedef struct nd_progress_job {
    /* Steps that were done when this start's loop began, which is 0 or the step of the checkpoint
     * that was loaded; -1: not known yet. */
    _Atomic int64_t first_step;
    /* The step of the newest durable checkpoint, be it the one that was loaded; -1: none. */
    _Atomic int64_t durable_step;
    _Atomic int64_t stepped_ns;         /* CLOCK_MONOTONIC; 0: no step of this start is done */
    _Atomic int32_t has_folder;         /* the path is complete */
    char run_folder[ND_RUN_FOLDER_MAX]; /* nd_progress_set_run_folder */
    char pad[36];
} nd_progress_job;

typedef struct nd_progress {
    nd_progress_job *job;
    nd_progress_slot *slots;   /* [count] */
    nd_failure_slot *failures; /* [count] */
    int count;
    int fd; /* -1: private */
} nd_progress;

const char *nd_phase_name(nd_phase phase);

/* Launcher: creates a page of `count` slots. Its descriptor closes on exec: the launcher hands it
 * down to the workers of this page only. */
nd_status nd_progress_create(int count, nd_progress *out);
/* Worker: maps the page behind `fd`, or a private one when fd is -1. */
nd_status nd_progress_open(int fd, int count, nd_progress *out);
void nd_progress_close(nd_progress *progress);

/*
 * Rank 0, once, as soon as the run folder is known and before the first checkpoint: its absolute
 * path. A second call changes nothing. ND_ERR_CANTCREATE for a path that is not absolute or does
 * not fit. The path is published whole: a reader sees all of it or none.
 */
nd_status nd_progress_set_run_folder(nd_progress *progress, const char *path);
/* "" until it is set. Points into the page. */
const char *nd_progress_run_folder(const nd_progress *progress);
/* Rank 0: a step of this start is done. A second call changes nothing. */
void nd_progress_set_stepped(nd_progress *progress);
/* The steps of the run that this worker has completed, as its slot tells; 0 while it starts. */
int64_t nd_progress_completed_steps(const nd_progress_slot *slot);

/* The record of a worker of this host; NULL without a page, as where there is no ndlaunch. */
static inline nd_failure_slot *nd_failure_slot_of(const nd_progress *page, int local_rank)
{
    return page->failures ? &page->failures[local_rank] : NULL;
}
/* Worker: records the error that ends it. The first record stays. Does nothing without a page. */
void nd_failure_record(const nd_progress *page, int local_rank, const nd_error *error);

static inline void nd_progress_set_phase(nd_progress_slot *slot, nd_phase phase, int64_t step)
{
    atomic_store_explicit(&slot->phase, (int32_t)phase, memory_order_relaxed);
    atomic_store_explicit(&slot->step, step, memory_order_relaxed);
}

#endif
