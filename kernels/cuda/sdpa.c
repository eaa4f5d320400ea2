// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sdpa.h"

#include "kernels/cuda/documents.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/device/cuda_check.h"

static bool has_form(const nd_cuda_context *context, const nd_attention *a, nd_dtype act,
                     bool backward)
{
    const int64_t ordered = backward && context->deterministic ? context->ordered_bytes : 0;
    return nd_cuda_sdpa_is_cudnn(a, act) && nd_sdpa_fits(a, ordered);
}

static bool cudnn_takes(const nd_sdpa_call *c)
{
    return has_form(c->context, &c->x.attention, c->x.q.dtype, c->backward) &&
           !c->x.first_key.data && nd_sdpa_is_aligned(c->x.q) && nd_sdpa_is_aligned(c->x.k) &&
           nd_sdpa_is_aligned(c->x.v) && nd_sdpa_is_aligned(c->x.out) &&
           (!c->backward || nd_sdpa_is_aligned(c->x.dout));
}

static void note_scratch(nd_cuda_context *context, size_t bytes)
{
    if (bytes > context->attention_scratch) {
        context->attention_scratch = bytes;
    }
}

static nd_status plain_fwd(nd_stream *stream, const nd_attention_fwd_args *args,
                           const int32_t *owners)
{
    int launched = nd_cuda_attention_plain_fwd(nd_cuda_stream(stream), args, owners);
    return nd_cuda_op_done(stream, "attention_plain_fwd", (cudaError_t)launched);
}

static nd_status forward_piece(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    nd_sdpa_form form = nd_sdpa_form_of(c, p);
    nd_sdpa_tensors t = {
        .q = nd_sdpa_at(c->x.q, p->row, 0).data,
        .k = c->x.k.data,
        .v = c->x.v.data,
        .out = nd_sdpa_at(c->x.out, p->row, 0).data,
        .stats = nd_sdpa_stats(c, p),
        .workspace = c->scratch,
    };
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, "attention_fwd", cudaSuccess));
    return nd_sdpa_move_stats(stream, c, p);
}

nd_status nd_cuda_sdpa_fwd(nd_stream *stream, const nd_attention_fwd_args *args)
{
    nd_sdpa_call c = nd_sdpa_forward_call(nd_cuda_context_of(stream->device), args);
    const bool documents = nd_documents_take(&c);
    const int32_t *owners = NULL;
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    if (documents || !cudnn_takes(&c)) {
        ND_TRY(documents ? nd_documents_run(stream, &c, args->scratch, &owners) : ND_OK);
        return plain_fwd(stream, args, owners);
    }
    ND_TRY(nd_sdpa_plan(&c));
    ND_TRY(nd_sdpa_place(&c, args->scratch));
    if (c.cut.blind > 0) {
        nd_attention_fwd_args blind = *args;
        blind.attention.sq = c.cut.blind;
        blind.lse = nd_sdpa_first_rows(args->lse, c.cut.blind);
        ND_TRY(plain_fwd(stream, &blind, NULL));
    }
    while (nd_sdpa_next(&c.cut, &walk, &p)) {
        ND_TRY(forward_piece(stream, &c, &p));
    }
    return ND_OK;
}

static nd_status plain_bwd(nd_stream *stream, const nd_attention_bwd_args *args,
                           const int32_t *owners)
{
    int launched = nd_cuda_attention_plain_bwd(nd_cuda_stream(stream), args, owners);
    return nd_cuda_op_done(stream, "attention_plain_bwd", (cudaError_t)launched);
}

/* Adds up the gradient of some rows over their keys: the first piece of these rows begins the sum,
 * and the last one stores it. */
static nd_status store_queries(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p,
                               nd_tensor part, nd_tensor result)
{
    nd_tensor sum = nd_sdpa_part(c->sum_q, 0, p->rows, 0, part.shape[2]);
    if (c->x.add_q || (p->first && p->last)) {
        return nd_sdpa_store(stream, result, part, c->x.add_q);
    }
    ND_TRY(nd_sdpa_store(stream, sum, part, !p->first));
    return p->last ? nd_sdpa_store(stream, result, sum, false) : ND_OK;
}

static nd_status store_keys(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p,
                            nd_tensor dk, nd_tensor dv)
{
    bool sums = c->cut.adds_keys && !c->x.add_kv;
    nd_tensor k = sums ? c->sum_k : c->x.dk, v = sums ? c->sum_v : c->x.dv;
    bool add = sums || c->x.add_kv;
    ND_TRY(nd_sdpa_store(stream, nd_sdpa_part(k, p->key, p->keys, p->kv, p->kvs), dk, add));
    return nd_sdpa_store(stream, nd_sdpa_part(v, p->key, p->keys, p->kv, p->kvs), dv, add);
}

static nd_status backward_piece(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    int64_t group = c->x.attention.heads / c->x.attention.kv_heads, h = p->kv * group,
            heads = p->kvs * group;
    nd_tensor result = nd_sdpa_part(c->x.dq, p->row, p->rows, h, heads);
    nd_tensor dq = c->through_q ? nd_sdpa_part(c->to_q, 0, p->rows, 0, heads) : result;
    nd_tensor dk = c->through_kv ? nd_sdpa_part(c->to_k, 0, p->keys, 0, p->kvs)
                                 : nd_sdpa_part(c->x.dk, p->key, p->keys, p->kv, p->kvs);
    nd_tensor dv = c->through_kv ? nd_sdpa_part(c->to_v, 0, p->keys, 0, p->kvs)
                                 : nd_sdpa_part(c->x.dv, p->key, p->keys, p->kv, p->kvs);
    nd_sdpa_form form = nd_sdpa_form_of(c, p);
    nd_sdpa_tensors t = {
        .q = nd_sdpa_at(c->x.q, p->row, h).data,
        .k = nd_sdpa_at(c->x.k, p->key, p->kv).data,
        .v = nd_sdpa_at(c->x.v, p->key, p->kv).data,
        .out = nd_sdpa_at(c->x.out, p->row, h).data,
        .stats = nd_sdpa_stats(c, p),
        .dout = nd_sdpa_at(c->x.dout, p->row, h).data,
        .dq = dq.data,
        .dk = dk.data,
        .dv = dv.data,
        .workspace = c->scratch,
    };
    if (p->first) {
        ND_TRY(nd_sdpa_move_stats(stream, c, p));
    }
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, "attention_bwd", cudaSuccess));
    if (c->through_q) {
        ND_TRY(store_queries(stream, c, p, dq, result));
    }
    return c->through_kv ? store_keys(stream, c, p, dk, dv) : ND_OK;
}

static nd_status backward_pieces(nd_stream *stream, const nd_sdpa_call *c)
{
    bool sums = c->cut.adds_keys && !c->x.add_kv;
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    if (sums) {
        /* The table directly, since nd_zero would be an op of its own to a CUDA graph. */
        size_t bytes = c->layout.end - c->layout.sum_k;
        ND_TRY(stream->device->table->zero(stream, c->sum_k.data, bytes));
    }
    while (nd_sdpa_next(&c->cut, &walk, &p)) {
        ND_TRY(backward_piece(stream, c, &p));
    }
    if (sums) {
        ND_TRY(nd_sdpa_store(stream, c->x.dk, c->sum_k, false));
        ND_TRY(nd_sdpa_store(stream, c->x.dv, c->sum_v, false));
    }
    return ND_OK;
}

static nd_status check_delta(const nd_sdpa_call *c)
{
    return c->x.delta.data || cudnn_takes(c)
               ? ND_OK
               : nd_fail(ND_ERR_INTERNAL,
                         "attention's backward without delta needs tensors at multiples of 16 "
                         "bytes, with strides of multiples of 8 elements, and no first_key");
}

nd_status nd_cuda_sdpa_bwd(nd_stream *stream, const nd_attention_bwd_args *args)
{
    nd_sdpa_call c = {.context = nd_cuda_context_of(stream->device), .backward = true, .x = *args};
    const bool documents = nd_documents_take(&c);
    const int32_t *owners = NULL;
    ND_TRY(check_delta(&c));
    if (documents || !cudnn_takes(&c)) {
        ND_TRY(documents ? nd_documents_run(stream, &c, args->scratch, &owners) : ND_OK);
        return plain_bwd(stream, args, owners);
    }
    ND_TRY(nd_sdpa_plan(&c));
    ND_TRY(nd_sdpa_place(&c, args->scratch));
    if (c.cut.blind > 0) {
        nd_attention_bwd_args blind = *args;
        blind.attention.sq = c.cut.blind;
        blind.dk = blind.delta = (nd_tensor){0};
        blind.lse = nd_sdpa_first_rows(args->lse, c.cut.blind);
        blind.add_kv = false;
        ND_TRY(plain_bwd(stream, &blind, NULL));
    }
    return backward_pieces(stream, &c);
}

/* Whether documents stay cuDNN's. A context without a device only plans. */
static bool keeps_documents(nd_cuda_context *context, const nd_attention *a)
{
    const int bit = 1 << (2 * (int)a->documents + (a->window > 0));
    if (context->device && !(context->documents_checked & bit)) {
        context->documents_checked |= bit;
        context->no_documents |= !nd_documents_are_right(context, a);
    }
    return !context->no_documents;
}

/* A call that cuDNN takes, or one of the plain kernels, which need nothing. */
static nd_status prepare(nd_sdpa_call *c)
{
    nd_cuda_context *context = c->context;
    if (nd_documents_take(c) && keeps_documents(context, &c->x.attention)) {
        note_scratch(context, c->documents.end);
    } else if (cudnn_takes(c)) {
        ND_TRY(nd_sdpa_plan(c));
        note_scratch(context, c->layout.end);
    } else {
        context->plain_documents |= c->x.first_key.data != NULL;
        nd_sdpa_call open = *c;
        open.x.attention.window = 0;
        context->plain_windows |= c->x.attention.window > 0 && cudnn_takes(&open);
        return ND_OK;
    }
    context->attention_prepared = true;
    return ND_OK;
}

nd_status nd_cuda_sdpa_prepare_fwd(nd_cuda_context *context, const nd_attention_fwd_args *args)
{
    nd_sdpa_call c = nd_sdpa_forward_call(context, args);
    return prepare(&c);
}

nd_status nd_cuda_sdpa_prepare_bwd(nd_cuda_context *context, const nd_attention_bwd_args *args)
{
    nd_sdpa_call c = {.context = context, .backward = true, .x = *args};
    ND_TRY(check_delta(&c));
    return prepare(&c);
}

/* Scratch of a block of contiguous tensors, by its plans; 0 when they cannot be made: the call
 * itself then fails with the message of the plan. */
static size_t scratch_by_plans(nd_cuda_context *context, const nd_attention *a, bool backward)
{
    nd_tensor q = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sq, a->heads, a->head_dim);
    nd_tensor k = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sk, a->kv_heads, a->head_dim);
    nd_tensor lse = nd_tensor_3d(NULL, ND_DTYPE_F32, a->batch, a->heads, a->sq);
    nd_sdpa_call c = {.context = context,
                      .backward = backward,
                      .x = {.attention = *a, .q = q, .k = k, .v = k, .out = q, .lse = lse}};
    if (backward) {
        c.x.dout = c.x.dq = q;
        c.x.dk = c.x.dv = k;
    }
    if (nd_sdpa_plan(&c) != ND_OK) {
        nd_error_clear();
        return 0;
    }
    return c.layout.end;
}

size_t nd_cuda_sdpa_scratch(nd_cuda_context *context, const nd_attention *a, nd_dtype act,
                            bool backward)
{
    int64_t ordered = context->deterministic ? context->ordered_bytes : 0;
    size_t bytes = nd_cuda_sdpa_scratch_by_formula(a, act, backward, ordered);
    const bool form = has_form(context, a, act, backward);
    if (form || (nd_cuda_sdpa_is_cudnn(a, act) && nd_documents_fit(a, context->deterministic))) {
        size_t asked = context->attention_prepared ? context->attention_scratch
                       : form                      ? scratch_by_plans(context, a, backward)
                                                   : 0;
        bytes = asked > bytes ? asked : bytes;
        note_scratch(context, bytes);
    }
    return bytes;
}
