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

/* All keys where there is no method. */
static nd_kv_source local_kv(const nd_cp *cp, nd_tensor qkv)
{
    nd_kv_source kv = nd_cp_local_source(&cp->dims, qkv);
    kv.first_keys = cp->sight.first_keys;
    return kv;
}

nd_status nd_cp_heads_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    if (cp->method) {
        return cp->method->forward(cp, qkv, o, lse);
    }
    nd_attention_block whole[ND_CP_BLOCKS];
    nd_cp_blocks_gathered(1, 0, 0, cp->dims.chunk, cp->sight.window, whole);
    nd_kv_source kv = local_kv(cp, qkv);
    return nd_cp_block_forward(cp, &whole[0], qkv, &kv, o, lse);
}

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    for (int c = 0; c < d->chunks && cp->delta; c++) {
        nd_attention_block all = {c, 0, d->chunk, 0};
        const nd_attention a = nd_cp_attention_of(cp, &all);
        if (!cp->sight.first_keys &&
            !cp->rank->ops->attention_uses_delta(cp->rank->device, &a, d->act)) {
            return ND_OK; /* other layers have a window */
        }
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, .attention = a,
              .delta = nd_cp_row_view(d, cp->delta, c), .out = nd_cp_q_view(d, o, c, 0, d->H),
              .dout = nd_cp_q_view(d, dout, c, 0, d->H));
    }
    return ND_OK;
}

nd_status nd_cp_heads_backward(nd_cp *cp, const nd_cp_backward *b)
{
    ND_TRY(make_delta(cp, b->o, b->dout));
    if (cp->method) {
        return cp->method->backward(cp, b);
    }
    nd_attention_block whole[ND_CP_BLOCKS];
    nd_cp_blocks_gathered(1, 0, 0, cp->dims.chunk, cp->sight.window, whole);
    nd_kv_source kv = local_kv(cp, b->qkv);
    const nd_block_gradients to = {.dq = b->dqkv, .dkv = nd_cp_local_source(&cp->dims, b->dqkv)};
    return nd_cp_block_backward(cp, &whole[0], b, &kv, &to);
}

nd_status nd_cp_heads_backward_finish(nd_cp *cp, nd_tensor dqkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t kv = 2 * d->K * d->D;
    ND_TRY(nd_exchange_finish(cp->rank, &cp->arriving));
    if (cp->method) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_columns(dqkv, d->H * d->D, kv),
              .x = nd_tensor_2d((float *)cp->arrived, ND_DTYPE_F32, d->T, kv));
    }
    return ND_OK;
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
