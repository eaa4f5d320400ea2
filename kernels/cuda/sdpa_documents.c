// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/documents.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/device/cuda_check.h"

/* Older ones may make NaN on Hopper where there is something between documents
 * (NVIDIA/TransformerEngine, issue 2186). */
enum { OLDEST = 91800 };

/* One op as calls of cuDNN, one for each round, tier and group of KV heads. */
typedef struct documents_call {
    nd_cuda_context *context;
    const nd_attention *a;
    bool backward, add_q, add_kv;
    nd_tensor q, k, v, out, dout, dq, dk, dv;
    nd_tensor lse, first_key, end_key;
    nd_document_tiers tiers;
    nd_documents_layout layout;
    char *scratch;
} documents_call;

/* Results of a group of heads in the scratch. */
static nd_tensor results_of(const documents_call *c, size_t at, int64_t rows, int64_t heads)
{
    return nd_tensor_4d(c->scratch + at, ND_DTYPE_BF16, c->a->batch, rows, heads, c->a->head_dim);
}

static int64_t heads_of(const documents_call *c)
{
    return c->layout.kvs * (c->a->heads / c->a->kv_heads);
}

static int32_t rounds_of(const nd_attention *a)
{
    return a->rounds > 0 ? (int32_t)a->rounds : 1;
}

/* Whether the tokens of all sequences lie at equal distances. */
static bool is_even(const nd_attention *a, nd_tensor t)
{
    return nd_sdpa_is_aligned(t) && (a->batch == 1 || t.stride[0] == t.shape[1] * t.stride[1]);
}

static bool fits(const nd_cuda_context *context, const nd_attention *a, nd_dtype act)
{
    return !context->no_documents && nd_cudnn_version(context->cudnn) >= OLDEST &&
           (context->capability / 10 == 9 || context->capability / 10 == 10) &&
           nd_cuda_sdpa_is_cudnn(a, act) && nd_documents_fit(a, context->deterministic);
}

static nd_sdpa_strides strides_of(nd_tensor t, int64_t rows)
{
    return (nd_sdpa_strides){rows * t.stride[1], t.stride[1], t.stride[2]};
}

static nd_sdpa_form form_of(const documents_call *c, const nd_document_tier *tier)
{
    const nd_attention *a = c->a;
    const int64_t D = a->head_dim, heads = heads_of(c), kvs = c->layout.kvs;
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
    form.q = strides_of(c->q, tier->rows);
    form.k = strides_of(c->k, tier->keys);
    form.v = strides_of(c->v, tier->keys);
    form.out = c->backward ? strides_of(c->out, tier->rows) : of_heads;
    form.window = a->window;
    form.scale = a->scale;
    form.mask = a->documents == ND_SEGMENTS_WHOLE      ? ND_SDPA_TOP_LEFT
                : a->documents == ND_SEGMENTS_DIAGONAL ? ND_SDPA_BOTTOM_RIGHT
                                                       : ND_SDPA_ALL;
    form.tokens = a->batch * a->sq;
    form.key_tokens = a->batch * a->sk;
    if (c->backward) {
        form.backward = true;
        form.dout = strides_of(c->dout, tier->rows);
        form.dq = of_heads;
        form.dk = form.dv = of_kv;
    }
    return form;
}

/* Makes the plans of all tiers that do not exist yet. */
static nd_status plan(documents_call *c)
{
    size_t workspace = 0, bytes = 0;
    c->tiers = nd_document_tiers_of(c->a);
    c->layout = nd_documents_layout_of(c->a, 0, c->backward);
    for (int t = 0; t < c->tiers.count; t++) {
        const nd_sdpa_form form = form_of(c, &c->tiers.of[t]);
        ND_TRY(nd_cudnn_workspace(c->context->cudnn, &form, &bytes));
        workspace = bytes > workspace ? bytes : workspace;
    }
    c->layout = nd_documents_layout_of(c->a, workspace, c->backward);
    return ND_OK;
}

/* The plain kernels compute what cuDNN has no plan for. */
static bool takes(documents_call *c)
{
    const bool adds = c->add_kv || c->a->documents == ND_SEGMENTS_WHOLE;
    const bool taken = c->end_key.data && fits(c->context, c->a, c->q.dtype) &&
                       is_even(c->a, c->q) && is_even(c->a, c->k) && is_even(c->a, c->v) &&
                       c->k.stride[1] == c->v.stride[1] &&
                       (!c->backward || (adds && is_even(c->a, c->out) && is_even(c->a, c->dout)));
    if (taken && plan(c) != ND_OK) {
        nd_error_clear();
        c->context->no_documents = true;
        return false;
    }
    return taken;
}

static documents_call forward_call(nd_cuda_context *context, const nd_attention_fwd_args *x)
{
    return (documents_call){.context = context,
                            .a = &x->attention,
                            .q = x->q,
                            .k = x->k,
                            .v = x->v,
                            .out = x->out,
                            .lse = x->lse,
                            .first_key = x->first_key,
                            .end_key = x->end_key};
}

static documents_call backward_call(nd_cuda_context *context, const nd_attention_bwd_args *x)
{
    return (documents_call){.context = context,
                            .a = &x->attention,
                            .backward = true,
                            .add_q = x->add_q,
                            .add_kv = x->add_kv,
                            .q = x->q,
                            .k = x->k,
                            .v = x->v,
                            .out = x->out,
                            .dout = x->dout,
                            .dq = x->dq,
                            .dk = x->dk,
                            .dv = x->dv,
                            .lse = x->lse,
                            .first_key = x->first_key,
                            .end_key = x->end_key};
}

static bool note(documents_call *c)
{
    const bool taken = takes(c);
    if (taken && c->layout.end > c->context->attention_scratch) {
        c->context->attention_scratch = c->layout.end;
    }
    return taken;
}

bool nd_documents_prepare_fwd(nd_cuda_context *context, const nd_attention_fwd_args *args)
{
    documents_call c = forward_call(context, args);
    return note(&c);
}

bool nd_documents_prepare_bwd(nd_cuda_context *context, const nd_attention_bwd_args *args)
{
    documents_call c = backward_call(context, args);
    return note(&c);
}

static int32_t *numbers_at(const documents_call *c, size_t at)
{
    return (int32_t *)(void *)(c->scratch + at);
}

static float *stats_of(const documents_call *c)
{
    return (float *)(void *)(c->scratch + c->layout.stats);
}

static int64_t *starts_of(const documents_call *c, int tier)
{
    return (int64_t *)(void *)(c->scratch + c->layout.starts[tier]);
}

static nd_status place(documents_call *c, void *scratch)
{
    c->scratch = scratch;
    return c->layout.end <= c->context->attention_scratch
               ? ND_OK
               : nd_fail(ND_ERR_INTERNAL,
                         "attention of documents needs %zu bytes of scratch; %zu were planned",
                         c->layout.end, c->context->attention_scratch);
}

/* Finds the segments of a round on the GPU. */
static nd_status find(nd_stream *stream, const documents_call *c, int round)
{
    const nd_attention *a = c->a;
    nd_documents_find_args find = {.tiers = c->tiers,
                                   .form = a->documents,
                                   .round = round,
                                   .rounds = rounds_of(c->a),
                                   .first_key = c->first_key.data,
                                   .end_key = c->end_key.data,
                                   .owners = numbers_at(c, c->layout.owners),
                                   .key_owners = numbers_at(c, c->layout.key_owners)};
    for (int t = 0; t < c->tiers.count; t++) {
        find.lengths[t] = numbers_at(c, c->layout.lengths[t]);
        find.starts[t] = starts_of(c, t);
    }
    const int64_t heads = heads_of(c);
    find.widths[ND_RAGGED_Q] = c->q.stride[1];
    find.widths[ND_RAGGED_KV] = c->k.stride[1];
    find.widths[ND_RAGGED_OUT] = c->backward ? c->out.stride[1] : heads * a->head_dim;
    find.widths[ND_RAGGED_STATS] = heads;
    find.widths[ND_RAGGED_DOUT] = c->backward ? c->dout.stride[1] : 0;
    find.widths[ND_RAGGED_DQ] = heads * a->head_dim;
    find.widths[ND_RAGGED_DKV] = c->layout.kvs * a->head_dim;
    return nd_cuda_op_done(stream, "attention: documents",
                           (cudaError_t)nd_cuda_documents_find(nd_cuda_stream(stream), &find));
}

static nd_status run_tier(nd_stream *stream, const documents_call *c, int t, int64_t head,
                          int64_t kv)
{
    const nd_document_tier *tier = &c->tiers.of[t];
    const nd_sdpa_form form = form_of(c, tier);
    char *rows = c->scratch + c->layout.rows;
    nd_sdpa_tensors at = {.q = nd_sdpa_at(c->q, 0, head).data,
                          .k = nd_sdpa_at(c->k, 0, kv).data,
                          .v = nd_sdpa_at(c->v, 0, kv).data,
                          .out = c->backward ? nd_sdpa_at(c->out, 0, head).data : rows,
                          .stats = stats_of(c),
                          .dout = c->backward ? nd_sdpa_at(c->dout, 0, head).data : NULL,
                          .dq = rows,
                          .dk = c->scratch + c->layout.keys[0],
                          .dv = c->scratch + c->layout.keys[1],
                          .workspace = c->scratch,
                          .rows = numbers_at(c, c->layout.lengths[t])};
    at.keys = at.rows + tier->slots;
    for (int k = 0; k < ND_RAGGED_KINDS; k++) {
        at.starts[k] = starts_of(c, t) + k * (tier->slots + 1);
    }
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &at));
    return nd_cuda_op_done(stream, c->backward ? "attention_bwd" : "attention_fwd", cudaSuccess);
}

/* Takes the rows of one owner, in some heads from `head` on, out of the scratch. */
static nd_status take(nd_stream *stream, nd_tensor out, int64_t head, nd_tensor from,
                      const int32_t *owners, int owner, bool add)
{
    nd_documents_take_args args = {.out = nd_sdpa_part(out, 0, out.shape[1], head, from.shape[2]),
                                   .x = from,
                                   .owners = owners,
                                   .owner = owner,
                                   .add = add};
    int launched = nd_cuda_documents_take(nd_cuda_stream(stream), &args);
    return nd_cuda_op_done(stream, "attention: rows of documents", (cudaError_t)launched);
}

static nd_status move_stats(nd_stream *stream, const documents_call *c, int64_t head, int owner)
{
    nd_documents_stats_args args = {.lse = c->lse,
                                    .stats = stats_of(c),
                                    .owners = numbers_at(c, c->layout.owners),
                                    .owner = owner,
                                    .to_lse = !c->backward};
    args.lse.data = (float *)c->lse.data + head * c->a->sq;
    args.lse.shape[1] = heads_of(c);
    int launched = nd_cuda_documents_stats(nd_cuda_stream(stream), &args);
    return nd_cuda_op_done(stream, "attention: statistics", (cudaError_t)launched);
}

static nd_status take_results(nd_stream *stream, const documents_call *c, int owner, int64_t head,
                              int64_t kv)
{
    const nd_documents_layout *l = &c->layout;
    const int32_t *owners = numbers_at(c, l->owners), *of_keys = numbers_at(c, l->key_owners);
    const nd_tensor rows = results_of(c, l->rows, c->a->sq, heads_of(c));
    const nd_tensor dk = results_of(c, l->keys[0], c->a->sk, l->kvs);
    const nd_tensor dv = results_of(c, l->keys[1], c->a->sk, l->kvs);
    if (!c->backward) {
        ND_TRY(take(stream, c->out, head, rows, owners, owner, false));
        return move_stats(stream, c, head, owner);
    }
    ND_TRY(take(stream, c->dq, head, rows, owners, owner, c->add_q));
    ND_TRY(take(stream, c->dk, kv, dk, of_keys, owner, c->add_kv));
    return take(stream, c->dv, kv, dv, of_keys, owner, c->add_kv);
}

static nd_status run(nd_stream *stream, const documents_call *c)
{
    const int64_t group = c->a->heads / c->a->kv_heads;
    for (int round = 0; round < rounds_of(c->a); round++) {
        ND_TRY(find(stream, c, round));
        for (int64_t kv = 0; kv < c->a->kv_heads; kv += c->layout.kvs) {
            ND_TRY(c->backward ? move_stats(stream, c, kv * group, 0) : ND_OK);
            for (int t = 0; t < c->tiers.count; t++) {
                ND_TRY(run_tier(stream, c, t, kv * group, kv));
                ND_TRY(take_results(stream, c, round * ND_DOCUMENT_TIERS + t, kv * group, kv));
            }
        }
    }
    return ND_OK;
}

nd_status nd_documents_fwd(nd_stream *stream, const nd_attention_fwd_args *args, bool *taken)
{
    documents_call c = forward_call(nd_cuda_context_of(stream->device), args);
    *taken = takes(&c);
    if (!*taken) {
        return ND_OK;
    }
    ND_TRY(place(&c, args->scratch));
    ND_TRY(run(stream, &c));
    int launched =
        nd_cuda_attention_plain_fwd(nd_cuda_stream(stream), args, numbers_at(&c, c.layout.owners));
    return nd_cuda_op_done(stream, "attention_plain_fwd", (cudaError_t)launched);
}

nd_status nd_documents_bwd(nd_stream *stream, const nd_attention_bwd_args *args, bool *taken)
{
    documents_call c = backward_call(nd_cuda_context_of(stream->device), args);
    *taken = takes(&c);
    if (!*taken) {
        return ND_OK;
    }
    ND_TRY(place(&c, args->scratch));
    ND_TRY(run(stream, &c));
    int launched =
        nd_cuda_attention_plain_bwd(nd_cuda_stream(stream), args, numbers_at(&c, c.layout.owners));
    return nd_cuda_op_done(stream, "attention_plain_bwd", (cudaError_t)launched);
}
