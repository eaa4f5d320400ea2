// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_OPS_H
#define ND_KERNELS_OPS_H
/*
 * THE op list: everything a device computes in a training step. One table of functions per backend (ref, cpu, cuda);
 * a missing entry is a start-up error naming the op.
 *
 * Conventions
 *   n      tokens of the call (rows); C hidden; V vocabulary rows held here; F ffn; H query heads, K KV heads, D head
 *          size (even); all local extents.
 *   act    activation dtype: BF16, or F32 in precision fp32. All activations and weights of a call have the same one.
 *   Views  2-d tensors may have stride[0] > shape[1] (a slice of columns); the last axis is contiguous. Vectors are
 *          contiguous.
 *   Math   is F32 (ref: F64 where it sums): operands are widened, results rounded once (to nearest even) when stored.
 *          Sums are in an order that depends only on the shape and the backend, never on timing or the thread count.
 *   Alias  an output may be the same view as an input only where the op says so. No other overlap.
 *   Stream results are visible to later calls on the same stream.
 *   Errors ND_ERR_INTERNAL when a library refuses; bad shapes are ND_ASSERTs: the model checks users' numbers first.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/device/device.h"
#include "runtime/tensor/tensor.h"

/* Rotary table. cos, sin: F32 (positions, D/2), row = position. Made once on the host, nd_rope_table (kernels/rope.h). */
typedef struct nd_rope_view {
    const float *cos, *sin; /* (P, D/2) */
    int64_t positions;      /* P */
} nd_rope_view;

/*
 * One block of attention. Row-major 4-d views with free strides on the first three axes:
 *   q, out, dout, dq   (B, Sq, H, D)
 *   k, v, dk, dv       (B, Sk, K, D)        query head h uses KV head h / (H / K)
 *   lse, delta         F32 (B, H, Sq), contiguous
 * score(i, j) = scale <q_i, k_j>, visible when j <= i + diag. diag = 0: causal; diag >= Sk: unmasked; diag = p: causal
 * with p keys before the first query; diag < 0: the first -diag rows see nothing: out = 0, lse = -inf.
 * Source of the blocked form: Dao et al., FlashAttention (2022), and FlashAttention-2 (2023).
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

/* A flat range of a shard that shares one weight decay (parameters with and without decay alternate in a unit). */
typedef struct nd_flat_range {
    int64_t begin, end;
    bool decay;
} nd_flat_range;

typedef struct nd_ops nd_ops;

struct nd_ops {
    const char *name; /* "ref", "cpu", "cuda" */

    /* ---- linear algebra ---- */
    /*
     * c = op(a) op(b) + beta c, op(x) = x or x^T. a, b: act or F32. c: act or F32 (weight gradients accumulate into
     * F32 with beta = 1). beta is 0 or 1. Sums in F32. Shapes: op(a) (m, k), op(b) (k, n), c (m, n).
     */
    nd_status (*matmul)(nd_stream *, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta);

    /* ---- embedding ---- */
    /* out (n, C) = table (V, C)[ids[i] - first], zero where the id is outside [first, first + V). ids I32 (n). */
    nd_status (*embedding_fwd)(nd_stream *, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first);
    /* dtable F32 (V, C) += rows of dout (n, C); tokens are added in ascending i, so the order is fixed. */
    nd_status (*embedding_bwd)(nd_stream *, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first);

    /* ---- RMSNorm. Source: Zhang and Sennrich (2019); Llama: y = w x / sqrt(mean(x^2) + eps) ---- */
    /*
     * sum = x + delta, then y = weight sum rstd. delta.data NULL: sum is not written and x itself is normalised.
     * sum is rounded to act before it is normalised (the residual stream is act). x, delta, sum, y (n, C);
     * weight act (C); rstd F32 (n). sum may alias x or delta.
     */
    nd_status (*rmsnorm_fwd)(nd_stream *, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x,
                             nd_tensor delta, nd_tensor weight, float eps);
    /*
     * dx (n, C) = dres + d(norm)/dx applied to dy; dres.data NULL means 0. dweight F32 (C) += sum_i dy x rstd.
     * x is the normalised input (the sum of the forward). dx may alias dres or dy.
     */
    nd_status (*rmsnorm_bwd)(nd_stream *, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                             nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd);

    /* ---- RoPE, rotate-half form of Hugging Face Llama (pairs (d, d + D/2)) ---- */
    /*
     * out (n, heads, D) = rotation of x (n, heads, D) by table row positions[i] (I32 (n)); inverse for backward.
     * 3-d views, stride[1] == D or free. out may be x.
     */
    nd_status (*rope)(nd_stream *, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse);

    /* ---- SwiGLU: out = silu(gate) up ---- */
    nd_status (*swiglu_fwd)(nd_stream *, nd_tensor out, nd_tensor gate,
                            nd_tensor up); /* (n, F) each */
    /* dgate, dup may alias gate, up. */
    nd_status (*swiglu_bwd)(nd_stream *, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up);

    /* ---- attention ---- */
    /* out, lse of one block; never materialises (Sq, Sk). `scratch`: attention_scratch bytes. */
    nd_status (*attention_fwd)(nd_stream *, const nd_attention *, nd_tensor out, nd_tensor lse,
                               nd_tensor q, nd_tensor k, nd_tensor v, void *scratch);
    /* delta (B, H, Sq) = rowsum(dout out), once per backward whatever the number of blocks. */
    nd_status (*attention_delta)(nd_stream *, const nd_attention *, nd_tensor delta, nd_tensor out,
                                 nd_tensor dout);
    /*
     * dq, dk, dv of one block from the final (merged) lse and delta. Each output is act or F32. add_q: dq is F32
     * and is added to; add_kv: dk and dv are F32 and are added to (blocks of a ring, prefixes of gathered keys);
     * otherwise they are overwritten.
     */
    nd_status (*attention_bwd)(nd_stream *, const nd_attention *, nd_tensor dq, nd_tensor dk,
                               nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor dout,
                               nd_tensor lse, nd_tensor delta, bool add_q, bool add_kv,
                               void *scratch);
    /* Bytes of scratch for one call of the above with these extents (planned once). */
    size_t (*attention_scratch)(const nd_device *, const nd_attention *, nd_dtype act,
                                bool backward);
    /*
     * Online merge of a partial result: acc F32 (B, Sq, H, D), acc_lse F32 (B, H, Sq) absorb out (act), lse.
     *   lse' = log(exp(acc_lse) + exp(lse)); acc = acc exp(acc_lse - lse') + out exp(lse - lse')
     * -inf on either side is exact and gives no NaN; acc is not read in rows whose acc_lse is -inf.
     */
    nd_status (*lse_merge)(nd_stream *, const nd_attention *, nd_tensor acc, nd_tensor acc_lse,
                           nd_tensor out, nd_tensor lse);

    /* ---- cross entropy over a vocabulary slice ---- */
    /*
     * Per row of logits act (n, V): row_max F32 (n); row_sum F32 (n) = sum_v exp(logit - row_max); target F32 (n) =
     * logit of label when first <= label < first + valid, else 0. Columns >= valid are padding and ignored.
     * labels I32 (n), -100 = not counted.
     */
    nd_status (*ce_stats)(nd_stream *, nd_tensor row_max, nd_tensor row_sum, nd_tensor target,
                          nd_tensor logits, nd_tensor labels, int64_t first, int64_t valid);
    /* row_sum *= exp(row_max - global_max): this slice's sum on the scale of the global maximum. F32 (n) each. */
    nd_status (*ce_rescale)(nd_stream *, nd_tensor row_sum, nd_tensor row_max,
                            nd_tensor global_max);
    /* loss_sum F64 (1) += sum over counted rows of log(sum) + max - target. sum, max, target are global. Fixed order. */
    nd_status (*ce_loss)(nd_stream *, double *loss_sum, nd_tensor max, nd_tensor sum,
                         nd_tensor target, nd_tensor labels);
    /* logits -> dlogits in place: (softmax - onehot) scale; 0 for rows not counted and for columns >= valid. */
    nd_status (*ce_bwd)(nd_stream *, nd_tensor logits, nd_tensor max, nd_tensor sum,
                        nd_tensor labels, int64_t first, int64_t valid, float scale);

    /* ---- elementwise and reductions; a, b, out of any 2-d views or flat ---- */
    nd_status (*add)(nd_stream *, nd_tensor out, nd_tensor a,
                     nd_tensor b); /* out may alias a or b */
    nd_status (*accumulate)(nd_stream *, nd_tensor acc,
                            nd_tensor x);                       /* F32 acc += x (act or F32) */
    nd_status (*cast)(nd_stream *, nd_tensor out, nd_tensor x); /* BF16 <-> F32, or a copy */
    nd_status (*sum_squares)(nd_stream *, double *out, const float *x,
                             int64_t count); /* *out += sum x^2, F64 blocks */

    /* ---- optimizers over flat F32 shards; in place ---- */
    /*
     * AdamW (Loshchilov and Hutter, 2019; torch.optim.AdamW): g = grad grad_scale; p -= lr wd p (decay ranges);
     * m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr (m / bias1) / (sqrt(v / bias2) + eps).
     */
    nd_status (*adamw)(nd_stream *, const nd_adamw *, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count);
    /* p -= lr (grad grad_scale + wd p (decay ranges)): torch.optim.SGD without momentum. */
    nd_status (*sgd)(nd_stream *, const nd_adamw *, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count);
};

/* Backends. Each checks its own table for completeness the first time. */
nd_status nd_ops_ref(const nd_ops **out); /* naive F32 C, the oracle */
/* oneDNN, vectorised. What the ops keep (primitives, their scratch) hangs off the device and dies with it. */
nd_status nd_ops_cpu(nd_device *device, const nd_ops **out);

/* What the CPU backend runs on: the instruction set in use ("avx512_bf16"), oneDNN's version. Static strings. */
const char *nd_ops_machine(const nd_device *device);
const char *nd_ops_library_version(void);

/* ND_ERR_INTERNAL naming the first missing op. */
nd_status nd_ops_check(const nd_ops *ops);

/*
 * Creates what a first call of each kind would allocate lazily (library primitives, thread pools) for the given
 * product shapes, so that no step allocates. cpu only; a no-op elsewhere.
 */
typedef struct nd_matmul_shape {
    int64_t m, n, k;
    bool a_transposed, b_transposed;
    nd_dtype in, out;
    float beta;
} nd_matmul_shape;

#endif
