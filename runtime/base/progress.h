// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_PROGRESS_H
#define ND_BASE_PROGRESS_H
/*
 * The progress page: one slot per local worker in memory shared with ndlaunch (a memfd inherited by
 * number), so that a stuck rank is named even when it is stopped or spinning. A worker writes only
 * its own slot, with relaxed atomics; readers may see two fields of different moments, which is
 * good enough for a diagnosis.
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

typedef struct nd_progress {
    nd_progress_slot *slots; /* [count] */
    int count;
    int fd; /* -1: private */
} nd_progress;

const char *nd_phase_name(nd_phase phase);

/* Launcher: creates a page of `count` slots; fd is to be inherited by the workers. */
nd_status nd_progress_create(int count, nd_progress *out);
/* Worker: maps the page behind `fd`, or a private one when fd is -1. */
nd_status nd_progress_open(int fd, int count, nd_progress *out);
void nd_progress_close(nd_progress *progress);

static inline void nd_progress_set_phase(nd_progress_slot *slot, nd_phase phase, int64_t step)
{
    atomic_store_explicit(&slot->phase, (int32_t)phase, memory_order_relaxed);
    atomic_store_explicit(&slot->step, step, memory_order_relaxed);
}

#endif
