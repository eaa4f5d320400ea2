// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/fsdp.h"

#include <stdlib.h>

#include "runtime/base/math.h"

/* Elements of a segment in a slot: those of its unit or, where blocks share slots, of the largest
 * block, since a filter may leave a linear of one block in BF16. */
static int64_t slot_count(const nd_fsdp *fsdp, nd_segment_kind kind, int slot)
{
    const bool shared = fsdp->blocks_share && slot < ND_FSDP_BLOCK_SLOTS;
    int64_t most = 0;
    for (int i = 0; i < fsdp->layout->unit_count; i++) {
        const nd_unit *u = &fsdp->layout->units[i];
        if (fsdp->slot_of_unit[i] == slot || (shared && u->kind == ND_UNIT_BLOCK)) {
            most = nd_max(most, u->segments[kind].count);
        }
    }
    return most;
}

static size_t bytes_of(int64_t count, size_t width)
{
    return (size_t)count * width;
}

/* Slots [first, end) are parts of one buffer for a segment. */
static void plan_slots(nd_fsdp *fsdp, nd_segment_kind kind, const char *name, int first, int end,
                       nd_memplan *plan)
{
    const size_t width = fsdp->aliased ? 0 : nd_dtype_size(nd_fsdp_gathered_dtype(fsdp, kind));
    int64_t all = 0, before = 0;
    for (int s = first; s < end; s++) {
        all += slot_count(fsdp, kind, s);
    }
    int want = nd_memplan_want(plan, ND_MEM_WEIGHTS, name, bytes_of(all, width), NULL);
    for (int s = first; s < end; s++) {
        nd_memplan_also(plan, want, bytes_of(before, width), &fsdp->slots[s].data[kind]);
        before += slot_count(fsdp, kind, s);
    }
}

size_t nd_fsdp_own_bytes(const nd_fsdp *fsdp)
{
    size_t bytes = 0;
    for (int u = 0; u < fsdp->layout->unit_count && !fsdp->aliased; u++) {
        const nd_segment *segments = fsdp->layout->units[u].segments;
        bytes += bytes_of(segments[ND_SEGMENT_HP].count, nd_dtype_size(fsdp->act)) +
                 bytes_of(segments[ND_SEGMENT_FP8].count, 1);
    }
    return bytes;
}

/* What a model without master weights has in their place. */
static void plan_kept(nd_fsdp *fsdp, nd_memplan *plan)
{
    static const char *const names[] = {"decoder blocks, shards",
                                        "decoder blocks, shards of codes"};
    const nd_layout *layout = fsdp->layout;
    int64_t landing = 0;
    bool codes = false;
    for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
        int64_t blocks = 0;
        for (int u = 0; u < layout->unit_count; u++) {
            const nd_segment *segment = &layout->units[u].segments[kind];
            landing = nd_max(landing, segment->shard_count);
            codes |= kind == ND_SEGMENT_FP8 && segment->count > 0;
            blocks += layout->units[u].kind == ND_UNIT_BLOCK ? segment->shard_count : 0;
        }
        size_t width = nd_dtype_size(nd_fsdp_gathered_dtype(fsdp, kind));
        nd_memplan_want(plan, ND_MEM_WEIGHTS, names[kind],
                        fsdp->converts && fsdp->blocks_share ? bytes_of(blocks, width) : 0,
                        &fsdp->kept[kind]);
    }
    fsdp->landing_count = fsdp->converts ? nd_min(landing, ND_FSDP_PIECE) : 0;
    nd_memplan_want(plan, ND_MEM_SCRATCH, "weights as they are read",
                    bytes_of(fsdp->landing_count, sizeof *fsdp->landing), &fsdp->landing);
    const bool rounds = fsdp->converts && codes && fsdp->scales->from_bf16;
    nd_memplan_want(plan, ND_MEM_SCRATCH, "weights as they are read, in bf16",
                    rounds ? bytes_of(fsdp->landing_count, sizeof *fsdp->rounded) : 0,
                    &fsdp->rounded);
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
    size_t block = bytes_of(block_most, 4), received = bytes_of(shard, 4);
    int blocks = nd_memplan_want(plan, ND_MEM_GRADIENTS, "decoder blocks",
                                 sharded ? ND_FSDP_BLOCK_SLOTS * block : 0, &slots[0].data);
    nd_memplan_want(plan, ND_MEM_GRADIENTS, "embedding, norm and head",
                    sharded ? bytes_of(edge_most, 4) : 0, &slots[ND_FSDP_BLOCK_SLOTS].data);
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
    const size_t bytes = bytes_of(layout->shard_total, 4);
    nd_memplan_want(plan, ND_MEM_STATE, "master weights", fsdp->converts ? 0 : bytes,
                    &fsdp->master);
    nd_memplan_want(plan, ND_MEM_STATE, "gradients", forward_only ? 0 : bytes, &fsdp->grad);
    nd_memplan_want(plan, ND_MEM_STATE, "first moments", moments ? bytes : 0, &fsdp->moment1);
    nd_memplan_want(plan, ND_MEM_STATE, "second moments", moments ? bytes : 0, &fsdp->moment2);
    if (!forward_only) {
        plan_gradients(fsdp, plan);
    }
    for (int i = 0; i < layout->param_count && !forward_only; i++) {
        const nd_flat_range range = nd_fsdp_summed_over_tp(fsdp, &layout->params[i]);
        fsdp->packed_count += range.end - range.begin;
    }
    return ND_OK;
}

nd_status nd_fsdp_plan_weights(nd_fsdp *fsdp, bool shares, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    fsdp->resident =
        (layout->shards == 1 && !shares) || !fsdp->rank->config->parallel.reshard_after_forward;
    const bool shared = !fsdp->resident && layout->block_count > ND_FSDP_BLOCK_SLOTS;
    const int slots = shared ? ND_FSDP_BLOCK_SLOTS : layout->block_count;
    int blocks = 0;
    fsdp->slot_count = slots + 2; /* head, embedding */
    fsdp->blocks_share = shared;
    ND_TRY(ND_ALLOC(fsdp->slot_count, &fsdp->slots));
    ND_TRY(ND_ALLOC(layout->unit_count, &fsdp->slot_of_unit));
    for (int u = 0; u < layout->unit_count; u++) {
        nd_unit_kind kind = layout->units[u].kind;
        fsdp->slot_of_unit[u] = kind == ND_UNIT_BLOCK  ? blocks++ % slots
                                : kind == ND_UNIT_HEAD ? slots
                                                       : slots + 1;
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "tp: replicated gradients",
                    bytes_of(fsdp->packed_count, 4), &fsdp->packed);
    plan_slots(fsdp, ND_SEGMENT_HP, "decoder blocks", 0, slots, plan);
    plan_slots(fsdp, ND_SEGMENT_FP8, "decoder blocks, fp8 codes", 0, slots, plan);
    plan_slots(fsdp, ND_SEGMENT_HP, "embedding", slots + 1, slots + 2, plan);
    plan_slots(fsdp, ND_SEGMENT_HP, "norm and head", slots, slots + 1, plan);
    plan_kept(fsdp, plan);
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
