// SPDX-License-Identifier: Apache-2.0
/* One task of a step: says who it is, what Slurm gave it, and what would be chosen from that. */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/device/gpu_choice.h"
#include "runtime/rdzv/pmix.h"

int main(void)
{
    nd_identity id;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int gpus = visible && visible[0] != '\0', ordinal = -1;
    for (const char *c = visible; gpus && *c; c++) {
        gpus += *c == ',';
    }
    nd_status status = nd_identity_read(&id);
    status = status == ND_OK ? nd_identity_join(&id) : status;
    if (status == ND_OK) {
        nd_gpu_request request = {"all", gpus, id.local_rank, id.local_world_size, false};
        status = nd_gpu_choose(&request, &ordinal);
    }
    if (status != ND_OK) {
        fprintf(stderr, "%s\n", nd_error_last()->message);
        return (int)status;
    }
    printf("rank %d of %d, local %d of %d, node %d of %d (%s): GPUs %s, ordinal %d\n", id.rank,
           id.world_size, id.local_rank, id.local_world_size, id.node_rank, id.nnodes, id.host,
           visible ? visible : "none", ordinal);
    nd_pmix_close(id.pmix, 0);
    return 0;
}
