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
    ID_WEIGHT_CODES,
    ID_WEIGHT_EMBED,
    ID_WEIGHT_TAIL,
    ID_GRAD_BLOCKS,
    ID_GRAD_EDGES,
    ID_RECEIVED
};

static const nd_segment *segment_of(const nd_layout *layout, int unit, nd_segment_kind kind)
{
    return &layout->units[unit].segments[kind];
}

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int block_units(const nd_layout *layout)
{
    return layout->tail - layout->first_block;
}

/* Elements of a segment in the largest block: a filter may leave a linear of one block in BF16. */
static int64_t largest_block(const nd_layout *layout, nd_segment_kind kind)
{
    int64_t most = 0;
    for (int u = layout->first_block; u < layout->tail; u++) {
        most = max_i64(most, segment_of(layout, u, kind)->count);
    }
    return most;
}

/* Elements of both segments: of a unit, or of its shard. */
static int64_t unit_count(const nd_layout *layout, int unit)
{
    return segment_of(layout, unit, ND_SEGMENT_HP)->count +
           segment_of(layout, unit, ND_SEGMENT_FP8)->count;
}

static int64_t unit_shard_count(const nd_layout *layout, int unit)
{
    return segment_of(layout, unit, ND_SEGMENT_HP)->shard_count +
           segment_of(layout, unit, ND_SEGMENT_FP8)->shard_count;
}

static int block_slots(const nd_fsdp *fsdp)
{
    int blocks = block_units(fsdp->layout);
    return fsdp->resident || blocks < ND_FSDP_BLOCK_SLOTS ? blocks : ND_FSDP_BLOCK_SLOTS;
}

/* Where slot `s` of the blocks begins in their common buffer: a block of its own, or one that any
 * block fits into. */
static int64_t block_slot_offset(const nd_fsdp *fsdp, nd_segment_kind kind, int s)
{
    const nd_layout *layout = fsdp->layout;
    int64_t offset = 0;
    if (block_slots(fsdp) < block_units(layout)) {
        return s * largest_block(layout, kind);
    }
    for (int b = 0; b < s; b++) {
        offset += segment_of(layout, layout->first_block + b, kind)->count;
    }
    return offset;
}

static void plan_weights(nd_fsdp *fsdp, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    size_t width = nd_dtype_size(fsdp->act);
    int slots = block_slots(fsdp);
    fsdp->slot_count = slots + (layout->tied ? 1 : 2);
    int64_t in_blocks = fsdp->aliased ? 0 : block_slot_offset(fsdp, ND_SEGMENT_HP, slots);
    int64_t in_embed =
        fsdp->aliased || layout->tied ? 0 : segment_of(layout, 0, ND_SEGMENT_HP)->count;
    int64_t in_tail = fsdp->aliased ? 0 : segment_of(layout, layout->tail, ND_SEGMENT_HP)->count;
    fsdp->ids[ID_WEIGHT_BLOCKS] =
        nd_memplan_add(plan, ND_MEM_WEIGHTS, "decoder blocks", in_blocks, width);
    fsdp->ids[ID_WEIGHT_CODES] = nd_memplan_add(plan, ND_MEM_WEIGHTS, "decoder blocks, fp8 codes",
                                                block_slot_offset(fsdp, ND_SEGMENT_FP8, slots), 1);
    fsdp->ids[ID_WEIGHT_EMBED] = nd_memplan_add(plan, ND_MEM_WEIGHTS, "embedding", in_embed, width);
    fsdp->ids[ID_WEIGHT_TAIL] =
        nd_memplan_add(plan, ND_MEM_WEIGHTS, "norm and head", in_tail, width);
}

static int64_t largest_block_gradient(const nd_layout *layout)
{
    int64_t most = 0;
    for (int u = layout->first_block; u < layout->tail; u++) {
        most = max_i64(most, unit_count(layout, u));
    }
    return most;
}

static void plan_gradients(nd_fsdp *fsdp, nd_memplan *plan)
{
    const nd_layout *layout = fsdp->layout;
    bool sharded = layout->shards > 1;
    bool accumulates = fsdp->rank->config->train.gradient_accumulation_steps > 1;
    int64_t edges = max_i64(unit_count(layout, 0), unit_count(layout, layout->tail));
    int64_t shard = 0;
    for (int u = 0; u < layout->unit_count; u++) {
        shard = max_i64(shard, unit_shard_count(layout, u));
    }
    fsdp->ids[ID_GRAD_BLOCKS] =
        nd_memplan_add(plan, ND_MEM_GRADIENTS, "decoder blocks",
                       sharded ? ND_FSDP_BLOCK_SLOTS * largest_block_gradient(layout) : 0, 4);
    fsdp->ids[ID_GRAD_EDGES] =
        nd_memplan_add(plan, ND_MEM_GRADIENTS, "embedding, norm and head", sharded ? edges : 0, 4);
    fsdp->ids[ID_RECEIVED] =
        nd_memplan_add(plan, ND_MEM_GRADIENTS, "received shards",
                       sharded && accumulates ? (ND_FSDP_BLOCK_SLOTS + 1) * shard : 0, 4);
}

nd_status nd_fsdp_init(nd_fsdp *fsdp, nd_rank *rank, nd_layout *layout, nd_scales *scales,
                       nd_dtype act, nd_memplan *plan)
{
    const nd_config *config = rank->config;
    bool moments = config->optimizer.name == ND_OPTIMIZER_ADAMW;
    *fsdp = (nd_fsdp){.rank = rank, .layout = layout, .scales = scales, .act = act, .version = 1};
    fsdp->aliased = layout->shards == 1 && act == ND_DTYPE_F32;
    fsdp->resident =
        (layout->shards == 1 && !rank->cast_units) || !config->parallel.reshard_after_forward;
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
    int blocks = block_slots(fsdp);
    fsdp->blocks_share = blocks < block_units(layout);
    for (int u = 0; u < layout->unit_count; u++) {
        bool is_block = layout->units[u].kind == ND_UNIT_BLOCK;
        fsdp->slot_of_unit[u] = is_block            ? (u - layout->first_block) % blocks
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
    char *codes = nd_memplan_at(plan, fsdp->ids[ID_WEIGHT_CODES]);
    size_t width = nd_dtype_size(fsdp->act);
    for (int s = 0; s < blocks; s++) {
        nd_weight_slot *slot = &fsdp->slots[s];
        slot->data[ND_SEGMENT_HP] =
            weights ? weights + (size_t)block_slot_offset(fsdp, ND_SEGMENT_HP, s) * width : NULL;
        slot->data[ND_SEGMENT_FP8] =
            codes ? codes + block_slot_offset(fsdp, ND_SEGMENT_FP8, s) : NULL;
    }
    fsdp->slots[blocks].data[ND_SEGMENT_HP] = nd_memplan_at(plan, fsdp->ids[ID_WEIGHT_TAIL]);
    if (!layout->tied) {
        fsdp->slots[blocks + 1].data[ND_SEGMENT_HP] =
            nd_memplan_at(plan, fsdp->ids[ID_WEIGHT_EMBED]);
    }
    float *blocks_grad = nd_memplan_at(plan, fsdp->ids[ID_GRAD_BLOCKS]);
    float *received = nd_memplan_at(plan, fsdp->ids[ID_RECEIVED]);
    int64_t stride =
        (int64_t)(plan->segments[fsdp->ids[ID_RECEIVED]].bytes / 4) / (ND_FSDP_BLOCK_SLOTS + 1);
    for (int s = 0; s <= ND_FSDP_BLOCK_SLOTS; s++) {
        bool edge = s == ND_FSDP_BLOCK_SLOTS;
        fsdp->grad_slots[s].data = edge          ? nd_memplan_at(plan, fsdp->ids[ID_GRAD_EDGES])
                                   : blocks_grad ? blocks_grad + s * largest_block_gradient(layout)
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
