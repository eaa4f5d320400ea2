// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/gpu_choice.h"

#include <stdlib.h>
#include <string.h>

/* The n-th number of a comma list, -1 beyond its end; the list's syntax has been checked with the
 * configuration. */
static int list_at(const char *list, int n)
{
    for (; n > 0 && list; n--) {
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
    return list && *list ? (int)strtol(list, NULL, 10) : -1;
}

static nd_status choose_listed(const nd_gpu_request *r, int *ordinal)
{
    int listed = 0;
    while (list_at(r->gpu_ids, listed) >= 0) {
        listed++;
    }
    if (listed < r->local_workers) {
        return nd_fail(
            ND_ERR_CONFIG,
            "launch.gpu_ids %s names %d GPUs, but this host has %d workers; name one for "
            "each, or start fewer workers",
            r->gpu_ids, listed, r->local_workers);
    }
    int chosen = list_at(r->gpu_ids, r->local_rank);
    if (chosen >= r->visible) {
        return nd_fail(
            ND_ERR_CONFIG,
            "launch.gpu_ids %s gives GPU %d to local rank %d, but %d %s visible, numbered "
            "from 0; the numbers count the visible ones only",
            r->gpu_ids, chosen, r->local_rank, r->visible, r->visible == 1 ? "is" : "are");
    }
    *ordinal = chosen;
    return ND_OK;
}

nd_status nd_gpu_choose(const nd_gpu_request *request, int *ordinal)
{
    const nd_gpu_request *r = request;
    if (strcmp(r->gpu_ids, "all") != 0) {
        return choose_listed(r, ordinal);
    }
    if (r->visible == 1 && !r->launched) {
        *ordinal = 0;
        return ND_OK;
    }
    if (r->visible < r->local_workers) {
        return nd_fail(
            ND_ERR_CONFIG,
            "%d workers of this host need a GPU each, but %d %s visible; start fewer "
            "workers, or let each task see all GPUs of its node (srun --gpus-per-node=%d)",
            r->local_workers, r->visible, r->visible == 1 ? "is" : "are", r->local_workers);
    }
    *ordinal = r->local_rank;
    return ND_OK;
}
