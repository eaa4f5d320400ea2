// SPDX-License-Identifier: Apache-2.0
/*
 * The forward list. Shapes: (Tl, C) between the tensor-parallel regions, (T, ...) inside. T = B s local tokens,
 * Tl = T / tp.
 */
#include "trainer/model/llama.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM, ELEMENTWISE = ND_TRACE_ELEMENTWISE;

static const nd_tensor none = {0};

/* Steps 1 to 10 make everything a backward needs; step 11 only the output. */
static nd_status attention_half(nd_model *m, int64_t layer, nd_tensor x, nd_tensor delta)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    nd_tensor h1_full;
    nd_tensor w1 = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_1, ND_PARAM_NORM_1, layer);
    nd_tensor wqkv = nd_fsdp_weight(&m->fsdp, ND_PARAM_Q, ND_PARAM_V, layer); /* (QKV, C) */
    nd_tensor wo = nd_fsdp_weight(&m->fsdp, ND_PARAM_O, ND_PARAM_O, layer);   /* (C, H D) */
    /* 1. residual sum and norm. Without delta the input is the sum already. */
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, a->h1, delta.data ? a->x_in : none, a->rstd1, x, delta, w1,
          (float)r->shape.rms_eps);
    /* 2. tp: (Tl, C) -> (T, C) */
    ND_TRY(nd_tp_gather(r, a->h1, m->full_a, ND_TRACE_COMMUNICATION, &h1_full));
    /* 3. q, k, v in one product */
    ND_OP(r, GEMM, matmul, a->qkv, h1_full, false, wqkv, true, 0.0f);
    /* 4. RoPE on q and k, in place: they are neighbours and have the same head size */
    nd_tensor qk = nd_tensor_3d(a->qkv.data, d->act, d->T, d->H + d->K, d->D);
    qk.stride[0] = d->QKV;
    ND_OP(r, ELEMENTWISE, rope, qk, qk, nd_tensor_1d(m->positions, ND_DTYPE_I32, d->T), m->rope,
          false);
    /* 5. attention, through context parallel */
    ND_TRY(nd_cp_attention_fwd(&m->cp, a->qkv, a->o, a->lse));
    /* 6. output projection; tp: partial sums (T, C) -> (Tl, C) */
    nd_tensor partial = nd_tp_partial(r, m->branch, m->full_b);
    ND_OP(r, GEMM, matmul, partial, a->o, false, wo, true, 0.0f);
    return nd_tp_reduce(r, partial, m->branch, ND_TRACE_COMMUNICATION);
}

static nd_status mlp_half(nd_model *m, int64_t layer, bool with_output)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    nd_tensor h2_full;
    nd_tensor w2 = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_2, ND_PARAM_NORM_2, layer);
    nd_tensor wgu = nd_fsdp_weight(&m->fsdp, ND_PARAM_GATE, ND_PARAM_UP, layer);     /* (2 F, C) */
    nd_tensor wdown = nd_fsdp_weight(&m->fsdp, ND_PARAM_DOWN, ND_PARAM_DOWN, layer); /* (C, F) */
    /* 7. residual sum and norm */
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, a->h2, a->x_mid, a->rstd2, a->x_in, m->branch, w2,
          (float)r->shape.rms_eps);
    /* 8. tp: (Tl, C) -> (T, C) */
    ND_TRY(nd_tp_gather(r, a->h2, m->full_a, ND_TRACE_COMMUNICATION, &h2_full));
    /* 9. gate and up in one product */
    ND_OP(r, GEMM, matmul, a->gu, h2_full, false, wgu, true, 0.0f);
    /* 10. SwiGLU */
    ND_OP(r, ELEMENTWISE, swiglu_fwd, a->act, nd_tensor_columns(a->gu, 0, d->F),
          nd_tensor_columns(a->gu, d->F, d->F));
    if (!with_output) {
        return ND_OK;
    }
    /* 11. down projection; tp: partial sums (T, C) -> (Tl, C) */
    nd_tensor partial = nd_tp_partial(r, m->branch, m->full_b);
    ND_OP(r, GEMM, matmul, partial, a->act, false, wdown, true, 0.0f);
    return nd_tp_reduce(r, partial, m->branch, ND_TRACE_COMMUNICATION);
}

nd_status nd_block_forward(nd_model *m, int64_t layer, nd_tensor x, nd_tensor delta)
{
    ND_TRY(attention_half(m, layer, x, delta));
    return mlp_half(m, layer, true);
}

/* Everything that the block did not keep, by the same ops on the same operands. */
nd_status nd_block_recompute(nd_model *m, int64_t layer)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_block_acts *a = &m->acts[layer];
    if (m->recompute == ND_RECOMPUTE_NONE) {
        return ND_OK;
    }
    if (m->recompute == ND_RECOMPUTE_FULL) {
        ND_TRY(attention_half(m, layer, a->x_in, none));
        return mlp_half(m, layer, false);
    }
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, a->h1, none, a->rstd1, a->x_in, none,
          nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_1, ND_PARAM_NORM_1, layer),
          (float)r->shape.rms_eps);
    ND_OP(r, ELEMENTWISE, rmsnorm_fwd, a->h2, none, a->rstd2, a->x_mid, none,
          nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_2, ND_PARAM_NORM_2, layer),
          (float)r->shape.rms_eps);
    ND_OP(r, ELEMENTWISE, swiglu_fwd, a->act, nd_tensor_columns(a->gu, 0, d->F),
          nd_tensor_columns(a->gu, d->F, d->F));
    return ND_OK;
}

static nd_status embed(nd_model *m)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    int unit = m->layout->params[nd_layout_find(m->layout, ND_PARAM_EMBED, -1)].unit;
    nd_tensor x = m->acts[0].x_in; /* (Tl, C) */
    nd_tensor partial = nd_tp_partial(r, x, m->full_b);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(nd_fsdp_prefetch(&m->fsdp, m->layout->first_block));
    ND_OP(r, ELEMENTWISE, embedding_fwd, partial, nd_tensor_1d(m->ids, ND_DTYPE_I32, d->T),
          nd_fsdp_weight(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1), d->vocab_first);
    if (unit != m->layout->tail) { /* a tied table stays until the end of backward */
        nd_fsdp_release(&m->fsdp, unit);
    }
    return nd_tp_reduce(r, partial, x, ND_TRACE_COMMUNICATION);
}

nd_status nd_model_forward(nd_model *m, bool train, double inverse_tokens)
{
    const nd_layout *layout = m->layout;
    ND_TRY(embed(m));
    nd_tensor x = m->acts[0].x_in, delta = none;
    for (int64_t l = 0; l < m->dims.L; l++) {
        int unit = layout->first_block + (int)l;
        ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_prefetch(&m->fsdp, unit + 1));
        ND_TRY(nd_block_forward(m, l, x, delta));
        nd_fsdp_release(&m->fsdp, unit);
        x = m->acts[l].x_mid;
        delta = m->branch;
    }
    ND_TRY(nd_fsdp_acquire(&m->fsdp, layout->tail));
    ND_TRY(nd_head_forward(m, x, delta, train, inverse_tokens));
    nd_fsdp_release(&m->fsdp, layout->tail);
    return ND_OK;
}
