// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_ops.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/lt.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "kernels/ops_check.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

/* An op that is one launch of a kernel of the same name. */
#define LAUNCH(stream_, op_, args_)                                                                \
    nd_cuda_op_done(stream_, #op_,                                                                 \
                    (cudaError_t)nd_cuda_##op_(nd_cuda_stream(stream_), (args_),                   \
                                               nd_cuda_context_of((stream_)->device)->scratch))

/* Such an op, which checks its arguments x first. */
#define OP(op, check)                                                                              \
    static nd_status op(nd_stream *s, const nd_##op##_args *x)                                     \
    {                                                                                              \
        ND_ASSERT(check);                                                                          \
        return LAUNCH(s, op, x);                                                                   \
    }

/* There is nothing to check. */
#define UNCHECKED_OP(op) OP(op, x)

static nd_lt *lt_of(const nd_stream *stream)
{
    return nd_cuda_context_of(stream->device)->lt;
}

static nd_status product(nd_stream *s, const nd_product_args *x)
{
    ND_TRY(nd_lt_product(lt_of(s), s, x, false));
    return nd_cuda_op_done(s, "product", cudaSuccess);
}

/* The kernel sorts as many tokens as its scratch holds; more go one part after the other, in
 * order. */
static nd_status embedding_bwd(nd_stream *s, const nd_embedding_bwd_args *x)
{
    int64_t n = x->dout.shape[0];
    ND_ASSERT(nd_is_vector(x->ids, ND_DTYPE_I32, n) && x->dtable.dtype == ND_DTYPE_F32);
    for (int64_t begin = 0; begin < n; begin += ND_CUDA_EMBEDDING_TOKENS) {
        int64_t rows = n - begin < ND_CUDA_EMBEDDING_TOKENS ? n - begin : ND_CUDA_EMBEDDING_TOKENS;
        nd_embedding_bwd_args part = *x;
        part.ids = nd_tensor_1d((int32_t *)x->ids.data + begin, ND_DTYPE_I32, rows);
        part.dout = nd_tensor_rows(x->dout, begin, rows);
        ND_TRY(LAUNCH(s, embedding_bwd, &part));
    }
    return ND_OK;
}

static void check_attention(const nd_attention *a, nd_tensor q, nd_tensor k, nd_tensor v)
{
    ND_ASSERT(a->heads % a->kv_heads == 0 && a->scale > 0.0f && nd_is_act(q));
    ND_ASSERT(q.dtype == k.dtype && k.dtype == v.dtype);
    ND_ASSERT(nd_is_4d(q, a->batch, a->sq, a->heads, a->head_dim));
    ND_ASSERT(nd_is_4d(k, a->batch, a->sk, a->kv_heads, a->head_dim));
    ND_ASSERT(nd_is_4d(v, a->batch, a->sk, a->kv_heads, a->head_dim));
}

static nd_status attention_fwd(nd_stream *s, const nd_attention_fwd_args *x)
{
    check_attention(&x->attention, x->q, x->k, x->v);
    ND_ASSERT(nd_are_bounds(x->first_key, x->end_key, &x->attention));
    return nd_cuda_sdpa_fwd(s, x, false);
}

static nd_status attention_bwd(nd_stream *s, const nd_attention_bwd_args *x)
{
    check_attention(&x->attention, x->q, x->k, x->v);
    ND_ASSERT(nd_are_bounds(x->first_key, x->end_key, &x->attention));
    ND_ASSERT(!x->add_q || x->dq.dtype == ND_DTYPE_F32);
    ND_ASSERT(!x->add_kv || (x->dk.dtype == ND_DTYPE_F32 && x->dv.dtype == ND_DTYPE_F32));
    return nd_cuda_sdpa_bwd(s, x, false);
}

static nd_status attention_cached(nd_stream *s, const nd_attention_cached_args *x)
{
    const nd_attention *a = &x->attention;
    const int64_t D = a->head_dim, n = x->out.shape[0], width = 2 * a->kv_heads * D;
    ND_ASSERT(a->heads % a->kv_heads == 0 && a->scale > 0.0f && D <= ND_PLAIN_HEAD_DIM);
    ND_ASSERT(nd_is_act(x->qkv) && nd_is_2d(x->qkv, n, a->heads * D + width));
    ND_ASSERT(nd_is_2d_of(x->out, x->qkv.dtype, n, a->heads * D));
    ND_ASSERT(x->cache.axes == 3 && x->cache.dtype == x->qkv.dtype && x->cache.shape[2] == width);
    return LAUNCH(s, attention_cached, x);
}

/* True if t has the dtype and the two extents of `of`. */
static bool is_like(nd_tensor t, nd_tensor of)
{
    return nd_is_2d_of(t, of.dtype, of.shape[0], of.shape[1]);
}

/* True if t has an element of this dtype for each row of `of`, or for each of its columns. */
static bool is_per(int axis, nd_tensor of, nd_tensor t, nd_dtype dtype)
{
    return nd_is_vector(t, dtype, of.shape[axis]);
}

enum { ROW = 0, COLUMN = 1 };

OP(embedding_fwd, is_per(ROW, x->out, x->ids, ND_DTYPE_I32) && x->out.dtype == x->table.dtype)
OP(rmsnorm_fwd, nd_is_act(x->x) && is_like(x->y, x->x) &&
                    is_per(COLUMN, x->x, x->weight, x->x.dtype) &&
                    is_per(ROW, x->x, x->rstd, ND_DTYPE_F32) &&
                    nd_is_fuse_of(&x->fuse, x->y, x->x.shape[0], x->x.shape[1]))
OP(rmsnorm_bwd,
   nd_is_act(x->x) && is_like(x->dx, x->x) && is_per(COLUMN, x->x, x->dweight, ND_DTYPE_F32))
OP(row_dots, nd_is_act(x->x) && is_like(x->y, x->x) && is_per(ROW, x->x, x->out, ND_DTYPE_F32) &&
                 (!x->weight.data || is_per(COLUMN, x->x, x->weight, x->x.dtype)))
OP(rope, x->out.axes == 3 && x->x.axes == 3 && x->out.dtype == x->x.dtype &&
             x->x.shape[2] % 2 == 0 && is_per(ROW, x->x, x->positions, ND_DTYPE_I32))
OP(swiglu_fwd, x->out.dtype == x->gate.dtype && x->gate.dtype == x->up.dtype && nd_is_act(x->out) &&
                   nd_is_fuse_of(&x->fuse, x->out, x->gate.shape[0], x->gate.shape[1]))
OP(swiglu_bwd, x->dout.dtype == x->gate.dtype && x->gate.dtype == x->up.dtype &&
                   nd_is_act(x->dout) &&
                   nd_is_fuse_of(&x->fuse[0], x->dgate, x->gate.shape[0], x->gate.shape[1]) &&
                   nd_is_fuse_of(&x->fuse[1], x->dup, x->gate.shape[0], x->gate.shape[1]))
OP(bias_fwd,
   nd_is_act(x->out) && is_like(x->out, x->out) && is_per(COLUMN, x->out, x->bias, x->out.dtype))
OP(bias_bwd, nd_is_act(x->dout) && is_like(x->dout, x->dout) &&
                 is_per(COLUMN, x->dout, x->dbias, ND_DTYPE_F32))
OP(ce_stats, nd_is_act(x->logits) && x->valid <= x->logits.shape[1])
OP(accumulate, x->acc.dtype == ND_DTYPE_F32 && nd_is_act(x->x))
OP(cast, nd_is_act(x->out) && nd_is_act(x->x))
OP(axpy, nd_is_act(x->out) && is_like(x->x, x->out))
UNCHECKED_OP(attention_delta)
UNCHECKED_OP(lse_merge)
UNCHECKED_OP(ce_rescale)
UNCHECKED_OP(ce_loss)
UNCHECKED_OP(ce_bwd)
UNCHECKED_OP(sum_squares)
UNCHECKED_OP(digest)
UNCHECKED_OP(random_normal)
UNCHECKED_OP(adamw)
UNCHECKED_OP(sgd)
UNCHECKED_OP(amax)
UNCHECKED_OP(fp8_scale)
UNCHECKED_OP(fp8_delayed)
UNCHECKED_OP(make_form)
UNCHECKED_OP(fp8_count)

/* nd_ops.prepare: the plans of cuBLASLt and cuDNN, made before step 1. */

static nd_status prepare_product(nd_stream *s, const nd_product_args *x)
{
    return nd_lt_product(lt_of(s), s, x, true);
}

static nd_status prepare_attention_fwd(nd_stream *s, const nd_attention_fwd_args *x)
{
    return nd_cuda_sdpa_fwd(s, x, true);
}

static nd_status prepare_attention_bwd(nd_stream *s, const nd_attention_bwd_args *x)
{
    return nd_cuda_sdpa_bwd(s, x, true);
}

static const nd_prepare_ops prepare_ops = {ND_EACH_PREPARED_OP(ND_OP_ENTRY, prepare_)};

static void context_destroy(void *native)
{
    nd_cuda_context *context = native;
    nd_lt_destroy(context->lt);
    nd_cudnn_destroy(context->cudnn);
    if (context->scratch) {
        nd_device_free(context->device, context->scratch, ND_CUDA_SCRATCH);
    }
    free(context);
}

static nd_status context_create(nd_device *device, bool deterministic)
{
    nd_cuda_context *context = NULL;
    nd_cuda_info info;
    nd_status status = ND_OK;
    ND_TRY(nd_cuda_info_of(device, &info));
    ND_TRY(ND_ALLOC(1, &context));
    context->ops = nd_ops_cuda_planner(deterministic);
    context->ops.prepare = &prepare_ops;
    context->ops.tuner = &nd_lt_tuner;
    context->ops.attention_scratch = nd_cuda_sdpa_scratch; /* a GPU's plans know more of it */
#define SET_OP(op, unused) context->ops.op = op;
    ND_EACH_OP(SET_OP, )
#undef SET_OP
    context->device = device;
    context->facts.capability = info.major * 10 + info.minor;
    context->deterministic = deterministic;
    context->ordered_bytes = ND_SDPA_ORDERED_BYTES;
    ND_TRY_OUT(nd_lt_create(device, context->facts.capability, &context->lt));
    ND_TRY_OUT(nd_cudnn_create(device, context->facts.capability, NULL, &context->cudnn));
    ND_TRY_OUT(nd_device_alloc(device, ND_CUDA_SCRATCH, &context->scratch));
    context->facts.cublaslt = context->lt->library.version();
    snprintf(context->facts.machine, sizeof context->facts.machine,
             "sm_%d, CUDA %d.%d, driver %d.%d, cuBLASLt %zu, cuDNN %zu", context->facts.capability,
             info.runtime / 1000, info.runtime % 1000 / 10, info.driver / 1000,
             info.driver % 1000 / 10, context->facts.cublaslt, nd_cudnn_version(context->cudnn));
    device->native = context;
    device->native_close = context_destroy;
out:
    if (status != ND_OK) {
        context_destroy(context);
    }
    return status;
}

nd_status nd_ops_cuda(nd_device *device, bool deterministic, const nd_ops **out)
{
    ND_ASSERT(device->kind == ND_DEVICE_CUDA && !device->native);
    ND_TRY(context_create(device, deterministic));
    *out = &nd_cuda_context_of(device)->ops;
    return nd_ops_check(*out);
}

const nd_cuda_facts *nd_ops_cuda_facts(const nd_device *device)
{
    return &nd_cuda_context_of(device)->facts;
}

bool nd_ops_cuda_lacks_cudnn(void)
{
    return !nd_cudnn_is_built();
}

nd_status nd_ops_cuda_limit_products(nd_device *device, int64_t processors)
{
    nd_cuda_info info;
    ND_TRY(nd_cuda_info_of(device, &info));
    if (processors > info.processors) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.product_processors is %lld, but %s has %d multiprocessors; set it "
                       "to at most %d, or to 0",
                       (long long)processors, device->name, info.processors, info.processors);
    }
    nd_cuda_context_of(device)->lt->processors = (int)processors;
    return ND_OK;
}
