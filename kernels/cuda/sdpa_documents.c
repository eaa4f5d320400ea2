// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/documents.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda_check.h"

/* Older ones may make NaN on Hopper where there is something between documents
 * (NVIDIA/TransformerEngine, issue 2186). */
enum { OLDEST = 91800 };

/* Whether the tokens of all sequences lie at equal distances. */
static bool is_even(const nd_attention *a, nd_tensor t)
{
    return nd_sdpa_is_aligned(t) && (a->batch == 1 || t.stride[0] == t.shape[1] * t.stride[1]);
}

static bool fits(const nd_sdpa_call *c)
{
    const nd_cuda_context *context = c->context;
    return c->end_key.data && !context->no_documents &&
           nd_cudnn_version(context->cudnn) >= OLDEST &&
           (context->capability / 10 == 9 || context->capability / 10 == 10) &&
           nd_cuda_sdpa_is_cudnn(c->a, c->q.dtype) &&
           nd_documents_fit(c->a, context->deterministic) && is_even(c->a, c->q) &&
           is_even(c->a, c->k) && is_even(c->a, c->v) && c->k.stride[1] == c->v.stride[1];
}

static bool fits_backward(const nd_sdpa_call *c)
{
    return (c->add_kv || c->a->documents == ND_SEGMENTS_WHOLE) && is_even(c->a, c->out) &&
           is_even(c->a, c->dout) && nd_sdpa_is_aligned(c->dq) && nd_sdpa_is_aligned(c->dk) &&
           nd_sdpa_is_aligned(c->dv);
}

static int64_t heads_of(const nd_sdpa_call *c)
{
    return c->documents.kvs * (c->a->heads / c->a->kv_heads);
}

/* Of segments; strides of the batch mean nothing. */
static nd_sdpa_strides strides_of(nd_tensor t)
{
    return (nd_sdpa_strides){t.shape[1] * t.stride[1], t.stride[1], t.stride[2]};
}

static nd_sdpa_form form_of(const nd_sdpa_call *c, const nd_document_tier *tier)
{
    const nd_attention *a = c->a;
    const int64_t D = a->head_dim, heads = heads_of(c), kvs = c->documents.kvs;
    const nd_sdpa_strides of_heads = {tier->rows * heads * D, heads * D, D};
    const nd_sdpa_strides of_kv = {tier->keys * kvs * D, kvs * D, D};
    nd_sdpa_form form;
    memset(&form, 0, sizeof form); /* compared by bytes */
    form.batch = tier->slots;
    form.sq = tier->rows;
    form.sk = tier->keys;
    form.heads = heads;
    form.kv_heads = kvs;
    form.head_dim = D;
    form.q = strides_of(c->q);
    form.k = strides_of(c->k);
    form.v = strides_of(c->v);
    form.out = c->backward ? strides_of(c->out) : of_heads;
    form.window = a->window;
    form.scale = a->scale;
    form.mask = a->documents == ND_SEGMENTS_WHOLE      ? ND_SDPA_TOP_LEFT
                : a->documents == ND_SEGMENTS_DIAGONAL ? ND_SDPA_BOTTOM_RIGHT
                                                       : ND_SDPA_ALL;
    form.tokens = a->batch * a->sq;
    form.key_tokens = a->batch * a->sk;
    if (c->backward) {
        form.backward = true;
        form.dout = strides_of(c->dout);
        form.dq = of_heads;
        form.dk = form.dv = of_kv;
    }
    return form;
}

/* Makes the plans of all tiers that do not exist yet. */
static nd_status plan(nd_sdpa_call *c)
{
    size_t workspace = 0, bytes = 0;
    c->documents = nd_documents_of(c->a, 0, c->backward);
    for (int t = 0; t < c->documents.count; t++) {
        const nd_sdpa_form form = form_of(c, &c->documents.tiers[t]);
        ND_TRY(nd_cudnn_workspace(c->context->cudnn, &form, &bytes));
        workspace = nd_max_bytes(workspace, bytes);
    }
    c->documents = nd_documents_of(c->a, workspace, c->backward);
    return ND_OK;
}

bool nd_documents_take(nd_sdpa_call *c)
{
    const bool taken = fits(c) && (c->backward ? fits_backward(c) : nd_sdpa_is_aligned(c->out));
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
static nd_status find(nd_stream *stream, const nd_sdpa_call *c, int64_t round, int64_t rounds)
{
    const int64_t D = c->a->head_dim, heads = heads_of(c);
    const nd_documents_find_args find = {
        .of = c->documents,
        .scratch = c->scratch,
        .form = c->a->documents,
        .round = round,
        .rounds = rounds,
        .first_key = c->first_key.data,
        .end_key = c->end_key.data,
        .widths = {[ND_RAGGED_Q] = c->q.stride[1],
                   [ND_RAGGED_KV] = c->k.stride[1],
                   [ND_RAGGED_OUT] = c->backward ? c->out.stride[1] : heads * D,
                   [ND_RAGGED_STATS] = heads,
                   [ND_RAGGED_DOUT] = c->dout.stride[1],
                   [ND_RAGGED_DQ] = heads * D,
                   [ND_RAGGED_DKV] = c->documents.kvs * D},
    };
    return nd_cuda_op_done(stream, "attention: documents",
                           (cudaError_t)nd_cuda_documents_find(nd_cuda_stream(stream), &find));
}

/* Takes heads of a result, from `head` on, out of the scratch; with lse also the statistics. */
static nd_status take(nd_stream *stream, const nd_sdpa_call *c, const nd_document_tier *tier,
                      nd_documents_take_args args, int64_t head)
{
    const bool keys = args.x != at(c, c->documents.results);
    args.out =
        nd_sdpa_part(args.out, 0, args.out.shape[1], head, keys ? c->documents.kvs : heads_of(c));
    args.slots = tier->slots;
    args.most = keys ? tier->keys : tier->rows;
    args.lengths = (int32_t *)at(c, tier->lengths) + (keys ? tier->slots : 0);
    args.starts = starts_of(c, tier, keys ? ND_RAGGED_DKV : ND_RAGGED_DQ);
    int launched = nd_cuda_documents_take(nd_cuda_stream(stream), &args);
    return nd_cuda_op_done(stream, "attention: rows of documents", (cudaError_t)launched);
}

/* The statistics of a group's heads. */
static nd_tensor lse_of(const nd_sdpa_call *c, int64_t head)
{
    nd_tensor lse = c->lse;
    lse.data = (float *)lse.data + head * c->a->sq;
    lse.shape[1] = heads_of(c);
    return lse;
}

/* As cuDNN's backward reads them. */
static nd_status pack_stats(nd_stream *stream, const nd_sdpa_call *c, int64_t head)
{
    const nd_tensor lse = lse_of(c, head);
    const nd_attention *a = c->a;
    nd_cast_args copy = {.out = nd_tensor_4d(at(c, c->documents.stats), ND_DTYPE_F32, a->batch,
                                             a->sq, heads_of(c), 1)};
    copy.x = copy.out;
    copy.x.data = lse.data;
    copy.x.stride[0] = lse.stride[0];
    copy.x.stride[1] = 1;
    copy.x.stride[2] = a->sq;
    int launched = nd_cuda_cast(nd_cuda_stream(stream), &copy, NULL);
    return nd_cuda_op_done(stream, "attention: statistics", (cudaError_t)launched);
}

static nd_status run_tier(nd_stream *stream, const nd_sdpa_call *c, const nd_document_tier *tier,
                          int64_t head, int64_t kv)
{
    const nd_documents *d = &c->documents;
    const nd_sdpa_form form = form_of(c, tier);
    void *results = at(c, d->results), *dk = at(c, d->dk), *dv = at(c, d->dv);
    nd_sdpa_tensors t = {.q = nd_sdpa_at(c->q, 0, head).data,
                         .k = nd_sdpa_at(c->k, 0, kv).data,
                         .v = nd_sdpa_at(c->v, 0, kv).data,
                         .out = c->backward ? nd_sdpa_at(c->out, 0, head).data : results,
                         .stats = at(c, d->stats),
                         .dout = c->backward ? nd_sdpa_at(c->dout, 0, head).data : NULL,
                         .dq = results,
                         .dk = dk,
                         .dv = dv,
                         .workspace = c->scratch,
                         .rows = at(c, tier->lengths)};
    t.keys = t.rows + tier->slots;
    for (int kind = 0; kind < ND_RAGGED_KINDS; kind++) {
        t.starts[kind] = starts_of(c, tier, kind);
    }
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, c->backward ? "attention_bwd" : "attention_fwd", cudaSuccess));
    if (!c->backward) {
        const nd_documents_take_args out = {
            .out = c->out, .x = results, .lse = lse_of(c, head), .stats = t.stats};
        return take(stream, c, tier, out, head);
    }
    const nd_documents_take_args of_queries = {.out = c->dq, .x = results, .add = c->add_q};
    const nd_documents_take_args of_keys = {.out = c->dk, .x = dk, .add = c->add_kv};
    const nd_documents_take_args of_values = {.out = c->dv, .x = dv, .add = c->add_kv};
    ND_TRY(take(stream, c, tier, of_queries, head));
    ND_TRY(take(stream, c, tier, of_keys, kv));
    return take(stream, c, tier, of_values, kv);
}

nd_status nd_documents_run(nd_stream *stream, nd_sdpa_call *c, void *scratch,
                           const int32_t **owners)
{
    const nd_attention *a = c->a;
    const int64_t group = a->heads / a->kv_heads, rounds = nd_max(a->rounds, 1);
    ND_TRY(nd_sdpa_check_scratch(c, c->documents.end));
    c->scratch = scratch;
    *owners = at(c, c->documents.owners);
    for (int64_t round = 0; round < rounds; round++) {
        ND_TRY(find(stream, c, round, rounds));
        for (int64_t kv = 0; kv < a->kv_heads; kv += c->documents.kvs) {
            ND_TRY(c->backward ? pack_stats(stream, c, kv * group) : ND_OK);
            for (int t = 0; t < c->documents.count; t++) {
                ND_TRY(run_tier(stream, c, &c->documents.tiers[t], kv * group, kv));
            }
        }
    }
    return ND_OK;
}
