// SPDX-License-Identifier: Apache-2.0
#include "trainer/context/method.h"

#include "runtime/base/math.h"

int nd_cp_blocks_gathered(int size, int index, int step, int64_t chunk, int64_t window,
                          nd_attention_block out[ND_CP_BLOCKS])
{
    if (size == 1) {
        out[0] = (nd_attention_block){0, chunk, 0, chunk, 0};
        return 1;
    }
    int64_t place[2] = {index, 2 * size - 1 - index};
    for (int c = 0; c < 2; c++) {
        out[c] =
            (nd_attention_block){c * chunk, chunk, 0, (place[c] + 1) * chunk, place[c] * chunk};
    }
    return 2;
}

/* With a window a block is a chunk of queries and one of keys, some of which it sees: first those
 * with the same number, where both are this rank's. */
static int blocks_with_window(int size, int index, int step, int64_t chunk, int64_t window,
                              nd_attention_block out[ND_CP_BLOCKS])
{
    const int64_t from = (index - step + size) % size;
    const int64_t queries[2] = {index, 2 * size - 1 - index}, keys[2] = {from, 2 * size - 1 - from};
    int count = 0;
    for (int64_t pair = 0; pair < 4; pair++) {
        const int64_t q = pair % 2, k = pair < 2 ? q : 1 - q;
        const int64_t between = (queries[q] - keys[k]) * chunk;
        if (between >= 0 && between - chunk + 1 < window) {
            out[count++] = (nd_attention_block){q * chunk, chunk, k * chunk, chunk, between};
        }
    }
    return count;
}

int nd_cp_blocks_ring(int size, int index, int step, int64_t chunk, int64_t window,
                      nd_attention_block out[ND_CP_BLOCKS])
{
    if (size == 1) {
        return nd_cp_blocks_gathered(size, index, step, chunk, window, out);
    }
    if (window > 0) {
        return blocks_with_window(size, index, step, chunk, window, out);
    }
    if (step == 0) {
        out[0] = (nd_attention_block){0, chunk, 0, chunk, 0};
        out[1] = (nd_attention_block){chunk, chunk, 0, 2 * chunk, chunk};
        return 2;
    }
    if (step <= index) { /* an earlier rank: one chunk before both of ours, one after */
        out[0] = (nd_attention_block){0, chunk, 0, chunk, chunk};
        out[1] = (nd_attention_block){chunk, chunk, 0, chunk, chunk};
        return 2;
    }
    /* A later rank: both its chunks are before our second one. */
    out[0] = (nd_attention_block){chunk, chunk, 0, 2 * chunk, 2 * chunk};
    return 1;
}

/* CUDA graphs, which are replayed whatever the documents are, have so many. A document is rarely
 * in more tiles of a rank (deal.h). */
enum { ROUNDS_OF_GRAPHS = 4 };

/* What the queries of the rank see of the keys of a step. In a step of a ring a window sees other
 * keys from row to row. */
static nd_segments segments_of(const nd_cp *cp, int step)
{
    if (cp->method->in_place || (cp->method->steps && step == 0 && cp->sight.window == 0)) {
        return ND_SEGMENTS_WHOLE;
    }
    return !cp->method->steps      ? ND_SEGMENTS_DIAGONAL
           : cp->sight.window == 0 ? ND_SEGMENTS_FLAT
                                   : ND_SEGMENTS_NONE;
}

/* Where documents are separate, bounds say what is visible, and diag, which no op reads then, what
 * work is estimated: that of one document. */
int nd_cp_blocks_of(const nd_cp *cp, int step, int64_t keys, nd_attention_block out[ND_CP_BLOCKS])
{
    const nd_mesh *mesh = &cp->rank->mesh;
    const int size = nd_mesh_group_size(mesh, ND_GROUP_CP);
    const int index = nd_mesh_group_index(mesh, ND_GROUP_CP, cp->rank->rank);
    const int64_t s = cp->dims.s;
    if (cp->sight.first_keys) {
        const bool graphs = cp->rank->config->kernels.cuda_graphs;
        out[0] = (nd_attention_block){0, s, 0, keys, (keys - s) / 2, segments_of(cp, step)};
        out[0].rounds = out[0].documents == ND_SEGMENTS_WHOLE ? 1
                        : graphs                              ? ROUNDS_OF_GRAPHS
                        : cp->sight.sent                      ? cp->sight.sent[1 + 2 * size + step]
                                                              : 1;
        return 1;
    }
    return cp->method->blocks(size, index, step, cp->dims.chunk, cp->sight.window, out);
}

nd_attention nd_cp_attention_of(const nd_cp *cp, const nd_attention_block *block)
{
    const nd_dims *d = &cp->dims;
    return (nd_attention){
        .batch = d->B,
        .sq = block->q_count,
        .sk = block->kv_count,
        .heads = d->H,
        .kv_heads = d->K,
        .head_dim = d->D,
        .diag = block->diag,
        .scale = d->attention_scale,
        .window = cp->sight.first_keys && cp->method->steps ? 0 : cp->sight.window,
        .documents = block->documents,
        .rounds = block->rounds,
    };
}

nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, const nd_attention_block *block)
{
    nd_tensor v = nd_tensor_4d(t.data, t.dtype, d->B, block->q_count, d->H, d->D);
    const int64_t first = block->q_begin * t.stride[0];
    v.data = t.data ? (char *)t.data + (size_t)first * nd_dtype_size(t.dtype) : NULL;
    v.stride[0] = d->s * t.stride[0];
    v.stride[1] = t.stride[0];
    return v;
}

/* The block's rows of a source, from column `column`: (B, count, K, D). */
static nd_tensor kv_view(const nd_dims *d, const nd_kv_source *from, int64_t column,
                         const nd_attention_block *block)
{
    nd_tensor v = nd_tensor_4d(from->data, from->dtype, d->B, block->kv_count, d->K, d->D);
    v.data = (char *)from->data +
             (size_t)(block->kv_begin * from->stride + column) * nd_dtype_size(from->dtype);
    v.stride[0] = from->rows * from->stride;
    v.stride[1] = from->stride;
    return v;
}

nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, const nd_attention_block *block)
{
    return nd_tensor_3d((float *)base + block->q_begin * d->B * d->H, ND_DTYPE_F32, d->B, d->H,
                        block->q_count);
}

/* Row `of` of a block's bounds: among keys that travel, those of a window, which counts tokens of
 * the text, are in the second one. */
static nd_tensor bounds_of(const nd_dims *d, const nd_kv_source *kv, int64_t of)
{
    return kv->bounds ? nd_tensor_2d((int32_t *)kv->bounds + of * d->T, ND_DTYPE_I32, d->B, d->s)
                      : (nd_tensor){0};
}

static nd_tensor first_keys_of(const nd_cp *cp, const nd_kv_source *kv)
{
    return bounds_of(&cp->dims, kv, cp->method->steps && cp->sight.window > 0);
}

nd_kv_source nd_cp_buffer_source(const nd_cp *cp, void *data, nd_dtype dtype, int64_t rows)
{
    const int64_t columns = cp->dims.K * cp->dims.D;
    return (nd_kv_source){data, dtype, rows, 2 * columns, 0, columns, cp->sight.first_keys};
}

nd_status nd_cp_block_forward(nd_cp *cp, const nd_attention_block *block, nd_tensor qkv,
                              const nd_kv_source *kv, nd_tensor o, const float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_attention a = nd_cp_attention_of(cp, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_fwd, .attention = a,
          .out = nd_cp_q_view(d, o, block), .lse = nd_cp_row_view(d, lse, block),
          .q = nd_cp_q_view(d, qkv, block), .k = kv_view(d, kv, kv->k, block),
          .v = kv_view(d, kv, kv->v, block), .first_key = first_keys_of(cp, kv),
          .end_key = bounds_of(d, kv, 2), .scratch = cp->scratch);
    return ND_OK;
}

nd_status nd_cp_blocks_forward(nd_cp *cp, nd_tensor qkv, const nd_kv_source *kv, nd_tensor o,
                               const float *lse)
{
    nd_attention_block blocks[ND_CP_BLOCKS];
    const int count = nd_cp_blocks_of(cp, 0, kv->rows, blocks);
    for (int i = 0; i < count; i++) {
        ND_TRY(nd_cp_block_forward(cp, &blocks[i], qkv, kv, o, lse));
    }
    return ND_OK;
}

nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_2d(out, d->act, d->T, kv),
          .x = nd_tensor_columns(qkv, d->H * d->D, kv));
    return ND_OK;
}

nd_status nd_cp_reorder(nd_cp *cp, const nd_dims *t, nd_group_kind group, void *ranks,
                        nd_tensor rows, bool to_rows)
{
    const int64_t members = nd_mesh_group_size(&cp->rank->mesh, group), width = rows.shape[1];
    const int64_t bytes = (int64_t)nd_dtype_size(rows.dtype);
    for (int64_t c = 0; c < 2; c++) {
        const int64_t first = c == 0 ? 0 : 2 * members - 1, step = c == 0 ? 1 : -1;
        char *of_ranks = (char *)ranks + c * t->chunk * width * bytes;
        char *at = (char *)rows.data + first * t->chunk * width * bytes;
        nd_tensor r = nd_tensor_4d(of_ranks, rows.dtype, members, t->B, t->chunk, width);
        nd_tensor x = nd_tensor_4d(at, rows.dtype, members, t->B, t->chunk, width);
        r.stride[0] = t->T * width;
        r.stride[1] = t->s * width;
        x.stride[0] = step * t->chunk * width;
        x.stride[1] = members * t->s * width;
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = to_rows ? x : r, .x = to_rows ? r : x);
    }
    return ND_OK;
}

static nd_status block_backward(nd_cp *cp, const nd_attention_block *block, const nd_cp_backward *b,
                                const nd_kv_source *kv, const nd_block_gradients *to)
{
    const nd_dims *d = &cp->dims;
    const nd_kv_source *dkv = &to->dkv;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_bwd, .attention = nd_cp_attention_of(cp, block),
          .dq = nd_cp_q_view(d, to->dq, block), .dk = kv_view(d, dkv, dkv->k, block),
          .dv = kv_view(d, dkv, dkv->v, block), .q = nd_cp_q_view(d, b->qkv, block),
          .k = kv_view(d, kv, kv->k, block), .v = kv_view(d, kv, kv->v, block),
          .out = nd_cp_q_view(d, b->o, block), .dout = nd_cp_q_view(d, b->dout, block),
          .lse = nd_cp_row_view(d, b->lse, block),
          .delta = cp->delta ? nd_cp_row_view(d, cp->delta, block) : (nd_tensor){0},
          .first_key = first_keys_of(cp, kv), .end_key = bounds_of(d, kv, 2), .add_q = to->add_q,
          .add_kv = to->add_kv, .scratch = cp->scratch);
    return ND_OK;
}

nd_status nd_cp_blocks_backward(nd_cp *cp, int step, const nd_cp_backward *b,
                                const nd_kv_source *kv, const nd_block_gradients *to)
{
    nd_attention_block blocks[ND_CP_BLOCKS];
    const int count = nd_cp_blocks_of(cp, step, kv->rows, blocks);
    for (int i = 0; i < count; i++) {
        ND_TRY(block_backward(cp, &blocks[i], b, kv, to));
    }
    return ND_OK;
}
