// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/kernel_table.h"

#include "kernels/cuda/kernels.h"
#include "kernels/ref/ref.h"

static _Alignas(256) char scratch[ND_CUDA_SCRATCH];

static nd_status launched(int error)
{
    return error ? nd_fail(ND_ERR_INTERNAL, "a launcher returned %d", error) : ND_OK;
}

/* The op `name` is its launcher with the arguments that follow, the first of them the queue. */
#define OP(name, parameters, ...)                                                                  \
    static nd_status name parameters                                                               \
    {                                                                                              \
        return launched(nd_cuda_##name(stream->native, __VA_ARGS__));                              \
    }

typedef nd_stream *S;
typedef nd_tensor T;

OP(embedding_fwd, (S stream, T out, T ids, T table, int64_t first), out, ids, table, first)
OP(embedding_bwd, (S stream, T dtable, T ids, T dout, int64_t first), dtable, ids, dout, first,
   scratch)
OP(rmsnorm_fwd,
   (S stream, T y, T sum, T rstd, T x, T delta, T weight, float eps, const nd_fuse *fuse), y, sum,
   rstd, x, delta, weight, eps, fuse)
OP(rmsnorm_bwd, (S stream, T dx, T dweight, T dy, T dres, T x, T weight, T rstd), dx, dweight, dy,
   dres, x, weight, rstd, scratch)
OP(rope, (S stream, T out, T x, T positions, nd_rope_view table, bool inverse), out, x, positions,
   table, inverse)
OP(swiglu_fwd, (S stream, T out, T gate, T up, const nd_fuse *fuse), out, gate, up, fuse)
OP(swiglu_bwd,
   (S stream, T dgate, T dup, T dout, T gate, T up, const nd_fuse *fuse_gate,
    const nd_fuse *fuse_up),
   dgate, dup, dout, gate, up, fuse_gate, fuse_up)
OP(attention_delta, (S stream, const nd_attention *a, T delta, T out, T dout), a, delta, out, dout)
OP(lse_merge, (S stream, const nd_attention *a, T acc, T acc_lse, T out, T lse), a, acc, acc_lse,
   out, lse)
OP(ce_stats, (S stream, T max, T sum, T target, T logits, T labels, int64_t first, int64_t valid),
   max, sum, target, logits, labels, first, valid)
OP(ce_rescale, (S stream, T sum, T max, T global_max), sum, max, global_max)
OP(ce_loss, (S stream, double *loss, T max, T sum, T target, T labels), loss, max, sum, target,
   labels)
OP(ce_bwd,
   (S stream, T logits, T max, T sum, T labels, int64_t first, int64_t valid, const int64_t *count),
   logits, max, sum, labels, first, valid, count)
OP(add, (S stream, T out, T a, T b), out, a, b)
OP(accumulate, (S stream, T acc, T x), acc, x)
OP(cast, (S stream, T out, T x), out, x)
OP(sum_squares, (S stream, double *out, const float *x, int64_t count), out, x, count, scratch)
OP(random_normal,
   (S stream, float *out, int64_t count, float deviation, uint64_t seed, uint64_t random_stream,
    uint64_t first),
   out, count, deviation, seed, random_stream, first)
OP(adamw,
   (S stream, const nd_adamw *o, float *p, float *m, float *v, const float *grad,
    const nd_flat_range *ranges, int count),
   o, p, m, v, grad, ranges, count)
OP(sgd,
   (S stream, const nd_adamw *o, float *p, const float *grad, const nd_flat_range *ranges,
    int count),
   o, p, grad, ranges, count)
OP(amax, (S stream, float *out, T x, nd_granularity granularity, bool merge), out, x, granularity,
   merge)
OP(fp8_scale,
   (S stream, float *scale, float *inverse, const float *amax, int64_t count, nd_dtype format,
    bool power_of_two),
   scale, inverse, amax, count, format, power_of_two)
OP(fp8_delayed, (S stream, const nd_fp8_history *history, nd_amax_algorithm algorithm), history,
   algorithm)
OP(fp8_cast, (S stream, nd_fp8 out, float *amax, T x), out, amax, x)
OP(fp8_transpose, (S stream, T out, T codes), out, codes)
OP(fp8_count, (S stream, int64_t counts[2], T x, nd_fp8 as), counts, x, as)

static const nd_ops kernels = {
    .name = "kernels",
    .matmul = nd_ref_matmul,
    .embedding_fwd = embedding_fwd,
    .embedding_bwd = embedding_bwd,
    .rmsnorm_fwd = rmsnorm_fwd,
    .rmsnorm_bwd = rmsnorm_bwd,
    .rope = rope,
    .swiglu_fwd = swiglu_fwd,
    .swiglu_bwd = swiglu_bwd,
    .attention_fwd = nd_ref_attention_fwd,
    .attention_delta = attention_delta,
    .attention_bwd = nd_ref_attention_bwd,
    .attention_scratch = nd_ref_attention_scratch,
    .attention_uses_delta = nd_ref_attention_uses_delta,
    .lse_merge = lse_merge,
    .ce_stats = ce_stats,
    .ce_rescale = ce_rescale,
    .ce_loss = ce_loss,
    .ce_bwd = ce_bwd,
    .add = add,
    .accumulate = accumulate,
    .cast = cast,
    .sum_squares = sum_squares,
    .random_normal = random_normal,
    .adamw = adamw,
    .sgd = sgd,
    .amax = amax,
    .fp8_scale = fp8_scale,
    .fp8_delayed = fp8_delayed,
    .fp8_cast = fp8_cast,
    .fp8_transpose = fp8_transpose,
    .fp8_count = fp8_count,
    .matmul_fp8 = nd_ref_matmul_fp8,
    .matmul_fp8_scratch = nd_ref_matmul_fp8_scratch,
};

const nd_ops *nd_ops_kernels(void)
{
    return &kernels;
}
