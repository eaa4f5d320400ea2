// SPDX-License-Identifier: Apache-2.0
/* This file has what happens to the heads of q, k and v between their products and attention, and
 * to their gradients. */
#include "trainer/model/model.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

/* (T, heads, D): adjacent heads of the columns of qkv. */
static nd_tensor heads_of(const nd_dims *d, nd_tensor qkv, int64_t first, int64_t heads)
{
    const nd_tensor columns = nd_tensor_columns(qkv, first * d->D, heads * d->D);
    nd_tensor t = nd_tensor_3d(columns.data, d->act, qkv.shape[0], heads, d->D);
    t.stride[0] = d->QKV;
    return t;
}

/* The norm of q, or of k: rows are heads (T heads, D), or tokens (T, heads D) that are normed as
 * one, of which a rank of tp has a part. */
typedef struct qk_norm {
    nd_param_id id;
    nd_tensor weight;
    nd_tensor heads;   /* (T, heads, D) of qkv, or of its gradient */
    nd_tensor x, work; /* before the norm; of the workspace */
    nd_tensor rstd;
    nd_tensor sums; /* (T), or absent: rows are whole */
    int64_t width;  /* of whole rows; heads of which ranks have copies count for each */
} qk_norm;

static qk_norm qk_norm_of(nd_block_call c, nd_tensor qkv, bool k)
{
    const nd_dims *d = &c.model->dims;
    const int64_t first = k ? d->H : 0, heads = k ? d->K : d->H, T = c.set->T;
    const int64_t rows = d->qk_as_one ? T : T * heads;
    const nd_param_id id = d->qk_as_one ? (k ? ND_PARAM_NORM_K_ALL : ND_PARAM_NORM_Q_ALL)
                                        : (k ? ND_PARAM_NORM_K : ND_PARAM_NORM_Q);
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    const nd_tensor x = nd_tensor_rows(a->qk, T * first, T * heads),
                    work = nd_tensor_rows(c.model->work.qk, T * first, T * heads);
    return (qk_norm){
        .id = id,
        .weight = nd_fsdp_weight(&c.model->fsdp, id, id, c.layer),
        .heads = heads_of(d, qkv, first, heads),
        .x = nd_tensor_2d(x.data, d->act, rows, T * heads * d->D / rows),
        .work = nd_tensor_2d(work.data, d->act, rows, T * heads * d->D / rows),
        .rstd = nd_tensor_rows(a->qk_rstd, d->qk_as_one ? k * T : T * first, rows),
        .sums =
            nd_tensor_rows(c.model->work.qk_sums, d->qk_as_one ? k * T : 0, d->qk_as_one ? T : 0),
        .width = heads * d->D * c.model->rank->mesh.size[ND_AXIS_TP],
    };
}

/* The heads of q and of k, in place; backward: their gradients become those before the norms. */
static nd_status norms(nd_block_call c, nd_tensor qkv, bool backward)
{
    nd_model *m = c.model;
    nd_rank *r = m->rank;
    const bool as_one = m->dims.qk_as_one;
    for (int k = 0; m->dims.normed && k < 2; k++) {
        const qk_norm n = qk_norm_of(c, qkv, k);
        const nd_tensor rows = backward ? n.work : n.x;
        ND_OP(r, ELEMENTWISE, cast, .out = rows, .x = n.heads);
        if (as_one) {
            ND_OP(r, ELEMENTWISE, row_dots, .out = n.sums, .x = rows, .y = n.x,
                  .weight = backward ? n.weight : (nd_tensor){0});
        }
    }
    ND_TRY(nd_all_reduce(r, ND_GROUP_TP, m->work.qk_sums.data, as_one ? 2 * c.set->T : 0,
                         ND_DTYPE_F32, ND_REDOP_SUM));
    for (int k = 0; m->dims.normed && k < 2; k++) {
        const qk_norm n = qk_norm_of(c, qkv, k);
        if (backward) {
            ND_OP(r, ELEMENTWISE, rmsnorm_bwd, .dx = n.work,
                  .dweight = nd_block_vector_gradient(c, n.id, n.id), .dy = n.work, .x = n.x,
                  .weight = n.weight, .plus = m->dims.norm_plus, .rstd = n.rstd, .dots = n.sums,
                  .width = n.width);
        } else {
            ND_OP(r, ELEMENTWISE, rmsnorm_fwd, .y = n.work, .rstd = n.rstd, .x = n.x,
                  .weight = n.weight, .plus = m->dims.norm_plus, .eps = (float)r->shape.rms_eps,
                  .squares = n.sums, .width = n.width);
        }
        ND_OP(r, ELEMENTWISE, cast, .out = n.heads, .x = n.work);
    }
    return ND_OK;
}

static nd_status turn(nd_block_call c, nd_tensor heads, nd_rope_view table, bool inverse)
{
    heads.shape[2] = c.model->dims.rotated;
    ND_OP(c.model->rank, ELEMENTWISE, rope, .out = heads, .x = heads,
          .positions = nd_tensor_1d(c.set->batch.positions, ND_DTYPE_I32, heads.shape[0]),
          .table = table, .inverse = inverse);
    return ND_OK;
}

/* Turns q and k in place, where the layer has RoPE: they are adjacent and have one head size. */
static nd_status rope(nd_block_call c, nd_tensor qkv, bool inverse)
{
    const nd_model *m = c.model;
    const nd_dims *d = &m->dims;
    if (!nd_shape_turns(&m->rank->shape, c.layer)) {
        return ND_OK;
    }
    if (m->query_rope.positions > 0) {
        ND_TRY(turn(c, heads_of(d, qkv, 0, d->H), m->query_rope, inverse));
        return turn(c, heads_of(d, qkv, d->H, d->K), m->rope, inverse);
    }
    const bool own =
        m->window_rope.positions > 0 && nd_shape_window(&m->rank->shape, c.layer, INT64_MAX) > 0;
    return turn(c, heads_of(d, qkv, 0, d->H + d->K), own ? m->window_rope : m->rope, inverse);
}

/* Head `from` of k and of v comes in the place of head `to`; inverse: the gradient of the place
 * goes back to that head. */
static nd_status move_kv_head(nd_block_call c, nd_tensor qkv, int64_t to, int64_t from,
                              bool inverse)
{
    const nd_dims *d = &c.model->dims;
    for (int64_t first = d->H; first <= d->H + d->K; first += d->K) {
        const nd_tensor a = nd_tensor_columns(qkv, (first + to) * d->D, d->D),
                        b = nd_tensor_columns(qkv, (first + from) * d->D, d->D);
        if (!inverse) {
            ND_OP(c.model->rank, ELEMENTWISE, cast, .out = a, .x = b);
            continue;
        }
        ND_OP(c.model->rank, ELEMENTWISE, axpy, .out = b, .x = a, .plus = b, .scale = 1.0f);
        ND_OP(c.model->rank, ELEMENTWISE, axpy, .out = a, .x = a, .scale = 0.0f);
    }
    return ND_OK;
}

/*
 * Where ranks of tp have copies of the same several KV heads, this puts in each place the head that
 * the place's query heads see (nd_shape_kv_copies). It does nothing else. First come the places
 * whose head lies behind them, upwards, then the others, downwards: so no head is overwritten
 * before it was read.
 */
static nd_status deal_kv(nd_block_call c, nd_tensor qkv, bool inverse)
{
    const nd_dims *d = &c.model->dims;
    for (int64_t i = 0; i < 2 * d->K; i++) {
        const int64_t step = inverse ? 2 * d->K - 1 - i : i;
        const bool upwards = step < d->K;
        const int64_t place = upwards ? step : 2 * d->K - 1 - step;
        const int64_t head = (d->kv_copy * d->K + place) / d->kv_copies;
        if (upwards ? head > place : head < place) {
            ND_TRY(move_kv_head(c, qkv, place, head, inverse));
        }
    }
    return ND_OK;
}

nd_status nd_block_heads(nd_block_call c, nd_tensor qkv, bool backward)
{
    if (backward) {
        ND_TRY(deal_kv(c, qkv, true));
        ND_TRY(rope(c, qkv, true));
        return norms(c, qkv, true);
    }
    ND_TRY(norms(c, qkv, false));
    ND_TRY(rope(c, qkv, false));
    ND_TRY(nd_block_show(c, ND_DUMP_QUERY, 2, 0, qkv));
    return deal_kv(c, qkv, false);
}
