// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_SLURM_H
#define ND_LAUNCHER_SLURM_H
/*
 * What Slurm's environment says to ndlaunch. A step that runs one ndlaunch on each of its nodes
 * gives the number of nodes and which one this is; where there are GPUs, a worker for each. What a
 * file or a flag says goes before.
 */
#include <stdbool.h>

#include "runtime/config/config.h"

typedef struct nd_slurm {
    bool in_job;                 /* below a batch script, salloc or srun */
    bool in_step;                /* started by srun */
    char job_id[32], node[128];  /* "" outside of Slurm */
    int job_nodes;               /* of the allocation */
    int nodes, node_rank, tasks; /* of the step; 1, 0, 1 outside of one */
    int gpus;                    /* of this node that the process may use; 0: none, or not said */
} nd_slurm;

/* ND_ERR_CONFIG for a variable that is no number. */
nd_status nd_slurm_read(nd_slurm *out);
/* Before file and flags are read: nnodes and node_rank of the step become the defaults. */
void nd_slurm_set_defaults(const nd_slurm *slurm, nd_config *config);
/*
 * After they are read, before nd_config_resolve: one worker per GPU where neither workers nor
 * nproc_per_node is given. ND_ERR_CONFIG when srun started several ndlaunch on a node, or on more
 * nodes than the configuration knows of.
 */
nd_status nd_slurm_complete(const nd_slurm *slurm, nd_config *config);

#endif
