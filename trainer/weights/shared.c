// SPDX-License-Identifier: Apache-2.0
/* Elements that several ranks hold are read by one of them, which passes them on; and how ranks
 * agree on a status, and share bytes of the host. */
#include <string.h>

#include "runtime/base/math.h"
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

/* A segment of a unit: in the replica that reads it the tensors that tp does not split, then all of
 * it, padding included. */
static nd_status pass_on(nd_rank *rank, const nd_layout *layout, const nd_unit *unit,
                         nd_segment_kind kind, char *state, nd_dtype dtype)
{
    const nd_segment *segment = &unit->segments[kind];
    nd_comm *tp = rank->groups.by_kind[ND_GROUP_TP];
    nd_comm *replicas = rank->groups.by_kind[ND_GROUP_DP_REPLICATE];
    const bool here =
        tp->size > 1 && rank->coord.at[ND_AXIS_DP_REPLICATE] == replica_of(rank, unit);
    for (int i = 0; here && i < unit->param_count; i++) {
        const nd_param *p = &layout->params[unit->first_param + i];
        const nd_flat_range held = nd_layout_shard_range(layout, p);
        const size_t at = (size_t)(held.begin - segment->shard_offset) * nd_dtype_size(dtype);
        if (p->segment == kind && p->split == ND_SPLIT_NONE && held.begin < held.end) {
            ND_TRY(nd_comm_broadcast(tp, &rank->stream, state + at, held.end - held.begin, dtype,
                                     tp_rank_of(rank, unit), NULL));
        }
    }
    return replicas->size > 1 && segment->shard_count > 0
               ? nd_comm_broadcast(replicas, &rank->stream, state, segment->shard_count, dtype,
                                   replica_of(rank, unit), NULL)
               : ND_OK;
}

nd_status nd_shared_pass_on(nd_rank *rank, const nd_layout *layout, float *array, nd_fsdp *kept)
{
    for (int u = 0; u < layout->unit_count; u++) {
        const nd_unit *unit = &layout->units[u];
        for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
            ND_TRY(kept ? pass_on(rank, layout, unit, kind, nd_fsdp_kept(kept, unit, kind),
                                  nd_fsdp_gathered_dtype(kept, kind))
                        : pass_on(rank, layout, unit, kind,
                                  (char *)(array + unit->segments[kind].shard_offset),
                                  ND_DTYPE_F32));
        }
    }
    return nd_stream_sync(&rank->stream);
}

nd_status nd_shared_fail(nd_status own, nd_status status, const char *what, const char *reason)
{
    return own == ND_OK       ? nd_fail_elsewhere(status, "another rank could not read %s", what)
           : own == ND_ERR_IO ? nd_fail_local(status, "%s", reason)
                              : nd_fail(status, "%s", reason);
}

nd_status nd_shared_agree_on(nd_rank *rank, nd_status status, const char *what, int64_t *values,
                             int64_t count)
{
    const nd_error own = *nd_error_last();
    values[0] = status;
    /* A rank that is lost meanwhile is reported here; it is no fault of reading. */
    ND_TRY(nd_all_reduce(rank, ND_GROUP_WORLD, values, count, ND_DTYPE_I64, ND_REDOP_MAX));
    const nd_status worst = (nd_status)values[0];
    return worst == ND_OK ? ND_OK : nd_shared_fail(status, worst, what, own.message);
}

nd_status nd_shared_agree(nd_rank *rank, nd_status status, const char *what)
{
    int64_t worst;
    return nd_shared_agree_on(rank, status, what, &worst, 1);
}

/* The bytes are a sum, to which others add 0: NCCL has broadcasts of device memory alone. */
nd_status nd_shared_bytes(nd_rank *rank, nd_group_kind group, void *data, int64_t bytes, bool own)
{
    int64_t words[512]; /* what NCCL reduces of host memory at once */
    for (int64_t at = 0; at < bytes; at += (int64_t)sizeof words) {
        const size_t n = (size_t)nd_min(bytes - at, sizeof words);
        memset(words, 0, sizeof words);
        if (own) {
            memcpy(words, (char *)data + at, n);
        }
        ND_TRY(nd_all_reduce(rank, group, words, nd_ceil_div((int64_t)n, 8), ND_DTYPE_I64,
                             ND_REDOP_SUM));
        memcpy((char *)data + at, words, n);
    }
    return ND_OK;
}
