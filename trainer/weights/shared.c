// SPDX-License-Identifier: Apache-2.0
/* Elements that several ranks hold are read by one of them, which passes them on. */
#include "trainer/weights/weights.h"

static int members(const nd_rank *rank, nd_axis axis)
{
    return rank->mesh.size[axis];
}

/* The coordinates of the readers go round with the units, so that all ranks read. */
static int replica_of(const nd_rank *rank, const nd_unit *unit)
{
    return unit->index % members(rank, ND_AXIS_DP_REPLICATE);
}

static int tp_rank_of(const nd_rank *rank, const nd_unit *unit)
{
    return unit->index / members(rank, ND_AXIS_DP_REPLICATE) % members(rank, ND_AXIS_TP);
}

bool nd_shared_reads(const nd_rank *rank, const nd_param *param)
{
    const nd_unit *unit = param->unit;
    return rank->coord.at[ND_AXIS_DP_REPLICATE] == replica_of(rank, unit) &&
           (param->split != ND_SPLIT_NONE || rank->coord.at[ND_AXIS_TP] == tp_rank_of(rank, unit));
}

/* In the replica that reads the unit: the tensors that tp does not split. */
static nd_status pass_on_unsplit(nd_rank *rank, const nd_layout *layout, const nd_unit *unit,
                                 float *array)
{
    nd_comm *tp = rank->groups.by_kind[ND_GROUP_TP];
    int root = tp_rank_of(rank, unit);
    if (tp->size == 1 || rank->coord.at[ND_AXIS_DP_REPLICATE] != replica_of(rank, unit)) {
        return ND_OK;
    }
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const nd_flat_range held = nd_layout_shard_range(layout, p);
        if (p->split == ND_SPLIT_NONE && held.begin < held.end) {
            ND_TRY(nd_comm_broadcast(tp, &rank->stream, array + held.begin, held.end - held.begin,
                                     ND_DTYPE_F32, root, NULL));
        }
    }
    return ND_OK;
}

nd_status nd_shared_pass_on(nd_rank *rank, const nd_layout *layout, float *array)
{
    nd_comm *replicas = rank->groups.by_kind[ND_GROUP_DP_REPLICATE];
    for (int u = 0; u < layout->unit_count; u++) {
        const nd_unit *unit = &layout->units[u];
        ND_TRY(pass_on_unsplit(rank, layout, unit, array));
        if (replicas->size > 1) { /* padding included */
            ND_TRY(nd_comm_broadcast(replicas, &rank->stream, array + unit->shard_offset,
                                     unit->shard_count, ND_DTYPE_F32, replica_of(rank, unit),
                                     NULL));
        }
    }
    return nd_stream_sync(&rank->stream);
}

/* The tensors that tp does not split, in the replica that has read the unit. */
static nd_status pass_on_kept_unsplit(nd_fsdp *fsdp, const nd_unit *unit)
{
    nd_rank *rank = fsdp->rank;
    nd_comm *tp = rank->groups.by_kind[ND_GROUP_TP];
    if (tp->size == 1 || rank->coord.at[ND_AXIS_DP_REPLICATE] != replica_of(rank, unit)) {
        return ND_OK;
    }
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        const nd_param *p = &fsdp->layout->params[i];
        const nd_flat_range held = nd_layout_shard_range(fsdp->layout, p);
        const nd_dtype dtype = nd_fsdp_gathered_dtype(fsdp, p->segment);
        const int64_t at = held.begin - unit->segments[p->segment].shard_offset;
        if (p->split == ND_SPLIT_NONE && held.begin < held.end) {
            char *kept = nd_fsdp_kept(fsdp, unit, p->segment);
            ND_TRY(nd_comm_broadcast(tp, &rank->stream, kept + (size_t)at * nd_dtype_size(dtype),
                                     held.end - held.begin, dtype, tp_rank_of(rank, unit), NULL));
        }
    }
    return ND_OK;
}

nd_status nd_shared_pass_on_kept(nd_fsdp *fsdp)
{
    nd_rank *rank = fsdp->rank;
    const nd_layout *layout = fsdp->layout;
    nd_comm *replicas = rank->groups.by_kind[ND_GROUP_DP_REPLICATE];
    for (int u = 0; u < layout->unit_count; u++) {
        const nd_unit *unit = &layout->units[u];
        ND_TRY(pass_on_kept_unsplit(fsdp, unit));
        for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT && replicas->size > 1; kind++) {
            if (unit->segments[kind].shard_count > 0) { /* padding included */
                ND_TRY(nd_comm_broadcast(replicas, &rank->stream, nd_fsdp_kept(fsdp, unit, kind),
                                         unit->segments[kind].shard_count,
                                         nd_fsdp_gathered_dtype(fsdp, kind), replica_of(rank, unit),
                                         NULL));
            }
        }
    }
    return nd_stream_sync(&rank->stream);
}

nd_status nd_shared_agree(nd_rank *rank, nd_status status, const char *what, bool *elsewhere)
{
    int64_t worst = status;
    const nd_error own = *nd_error_last();
    *elsewhere = false;
    ND_TRY(nd_comm_all_reduce(rank->groups.by_kind[ND_GROUP_WORLD], &rank->stream, &worst, 1,
                              ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    if (status != ND_OK) { /* a rank that was lost meanwhile is reported above, as no read */
        return status == ND_ERR_IO ? nd_fail_local((nd_status)worst, "%s", own.message)
                                   : nd_fail((nd_status)worst, "%s", own.message);
    }
    *elsewhere = worst != ND_OK;
    return *elsewhere ? nd_fail_elsewhere((nd_status)worst, "another rank could not read %s", what)
                      : ND_OK;
}
