// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/gradsync.h"

#include <stdlib.h>

nd_status nd_gradsync_init(nd_gradsync *sync, nd_fsdp *fsdp, nd_memplan *plan)
{
    *sync = (nd_gradsync){.fsdp = fsdp};
    ND_TRY(nd_layout_owned_ranges(fsdp->layout, &sync->owned, &sync->owned_count));
    ND_TRY(nd_layout_copied_ranges(fsdp->layout, &sync->copied, &sync->copied_count));
    for (int i = 0; i < fsdp->replicated_count; i++) {
        sync->packed_count += fsdp->replicated[i].end - fsdp->replicated[i].begin;
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "tp: replicated gradients",
                    (size_t)sync->packed_count * sizeof *sync->packed, &sync->packed);
    return ND_OK;
}

void nd_gradsync_fini(nd_gradsync *sync)
{
    free(sync->owned);
    free(sync->copied);
    sync->owned = sync->copied = NULL;
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

static nd_status reduce_copied(nd_gradsync *sync)
{
    nd_rank *r = sync->fsdp->rank;
    ND_ASSERT(r->groups.by_kind[ND_GROUP_KV_COPIES]->size ==
              nd_shape_kv_copies(&r->shape, r->mesh.size[ND_AXIS_TP]));
    for (int i = 0; i < sync->copied_count; i++) {
        const nd_flat_range *range = &sync->copied[i];
        ND_TRY(nd_all_reduce(r, ND_GROUP_KV_COPIES, sync->fsdp->grad + range->begin,
                             range->end - range->begin, ND_DTYPE_F32, ND_REDOP_SUM));
    }
    return ND_OK;
}

nd_status nd_gradsync_reduce(nd_gradsync *sync)
{
    ND_TRY(nd_fsdp_sums_finish(sync->fsdp));
    ND_TRY(reduce_copied(sync));
    return sync->packed_count > 0 ? reduce_replicated(sync) : ND_OK;
}

nd_status nd_gradsync_squares(nd_gradsync *sync, double *squares)
{
    nd_rank *r = sync->fsdp->rank;
    ND_TRY(nd_zero(&r->stream, squares, sizeof *squares));
    for (int i = 0; i < sync->owned_count; i++) {
        ND_OP(r, ND_TRACE_OPTIMIZER, sum_squares, .out = squares,
              .x = sync->fsdp->grad + sync->owned[i].begin,
              .count = sync->owned[i].end - sync->owned[i].begin);
    }
    return nd_all_reduce(r, ND_GROUP_MODEL, squares, 1, ND_DTYPE_F64, ND_REDOP_SUM);
}
