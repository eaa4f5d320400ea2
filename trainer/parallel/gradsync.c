// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/gradsync.h"

#include <stdlib.h>

nd_status nd_gradsync_init(nd_gradsync *sync, nd_fsdp *fsdp, nd_memplan *plan)
{
    *sync = (nd_gradsync){.fsdp = fsdp};
    ND_TRY(nd_layout_decay_ranges(fsdp->layout, &sync->all, &sync->all_count));
    for (int i = 0; i < fsdp->replicated_count; i++) {
        sync->packed_count += fsdp->replicated[i].end - fsdp->replicated[i].begin;
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "tp: replicated gradients, packed",
                    (size_t)sync->packed_count * sizeof *sync->packed, &sync->packed);
    return ND_OK;
}

void nd_gradsync_fini(nd_gradsync *sync)
{
    free(sync->all);
    sync->all = NULL;
}

static nd_status copy_packed(nd_gradsync *sync, bool pack)
{
    float *at = sync->packed;
    for (int i = 0; i < sync->fsdp->replicated_count; i++) {
        const nd_flat_range *range = &sync->fsdp->replicated[i];
        float *grad = sync->fsdp->grad + range->begin;
        size_t bytes = (size_t)(range->end - range->begin) * 4;
        ND_TRY(pack ? nd_copy(&sync->fsdp->rank->stream, at, grad, bytes)
                    : nd_copy(&sync->fsdp->rank->stream, grad, at, bytes));
        at += range->end - range->begin;
    }
    return ND_OK;
}

static nd_status reduce_replicated(nd_gradsync *sync)
{
    static const nd_group_kind over[] = {ND_GROUP_TP, ND_GROUP_DP_REPLICATE};
    nd_rank *r = sync->fsdp->rank;
    ND_TRY(copy_packed(sync, true));
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_all_reduce(r, over[i], sync->packed, sync->packed_count, ND_DTYPE_F32,
                             ND_REDOP_SUM));
    }
    return copy_packed(sync, false);
}

nd_status nd_gradsync_reduce(nd_gradsync *sync)
{
    ND_TRY(nd_fsdp_sums_finish(sync->fsdp));
    return sync->packed_count > 0 ? reduce_replicated(sync) : ND_OK;
}

static bool is_replicated(const nd_gradsync *sync, const nd_flat_range *range)
{
    for (int i = 0; i < sync->fsdp->replicated_count; i++) {
        if (sync->fsdp->replicated[i].begin == range->begin) {
            return true;
        }
    }
    return false;
}

nd_status nd_gradsync_squares(nd_gradsync *sync, double *squares)
{
    nd_rank *r = sync->fsdp->rank;
    bool counts_replicated = r->coord.at[ND_AXIS_TP] == 0;
    ND_TRY(nd_zero(&r->stream, squares, sizeof *squares));
    for (int i = 0; i < sync->all_count; i++) {
        if (counts_replicated || !is_replicated(sync, &sync->all[i])) {
            ND_OP(r, ND_TRACE_OPTIMIZER, sum_squares, .out = squares,
                  .x = sync->fsdp->grad + sync->all[i].begin,
                  .count = sync->all[i].end - sync->all[i].begin);
        }
    }
    return nd_all_reduce(r, ND_GROUP_MODEL, squares, 1, ND_DTYPE_F64, ND_REDOP_SUM);
}
