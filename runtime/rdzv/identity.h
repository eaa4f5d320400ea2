// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_IDENTITY_H
#define ND_RDZV_IDENTITY_H
/*
 * The identity of this worker. Sources in order: the environment (RANK, WORLD_SIZE, LOCAL_RANK, ...
 * as torchrun and ndlaunch set it), PMIx, a single process.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/progress.h"
#include "runtime/base/status.h"

typedef enum nd_identity_source {
    ND_IDENTITY_SINGLE = 0,  /* world of one, no store */
    ND_IDENTITY_NDLAUNCH,    /* environment with ND_*: store in ndlaunch */
    ND_IDENTITY_ENVIRONMENT, /* torchrun-like environment: rank 0 hosts the store */
    ND_IDENTITY_PMIX
} nd_identity_source;

typedef struct nd_identity {
    nd_identity_source source;
    int rank, world_size;
    int local_rank, local_world_size;
    int node_rank, nnodes;
    char master_addr[256]; /* store endpoint */
    int master_port;
    char run_id[64]; /* the same on all ranks; names the job in messages */
    char host[128];
    int key_fd;        /* inherited descriptor holding the 32-byte job key, -1: none */
    nd_progress page;  /* inherited from ndlaunch; without it all is 0 */
    int config_fd;     /* inherited resolved configuration (native YAML), -1: none */
    int restart_epoch; /* number of this start of the job, from 0; the store takes no other */
    /* The folder that the job's first start began, absolute: rank 0 goes on in it. "": this start
     * begins a folder of its own. */
    char run_folder[ND_RUN_FOLDER_MAX];
    bool terminal;        /* somebody looks at a terminal: rank 0 may draw a progress bar */
    struct nd_pmix *pmix; /* after nd_identity_join of a worker that PMIx started, else NULL; to be
                             closed (pmix.h) */
} nd_identity;

/*
 * From the environment alone: of PMIx only the rank. ND_ERR_CONFIG when the variables contradict
 * each other (RANK >= WORLD_SIZE, one missing, not a number).
 */
nd_status nd_identity_read(nd_identity *out);
/*
 * A worker that is going to train: joins PMIx where that started it, and learns the rest.
 * ND_ERR_CONFIG for one of several tasks of srun that have no means to find each other.
 */
nd_status nd_identity_join(nd_identity *identity);
/* The name of this host in the job: the node's name in Slurm, else the host name. */
void nd_identity_host(char *out, size_t capacity);
const char *nd_identity_source_name(nd_identity_source source);

/*
 * Lets a worker that ndlaunch started die with ndlaunch, also when ndlaunch is killed by SIGKILL:
 * no orphans. main() calls it first, in the main thread. Without ndlaunch it does nothing.
 */
void nd_worker_die_with_parent(void);

#endif
