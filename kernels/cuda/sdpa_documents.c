// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/context.h"
#include "kernels/cuda/documents.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda_check.h"

/* Older ones may make NaN on Hopper where there is something between documents
 * (NVIDIA/TransformerEngine, issue 2186). */
enum { OLDEST = 91800 };

/* True if the tokens of all sequences lie at equal distances. */
static bool is_even(const nd_attention *a, nd_tensor t)
{
    return nd_sdpa_is_aligned(t) && (a->batch == 1 || t.stride[0] == t.shape[1] * t.stride[1]);
}

static bool fits(const nd_sdpa_call *c)
{
    const nd_cuda_context *context = c->context;
    const nd_attention_bwd_args *x = &c->x;
    const nd_attention *a = &x->attention;
    if (!x->end_key.data || context->no_documents || nd_cudnn_version(context->cudnn) < OLDEST ||
        (context->facts.capability / 10 != 9 && context->facts.capability / 10 != 10) ||
        !nd_cuda_sdpa_is_cudnn(a, x->q.dtype) || !nd_documents_fit(a, context->deterministic) ||
        !is_even(a, x->q) || !is_even(a, x->k) || !is_even(a, x->v) ||
        x->k.stride[1] != x->v.stride[1]) {
        return false;
    }
    return !c->backward ? nd_sdpa_is_aligned(x->out)
                        : (x->add_kv || a->documents == ND_SEGMENTS_WHOLE) && is_even(a, x->out) &&
                              is_even(a, x->dout) && nd_sdpa_is_aligned(x->dq) &&
                              nd_sdpa_is_aligned(x->dk) && nd_sdpa_is_aligned(x->dv);
}

/* Strides of the batch mean nothing. */
static nd_sdpa_form form_of(const nd_sdpa_call *c, const nd_document_tier *tier)
{
    const nd_attention *a = &c->x.attention;
    const nd_sdpa_piece p = {.rows = tier->rows,
                             .keys = tier->keys,
                             .kvs = c->documents.kvs,
                             .mask = a->documents == ND_SEGMENTS_WHOLE      ? ND_SDPA_TOP_LEFT
                                     : a->documents == ND_SEGMENTS_DIAGONAL ? ND_SDPA_BOTTOM_RIGHT
                                                                            : ND_SDPA_ALL};
    nd_sdpa_form form = nd_sdpa_form_of(c, &p);
    nd_sdpa_strides *of_queries[] = {&form.q, &form.out, &form.dout, &form.dq};
    nd_sdpa_strides *of_keys[] = {&form.k, &form.v, &form.dk, &form.dv};
    for (int i = 0; i < 4; i++) { /* as if each segment were padded */
        of_queries[i]->batch = tier->rows * of_queries[i]->row;
        of_keys[i]->batch = tier->keys * of_keys[i]->row;
    }
    form.batch = tier->slots;
    form.tokens = a->batch * a->sq;
    form.key_tokens = a->batch * a->sk;
    return form;
}

/* Makes the plans of all tiers that do not exist yet. Results have places in the scratch. */
static nd_status plan(nd_sdpa_call *c)
{
    const nd_attention *a = &c->x.attention;
    size_t workspace = 0, bytes = 0;
    c->documents = nd_documents_of(a, 0, c->backward);
    const int64_t kvs = c->documents.kvs, heads = kvs * (a->heads / a->kv_heads);
    c->to_q = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sq, heads, a->head_dim);
    c->to_k = c->to_v = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sk, kvs, a->head_dim);
    for (int t = 0; t < c->documents.count; t++) {
        const nd_sdpa_form form = form_of(c, &c->documents.tiers[t]);
        ND_TRY(nd_cudnn_workspace(c->context->cudnn, &form, &bytes));
        workspace = nd_max_bytes(workspace, bytes);
    }
    c->documents = nd_documents_of(a, workspace, c->backward);
    return ND_OK;
}

bool nd_documents_take(nd_sdpa_call *c)
{
    const bool taken = fits(c);
    if (taken && plan(c) != ND_OK) {
        nd_error_clear();
        c->context->no_documents = true;
        return false;
    }
    return taken;
}

static void *at(const nd_sdpa_call *c, size_t place)
{
    return c->scratch + place;
}

static const int64_t *starts_of(const nd_sdpa_call *c, const nd_document_tier *tier, int kind)
{
    return (int64_t *)at(c, tier->starts) + kind * (tier->slots + 1);
}

/* Finds the segments of a round on the GPU. */
static nd_status find_segments(nd_stream *stream, const nd_sdpa_call *c, int64_t round,
                               int64_t rounds)
{
    const nd_attention_bwd_args *x = &c->x;
    const nd_documents_find_args find = {
        .of = c->documents,
        .scratch = c->scratch,
        .form = x->attention.documents,
        .round = round,
        .rounds = rounds,
        .first_key = x->first_key.data,
        .end_key = x->end_key.data,
        .widths = {[ND_RAGGED_Q] = x->q.stride[1],
                   [ND_RAGGED_KV] = x->k.stride[1],
                   [ND_RAGGED_OUT] = (c->backward ? x->out : c->to_q).stride[1],
                   [ND_RAGGED_STATS] = c->to_q.shape[2],
                   [ND_RAGGED_DOUT] = x->dout.stride[1],
                   [ND_RAGGED_DQ] = c->to_q.stride[1],
                   [ND_RAGGED_DKV] = c->to_k.stride[1]},
    };
    return nd_cuda_op_done(stream, "attention: documents",
                           (cudaError_t)nd_cuda_documents_find(nd_cuda_stream(stream), &find));
}

/* Takes a result's heads, from `head` on, out of the scratch, or adds them; lse: statistics too. */
static nd_status take_heads(nd_stream *stream, const nd_sdpa_call *c, const nd_document_tier *tier,
                            nd_tensor from, nd_tensor to, int64_t head, nd_tensor lse)
{
    const bool keys = from.data != c->to_q.data;
    const nd_documents_take_args args = {
        .out = nd_sdpa_part(to, 0, to.shape[1], head, from.shape[2]),
        .x = from.data,
        .lse = lse,
        .stats = at(c, c->documents.stats),
        .slots = tier->slots,
        .most = keys ? tier->keys : tier->rows,
        .lengths = (int32_t *)at(c, tier->lengths) + (keys ? tier->slots : 0),
        .starts = starts_of(c, tier, keys ? ND_RAGGED_DKV : ND_RAGGED_DQ),
        .add = keys ? c->x.add_kv : c->x.add_q,
    };
    int launched = nd_cuda_documents_take(nd_cuda_stream(stream), &args);
    return nd_cuda_op_done(stream, "attention: rows of documents", (cudaError_t)launched);
}

/* The statistics of a group's heads. */
static nd_tensor lse_of(const nd_sdpa_call *c, int64_t head)
{
    nd_tensor lse = c->x.lse;
    lse.data = (float *)lse.data + head * c->x.attention.sq;
    lse.shape[1] = c->to_q.shape[2];
    return lse;
}

/* Packs the statistics as cuDNN's backward reads them. */
static nd_status pack_stats(nd_stream *stream, const nd_sdpa_call *c, nd_tensor lse)
{
    nd_cast_args copy = {.out = nd_tensor_4d(at(c, c->documents.stats), ND_DTYPE_F32, lse.shape[0],
                                             lse.shape[2], lse.shape[1], 1)};
    copy.x = copy.out;
    copy.x.data = lse.data;
    copy.x.stride[0] = lse.stride[0];
    copy.x.stride[1] = 1;
    copy.x.stride[2] = lse.shape[2];
    int launched = nd_cuda_cast(nd_cuda_stream(stream), &copy, NULL);
    return nd_cuda_op_done(stream, "attention: statistics", (cudaError_t)launched);
}

static nd_status run_tier(nd_stream *stream, const nd_sdpa_call *c, const nd_document_tier *tier,
                          int64_t head, int64_t kv)
{
    const nd_attention_bwd_args *x = &c->x;
    const nd_tensor none = {0};
    const nd_sdpa_form form = form_of(c, tier);
    nd_sdpa_tensors t = {.q = nd_sdpa_at(x->q, 0, head).data,
                         .k = nd_sdpa_at(x->k, 0, kv).data,
                         .v = nd_sdpa_at(x->v, 0, kv).data,
                         .out = c->backward ? nd_sdpa_at(x->out, 0, head).data : c->to_q.data,
                         .stats = at(c, c->documents.stats),
                         .dout = c->backward ? nd_sdpa_at(x->dout, 0, head).data : NULL,
                         .dq = c->to_q.data,
                         .dk = c->to_k.data,
                         .dv = c->to_v.data,
                         .workspace = c->scratch,
                         .rows = at(c, tier->lengths)};
    t.keys = t.rows + tier->slots;
    for (int kind = 0; kind < ND_RAGGED_KINDS; kind++) {
        t.starts[kind] = starts_of(c, tier, kind);
    }
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, c->backward ? "attention_bwd" : "attention_fwd", cudaSuccess));
    if (!c->backward) {
        return take_heads(stream, c, tier, c->to_q, x->out, head, lse_of(c, head));
    }
    ND_TRY(take_heads(stream, c, tier, c->to_q, x->dq, head, none));
    ND_TRY(take_heads(stream, c, tier, c->to_k, x->dk, kv, none));
    return take_heads(stream, c, tier, c->to_v, x->dv, kv, none);
}

nd_status nd_documents_run(nd_stream *stream, nd_sdpa_call *c, void *scratch,
                           const int32_t **owners)
{
    const nd_attention *a = &c->x.attention;
    const nd_documents *d = &c->documents;
    const int64_t group = a->heads / a->kv_heads, rounds = nd_max(a->rounds, 1);
    ND_TRY(nd_sdpa_check_scratch(c, d->end));
    c->scratch = scratch;
    c->to_q.data = at(c, d->results);
    c->to_k.data = at(c, d->dk);
    c->to_v.data = at(c, d->dv);
    *owners = at(c, d->owners);
    for (int64_t round = 0; round < rounds; round++) {
        ND_TRY(find_segments(stream, c, round, rounds));
        for (int64_t kv = 0; kv < a->kv_heads; kv += d->kvs) {
            ND_TRY(c->backward ? pack_stats(stream, c, lse_of(c, kv * group)) : ND_OK);
            for (int t = 0; t < d->count; t++) {
                ND_TRY(run_tier(stream, c, &d->tiers[t], kv * group, kv));
            }
        }
    }
    return ND_OK;
}
