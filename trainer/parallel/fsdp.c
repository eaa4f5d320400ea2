// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/fsdp.h"

#include <stdlib.h>
#include <string.h>

enum {
    ID_MASTER,
    ID_GRAD,
    ID_MOMENT1,
    ID_MOMENT2,
    ID_WEIGHT_BLOCKS,
    ID_WEIGHT_EMBED,
    ID_WEIGHT_TAIL,
    ID_GRAD_BLOCKS,
    ID_GRAD_EDGES,
    ID_RECEIVED
};

static const nd_segment *hp(const nd_layout *layout, int unit)
{
    return &layout->units[unit].segments[ND_SEGMENT_HP];
}

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* All blocks have the same count; embedding and tail have their own. */
static int64_t block_count(const nd_layout *layout)
{
    return hp(layout, layout->first_block)->count;
}

static int block_units(const nd_layout *layout)
{
    return layout->tail - layout->first_block;
}

static void plan_weights(nd_fsdp *fsdp, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    size_t width = nd_dtype_size(fsdp->act);
    int blocks = block_units(layout);
    int slots = fsdp->resident || blocks < ND_FSDP_BLOCK_SLOTS ? blocks : ND_FSDP_BLOCK_SLOTS;
    fsdp->slot_count = slots + (layout->tied ? 1 : 2);
    int64_t in_blocks = fsdp->aliased ? 0 : slots * block_count(layout);
    int64_t in_embed = fsdp->aliased || layout->tied ? 0 : hp(layout, 0)->count;
    int64_t in_tail = fsdp->aliased ? 0 : hp(layout, layout->tail)->count;
    fsdp->ids[ID_WEIGHT_BLOCKS] =
        nd_memplan_add(plan, ND_MEM_WEIGHTS, "decoder blocks", in_blocks, width);
    fsdp->ids[ID_WEIGHT_EMBED] = nd_memplan_add(plan, ND_MEM_WEIGHTS, "embedding", in_embed, width);
    fsdp->ids[ID_WEIGHT_TAIL] =
        nd_memplan_add(plan, ND_MEM_WEIGHTS, "norm and head", in_tail, width);
}

static void plan_gradients(nd_fsdp *fsdp, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    bool sharded = layout->shards > 1;
    bool accumulates = fsdp->rank->config->train.gradient_accumulation_steps > 1;
    int64_t edges = max_i64(hp(layout, 0)->count, hp(layout, layout->tail)->count);
    int64_t shard =
        max_i64(max_i64(hp(layout, 0)->shard_count, hp(layout, layout->tail)->shard_count),
                hp(layout, layout->first_block)->shard_count);
    fsdp->ids[ID_GRAD_BLOCKS] =
        nd_memplan_add(plan, ND_MEM_GRADIENTS, "decoder blocks",
                       sharded ? ND_FSDP_BLOCK_SLOTS * block_count(layout) : 0, 4);
    fsdp->ids[ID_GRAD_EDGES] =
        nd_memplan_add(plan, ND_MEM_GRADIENTS, "embedding, norm and head", sharded ? edges : 0, 4);
    fsdp->ids[ID_RECEIVED] =
        nd_memplan_add(plan, ND_MEM_GRADIENTS, "received shards",
                       sharded && accumulates ? (ND_FSDP_BLOCK_SLOTS + 1) * shard : 0, 4);
}

nd_status nd_fsdp_init(nd_fsdp *fsdp, nd_rank *rank, nd_layout *layout, nd_dtype act,
                       nd_memplan *plan)
{
    const nd_config *config = rank->config;
    bool moments = config->optimizer.name == ND_OPTIMIZER_ADAMW;
    *fsdp = (nd_fsdp){.rank = rank, .layout = layout, .act = act, .version = 1};
    fsdp->aliased = layout->shards == 1 && act == ND_DTYPE_F32;
    fsdp->resident = layout->shards == 1 || !config->parallel.reshard_after_forward;
    fsdp->ids[ID_MASTER] =
        nd_memplan_add(plan, ND_MEM_STATE, "master weights", layout->shard_total, 4);
    fsdp->ids[ID_GRAD] = nd_memplan_add(plan, ND_MEM_STATE, "gradients", layout->shard_total, 4);
    fsdp->ids[ID_MOMENT1] =
        nd_memplan_add(plan, ND_MEM_STATE, "first moments", moments ? layout->shard_total : 0, 4);
    fsdp->ids[ID_MOMENT2] =
        nd_memplan_add(plan, ND_MEM_STATE, "second moments", moments ? layout->shard_total : 0, 4);
    plan_weights(fsdp, plan);
    plan_gradients(fsdp, plan);
    ND_TRY(ND_ALLOC(fsdp->slot_count, &fsdp->slots));
    ND_TRY(ND_ALLOC(layout->unit_count, &fsdp->slot_of_unit));
    ND_TRY(ND_ALLOC(layout->unit_count, &fsdp->unit_fresh));
    int blocks = fsdp->slot_count - (layout->tied ? 1 : 2);
    for (int u = 0; u < layout->unit_count; u++) {
        bool is_block = layout->units[u].kind == ND_UNIT_BLOCK;
        bool fixed = fsdp->resident || blocks == block_units(layout);
        fsdp->slot_of_unit[u] = is_block            ? (fixed ? u - layout->first_block : -1)
                                : u == layout->tail ? blocks
                                                    : blocks + 1;
    }
    for (int s = 0; s < fsdp->slot_count; s++) {
        fsdp->slots[s].unit = -1;
    }
    for (int s = 0; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        fsdp->grad_slots[s].unit = -1;
    }
    return ND_OK;
}

void nd_fsdp_bind(nd_fsdp *fsdp, const nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    fsdp->master = nd_memplan_at(plan, fsdp->ids[ID_MASTER]);
    fsdp->grad = nd_memplan_at(plan, fsdp->ids[ID_GRAD]);
    fsdp->moment1 = nd_memplan_at(plan, fsdp->ids[ID_MOMENT1]);
    fsdp->moment2 = nd_memplan_at(plan, fsdp->ids[ID_MOMENT2]);
    int blocks = fsdp->slot_count - (layout->tied ? 1 : 2);
    char *weights = nd_memplan_at(plan, fsdp->ids[ID_WEIGHT_BLOCKS]);
    for (int s = 0; s < blocks; s++) {
        fsdp->slots[s].data =
            weights ? weights + (size_t)(s * block_count(layout)) * nd_dtype_size(fsdp->act) : NULL;
    }
    fsdp->slots[blocks].data = nd_memplan_at(plan, fsdp->ids[ID_WEIGHT_TAIL]);
    if (!layout->tied) {
        fsdp->slots[blocks + 1].data = nd_memplan_at(plan, fsdp->ids[ID_WEIGHT_EMBED]);
    }
    float *blocks_grad = nd_memplan_at(plan, fsdp->ids[ID_GRAD_BLOCKS]);
    float *received = nd_memplan_at(plan, fsdp->ids[ID_RECEIVED]);
    int64_t stride =
        (int64_t)(plan->segments[fsdp->ids[ID_RECEIVED]].bytes / 4) / (ND_FSDP_BLOCK_SLOTS + 1);
    for (int s = 0; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        bool edge = s == ND_FSDP_BLOCK_SLOTS;
        fsdp->grad_slots[s].data = edge          ? nd_memplan_at(plan, fsdp->ids[ID_GRAD_EDGES])
                                   : blocks_grad ? blocks_grad + s * block_count(layout)
                                                 : NULL;
        fsdp->grad_slots[s].received = received ? received + s * stride : NULL;
    }
}

void nd_fsdp_fini(nd_fsdp *fsdp)
{
    free(fsdp->slots);
    free(fsdp->slot_of_unit);
    free(fsdp->unit_fresh);
    fsdp->slots = NULL;
    fsdp->slot_of_unit = NULL;
    fsdp->unit_fresh = NULL;
}

void nd_fsdp_weights_changed(nd_fsdp *fsdp)
{
    fsdp->version++;
}

static nd_weight_slot *slot_holding(const nd_fsdp *fsdp, int unit)
{
    for (int s = 0; s < fsdp->slot_count; s++) {
        if (fsdp->slots[s].unit == unit && fsdp->slots[s].version == fsdp->version) {
            return &fsdp->slots[s];
        }
    }
    return NULL;
}

/* A buffer for the unit: its own, or a block buffer that nobody holds or waits for. NULL when all are busy. */
static nd_weight_slot *slot_for(nd_fsdp *fsdp, int unit)
{
    if (fsdp->slot_of_unit[unit] >= 0) {
        return &fsdp->slots[fsdp->slot_of_unit[unit]];
    }
    for (int s = 0; s < ND_FSDP_BLOCK_SLOTS; s++) {
        if (!fsdp->slots[s].held && !fsdp->slots[s].pending) {
            return &fsdp->slots[s];
        }
    }
    return NULL;
}

static nd_status begin_gather(nd_fsdp *fsdp, nd_weight_slot *slot, int unit)
{
    nd_rank *r = fsdp->rank;
    const nd_segment *segment = hp(fsdp->layout, unit);
    float *shard = fsdp->master + segment->shard_offset;
    slot->unit = unit;
    slot->version = fsdp->version;
    if (fsdp->aliased) {
        slot->data = shard;
        return ND_OK;
    }
    int64_t n = segment->shard_count;
    char *own =
        (char *)slot->data + (size_t)(n * fsdp->layout->shard_index) * nd_dtype_size(fsdp->act);
    ND_OP(r, ND_TRACE_ELEMENTWISE, cast, nd_tensor_1d(own, fsdp->act, n),
          nd_tensor_1d(shard, ND_DTYPE_F32, n));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_gather(r->groups.by_kind[ND_GROUP_DP_SHARD_CP], &r->stream, own, slot->data,
                              n, fsdp->act, &slot->gathered));
    slot->pending = true;
    return ND_OK;
}

nd_status nd_fsdp_prefetch(nd_fsdp *fsdp, int unit)
{
    if (unit < 0 || unit >= fsdp->layout->unit_count || slot_holding(fsdp, unit)) {
        return ND_OK;
    }
    nd_weight_slot *slot = slot_for(fsdp, unit);
    return slot ? begin_gather(fsdp, slot, unit) : ND_OK;
}

nd_status nd_fsdp_acquire(nd_fsdp *fsdp, int unit)
{
    nd_rank *r = fsdp->rank;
    nd_weight_slot *slot = slot_holding(fsdp, unit);
    if (!slot) {
        slot = slot_for(fsdp, unit);
        ND_ASSERT(slot); /* the caller releases a block before it acquires the next but one */
        ND_TRY(begin_gather(fsdp, slot, unit));
    }
    if (slot->pending) {
        slot->pending = false;
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &slot->gathered));
    }
    slot->held = true;
    return ND_OK;
}

void nd_fsdp_release(nd_fsdp *fsdp, int unit)
{
    nd_weight_slot *slot = slot_holding(fsdp, unit);
    ND_ASSERT(slot && slot->held);
    slot->held = false;
}

/* Offset and shape of the neighbours first..last in their unit. */
static nd_tensor block_view(const nd_layout *layout, nd_param_id first, nd_param_id last,
                            int64_t layer, void *base, nd_dtype dtype)
{
    const nd_param *p = &layout->params[nd_layout_find(layout, first, layer)];
    int64_t rows = 0;
    for (nd_param_id id = first; id <= last; id++) {
        rows += layout->params[nd_layout_find(layout, id, layer)].local_rows;
    }
    char *data = (char *)base + (size_t)p->offset * nd_dtype_size(dtype);
    return p->axes == 1 ? nd_tensor_1d(data, dtype, rows)
                        : nd_tensor_2d(data, dtype, rows, p->local_cols);
}

nd_tensor nd_fsdp_weight(const nd_fsdp *fsdp, nd_param_id first, nd_param_id last, int64_t layer)
{
    int unit = fsdp->layout->params[nd_layout_find(fsdp->layout, first, layer)].unit;
    const nd_weight_slot *slot = slot_holding(fsdp, unit);
    ND_ASSERT(slot && slot->held);
    return block_view(fsdp->layout, first, last, layer, slot->data, fsdp->act);
}

void nd_fsdp_begin_micro(nd_fsdp *fsdp, bool first)
{
    fsdp->first_micro = first;
    for (int u = 0; first && u < fsdp->layout->unit_count; u++) {
        fsdp->unit_fresh[u] = true;
    }
}

static bool sharded(const nd_fsdp *fsdp)
{
    return fsdp->layout->shards > 1;
}

static nd_grad_slot *grad_slot_of(const nd_fsdp *fsdp, int unit)
{
    for (int s = 0; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        if (fsdp->grad_slots[s].unit == unit) {
            return (nd_grad_slot *)&fsdp->grad_slots[s];
        }
    }
    return NULL;
}

/* Waits for the reduce-scatter of a slot and adds what arrived; the slot is free afterwards. */
static nd_status finish_slot(nd_fsdp *fsdp, nd_grad_slot *slot)
{
    nd_rank *r = fsdp->rank;
    if (!slot->pending) {
        return ND_OK;
    }
    const nd_segment *segment = hp(fsdp->layout, slot->unit);
    slot->pending = false;
    slot->unit = -1;
    ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &slot->reduced));
    if (!fsdp->first_micro) {
        ND_OP(r, ND_TRACE_ELEMENTWISE, accumulate,
              nd_tensor_1d(fsdp->grad + segment->shard_offset, ND_DTYPE_F32, segment->shard_count),
              nd_tensor_1d(slot->received, ND_DTYPE_F32, segment->shard_count));
    }
    return ND_OK;
}

nd_status nd_fsdp_grad_acquire(nd_fsdp *fsdp, int unit)
{
    if (!sharded(fsdp)) {
        return ND_OK;
    }
    bool block = fsdp->layout->units[unit].kind == ND_UNIT_BLOCK;
    nd_grad_slot *slot =
        &fsdp->grad_slots[block ? unit % ND_FSDP_BLOCK_SLOTS : ND_FSDP_BLOCK_SLOTS];
    ND_TRY(finish_slot(fsdp, slot));
    ND_ASSERT(slot->unit == -1);
    slot->unit = unit;
    slot->fresh = true;
    return ND_OK;
}

nd_tensor nd_fsdp_grad(const nd_fsdp *fsdp, nd_param_id first, nd_param_id last, int64_t layer)
{
    int unit = fsdp->layout->params[nd_layout_find(fsdp->layout, first, layer)].unit;
    nd_grad_slot *slot = grad_slot_of(fsdp, unit);
    ND_ASSERT(slot || !sharded(fsdp));
    float *base = sharded(fsdp) ? slot->data : fsdp->grad + hp(fsdp->layout, unit)->shard_offset;
    return block_view(fsdp->layout, first, last, layer, base, ND_DTYPE_F32);
}

static bool is_fresh(const nd_fsdp *fsdp, int unit)
{
    return sharded(fsdp) ? grad_slot_of(fsdp, unit)->fresh : fsdp->unit_fresh[unit];
}

float nd_fsdp_grad_beta(const nd_fsdp *fsdp, int unit)
{
    return is_fresh(fsdp, unit) ? 0.0f : 1.0f;
}

nd_status nd_fsdp_grad_zero_if_fresh(nd_fsdp *fsdp, nd_param_id id, int64_t layer)
{
    int unit = fsdp->layout->params[nd_layout_find(fsdp->layout, id, layer)].unit;
    if (!is_fresh(fsdp, unit)) {
        return ND_OK;
    }
    nd_tensor g = nd_fsdp_grad(fsdp, id, id, layer);
    return nd_zero(&fsdp->rank->stream, g.data, nd_tensor_bytes(g));
}

nd_status nd_fsdp_grad_release(nd_fsdp *fsdp, int unit)
{
    nd_rank *r = fsdp->rank;
    if (!sharded(fsdp)) {
        fsdp->unit_fresh[unit] = false;
        return ND_OK;
    }
    nd_grad_slot *slot = grad_slot_of(fsdp, unit);
    const nd_segment *segment = hp(fsdp->layout, unit);
    float *to = fsdp->first_micro ? fsdp->grad + segment->shard_offset : slot->received;
    slot->fresh = false;
    slot->pending = true;
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_reduce_scatter(r->groups.gradients, &r->stream, slot->data, to,
                                  segment->shard_count, ND_DTYPE_F32, ND_REDOP_SUM,
                                  &slot->reduced));
    return ND_OK;
}

nd_status nd_fsdp_grad_finish(nd_fsdp *fsdp)
{
    for (int s = 0; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        ND_TRY(finish_slot(fsdp, &fsdp->grad_slots[s]));
    }
    return ND_OK;
}
