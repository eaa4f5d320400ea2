// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/fsdp.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

/* Gradients: a unit's unsharded buffer, its reduce-scatters, the sums over micro-batches, replicas
 * and tp, and their norm. */

void nd_fsdp_begin_step(nd_fsdp *fsdp, int micros)
{
    fsdp->micros = micros;
    memset(fsdp->released, 0, (size_t)fsdp->layout->unit_count * sizeof *fsdp->released);
    memset(fsdp->zeroed, 0, (size_t)fsdp->layout->param_count * sizeof *fsdp->zeroed);
}

static bool sharded(const nd_fsdp *fsdp)
{
    return fsdp->layout->shards > 1;
}

static nd_grad_slot *grad_slot_of(const nd_fsdp *fsdp, const nd_unit *unit)
{
    const bool block = unit->kind == ND_UNIT_BLOCK;
    const int s = block ? unit->index % ND_FSDP_BLOCK_SLOTS : ND_FSDP_BLOCK_SLOTS;
    return (nd_grad_slot *)&fsdp->grad_slots[s];
}

/* Returns what the shard has of a parameter whose gradient is summed over tp first. */
static nd_flat_range summed_over_tp(const nd_fsdp *fsdp, const nd_param *p)
{
    const bool sums = p->split == ND_SPLIT_NONE && fsdp->rank->mesh.size[ND_AXIS_TP] > 1;
    return sums ? nd_layout_shard_range(fsdp->layout, p) : (nd_flat_range){0};
}

static nd_status begin_sum(nd_fsdp *fsdp, int64_t begin, int64_t end)
{
    nd_rank *r = fsdp->rank;
    if (begin < end) {
        ND_ASSERT(fsdp->sum_count < fsdp->layout->unit_count + fsdp->layout->param_count);
        ND_RUN(r, ND_TRACE_COMMUNICATION,
               nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_DP_REPLICATE], &r->stream,
                                  fsdp->grad + begin, end - begin, ND_DTYPE_F32, ND_REDOP_SUM,
                                  &fsdp->sums[fsdp->sum_count++].done));
    }
    return ND_OK;
}

static nd_status sum_over_replicas(nd_fsdp *fsdp, const nd_unit *unit)
{
    int64_t at = unit->shard_offset;
    const int64_t end = at + unit->shard_count;
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        const nd_flat_range range = summed_over_tp(fsdp, &fsdp->layout->params[i]);
        if (range.begin < range.end) {
            ND_TRY(begin_sum(fsdp, at, range.begin));
            at = range.end;
        }
    }
    return begin_sum(fsdp, at, end);
}

/* The accumulator has a micro-batch's gradient of the unit. */
static nd_status added_up(nd_fsdp *fsdp, const nd_unit *unit)
{
    return fsdp->released[unit->index] == fsdp->micros ? sum_over_replicas(fsdp, unit) : ND_OK;
}

static nd_status finish_sums(nd_fsdp *fsdp)
{
    for (int u = 0; u < fsdp->layout->unit_count; u++) {
        if (fsdp->released[u] < fsdp->micros) { /* it has not begun */
            ND_TRY(sum_over_replicas(fsdp, &fsdp->layout->units[u]));
        }
    }
    for (int i = 0; i < fsdp->sum_count; i++) {
        ND_TRY(nd_exchange_finish(fsdp->rank, &fsdp->sums[i]));
    }
    fsdp->sum_count = 0;
    return ND_OK;
}

/* Waits for the reduce-scatter of a slot and adds what arrived; the slot is free afterwards. */
static nd_status finish_slot(nd_fsdp *fsdp, nd_grad_slot *slot)
{
    nd_rank *r = fsdp->rank;
    if (!slot->pending) {
        return ND_OK;
    }
    const nd_unit *unit = slot->unit;
    slot->pending = false;
    slot->unit = NULL;
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        if (unit->segments[kind].count > 0) {
            ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &slot->reduced[kind]));
        }
    }
    if (slot->adds) {
        float *shard = fsdp->grad + unit->shard_offset;
        ND_OP(r, ND_TRACE_ELEMENTWISE, accumulate,
              .acc = nd_tensor_1d(shard, ND_DTYPE_F32, unit->shard_count),
              .x = nd_tensor_1d(slot->received, ND_DTYPE_F32, unit->shard_count));
    }
    return added_up(fsdp, unit);
}

nd_status nd_fsdp_grad_acquire(nd_fsdp *fsdp, const nd_unit *unit)
{
    if (!sharded(fsdp)) {
        return ND_OK;
    }
    nd_grad_slot *slot = grad_slot_of(fsdp, unit);
    ND_TRY(finish_slot(fsdp, slot));
    ND_ASSERT(!slot->unit);
    slot->unit = unit;
    slot->fresh = true;
    return ND_OK;
}

nd_tensor nd_fsdp_grad(const nd_fsdp *fsdp, nd_param_id first, nd_param_id last, int64_t layer)
{
    const nd_param *p = nd_layout_param(fsdp->layout, first, layer);
    const nd_segment *segments = p->unit->segments;
    nd_grad_slot *slot = grad_slot_of(fsdp, p->unit);
    ND_ASSERT(slot->unit == p->unit || !sharded(fsdp));
    float *base = sharded(fsdp) ? slot->data : fsdp->grad + segments[ND_SEGMENT_HP].shard_offset;
    base += p->segment == ND_SEGMENT_FP8 ? segments[ND_SEGMENT_HP].count : 0;
    return nd_layout_view(fsdp->layout, first, last, layer, base, ND_DTYPE_F32);
}

static bool is_fresh(const nd_fsdp *fsdp, const nd_unit *unit)
{
    const nd_grad_slot *slot = grad_slot_of(fsdp, unit);
    return sharded(fsdp) ? slot->unit != unit || slot->fresh : fsdp->released[unit->index] == 0;
}

float nd_fsdp_grad_beta(const nd_fsdp *fsdp, const nd_unit *unit)
{
    return is_fresh(fsdp, unit) ? 0.0f : 1.0f;
}

nd_status nd_fsdp_grad_zero_if_fresh(nd_fsdp *fsdp, nd_param_id id, int64_t layer)
{
    const nd_param *p = nd_layout_param(fsdp->layout, id, layer);
    bool *zeroed = &fsdp->zeroed[p - fsdp->layout->params];
    if (sharded(fsdp) ? !is_fresh(fsdp, p->unit) : *zeroed) {
        return ND_OK;
    }
    *zeroed = true;
    nd_tensor g = nd_fsdp_grad(fsdp, id, id, layer);
    return nd_zero(&fsdp->rank->stream, g.data, nd_tensor_bytes(g));
}

nd_status nd_fsdp_grad_release(nd_fsdp *fsdp, const nd_unit *unit)
{
    nd_rank *r = fsdp->rank;
    bool adds = fsdp->released[unit->index]++ > 0;
    if (!sharded(fsdp)) {
        return added_up(fsdp, unit);
    }
    nd_grad_slot *slot = grad_slot_of(fsdp, unit);
    ND_ASSERT(slot->unit == unit && !slot->pending);
    const nd_segment *segments = unit->segments;
    const float *from = slot->data;
    float *to = adds ? slot->received : fsdp->grad + unit->shard_offset;
    nd_comm *comm = r->groups.second[ND_GROUP_DP_SHARD_CP];
    slot->fresh = false;
    slot->adds = adds;
    slot->pending = true;
    ND_RUN(r, ND_TRACE_COMMUNICATION, nd_comm_group_begin(comm));
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        if (segments[kind].count > 0) {
            ND_COMM(r, comm, reduce_scatter, &slot->reduced[kind], .send = from, .recv = to,
                    .count = segments[kind].shard_count, .dtype = ND_DTYPE_F32,
                    .redop = ND_REDOP_SUM);
        }
        from += segments[kind].count;
        to += segments[kind].shard_count;
    }
    ND_RUN(r, ND_TRACE_COMMUNICATION, nd_comm_group_end(comm));
    return ND_OK;
}

nd_status nd_fsdp_grad_finish(nd_fsdp *fsdp)
{
    for (int s = 0; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        ND_TRY(finish_slot(fsdp, &fsdp->grad_slots[s]));
    }
    return ND_OK;
}

static nd_status copy_packed(nd_fsdp *fsdp, bool pack)
{
    float *at = fsdp->packed;
    for (int i = 0; i < fsdp->layout->param_count; i++) {
        const nd_flat_range range = summed_over_tp(fsdp, &fsdp->layout->params[i]);
        const int64_t count = range.end - range.begin;
        float *grad = fsdp->grad + range.begin;
        if (count > 0) {
            ND_TRY(nd_copy(&fsdp->rank->stream, pack ? at : grad, pack ? grad : at,
                           (size_t)count * sizeof *at));
        }
        at += count;
    }
    return ND_OK;
}

static nd_status reduce_copies(nd_fsdp *fsdp)
{
    nd_rank *r = fsdp->rank;
    ND_ASSERT(r->groups.by_kind[ND_GROUP_KV_COPIES]->size ==
              nd_shape_kv_copies(&r->shape, r->mesh.size[ND_AXIS_TP]));
    for (int i = 0; i < fsdp->layout->param_count; i++) {
        const nd_param *p = &fsdp->layout->params[i];
        const nd_flat_range range = nd_layout_shard_range(fsdp->layout, p);
        if (p->split != ND_SPLIT_NONE && p->copies > 1) {
            ND_TRY(nd_all_reduce(r, ND_GROUP_KV_COPIES, fsdp->grad + range.begin,
                                 range.end - range.begin, ND_DTYPE_F32, ND_REDOP_SUM));
        }
    }
    return ND_OK;
}

/* Every element is counted once whatever the mesh, by the rank that owns it. */
static nd_status add_squares(nd_fsdp *fsdp, double *squares)
{
    nd_rank *r = fsdp->rank;
    ND_TRY(nd_zero(&r->stream, squares, sizeof *squares));
    for (int i = 0; i < fsdp->layout->param_count; i++) {
        const nd_param *p = &fsdp->layout->params[i];
        const nd_flat_range range = nd_layout_shard_range(fsdp->layout, p);
        if (p->owned && range.begin < range.end) {
            ND_OP(r, ND_TRACE_OPTIMIZER, sum_squares, .out = squares, .x = fsdp->grad + range.begin,
                  .count = range.end - range.begin);
        }
    }
    return nd_all_reduce(r, ND_GROUP_MODEL, squares, 1, ND_DTYPE_F64, ND_REDOP_SUM);
}

nd_status nd_fsdp_grad_reduce(nd_fsdp *fsdp, double *squares)
{
    ND_TRY(finish_sums(fsdp));
    ND_TRY(reduce_copies(fsdp));
    ND_TRY(copy_packed(fsdp, true));
    static const nd_group_kind over[] = {ND_GROUP_TP, ND_GROUP_DP_REPLICATE};
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_all_reduce(fsdp->rank, over[i], fsdp->packed, fsdp->packed_count, ND_DTYPE_F32,
                             ND_REDOP_SUM));
    }
    ND_TRY(copy_packed(fsdp, false));
    return add_squares(fsdp, squares);
}

static void plan_gradients(nd_fsdp *fsdp, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    bool sharded = layout->shards > 1;
    bool accumulates = fsdp->rank->config->train.gradient_accumulation_steps > 1;
    int64_t block_most = 0, edge_most = 0, shard = 0;
    for (int u = 0; u < layout->unit_count; u++) {
        const nd_unit *unit = &layout->units[u];
        int64_t *most = unit->kind == ND_UNIT_BLOCK ? &block_most : &edge_most;
        *most = nd_max(*most,
                       unit->segments[ND_SEGMENT_HP].count + unit->segments[ND_SEGMENT_FP8].count);
        shard = nd_max(shard, unit->shard_count);
    }
    nd_grad_slot *slots = fsdp->grad_slots;
    size_t block = (size_t)block_most * 4, received = (size_t)shard * 4;
    int blocks = nd_memplan_want(plan, ND_MEM_GRADIENTS, "gradients of decoder blocks",
                                 sharded ? ND_FSDP_BLOCK_SLOTS * block : 0, &slots[0].data);
    nd_memplan_want(plan, ND_MEM_GRADIENTS, "gradients of embedding, norm and head",
                    sharded ? (size_t)edge_most * 4 : 0, &slots[ND_FSDP_BLOCK_SLOTS].data);
    int all = nd_memplan_want(plan, ND_MEM_GRADIENTS, "received shards",
                              sharded && accumulates ? (ND_FSDP_BLOCK_SLOTS + 1) * received : 0,
                              &slots[0].received);
    for (int s = 1; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        nd_memplan_also(plan, all, (size_t)s * received, &slots[s].received);
        if (s < ND_FSDP_BLOCK_SLOTS) {
            nd_memplan_also(plan, blocks, (size_t)s * block, &slots[s].data);
        }
    }
}

nd_status nd_fsdp_init(nd_fsdp *fsdp, nd_rank *rank, nd_layout *layout, nd_scales *scales,
                       bool forward_only, nd_memplan *plan)
{
    const bool f32 = rank->config->train.precision == ND_PRECISION_FP32;
    const bool fp8 = scales && scales->recipe.name;
    *fsdp = (nd_fsdp){.rank = rank, .layout = layout, .scales = scales, .version = 1};
    fsdp->act = f32 ? ND_DTYPE_F32 : ND_DTYPE_BF16;
    fsdp->aliased = layout->shards == 1 && f32;
    /* Delayed scales follow from master weights. */
    fsdp->converts = forward_only && !f32 && (!fp8 || scales->weights_kept);
    ND_TRY(ND_ALLOC(layout->unit_count, &fsdp->released));
    ND_TRY(ND_ALLOC(layout->param_count, &fsdp->zeroed));
    ND_TRY(ND_ALLOC(layout->unit_count + layout->param_count, &fsdp->sums));
    const bool moments = !forward_only && rank->config->optimizer.name == ND_OPTIMIZER_ADAMW;
    const size_t bytes = (size_t)layout->shard_total * 4;
    nd_memplan_want(plan, ND_MEM_STATE, "master weights", fsdp->converts ? 0 : bytes,
                    &fsdp->master);
    nd_memplan_want(plan, ND_MEM_STATE, "gradients", forward_only ? 0 : bytes, &fsdp->grad);
    nd_memplan_want(plan, ND_MEM_STATE, "first moments", moments ? bytes : 0, &fsdp->moment1);
    nd_memplan_want(plan, ND_MEM_STATE, "second moments", moments ? bytes : 0, &fsdp->moment2);
    if (!forward_only) {
        plan_gradients(fsdp, plan);
    }
    for (int i = 0; i < layout->param_count && !forward_only; i++) {
        const nd_flat_range range = summed_over_tp(fsdp, &layout->params[i]);
        fsdp->packed_count += range.end - range.begin;
    }
    return ND_OK;
}

void nd_fsdp_fini(nd_fsdp *fsdp)
{
    free(fsdp->slots);
    free(fsdp->slot_of_unit);
    free(fsdp->released);
    free(fsdp->zeroed);
    free(fsdp->sums);
    *fsdp = (nd_fsdp){0};
}
