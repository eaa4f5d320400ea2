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

/* One op as calls of cuDNN, one for each tier. */
typedef struct documents_call {
    nd_cuda_context *context;
    const nd_attention *a;
    bool backward;
    nd_tensor q, k, v, out, dout;
    nd_tensor lse, first_key;
    nd_document_tiers tiers;
    nd_documents_layout layout;
    char *scratch;
} documents_call;

static nd_tensor heads_of_all(const nd_attention *a, void *data, int64_t heads)
{
    return nd_tensor_4d(data, ND_DTYPE_BF16, a->batch, a->sq, heads, a->head_dim);
}

/* Whether the tokens of all sequences lie at equal distances. */
static bool is_even(const nd_attention *a, nd_tensor t)
{
    return nd_sdpa_is_aligned(t) && (a->batch == 1 || t.stride[0] == a->sq * t.stride[1]);
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
    const nd_tensor of_heads = heads_of_all(a, NULL, a->heads);
    const nd_tensor of_kv = heads_of_all(a, NULL, a->kv_heads);
    nd_sdpa_form form;
    memset(&form, 0, sizeof form); /* compared by bytes */
    form.batch = tier->slots;
    form.sq = form.sk = tier->most;
    form.heads = a->heads;
    form.kv_heads = a->kv_heads;
    form.head_dim = a->head_dim;
    form.q = strides_of(c->q, tier->most);
    form.k = strides_of(c->k, tier->most);
    form.v = strides_of(c->v, tier->most);
    form.out = strides_of(c->backward ? c->out : of_heads, tier->most);
    form.scale = a->scale;
    form.mask = ND_SDPA_TOP_LEFT;
    form.tokens = a->batch * a->sq;
    if (c->backward) {
        form.backward = true;
        form.dout = strides_of(c->dout, tier->most);
        form.dq = strides_of(of_heads, tier->most);
        form.dk = form.dv = strides_of(of_kv, tier->most);
    }
    return form;
}

/* Makes the plans of all tiers that do not exist yet. */
static nd_status plan(documents_call *c)
{
    size_t workspace = 0, bytes = 0;
    c->tiers = nd_document_tiers_of(c->a);
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
    const bool taken = c->first_key.data && fits(c->context, c->a, c->q.dtype) &&
                       is_even(c->a, c->q) && is_even(c->a, c->k) && is_even(c->a, c->v) &&
                       c->k.stride[1] == c->v.stride[1] &&
                       (!c->backward || (is_even(c->a, c->out) && is_even(c->a, c->dout)));
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
                            .lse = x->lse,
                            .first_key = x->first_key};
}

static documents_call backward_call(nd_cuda_context *context, const nd_attention_bwd_args *x)
{
    return (documents_call){.context = context,
                            .a = &x->attention,
                            .backward = true,
                            .q = x->q,
                            .k = x->k,
                            .v = x->v,
                            .out = x->out,
                            .dout = x->dout,
                            .lse = x->lse,
                            .first_key = x->first_key};
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

static int32_t *owners_of(const documents_call *c)
{
    return (int32_t *)(void *)(c->scratch + c->layout.owners);
}

static float *stats_of(const documents_call *c)
{
    return (float *)(void *)(c->scratch + c->layout.stats);
}

/* Finds the documents on the GPU. */
static nd_status begin(nd_stream *stream, documents_call *c, void *scratch)
{
    const nd_attention *a = c->a;
    if (c->layout.end > c->context->attention_scratch) {
        return nd_fail(ND_ERR_INTERNAL,
                       "attention of documents needs %zu bytes of scratch; %zu were planned",
                       c->layout.end, c->context->attention_scratch);
    }
    c->scratch = scratch;
    nd_documents_find_args find = {
        .tiers = c->tiers, .first_key = c->first_key.data, .owners = owners_of(c)};
    for (int t = 0; t < c->tiers.count; t++) {
        find.lengths[t] = (int32_t *)(void *)(c->scratch + c->layout.lengths[t]);
        find.starts[t] = (int64_t *)(void *)(c->scratch + c->layout.starts[t]);
    }
    const int64_t of_heads = a->heads * a->head_dim;
    find.widths[ND_RAGGED_Q] = c->q.stride[1];
    find.widths[ND_RAGGED_KV] = c->k.stride[1];
    find.widths[ND_RAGGED_OUT] = c->backward ? c->out.stride[1] : of_heads;
    find.widths[ND_RAGGED_STATS] = a->heads;
    find.widths[ND_RAGGED_DOUT] = c->backward ? c->dout.stride[1] : 0;
    find.widths[ND_RAGGED_DQ] = of_heads;
    find.widths[ND_RAGGED_DKV] = a->kv_heads * a->head_dim;
    return nd_cuda_op_done(stream, "attention: documents",
                           (cudaError_t)nd_cuda_documents_find(nd_cuda_stream(stream), &find));
}

static nd_status run_tier(nd_stream *stream, const documents_call *c, int t)
{
    const nd_document_tier *tier = &c->tiers.of[t];
    const nd_sdpa_form form = form_of(c, tier);
    char *rows = c->scratch + c->layout.rows;
    nd_sdpa_tensors at = {.q = c->q.data,
                          .k = c->k.data,
                          .v = c->v.data,
                          .out = c->backward ? c->out.data : rows,
                          .stats = stats_of(c),
                          .dout = c->dout.data,
                          .dq = rows,
                          .dk = c->scratch + c->layout.keys[0],
                          .dv = c->scratch + c->layout.keys[1],
                          .workspace = c->scratch,
                          .lengths = (int32_t *)(void *)(c->scratch + c->layout.lengths[t])};
    for (int k = 0; k < ND_RAGGED_KINDS; k++) {
        at.starts[k] =
            (int64_t *)(void *)(c->scratch + c->layout.starts[t]) + k * (tier->slots + 1);
    }
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &at));
    return nd_cuda_op_done(stream, c->backward ? "attention_bwd" : "attention_fwd", cudaSuccess);
}

/* Rows of the tier's documents, out of the scratch. */
static nd_status take(nd_stream *stream, const documents_call *c, int tier, nd_tensor out,
                      size_t from, bool add)
{
    nd_documents_take_args args = {.out = out,
                                   .x = heads_of_all(c->a, c->scratch + from, out.shape[2]),
                                   .owners = owners_of(c),
                                   .tier = tier,
                                   .add = add};
    int launched = nd_cuda_documents_take(nd_cuda_stream(stream), &args);
    return nd_cuda_op_done(stream, "attention: rows of documents", (cudaError_t)launched);
}

static nd_status move_stats(nd_stream *stream, const documents_call *c, int tier)
{
    nd_documents_stats_args args = {.lse = c->lse,
                                    .stats = stats_of(c),
                                    .owners = owners_of(c),
                                    .tier = tier,
                                    .to_lse = !c->backward};
    int launched = nd_cuda_documents_stats(nd_cuda_stream(stream), &args);
    return nd_cuda_op_done(stream, "attention: statistics", (cudaError_t)launched);
}

nd_status nd_documents_fwd(nd_stream *stream, const nd_attention_fwd_args *args, bool *taken)
{
    documents_call c = forward_call(nd_cuda_context_of(stream->device), args);
    *taken = takes(&c);
    if (!*taken) {
        return ND_OK;
    }
    ND_TRY(begin(stream, &c, args->scratch));
    for (int t = 0; t < c.tiers.count; t++) {
        ND_TRY(run_tier(stream, &c, t));
        ND_TRY(take(stream, &c, t, args->out, c.layout.rows, false));
        ND_TRY(move_stats(stream, &c, t));
    }
    int launched = nd_cuda_attention_plain_fwd(nd_cuda_stream(stream), args, owners_of(&c));
    return nd_cuda_op_done(stream, "attention_plain_fwd", (cudaError_t)launched);
}

nd_status nd_documents_bwd(nd_stream *stream, const nd_attention_bwd_args *args, bool *taken)
{
    documents_call c = backward_call(nd_cuda_context_of(stream->device), args);
    *taken = takes(&c);
    if (!*taken) {
        return ND_OK;
    }
    ND_TRY(begin(stream, &c, args->scratch));
    ND_TRY(move_stats(stream, &c, 0));
    for (int t = 0; t < c.tiers.count; t++) {
        ND_TRY(run_tier(stream, &c, t));
        ND_TRY(take(stream, &c, t, args->dq, c.layout.rows, args->add_q));
        ND_TRY(take(stream, &c, t, args->dk, c.layout.keys[0], args->add_kv));
        ND_TRY(take(stream, &c, t, args->dv, c.layout.keys[1], args->add_kv));
    }
    int launched = nd_cuda_attention_plain_bwd(nd_cuda_stream(stream), args, owners_of(&c));
    return nd_cuda_op_done(stream, "attention_plain_bwd", (cudaError_t)launched);
}
