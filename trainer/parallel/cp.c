// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

#include "runtime/base/math.h"

/* The largest need of all blocks of this rank, forward and backward, of layers with this window. */
static size_t scratch_bytes(nd_cp *cp, int64_t window)
{
    const nd_rank *r = cp->rank;
    const int size = nd_mesh_group_size(&r->mesh, ND_GROUP_CP),
              index = nd_mesh_group_index(&r->mesh, ND_GROUP_CP, r->rank);
    int steps = cp->method && cp->method->steps ? size : 1;
    size_t bytes = 0;
    cp->sight.window = window;
    for (int step = 0; step < steps; step++) {
        nd_attention_block blocks[ND_CP_BLOCKS];
        int count = cp->method
                        ? cp->method->blocks(size, index, step, cp->dims.chunk, window, blocks)
                        : nd_cp_blocks_gathered(1, 0, 0, cp->dims.chunk, window, blocks);
        for (int i = 0; i < 2 * count; i++) {
            nd_attention a = nd_cp_attention_of(cp, &blocks[i / 2]);
            size_t asked = r->ops->attention_scratch(r->device, &a, cp->dims.act, i % 2 != 0);
            bytes = nd_max_bytes(bytes, asked);
        }
    }
    return bytes;
}

/* NULL: one rank has all keys. */
static const nd_cp_method *method_of(const nd_rank *rank)
{
    if (nd_mesh_group_size(&rank->mesh, ND_GROUP_CP) == 1) {
        return NULL;
    }
    return nd_cp_exchange_of(&rank->shape, rank->config).ring ? &nd_cp_method_ring
                                                              : &nd_cp_method_gather;
}

int64_t nd_cp_first_key_count(const nd_rank *rank, const nd_dims *tokens)
{
    const nd_cp_method *method = method_of(rank);
    const nd_dims heads = nd_cp_dims_of_heads(rank, tokens);
    return method ? method->first_key_count(rank, &heads)
                  : nd_cp_gathered_first_key_count(rank, &heads);
}

void nd_cp_first_keys(const nd_rank *rank, const nd_dims *tokens, const int32_t *sequence,
                      int32_t *out)
{
    const nd_cp_method *method = method_of(rank);
    const nd_dims heads = nd_cp_dims_of_heads(rank, tokens);
    (method ? method->first_keys : nd_cp_gathered_first_keys)(rank, &heads, sequence, out);
}

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *tokens, bool separate, nd_memplan *plan)
{
    *cp = (nd_cp){.rank = rank, .tokens = *tokens, .separate = separate};
    cp->dims = nd_cp_dims_of_heads(rank, tokens);
    cp->method = method_of(rank);
    nd_cp_ulysses_plan(cp, plan);
    if (cp->method) {
        cp->method->plan(cp, plan);
    } else {
        nd_cp_want_delta(cp, plan);
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks",
                    nd_max_bytes(scratch_bytes(cp, rank->shape.window), scratch_bytes(cp, 0)),
                    &cp->scratch);
}

nd_status nd_cp_attention_fwd(nd_cp *cp, nd_sight sight, nd_tensor qkv, nd_tensor o, float *lse)
{
    cp->sight = sight;
    return cp->ulysses.members > 1 ? nd_cp_ulysses_forward(cp, qkv, o, lse)
                                   : nd_cp_heads_forward(cp, qkv, o, lse);
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
