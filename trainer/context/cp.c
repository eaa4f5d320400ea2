// SPDX-License-Identifier: Apache-2.0
#include "trainer/context/method.h"

#include "runtime/base/math.h"

static const nd_cp_method *method_of(const nd_rank *rank)
{
    const int size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    return size == 1             ? &nd_cp_method_local
           : nd_cp_gathers(rank) ? &nd_cp_method_gather
                                 : &nd_cp_method_ring;
}

/* The largest need of all blocks of this rank, forward and backward, for what cp->sight says. */
static size_t scratch_bytes(const nd_cp *cp)
{
    const nd_rank *r = cp->rank;
    const bool travel = cp->method->steps;
    const int steps = travel ? nd_mesh_group_size(&r->mesh, ND_GROUP_CP) : 1;
    size_t bytes = 0;
    for (int step = 0; step < steps; step++) {
        nd_attention_block blocks[ND_CP_BLOCKS];
        const int count = nd_cp_blocks_of(cp, step, travel ? cp->dims.s : cp->dims.S, blocks);
        for (int i = 0; i < 2 * count; i++) {
            nd_attention a = nd_cp_attention_of(cp, &blocks[i / 2]);
            size_t asked = r->ops->attention_scratch(r->device, &a, cp->dims.act, i % 2 != 0);
            bytes = nd_max_bytes(bytes, asked);
        }
    }
    return bytes;
}

/* For layers with and without a window, and for micro-batches of separate documents. */
static void plan_attention(nd_cp *cp, nd_memplan *plan)
{
    static const int32_t some_key;
    const nd_dims *d = &cp->dims;
    const int64_t window = cp->rank->shape.window < d->S ? cp->rank->shape.window : 0;
    size_t scratch = 0;
    bool delta = false;
    for (int i = 0; i < 2 + cp->separate; i++) {
        cp->sight = (nd_sight){.window = i == 1 ? window : 0, .first_keys = i == 2 ? &some_key : 0};
        scratch = nd_max_bytes(scratch, scratch_bytes(cp));
        delta |= nd_cp_uses_delta(cp);
    }
    cp->sight = (nd_sight){0};
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: delta",
                    delta ? (size_t)(d->T * d->H) * sizeof *cp->delta : 0, &cp->delta);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks", scratch, &cp->scratch);
}

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *tokens, bool separate, nd_memplan *plan)
{
    *cp = (nd_cp){.rank = rank, .tokens = *tokens, .separate = separate};
    cp->dims = nd_cp_dims_of_heads(rank, tokens);
    cp->method = method_of(rank);
    nd_cp_ulysses_plan(cp, plan);
    if (cp->method->plan) {
        cp->method->plan(cp, plan);
    }
    plan_attention(cp, plan);
}

nd_status nd_cp_attention_fwd(nd_cp *cp, nd_sight sight, nd_tensor qkv, nd_tensor o, float *lse)
{
    cp->sight = sight;
    return cp->ulysses.members > 1 ? nd_cp_ulysses_forward(cp, qkv, o, lse)
                                   : cp->method->forward(cp, qkv, o, lse);
}

nd_status nd_cp_attention_bwd(nd_cp *cp, nd_sight sight, const nd_cp_backward *b)
{
    cp->sight = sight;
    return cp->ulysses.members > 1 ? nd_cp_ulysses_backward(cp, b) : nd_cp_heads_backward(cp, b);
}

nd_status nd_cp_attention_bwd_finish(nd_cp *cp, nd_tensor dqkv)
{
    return cp->ulysses.members > 1 ? nd_cp_ulysses_backward_finish(cp, dqkv)
                                   : nd_cp_heads_backward_finish(cp, dqkv);
}
