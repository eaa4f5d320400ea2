// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sdpa.h"

#include <string.h>

#include "kernels/cuda/attention_plain.h"
#include "runtime/device/cuda_check.h"

enum { HEAD_DIM_MAX = 128 };

static bool is_aligned(nd_tensor t)
{
    return (uintptr_t)t.data % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 &&
           t.stride[2] % 8 == 0;
}

bool nd_cuda_sdpa_is_cudnn(const nd_attention *a, nd_dtype act)
{
    return act == ND_DTYPE_BF16 && a->head_dim % 8 == 0 && a->head_dim <= HEAD_DIM_MAX;
}

static bool cudnn_takes(const nd_attention *a, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out)
{
    return nd_cuda_sdpa_is_cudnn(a, q.dtype) && is_aligned(q) && is_aligned(k) && is_aligned(v) &&
           is_aligned(out);
}

static nd_sdpa_strides strides_of(nd_tensor t)
{
    return (nd_sdpa_strides){t.stride[0], t.stride[1], t.stride[2]};
}

static nd_tensor at_head(nd_tensor t, int64_t row, int64_t head)
{
    t.data =
        (char *)t.data + (row * t.stride[1] + head * t.stride[2]) * (int64_t)nd_dtype_size(t.dtype);
    return t;
}

static nd_sdpa_form form_of(const nd_attention *a, const nd_sdpa_piece *p, nd_tensor q, nd_tensor k,
                            nd_tensor v, nd_tensor out, nd_tensor lse)
{
    nd_sdpa_form form;
    memset(&form, 0, sizeof form); /* compared by bytes */
    form.batch = a->batch;
    form.sq = p->rows;
    form.sk = p->keys;
    form.heads = p->kvs * (a->heads / a->kv_heads);
    form.kv_heads = p->kvs;
    form.head_dim = a->head_dim;
    form.q = strides_of(q);
    form.k = strides_of(k);
    form.v = strides_of(v);
    form.out = strides_of(out);
    form.stats_batch = lse.stride[0];
    form.stats_head = lse.stride[1];
    form.scale = a->scale;
    form.mask = (int32_t)p->mask;
    return form;
}

static float *stats_at(nd_tensor lse, int64_t row, int64_t head)
{
    return (float *)lse.data + head * lse.stride[1] + row;
}

/* The same block with fewer rows, for the plain kernels. */
static nd_tensor first_rows_of_stats(nd_tensor lse, int64_t rows)
{
    lse.shape[2] = rows;
    return lse;
}

nd_status nd_cuda_sdpa_fwd(nd_stream *stream, const nd_attention *a, nd_tensor out, nd_tensor lse,
                           nd_tensor q, nd_tensor k, nd_tensor v, void *scratch)
{
    nd_cuda_context *context = nd_cuda_context_of(stream->device);
    cudaStream_t queue = nd_cuda_stream(stream);
    if (!cudnn_takes(a, q, k, v, out)) {
        int launched = nd_cuda_attention_plain_fwd(queue, a, out, lse, q, k, v);
        return nd_cuda_op_done(stream, "attention_plain_fwd", (cudaError_t)launched);
    }
    nd_sdpa_cut c = nd_sdpa_cut_block(a, false);
    if (c.blind > 0) {
        nd_attention none = *a;
        none.sq = c.blind;
        int launched = nd_cuda_attention_plain_fwd(queue, &none, out,
                                                   first_rows_of_stats(lse, c.blind), q, k, v);
        ND_TRY(nd_cuda_op_done(stream, "attention_plain_fwd", (cudaError_t)launched));
    }
    for (int64_t i = 0; i < c.count; i++) {
        nd_sdpa_piece p = nd_sdpa_piece_at(a, &c, i);
        nd_sdpa_form form = form_of(a, &p, q, k, v, out, lse);
        nd_sdpa_tensors t = {
            .q = at_head(q, p.row, 0).data,
            .k = k.data,
            .v = v.data,
            .out = at_head(out, p.row, 0).data,
            .stats = stats_at(lse, p.row, 0),
            .workspace = scratch,
        };
        ND_TRY(nd_cudnn_run(context->cudnn, stream, &form, &t));
        ND_TRY(nd_cuda_op_done(stream, "attention_fwd", cudaSuccess));
    }
    return ND_OK;
}

static size_t workspace_of(const nd_cuda_context *context, const nd_attention *a,
                           const nd_sdpa_piece *p, bool backward, bool ordered)
{
    size_t formula = nd_sdpa_workspace_by_formula(a, p, backward, ordered), asked = 0;
    if (!context) {
        return formula;
    }
    int64_t row_q = a->heads * a->head_dim, row_k = a->kv_heads * a->head_dim;
    nd_tensor q = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sq, a->heads, a->head_dim);
    nd_tensor k = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sk, a->kv_heads, a->head_dim);
    nd_tensor lse = nd_tensor_3d(NULL, ND_DTYPE_F32, a->batch, a->heads, a->sq);
    nd_sdpa_form form = form_of(a, p, q, k, k, q, lse);
    form.backward = backward;
    form.deterministic = backward && ordered;
    form.dout = form.dq = (nd_sdpa_strides){a->sq * row_q, row_q, a->head_dim};
    form.dk = form.dv = (nd_sdpa_strides){a->sk * row_k, row_k, a->head_dim};
    /* What cannot be planned here is said by the call itself, with the plan's own words. */
    if (nd_cudnn_workspace(context->cudnn, &form, &asked) != ND_OK) {
        nd_error_clear();
    }
    return asked > formula ? asked : formula;
}

size_t nd_cuda_sdpa_scratch(nd_cuda_context *context, const nd_attention *a, nd_dtype act,
                            bool backward, bool deterministic)
{
    if (!nd_cuda_sdpa_is_cudnn(a, act)) {
        return 256;
    }
    size_t workspace = 256;
    bool ordered = backward && deterministic;
    nd_sdpa_cut c = nd_sdpa_cut_block(a, ordered);
    for (int64_t i = 0; i < c.count; i++) {
        nd_sdpa_piece p = nd_sdpa_piece_at(a, &c, i); /* later heads are as many, or fewer */
        size_t bytes = p.kv > 0 ? 0 : workspace_of(context, a, &p, backward, ordered);
        workspace = bytes > workspace ? bytes : workspace;
    }
    size_t bytes = backward ? nd_sdpa_layout_of(a, &c, workspace).end : workspace;
    if (context && bytes > context->attention_scratch) {
        context->attention_scratch = bytes;
    }
    return bytes;
}

/* dst (+)= src: (B, S, heads, D) views of which src is contiguous; matrix by matrix. */
static nd_status store(nd_stream *stream, nd_tensor dst, nd_tensor src, bool add)
{
    int64_t heads = dst.shape[2], D = dst.shape[3];
    bool whole_rows = dst.stride[2] == D && src.stride[2] == D;
    int64_t columns = whole_rows ? heads * D : D, views = whole_rows ? 1 : heads;
    for (int64_t b = 0; b < dst.shape[0]; b++) {
        for (int64_t h = 0; h < views; h++) {
            nd_tensor to = nd_tensor_2d(at_head(dst, 0, h).data, dst.dtype, dst.shape[1], columns);
            nd_tensor from =
                nd_tensor_2d(at_head(src, 0, h).data, src.dtype, dst.shape[1], columns);
            to.data = (char *)to.data + b * dst.stride[0] * (int64_t)nd_dtype_size(dst.dtype);
            from.data = (char *)from.data + b * src.stride[0] * (int64_t)nd_dtype_size(src.dtype);
            to.stride[0] = dst.stride[1];
            from.stride[0] = src.stride[1];
            int launched = add ? nd_cuda_accumulate(nd_cuda_stream(stream), to, from)
                               : nd_cuda_cast(nd_cuda_stream(stream), to, from);
            ND_TRY(nd_cuda_op_done(stream, "attention_bwd: store", (cudaError_t)launched));
        }
    }
    return ND_OK;
}

/* Rows and heads of one piece of a (B, S, heads, D) view. */
static nd_tensor part_of(nd_tensor t, int64_t row, int64_t rows, int64_t head, int64_t heads)
{
    t = at_head(t, row, head);
    t.shape[1] = rows;
    t.shape[2] = heads;
    return t;
}

typedef struct backward {
    const nd_attention *a;
    nd_tensor dq, dk, dv, q, k, v, out, dout, lse;
    nd_tensor to_q, to_k, to_v; /* what cuDNN writes: the results themselves or the scratch */
    nd_tensor sum_k, sum_v;     /* F32, where pieces add up */
    bool through_q, through_kv; /* to_* are scratch */
    bool add_q, add_kv, ordered, adds_keys;
    void *workspace;
} backward;

static nd_sdpa_form backward_form(const backward *w, const nd_sdpa_piece *p)
{
    nd_sdpa_form form = form_of(w->a, p, w->q, w->k, w->v, w->out, w->lse);
    form.backward = true;
    form.deterministic = w->ordered;
    form.dout = strides_of(w->dout);
    form.dq = strides_of(w->to_q);
    form.dk = strides_of(w->to_k);
    form.dv = strides_of(w->to_v);
    return form;
}

static nd_status run_piece(nd_stream *stream, const backward *w, const nd_sdpa_piece *p)
{
    nd_cuda_context *context = nd_cuda_context_of(stream->device);
    int64_t group = w->a->heads / w->a->kv_heads, h = p->kv * group, heads = p->kvs * group;
    nd_tensor dq = part_of(w->to_q, p->row, p->rows, h, heads);
    nd_tensor dk = part_of(w->to_k, 0, p->keys, p->kv, p->kvs);
    nd_tensor dv = part_of(w->to_v, 0, p->keys, p->kv, p->kvs);
    nd_sdpa_form form = backward_form(w, p);
    nd_sdpa_tensors t = {
        .q = at_head(w->q, p->row, h).data,
        .k = at_head(w->k, 0, p->kv).data,
        .v = at_head(w->v, 0, p->kv).data,
        .out = at_head(w->out, p->row, h).data,
        .stats = stats_at(w->lse, p->row, h),
        .dout = at_head(w->dout, p->row, h).data,
        .dq = dq.data,
        .dk = dk.data,
        .dv = dv.data,
        .workspace = w->workspace,
    };
    ND_TRY(nd_cudnn_run(context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, "attention_bwd", cudaSuccess));
    if (w->through_q) {
        ND_TRY(store(stream, part_of(w->dq, p->row, p->rows, h, heads), dq, w->add_q));
    }
    if (w->through_kv) {
        bool add = w->add_kv || w->adds_keys;
        nd_tensor k = w->add_kv ? w->dk : w->adds_keys ? w->sum_k : w->dk;
        nd_tensor v = w->add_kv ? w->dv : w->adds_keys ? w->sum_v : w->dv;
        ND_TRY(store(stream, part_of(k, 0, p->keys, p->kv, p->kvs), dk, add));
        ND_TRY(store(stream, part_of(v, 0, p->keys, p->kv, p->kvs), dv, add));
    }
    return ND_OK;
}

static nd_tensor in_scratch(void *scratch, size_t offset, nd_dtype dtype, nd_tensor like)
{
    return nd_tensor_4d((char *)scratch + offset, dtype, like.shape[0], like.shape[1],
                        like.shape[2], like.shape[3]);
}

/* Where everything of this call lies; what is written directly keeps its strides, and the plans are
 * for those. */
static nd_status place(nd_cuda_context *context, backward *w, const nd_sdpa_cut *c, void *scratch,
                       nd_sdpa_layout *out)
{
    size_t workspace = 256, bytes = 0;
    nd_sdpa_layout l = {0};
    for (int pass = 0; pass < 2; pass++) {
        l = nd_sdpa_layout_of(w->a, c, workspace);
        w->to_q = w->through_q ? in_scratch(scratch, l.dq, ND_DTYPE_BF16, w->dq) : w->dq;
        w->to_k = w->through_kv ? in_scratch(scratch, l.dk, ND_DTYPE_BF16, w->dk) : w->dk;
        w->to_v = w->through_kv ? in_scratch(scratch, l.dv, ND_DTYPE_BF16, w->dv) : w->dv;
        w->sum_k = in_scratch(scratch, l.sum_k, ND_DTYPE_F32, w->dk);
        w->sum_v = in_scratch(scratch, l.sum_v, ND_DTYPE_F32, w->dv);
        for (int64_t i = 0; i < c->count && pass == 0; i++) {
            nd_sdpa_piece p = nd_sdpa_piece_at(w->a, c, i);
            nd_sdpa_form form = backward_form(w, &p);
            ND_TRY(nd_cudnn_workspace(context->cudnn, &form, &bytes));
            workspace = bytes > workspace ? bytes : workspace;
        }
    }
    if (l.end > context->attention_scratch) {
        return nd_fail(ND_ERR_INTERNAL,
                       "attention's backward of %lld rows and %lld keys needs %zu bytes of "
                       "scratch; %zu were planned",
                       (long long)w->a->sq, (long long)w->a->sk, l.end, context->attention_scratch);
    }
    *out = l;
    return ND_OK;
}

static nd_status plain_bwd(nd_stream *stream, const nd_attention *a, nd_tensor dq, nd_tensor dk,
                           nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor dout,
                           nd_tensor lse, nd_tensor delta, bool add_q, bool add_kv)
{
    int launched = nd_cuda_attention_plain_bwd(nd_cuda_stream(stream), a, dq, dk, dv, q, k, v, dout,
                                               lse, delta, add_q, add_kv);
    return nd_cuda_op_done(stream, "attention_plain_bwd", (cudaError_t)launched);
}

nd_status nd_cuda_sdpa_bwd(nd_stream *stream, const nd_attention *a, nd_tensor dq, nd_tensor dk,
                           nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out,
                           nd_tensor dout, nd_tensor lse, nd_tensor delta, bool add_q, bool add_kv,
                           void *scratch)
{
    nd_cuda_context *context = nd_cuda_context_of(stream->device);
    if (!cudnn_takes(a, q, k, v, out) || !is_aligned(dout)) {
        if (!delta.data) {
            return nd_fail(ND_ERR_INTERNAL,
                           "attention's backward without delta needs tensors at multiples of 16 "
                           "bytes, with strides of multiples of 8 elements");
        }
        return plain_bwd(stream, a, dq, dk, dv, q, k, v, dout, lse, delta, add_q, add_kv);
    }
    bool ordered = context->deterministic;
    nd_sdpa_cut c = nd_sdpa_cut_block(a, ordered);
    backward w = {a, dq, dk, dv, q, k, v, out, dout, lse};
    w.through_q = dq.dtype != ND_DTYPE_BF16 || !is_aligned(dq);
    w.through_kv = dk.dtype != ND_DTYPE_BF16 || c.adds_keys || !is_aligned(dk) || !is_aligned(dv);
    w.ordered = ordered;
    w.workspace = scratch;
    nd_sdpa_layout l = {0};
    ND_TRY(place(context, &w, &c, scratch, &l));
    w.add_q = add_q;
    w.add_kv = add_kv;
    w.adds_keys = c.adds_keys;
    if (c.blind > 0) {
        nd_attention none = *a;
        none.sq = c.blind;
        ND_TRY(plain_bwd(stream, &none, dq, (nd_tensor){0}, dv, q, k, v, dout,
                         first_rows_of_stats(lse, c.blind), (nd_tensor){0}, add_q, false));
    }
    bool sums = c.adds_keys && !add_kv;
    if (sums) {
        ND_TRY(stream->device->table->zero(stream, w.sum_k.data, l.end - l.sum_k));
    }
    for (int64_t i = 0; i < c.count; i++) {
        nd_sdpa_piece p = nd_sdpa_piece_at(a, &c, i);
        ND_TRY(run_piece(stream, &w, &p));
    }
    if (sums) {
        ND_TRY(store(stream, dk, w.sum_k, false));
        ND_TRY(store(stream, dv, w.sum_v, false));
    }
    return ND_OK;
}
