// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_ops.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/lt.h"
#include "kernels/cuda/sdpa.h"
#include "kernels/cuda/sdpa_parts.h"
#include "kernels/ops_check.h"
#include "kernels/ops_list.h"
#include "runtime/base/clock.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

/* An op that is one launch of a kernel of the same name. */
#define LAUNCH(stream_, name_, ...)                                                                \
    nd_cuda_op_done(                                                                               \
        stream_, #name_,                                                                           \
        (cudaError_t)nd_cuda_##name_(nd_cuda_stream(stream_) __VA_OPT__(, ) __VA_ARGS__))

static void *scratch_of(nd_stream *stream)
{
    return nd_cuda_context_of(stream->device)->scratch;
}

static nd_status matmul(nd_stream *s, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta)
{
    int64_t m = c.shape[0], n = c.shape[1], k = a.shape[a_transposed ? 0 : 1];
    ND_ASSERT(nd_is_act(a) && nd_is_act(c) && a.dtype == b.dtype);
    ND_ASSERT(nd_is_2d(a, a_transposed ? k : m, a_transposed ? m : k));
    ND_ASSERT(nd_is_2d(b, b_transposed ? n : k, b_transposed ? k : n) && nd_is_2d(c, m, n));
    if (m == 0 || n == 0) {
        return ND_OK;
    }
    ND_TRY(nd_lt_matmul(nd_cuda_context_of(s->device)->lt, s, c, a, a_transposed, b, b_transposed,
                        beta));
    return nd_cuda_op_done(s, "matmul", cudaSuccess);
}

static nd_status embedding_fwd(nd_stream *s, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first)
{
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, out.shape[0]) && out.dtype == table.dtype);
    return LAUNCH(s, embedding_fwd, out, ids, table, first);
}

/* The kernel sorts as many tokens as its scratch holds; more go one part after the other, in
 * order. */
static nd_status embedding_bwd(nd_stream *s, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first)
{
    int64_t n = dout.shape[0];
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, n) && dtable.dtype == ND_DTYPE_F32);
    for (int64_t begin = 0; begin < n; begin += ND_CUDA_EMBEDDING_TOKENS) {
        int64_t rows = n - begin < ND_CUDA_EMBEDDING_TOKENS ? n - begin : ND_CUDA_EMBEDDING_TOKENS;
        nd_tensor part = nd_tensor_1d((int32_t *)ids.data + begin, ND_DTYPE_I32, rows);
        ND_TRY(LAUNCH(s, embedding_bwd, dtable, part, nd_tensor_rows(dout, begin, rows), first,
                      scratch_of(s)));
    }
    return ND_OK;
}

static nd_status rmsnorm_fwd(nd_stream *s, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x,
                             nd_tensor delta, nd_tensor weight, float eps, const nd_fuse *fuse)
{
    ND_ASSERT(nd_is_act(x) && nd_is_2d_of(y, x.dtype, x.shape[0], x.shape[1]));
    ND_ASSERT(nd_is_vector(weight, x.dtype, x.shape[1]));
    ND_ASSERT(nd_is_fuse_of(fuse, y, x.shape[0], x.shape[1]));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, x.shape[0]));
    return LAUNCH(s, rmsnorm_fwd, y, sum, rstd, x, delta, weight, eps, fuse);
}

static nd_status rmsnorm_bwd(nd_stream *s, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                             nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd)
{
    ND_ASSERT(nd_is_act(x) && nd_is_2d_of(dx, x.dtype, x.shape[0], x.shape[1]));
    ND_ASSERT(nd_is_vector(dweight, ND_DTYPE_F32, x.shape[1]));
    return LAUNCH(s, rmsnorm_bwd, dx, dweight, dy, dres, x, weight, rstd, scratch_of(s));
}

static nd_status rope(nd_stream *s, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse)
{
    ND_ASSERT(out.axes == 3 && x.axes == 3 && out.dtype == x.dtype && x.shape[2] % 2 == 0);
    ND_ASSERT(nd_is_vector(positions, ND_DTYPE_I32, x.shape[0]));
    return LAUNCH(s, rope, out, x, positions, table, inverse);
}

static nd_status swiglu_fwd(nd_stream *s, nd_tensor out, nd_tensor gate, nd_tensor up,
                            const nd_fuse *fuse)
{
    ND_ASSERT(out.dtype == gate.dtype && gate.dtype == up.dtype && nd_is_act(out));
    ND_ASSERT(nd_is_fuse_of(fuse, out, gate.shape[0], gate.shape[1]));
    return LAUNCH(s, swiglu_fwd, out, gate, up, fuse);
}

static nd_status swiglu_bwd(nd_stream *s, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up, const nd_fuse *fuse_gate,
                            const nd_fuse *fuse_up)
{
    ND_ASSERT(dout.dtype == gate.dtype && gate.dtype == up.dtype && nd_is_act(dout));
    ND_ASSERT(nd_is_fuse_of(fuse_gate, dgate, gate.shape[0], gate.shape[1]));
    ND_ASSERT(nd_is_fuse_of(fuse_up, dup, gate.shape[0], gate.shape[1]));
    return LAUNCH(s, swiglu_bwd, dgate, dup, dout, gate, up, fuse_gate, fuse_up);
}

static void check_attention(const nd_attention *a, nd_tensor q, nd_tensor k, nd_tensor v)
{
    ND_ASSERT(a->heads % a->kv_heads == 0 && a->scale > 0.0f && nd_is_act(q));
    ND_ASSERT(q.dtype == k.dtype && k.dtype == v.dtype);
    ND_ASSERT(nd_is_4d(q, a->batch, a->sq, a->heads, a->head_dim));
    ND_ASSERT(nd_is_4d(k, a->batch, a->sk, a->kv_heads, a->head_dim));
    ND_ASSERT(nd_is_4d(v, a->batch, a->sk, a->kv_heads, a->head_dim));
}

static nd_status attention_fwd(nd_stream *s, const nd_attention *a, nd_tensor out, nd_tensor lse,
                               nd_tensor q, nd_tensor k, nd_tensor v, void *scratch)
{
    check_attention(a, q, k, v);
    return nd_cuda_sdpa_fwd(s, a, out, lse, q, k, v, scratch);
}

static nd_status attention_delta(nd_stream *s, const nd_attention *a, nd_tensor delta,
                                 nd_tensor out, nd_tensor dout)
{
    return LAUNCH(s, attention_delta, a, delta, out, dout);
}

static nd_status attention_bwd(nd_stream *s, const nd_attention *a, nd_tensor dq, nd_tensor dk,
                               nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out,
                               nd_tensor dout, nd_tensor lse, nd_tensor delta, bool add_q,
                               bool add_kv, void *scratch)
{
    check_attention(a, q, k, v);
    ND_ASSERT(!add_q || dq.dtype == ND_DTYPE_F32);
    ND_ASSERT(!add_kv || (dk.dtype == ND_DTYPE_F32 && dv.dtype == ND_DTYPE_F32));
    return nd_cuda_sdpa_bwd(s, a, dq, dk, dv, q, k, v, out, dout, lse, delta, add_q, add_kv,
                            scratch);
}

static size_t attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    nd_cuda_context *context = device->kind == ND_DEVICE_CUDA ? nd_cuda_context_of(device) : NULL;
    return nd_cuda_sdpa_scratch(context, a, act, backward, context && context->deterministic);
}

static bool attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return !nd_cuda_sdpa_is_cudnn(a, act);
}

static nd_status lse_merge(nd_stream *s, const nd_attention *a, nd_tensor acc, nd_tensor acc_lse,
                           nd_tensor out, nd_tensor lse)
{
    return LAUNCH(s, lse_merge, a, acc, acc_lse, out, lse);
}

static nd_status ce_stats(nd_stream *s, nd_tensor row_max, nd_tensor row_sum, nd_tensor target,
                          nd_tensor logits, nd_tensor labels, int64_t first, int64_t valid)
{
    ND_ASSERT(nd_is_act(logits) && valid <= logits.shape[1]);
    return LAUNCH(s, ce_stats, row_max, row_sum, target, logits, labels, first, valid);
}

static nd_status ce_rescale(nd_stream *s, nd_tensor row_sum, nd_tensor row_max,
                            nd_tensor global_max)
{
    return LAUNCH(s, ce_rescale, row_sum, row_max, global_max);
}

static nd_status ce_loss(nd_stream *s, double *loss_sum, nd_tensor max, nd_tensor sum,
                         nd_tensor target, nd_tensor labels)
{
    return LAUNCH(s, ce_loss, loss_sum, max, sum, target, labels);
}

static nd_status ce_bwd(nd_stream *s, nd_tensor logits, nd_tensor max, nd_tensor sum,
                        nd_tensor labels, int64_t first, int64_t valid, const int64_t *count)
{
    return LAUNCH(s, ce_bwd, logits, max, sum, labels, first, valid, count);
}

static nd_status add(nd_stream *s, nd_tensor out, nd_tensor a, nd_tensor b)
{
    return LAUNCH(s, add, out, a, b);
}

static nd_status accumulate(nd_stream *s, nd_tensor acc, nd_tensor x)
{
    ND_ASSERT(acc.dtype == ND_DTYPE_F32 && nd_is_act(x));
    return LAUNCH(s, accumulate, acc, x);
}

static nd_status cast(nd_stream *s, nd_tensor out, nd_tensor x)
{
    ND_ASSERT(nd_is_act(out) && nd_is_act(x));
    return LAUNCH(s, cast, out, x);
}

static nd_status sum_squares(nd_stream *s, double *out, const float *x, int64_t count)
{
    return LAUNCH(s, sum_squares, out, x, count, scratch_of(s));
}

static nd_status random_normal(nd_stream *s, float *out, int64_t count, float deviation,
                               uint64_t seed, uint64_t random_stream, uint64_t first)
{
    return LAUNCH(s, random_normal, out, count, deviation, seed, random_stream, first);
}

static nd_status adamw(nd_stream *s, const nd_adamw *hyper, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count)
{
    return LAUNCH(s, adamw, hyper, p, m, v, grad, ranges, range_count);
}

static nd_status sgd(nd_stream *s, const nd_adamw *hyper, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count)
{
    return LAUNCH(s, sgd, hyper, p, grad, ranges, range_count);
}

static nd_status amax(nd_stream *s, float *amax, nd_tensor x, nd_granularity granularity,
                      bool merge)
{
    return LAUNCH(s, amax, amax, x, granularity, merge);
}

static nd_status fp8_scale(nd_stream *s, float *scale, float *inverse, const float *amax,
                           int64_t count, nd_dtype format, bool power_of_two)
{
    return LAUNCH(s, fp8_scale, scale, inverse, amax, count, format, power_of_two);
}

static nd_status fp8_delayed(nd_stream *s, const nd_fp8_history *history,
                             nd_amax_algorithm algorithm)
{
    return LAUNCH(s, fp8_delayed, history, algorithm);
}

static nd_status fp8_cast(nd_stream *s, nd_fp8 out, float *amax, nd_tensor x)
{
    return LAUNCH(s, fp8_cast, out, amax, x);
}

static nd_status fp8_transpose(nd_stream *s, nd_tensor out, nd_tensor codes)
{
    return LAUNCH(s, fp8_transpose, out, codes);
}

static nd_status fp8_count(nd_stream *s, int64_t counts[2], nd_tensor x, nd_fp8 as)
{
    return LAUNCH(s, fp8_count, counts, x, as);
}

static nd_status matmul_fp8(nd_stream *s, nd_tensor c, nd_fp8 a, bool a_transposed, nd_fp8 b,
                            bool b_transposed, float beta, bool fast_accumulation, void *scratch)
{
    if (c.shape[0] == 0 || c.shape[1] == 0) {
        return ND_OK;
    }
    ND_TRY(nd_lt_matmul_fp8(nd_cuda_context_of(s->device)->lt, s, c, &a, a_transposed, &b,
                            b_transposed, beta, fast_accumulation, scratch));
    return nd_cuda_op_done(s, "matmul_fp8", cudaSuccess);
}

static size_t matmul_fp8_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                                 nd_dtype act)
{
    return nd_lt_matmul_fp8_scratch(m, n, k, act);
}

/* nd_ops.prepare: the plans of cuBLASLt and cuDNN, made before step 1. */

static nd_status prepare_matmul(nd_stream *s, nd_tensor c, nd_tensor a, bool a_transposed,
                                nd_tensor b, bool b_transposed, float beta)
{
    nd_lt *lt = nd_cuda_context_of(s->device)->lt;
    if (c.shape[0] == 0 || c.shape[1] == 0) {
        return ND_OK;
    }
    nd_lt_prepare_begin(lt);
    nd_status status = nd_lt_matmul(lt, s, c, a, a_transposed, b, b_transposed, beta);
    nd_lt_prepare_end(lt);
    return status;
}

static nd_status prepare_matmul_fp8(nd_stream *s, nd_tensor c, nd_fp8 a, bool a_transposed,
                                    nd_fp8 b, bool b_transposed, float beta, bool fast_accumulation,
                                    void *scratch)
{
    nd_lt *lt = nd_cuda_context_of(s->device)->lt;
    if (c.shape[0] == 0 || c.shape[1] == 0) {
        return ND_OK;
    }
    nd_lt_prepare_begin(lt);
    nd_status status = nd_lt_matmul_fp8(lt, s, c, &a, a_transposed, &b, b_transposed, beta,
                                        fast_accumulation, scratch);
    nd_lt_prepare_end(lt);
    return status;
}

static nd_status prepare_attention_fwd(nd_stream *s, const nd_attention *a, nd_tensor out,
                                       nd_tensor lse, nd_tensor q, nd_tensor k, nd_tensor v,
                                       void *scratch)
{
    return nd_cuda_sdpa_prepare_fwd(nd_cuda_context_of(s->device), a, out, lse, q, k, v);
}

static nd_status prepare_attention_bwd(nd_stream *s, const nd_attention *a, nd_tensor dq,
                                       nd_tensor dk, nd_tensor dv, nd_tensor q, nd_tensor k,
                                       nd_tensor v, nd_tensor out, nd_tensor dout, nd_tensor lse,
                                       nd_tensor delta, bool add_q, bool add_kv, void *scratch)
{
    return nd_cuda_sdpa_prepare_bwd(nd_cuda_context_of(s->device), a, dq, dk, dv, q, k, v, out,
                                    dout, lse, delta);
}

static const nd_ops prepare_ops = {
    .name = "cuda",
    .matmul = prepare_matmul,
    .matmul_fp8 = prepare_matmul_fp8,
    .attention_fwd = prepare_attention_fwd,
    .attention_bwd = prepare_attention_bwd,
};

#define ENTRY(op) .op = op,

static const nd_ops cuda_ops = {
    .name = "cuda", .fp8_needs_transposed = true, .prepare = &prepare_ops, ND_EACH_OP(ENTRY)};

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
    context->device = device;
    context->capability = info.major * 10 + info.minor;
    context->deterministic = deterministic;
    context->ordered_bytes = ND_SDPA_ORDERED_BYTES;
    ND_TRY_OUT(nd_lt_create(device, context->capability, &context->lt));
    ND_TRY_OUT(nd_cudnn_create(device, context->capability, NULL, &context->cudnn));
    ND_TRY_OUT(nd_device_alloc(device, ND_CUDA_SCRATCH, &context->scratch));
    snprintf(context->machine, sizeof context->machine,
             "sm_%d, CUDA %d.%d, driver %d.%d, cuBLASLt %zu, cuDNN %zu", context->capability,
             info.runtime / 1000, info.runtime % 1000 / 10, info.driver / 1000,
             info.driver % 1000 / 10, nd_lt_version(context->lt), nd_cudnn_version(context->cudnn));
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
    ND_TRY(nd_ops_check(&cuda_ops));
    ND_TRY(context_create(device, deterministic));
    *out = &cuda_ops;
    return ND_OK;
}

static size_t ordered_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                              bool backward)
{
    return nd_cuda_sdpa_scratch(NULL, a, act, backward, true);
}

nd_status nd_ops_cuda_planner(bool deterministic, nd_ops *out)
{
    *out = cuda_ops;
    if (deterministic) {
        out->attention_scratch = ordered_scratch;
    }
    return ND_OK;
}

const char *nd_ops_cuda_machine(const nd_device *device)
{
    return nd_cuda_context_of(device)->machine;
}

bool nd_ops_cuda_lacks_cudnn(void)
{
    return !nd_cudnn_is_built();
}

size_t nd_ops_cuda_workspace(void)
{
    return ND_LT_WORKSPACE + ND_CUDA_SCRATCH;
}

void nd_ops_cuda_tune(nd_device *device, int candidates, double seconds)
{
    nd_lt_tune(nd_cuda_context_of(device)->lt, candidates, nd_clock_seconds() + seconds);
}

int nd_ops_cuda_choices(const nd_device *device, nd_lt_choice out[ND_LT_PLANS])
{
    return nd_lt_choices(nd_cuda_context_of(device)->lt, out);
}

nd_status nd_ops_cuda_install(nd_device *device, const nd_lt_choice *choices, int count)
{
    return nd_lt_install(nd_cuda_context_of(device)->lt, choices, count);
}

int nd_ops_cuda_unchosen(const nd_device *device)
{
    return nd_lt_unchosen(nd_cuda_context_of(device)->lt);
}

void nd_ops_cuda_versions(const nd_device *device, int *capability, size_t *cublaslt)
{
    *capability = nd_cuda_context_of(device)->capability;
    *cublaslt = nd_lt_version(nd_cuda_context_of(device)->lt);
}

nd_status nd_ops_cuda_median(nd_stream *stream, nd_status (*call)(void *context, nd_stream *stream),
                             void *context, int repeats, double *seconds)
{
    return nd_cuda_median(stream, call, context, repeats, seconds);
}
