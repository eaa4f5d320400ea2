// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_AFFINITY_H
#define ND_DEVICE_AFFINITY_H
/*
 * CPUs of a worker: threads = allowed cores / local workers, at least 1, and a binding by hwloc
 * that is never wider than the mask the process was given. The CPUs of a core (hyperthreads) share
 * its vector and tile units and its first caches, so a second thread on a core gains nothing. With
 * at least one CPU per worker each gets its own adjacent CPUs of the topology, so that a worker's
 * threads share caches; with fewer CPUs than workers no worker is bound and the scheduler balances.
 */
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_affinity {
    int allowed;    /* CPUs in the mask of the process */
    int cores;      /* that have these CPUs */
    int threads;    /* of this worker */
    int bound;      /* CPUs it was bound to; 0: not bound */
    char cpus[128]; /* their list, such as "0-3" */
} nd_affinity;

/* Equal for processes that were given the same CPUs. */
nd_status nd_affinity_digest(uint64_t *out);

/* threads_wanted 0: as above. More than the worker's CPUs is honoured. */
nd_status nd_affinity_apply(int local_rank, int local_workers, int threads_wanted,
                            nd_affinity *out);

/* The threads that nd_affinity_apply would choose, without binding anything; 1 where the cores
 * cannot be counted. */
int nd_affinity_threads(int local_workers, int threads_wanted);

#endif
