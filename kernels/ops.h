// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_OPS_H
#define ND_KERNELS_OPS_H
/*
 * THE op list: everything a device computes in a training step. One table of functions per backend
 * (ref, cpu, cuda); a missing entry is a start-up error naming the op.
 *
 * Conventions
 *   n      tokens of the call (rows); C hidden; V vocabulary rows held here; F ffn; H query heads,
 *          K KV heads, D head size (even); all local extents.
 *   act    activation dtype: BF16, or F32 in precision fp32. All activations and weights of a call
 *          have the same one.
 *   Views  2-d tensors may have stride[0] > shape[1] (a slice of columns); the last axis is
 *          contiguous. Vectors are contiguous.
 *   Math   is F32 (ref: F64 where it sums): operands are widened, results rounded once (to nearest
 *          even) when stored. Sums are in an order that never depends on timing, but on shape,
 *          backend and, in products and attention, the device's thread count.
 *   Alias  an output may be the same view as an input only where the op says so. No other overlap.
 *   Stream results are visible to later calls on the same stream.
 *   Errors ND_ERR_INTERNAL when a library refuses; bad shapes are ND_ASSERTs: the model checks
 *          users' numbers first.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/device/device.h"
#include "runtime/tensor/tensor.h"

/* Rotary table. cos, sin: F32 (positions, D/2), row = position. Made once on the host,
 * nd_rope_table (kernels/rope.h). */
typedef struct nd_rope_view {
    const float *cos, *sin; /* (P, D/2) */
    int64_t positions;      /* P */
} nd_rope_view;

/*
 * One block of attention. Row-major 4-d views with free strides on the first three axes:
 *   q, out, dout, dq   (B, Sq, H, D)
 *   k, v, dk, dv       (B, Sk, K, D)        query head h uses KV head h / (H / K)
 *   lse, delta         F32 (B, H, Sq), contiguous
 * score(i, j) = scale <q_i, k_j>, visible when j <= i + diag. diag = 0: causal; diag >= Sk:
 * unmasked; diag = p: causal with p keys before the first query; diag < 0: the first -diag rows see
 * nothing: out = 0, lse = -inf. Source of the blocked form: Dao et al., FlashAttention (2022), and
 * FlashAttention-2 (2023).
 */
typedef struct nd_attention {
    int64_t batch, sq, sk, heads, kv_heads, head_dim;
    int64_t diag;
    float scale;
} nd_attention;

typedef struct nd_adamw {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale;   /* clip factor, multiplies the gradient first */
    float bias1, bias2; /* 1 - beta^t */
} nd_adamw;

/* A flat range of a shard that shares one weight decay (parameters with and without decay alternate
 * in a unit). */
typedef struct nd_flat_range {
    int64_t begin, end;
    bool decay;
    nd_bf16
        *copy; /* optimizers: NULL, or a BF16 copy on the device, copy[i] of element begin + i */
} nd_flat_range;

/*
 * FP8. FMAX is the largest finite value of a format: 448 (E4M3), 57344 (E5M2). `scale` is what a
 * value is multiplied by before it is rounded to a code, `inverse` = 1.0f / scale what a code is
 * multiplied by to get the value back: F32, on the device, as many as the granularity says: 1, one
 * per row, or one per column of the matrix (rows, columns).
 */
typedef enum nd_granularity { ND_PER_TENSOR = 0, ND_PER_ROW, ND_PER_COLUMN } nd_granularity;

/*
 * A matrix in FP8, a view that owns nothing: value(i, j) = code(i, j) inverse[g], g = 0, i or j.
 * `codes` and `transposed` hold the same codes; either may be absent (data NULL), its dtype is then
 * ignored.
 */
typedef struct nd_fp8 {
    nd_tensor codes;        /* (rows, columns), E4M3 or E5M2; row stride free */
    nd_tensor transposed;   /* (columns, rows), the same dtype; row stride free */
    float *scale, *inverse; /* 1, (rows) or (columns) */
    nd_granularity granularity;
} nd_fp8;

/*
 * What an op does with a result beside storing it, without reading it again (a parameter of its
 * own; NULL: nothing). Of the values as they are stored, rounded to act. A result with codes need
 * not be stored: its tensor's data may be NULL, its shape and dtype count.
 */
typedef struct nd_fuse {
    float *amax;     /* NULL, or F32 (1), on the device: merged with the largest |value| as by
                         * `amax`; 0 before the first */
    nd_tensor codes; /* data NULL, or FP8 of the result's shape: cast as by fp8_cast, per tensor */
    const float *scale; /* F32 (1), on the device, with codes */
} nd_fuse;

/* Which of its past amaxes a delayed scale follows: the last one, or the largest of the history. */
typedef enum nd_amax_algorithm { ND_AMAX_MOST_RECENT = 0, ND_AMAX_MAX } nd_amax_algorithm;

/* Delayed scaling of `count` tensors; F32, on the device. At the start amax is 0, scale and inverse
 * are 1. */
typedef struct nd_fp8_history {
    int64_t length, count; /* length >= 1 */
    float *amax;        /* (length, count): row 0 is this step's, then past steps from the oldest */
    const float *limit; /* (count): FMAX of the tensor's format / 2^margin */
    float *scale, *inverse; /* (count) */
} nd_fp8_history;

typedef struct nd_ops nd_ops;

struct nd_ops {
    const char *name; /* "ref", "cpu", "cuda" */
    /*
     * matmul_fp8 reads an operand only where its summed axis is the contiguous one: `codes` of a
     * and of a transposed b, `transposed` of a transposed a and of b. Where this is false it takes
     * whichever is there.
     */
    bool fp8_needs_transposed;
    /*
     * NULL, or ops that make what a call of the same name keeps for its form, such as a library's
     * plan, and do nothing else: matmul, matmul_fp8, attention_fwd and attention_bwd; the other
     * entries are NULL. Of the stream only the device is used; tensors need no memory, but
     * addresses that are aligned as those of the call. What attention_scratch returns afterwards
     * holds for the prepared calls.
     */
    const nd_ops *prepare;

    /* linear algebra */
    /*
     * c = op(a) op(b) + beta c, op(x) = x or x^T. a, b: act or F32. c: act or F32 (weight gradients
     * accumulate into F32 with beta = 1). beta is 0 or 1. Sums in F32. Shapes: op(a) (m, k), op(b)
     * (k, n), c (m, n).
     */
    nd_status (*matmul)(nd_stream *, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta);

    /* embedding */
    /* out (n, C) = table (V, C)[ids[i] - first], zero where the id is outside [first, first + V).
     * ids I32 (n). */
    nd_status (*embedding_fwd)(nd_stream *, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first);
    /* dtable F32 (V, C) += rows of dout (n, C); tokens are added in ascending i, so the order is
     * fixed. */
    nd_status (*embedding_bwd)(nd_stream *, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first);

    /* ---- RMSNorm. Source: Zhang and Sennrich (2019); Llama: y = w x / sqrt(mean(x^2) + eps)
     * ---- */
    /*
     * sum = x + delta, then y = weight sum rstd. delta.data NULL: sum is not written and x itself
     * is normalised. sum is rounded to act before it is normalised (the residual stream is act). x,
     * delta, sum, y (n, C); weight act (C); rstd F32 (n). sum may alias x or delta. fuse: of y.
     */
    nd_status (*rmsnorm_fwd)(nd_stream *, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x,
                             nd_tensor delta, nd_tensor weight, float eps, const nd_fuse *fuse);
    /*
     * dx (n, C) = dres + d(norm)/dx applied to dy; dres.data NULL means 0. dweight F32 (C) += sum_i
     * dy x rstd. x is the normalised input (the sum of the forward). dx may alias dres or dy.
     */
    nd_status (*rmsnorm_bwd)(nd_stream *, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                             nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd);

    /* RoPE, rotate-half form of Hugging Face Llama (pairs (d, d + D/2)) */
    /*
     * out (n, heads, D) = rotation of x (n, heads, D) by table row positions[i] (I32 (n)); inverse
     * for backward. 3-d views, stride[1] == D or free. out may be x.
     */
    nd_status (*rope)(nd_stream *, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse);

    /* SwiGLU: out = silu(gate) up */
    /* (n, F) each; fuse: of out. */
    nd_status (*swiglu_fwd)(nd_stream *, nd_tensor out, nd_tensor gate, nd_tensor up,
                            const nd_fuse *fuse);
    /* dgate, dup may alias gate, up; a fuse for each of them. */
    nd_status (*swiglu_bwd)(nd_stream *, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up, const nd_fuse *fuse_gate,
                            const nd_fuse *fuse_up);

    /* attention */
    /* out, lse of one block; never materialises (Sq, Sk). `scratch`: attention_scratch bytes. */
    nd_status (*attention_fwd)(nd_stream *, const nd_attention *, nd_tensor out, nd_tensor lse,
                               nd_tensor q, nd_tensor k, nd_tensor v, void *scratch);
    /* delta (B, H, Sq) = rowsum(dout out), once per backward whatever the number of blocks, where
     * attention_uses_delta says so. */
    nd_status (*attention_delta)(nd_stream *, const nd_attention *, nd_tensor delta, nd_tensor out,
                                 nd_tensor dout);
    /*
     * dq, dk, dv of one block from the final (merged) out, lse and delta. delta has no data where
     * attention_uses_delta says that it is not read; else out is not read. Each output is act or
     * F32. add_q: dq is F32 and is added to; add_kv: dk and dv are F32 and are added to (blocks of
     * a ring, prefixes of gathered keys); otherwise they are overwritten.
     */
    nd_status (*attention_bwd)(nd_stream *, const nd_attention *, nd_tensor dq, nd_tensor dk,
                               nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out,
                               nd_tensor dout, nd_tensor lse, nd_tensor delta, bool add_q,
                               bool add_kv, void *scratch);
    /* Bytes of scratch for one call of the above with these extents (planned once). */
    size_t (*attention_scratch)(const nd_device *, const nd_attention *, nd_dtype act,
                                bool backward);
    /* Whether attention_bwd of tensors of type act reads delta. Where it does not, q, k, v, out and
     * dout must lie at multiples of 16 bytes, with strides of multiples of 8 elements. */
    bool (*attention_uses_delta)(const nd_device *, const nd_attention *, nd_dtype act);
    /*
     * Online merge of a partial result: acc F32 (B, Sq, H, D), acc_lse F32 (B, H, Sq) absorb out
     * (act), lse.
     *   lse' = log(exp(acc_lse) + exp(lse)); acc = acc exp(acc_lse - lse') + out exp(lse - lse')
     * -inf on either side is exact and gives no NaN; acc is not read in rows whose acc_lse is -inf.
     */
    nd_status (*lse_merge)(nd_stream *, const nd_attention *, nd_tensor acc, nd_tensor acc_lse,
                           nd_tensor out, nd_tensor lse);

    /* cross entropy over a vocabulary slice */
    /*
     * Per row of logits act (n, V): row_max F32 (n); row_sum F32 (n) = sum_v exp(logit - row_max);
     * target F32 (n) = logit of label when first <= label < first + valid, else 0. Columns >= valid
     * are padding and ignored. labels I32 (n), -100 = not counted.
     */
    nd_status (*ce_stats)(nd_stream *, nd_tensor row_max, nd_tensor row_sum, nd_tensor target,
                          nd_tensor logits, nd_tensor labels, int64_t first, int64_t valid);
    /* row_sum *= exp(row_max - global_max): this slice's sum on the scale of the global maximum.
     * F32 (n) each. */
    nd_status (*ce_rescale)(nd_stream *, nd_tensor row_sum, nd_tensor row_max,
                            nd_tensor global_max);
    /* loss_sum F64 (1) += sum over counted rows of log(sum) + max - target. sum, max, target are
     * global. Fixed order. */
    nd_status (*ce_loss)(nd_stream *, double *loss_sum, nd_tensor max, nd_tensor sum,
                         nd_tensor target, nd_tensor labels);
    /* logits -> dlogits in place: (softmax - onehot) / *count (I64 (1); the quotient 1 / *count in
     * F64, rounded to F32, multiplies); 0 for rows not counted and for columns >= valid. */
    nd_status (*ce_bwd)(nd_stream *, nd_tensor logits, nd_tensor max, nd_tensor sum,
                        nd_tensor labels, int64_t first, int64_t valid, const int64_t *count);

    /* elementwise and reductions; a, b, out of any 2-d views or flat */
    nd_status (*add)(nd_stream *, nd_tensor out, nd_tensor a,
                     nd_tensor b); /* out may alias a or b */
    nd_status (*accumulate)(nd_stream *, nd_tensor acc,
                            nd_tensor x);                       /* F32 acc += x (act or F32) */
    nd_status (*cast)(nd_stream *, nd_tensor out, nd_tensor x); /* BF16 <-> F32, or a copy */
    nd_status (*sum_squares)(nd_stream *, double *out, const float *x,
                             int64_t count); /* *out += sum x^2, F64 blocks */

    /*
     * out[i] = deviation nd_rng_normal(seed, random_stream, first + i), rounded once: the same bits
     * in every backend.
     */
    nd_status (*random_normal)(nd_stream *, float *out, int64_t count, float deviation,
                               uint64_t seed, uint64_t random_stream, uint64_t first);

    /* optimizers over flat F32 shards; in place */
    /*
     * AdamW (Loshchilov and Hutter, 2019; torch.optim.AdamW): g = grad grad_scale; p -= lr wd p
     * (decay ranges); m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr (m / bias1) / (sqrt(v
     * / bias2) + eps). A range's copy gets the updated p as `cast` rounds it.
     */
    nd_status (*adamw)(nd_stream *, const nd_adamw *, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count);
    /* p -= lr (grad grad_scale + wd p (decay ranges)): torch.optim.SGD without momentum. Copies as
     * above. */
    nd_status (*sgd)(nd_stream *, const nd_adamw *, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count);

    /* FP8: scales */
    /*
     * amax (1, rows or columns; F32) = largest |x| of all of x, of each row or column. x act or
     * F32, 2-d, or 1-d per tensor. NaN in x gives NaN, as torch.max does. merge: the maximum with
     * what is there (NaN on either side gives NaN), so the amax of pieces is that of the whole;
     * otherwise overwritten, 0 where x is empty.
     */
    nd_status (*amax)(nd_stream *, float *amax, nd_tensor x, nd_granularity granularity,
                      bool merge);
    /*
     * Current scaling: scale (count) = FMAX / max(amax, 1e-12), divided in F64 and rounded to F32;
     * NaN stays NaN, and an infinite amax gives scale 0 and an infinite inverse, so that the
     * product shows it. power_of_two: then 2^floor(l), l = log2(scale) rounded to F32 (which may
     * round up to an integer). Source: torchao 0.18, float8_utils.amax_to_scale.
     */
    nd_status (*fp8_scale)(nd_stream *, float *scale, float *inverse, const float *amax,
                           int64_t count, nd_dtype format, bool power_of_two);
    /*
     * Delayed scaling, once per step, after row 0 is complete (all micro-batches, all ranks). For
     * each tensor, with newest = amax[0]: when newest is not 0, rows 2.. move up by one, newest
     * goes to the last row, and row 0 becomes
     * 0. A = newest, or (max, and newest not 0) the largest of the whole history, row 0 and the row
     * that drops out included, NaN ignored. When A is finite and above 0, scale = limit / A in F32,
     * FLT_MAX where that is infinite; else the scale stays. inverse = 1.0f / scale. Source:
     * Transformer Engine, common/recipe/delayed_scaling.cu.
     */
    nd_status (*fp8_delayed)(nd_stream *, const nd_fp8_history *history,
                             nd_amax_algorithm algorithm);

    /* FP8: codes */
    /*
     * codes = x scale (in F32), limited to +-FMAX (infinities too), rounded to nearest even; NaN
     * gives a NaN code (which of them is free), -0 and what rounds to it keeps its sign. Writes
     * out.codes and out.transposed, whichever are there, in one pass, with the scale that is there;
     * reads no inverse. x act or F32, (rows, columns) as codes; 1-d per tensor where out.transposed
     * is absent. amax NULL, or F32 (1): merged with the largest |x| of the tensor as by `amax`.
     */
    nd_status (*fp8_cast)(nd_stream *, nd_fp8 out, float *amax, nd_tensor x);
    /* out (columns, rows) = codes (rows, columns) transposed; one FP8 dtype. */
    nd_status (*fp8_transpose)(nd_stream *, nd_tensor out, nd_tensor codes);
    /*
     * For the health log: counts[0] += elements that are not 0 but whose code is +-0, counts[1] +=
     * elements with |x scale| > FMAX. NaN counts in neither. `as`: what x was cast to; only its
     * form, format and scale are read.
     */
    nd_status (*fp8_count)(nd_stream *, int64_t counts[2], nd_tensor x, nd_fp8 as);

    /* FP8: products */
    /*
     * c = op(a) op(b) of the dequantised values + beta c, as matmul: c act or F32 (also F32 with
     * BF16 activations), beta 0 or 1. One of a, b may be E5M2. The sum is that of the codes, in
     * F32; it is multiplied by the inverse scales (in F32, in any order) and c is added before the
     * one rounding. An operand's scale is per tensor or constant along the summed axis: op(a) per
     * row, op(b) per column (of the stored matrix: per column of a transposed a).
     * fast_accumulation: a tensor core may sum with fewer bits. m, n and k are multiples of 16 on
     * cuda; the model checks users' numbers. scratch: matmul_fp8_scratch bytes, aligned to 256.
     */
    nd_status (*matmul_fp8)(nd_stream *, nd_tensor c, nd_fp8 a, bool a_transposed, nd_fp8 b,
                            bool b_transposed, float beta, bool fast_accumulation, void *scratch);
    /* Bytes for one call with these extents and c of either type (planned once; enough for smaller
     * extents too). */
    size_t (*matmul_fp8_scratch)(const nd_device *, int64_t m, int64_t n, int64_t k, nd_dtype act);
};

/* Backends. Each checks its own table for completeness the first time. */
nd_status nd_ops_ref(const nd_ops **out); /* naive F32 C, the oracle */
/* oneDNN, vectorised. What the ops keep (primitives, their scratch) hangs off the device and dies
 * with it. */
nd_status nd_ops_cpu(nd_device *device, const nd_ops **out);

/* What the CPU backend runs on: the instruction set in use ("avx512_bf16"), oneDNN's version.
 * Static strings. */
const char *nd_ops_machine(const nd_device *device);
const char *nd_ops_library_version(void);
/* Date of its OpenMP standard, and the compiler whose library runs its threads. */
const char *nd_ops_openmp_version(void);

/* ND_ERR_INTERNAL naming the first missing op. */
nd_status nd_ops_check(const nd_ops *ops);

#endif
