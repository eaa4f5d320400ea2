// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

#include "runtime/base/math.h"

/* The largest need of all blocks of this rank, forward and backward, for what cp->sight says. */
static size_t scratch_bytes(const nd_cp *cp)
{
    const nd_rank *r = cp->rank;
    const int size = nd_mesh_group_size(&r->mesh, ND_GROUP_CP);
    const bool travel = cp->method->steps;
    size_t bytes = 0;
    for (int step = 0; step < (travel ? size : 1); step++) {
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

static const nd_cp_method *method_of(const nd_rank *rank)
{
    if (nd_mesh_group_size(&rank->mesh, ND_GROUP_CP) == 1) {
        return &nd_cp_method_local;
    }
    return nd_cp_exchange_of(&rank->shape, rank->config).ring ? &nd_cp_method_ring
                                                              : &nd_cp_method_gather;
}

int64_t nd_cp_first_key_count(const nd_rank *rank, const nd_dims *tokens)
{
    const nd_dims heads = nd_cp_dims_of_heads(rank, tokens);
    return method_of(rank)->first_key_count(&heads, nd_mesh_group_size(&rank->mesh, ND_GROUP_CP));
}

int64_t nd_cp_sent_count(const nd_rank *rank)
{
    return 1 + 2 * nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
}

size_t nd_cp_first_keys_bytes(const nd_rank *rank, const nd_dims *tokens)
{
    const int64_t size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    return (size_t)(2 * size) * sizeof(int64_t) +
           (size_t)((tokens->B + 2) * tokens->S + 1 + size) * sizeof(int32_t);
}

void nd_cp_first_keys(const nd_rank *rank, const nd_dims *tokens, const nd_dealt *dealt,
                      void *scratch, int32_t *out, int64_t *sent)
{
    const nd_dims d = nd_cp_dims_of_heads(rank, tokens);
    const int size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    nd_cp_deal deal = {.d = &d,
                       .size = size,
                       .index = nd_mesh_group_index(&rank->mesh, ND_GROUP_CP, rank->rank),
                       .window = rank->shape.window,
                       .may_select = !rank->config->kernels.cuda_graphs,
                       .first_keys = dealt->first_keys,
                       .places = dealt->places,
                       .sent = sent,
                       .counts = scratch};
    deal.at = (int32_t *)(deal.counts + 2 * size);
    deal.rows = deal.at + d.B * d.S;
    deal.before = deal.rows + d.S;
    deal.sharers = deal.before + d.S + 1;
    for (int64_t i = 0; i < d.B * d.S; i++) {
        deal.at[i - i % d.S + deal.places[i]] = (int32_t)(i % d.S);
    }
    sent[0] = -1;
    method_of(rank)->first_keys(&deal, out);
}

/* For layers with and without a window, and for micro-batches of separate documents. */
static size_t most_scratch(nd_cp *cp)
{
    static const int32_t some_key;
    size_t bytes = 0;
    for (int i = 0; i < 2 + cp->separate; i++) {
        cp->sight = (nd_sight){.window = i == 1 ? cp->rank->shape.window : 0,
                               .first_keys = i == 2 ? &some_key : NULL};
        bytes = nd_max_bytes(bytes, scratch_bytes(cp));
    }
    cp->sight = (nd_sight){0};
    return bytes;
}

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *tokens, bool separate, nd_memplan *plan)
{
    *cp = (nd_cp){.rank = rank, .tokens = *tokens, .separate = separate};
    cp->dims = nd_cp_dims_of_heads(rank, tokens);
    cp->method = method_of(rank);
    nd_cp_ulysses_plan(cp, plan);
    cp->method->plan(cp, plan);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks", most_scratch(cp), &cp->scratch);
}

nd_status nd_cp_attention_fwd(nd_cp *cp, nd_sight sight, nd_tensor qkv, nd_tensor o, float *lse)
{
    cp->sight = sight;
    return cp->ulysses.members > 1 ? nd_cp_ulysses_forward(cp, qkv, o, lse)
                                   : cp->method->forward(cp, qkv, o, lse);
}

nd_status nd_cp_attention_bwd(nd_cp *cp, nd_sight sight, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                              const float *lse, nd_tensor dout)
{
    const nd_cp_backward b = {.dqkv = dqkv, .qkv = qkv, .o = o, .dout = dout, .lse = lse};
    cp->sight = sight;
    return cp->ulysses.members > 1 ? nd_cp_ulysses_backward(cp, &b) : nd_cp_heads_backward(cp, &b);
}

nd_status nd_cp_attention_bwd_finish(nd_cp *cp, nd_tensor dqkv)
{
    return cp->ulysses.members > 1 ? nd_cp_ulysses_backward_finish(cp, dqkv)
                                   : nd_cp_heads_backward_finish(cp, dqkv);
}
