// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_WORKER_H
#define ND_WORKER_WORKER_H
/*
 * A worker process from its environment to a rank that can train: identity, store, device, CPUs,
 * transport, groups. Owns all of them; nd_worker_close undoes them in reverse order.
 */
#include "runtime/device/affinity.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"
#include "trainer/worker/peers.h"
#include "trainer/rank.h"

/* Which of the ranks that fail together gives the reason, where no ndlaunch sorts it out. */
typedef enum nd_voice {
    ND_VOICE_ALIKE =
        0, /* all have the same one, as before they have compared their settings: rank 0 speaks */
    ND_VOICE_OWN, /* this rank has its own */
    ND_VOICE_ECHO /* another rank has it */
} nd_voice;

typedef struct nd_worker {
    nd_identity identity;
    nd_store *store;
    nd_peers peers;
    bool met; /* the ranks know of each other */
    nd_voice voice;
    nd_progress progress;
    nd_affinity affinity;
    nd_device *device;
    nd_transport *transport;
    nd_rank rank;
    nd_ops planner;   /* of a GPU that is not here; rank.ops points to it */
    nd_error failure; /* its status is ND_OK until nd_worker_fail */
} nd_worker;

/* ND_ERR_CONFIG when the device that was asked for is not there. */
nd_status nd_worker_check_device(const nd_config *config);
/* Device and ops only. */
nd_status nd_worker_open_device(const nd_config *config, int local_rank, int local_workers,
                                nd_worker *worker);
/*
 * For a plan: the CPU's ops whatever the device, since nothing runs, with the threads that a worker
 * on a machine of as many CPUs as this one would have.
 */
nd_status nd_worker_open_planner(const nd_config *config, nd_worker *worker);
/*
 * Joins the job's store and waits until all ranks have, within launch.rdzv_timeout_seconds. Comes
 * before the data are opened: ranks may take minutes to index them, and nobody takes that for a
 * rank that is not there. Where a rank hosts the store, a rank that dies ends all of them from here
 * on.
 */
nd_status nd_worker_meet(nd_worker *worker, const nd_config *config);
/* The rest, among ranks that agree (agree.h). The config is borrowed. */
nd_status nd_worker_join(nd_worker *worker, const nd_config *config, const nd_llama_shape *shape);
/*
 * Before a failing rank closes anything, which may take long, wait for a peer, or show a peer that
 * this rank fails: says the sentence, where no ndlaunch watches after settling who speaks (seconds;
 * not for a rank with its own reason), ends the job where PMIx started it, and then abandons the
 * transport. A second call does nothing.
 */
void nd_worker_fail(nd_worker *worker, nd_status status, const char *message);
/*
 * Reports how the worker ended and closes it. A failure of one that PMIx started ends all: srun
 * gives its code. `message` is the failure's sentence, or NULL; it is logged. Returns the exit
 * code.
 */
int nd_worker_close(nd_worker *worker, nd_status status, const char *message);

#endif
