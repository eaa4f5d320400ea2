// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_OPS_H
#define ND_KERNELS_OPS_H
/*
 * The ops: everything a device computes in a training step. Each takes a stream and one struct of
 * arguments, declared here with its contract; ops_list.h names them once. There is one table of
 * functions per backend (ref, cpu, cuda); a missing entry is a start-up error naming the op.
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
 *   Absent operands have no data (data NULL); a struct's members that are not named are absent.
 *   Stream results are visible to later calls on the same stream.
 *   Errors ND_ERR_INTERNAL when a library refuses; bad shapes are ND_ASSERTs: the model checks
 *          users' numbers first, among them those that nd_op_limits bounds.
 */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/ops_list.h"
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
 * score(i, j) = scale <q_i, k_j>, visible when first(i) <= j < end(i). end(i) = i + diag + 1.
 * diag = 0: causal; diag >= Sk: unmasked; diag = p: causal with p keys before the first query; diag
 * < 0: the first -diag rows see nothing. first(i) is the largest of: 0; end(i) - window where
 * window > 0, so that a row sees at most `window` keys; first_key(b, i) where a call has it, such
 * as the first key of the row's document. Where a call has an end_key, end(i) is end_key(b, i), and
 * diag is not read: the rows are any queries in any order. Rows that see nothing: out = 0, lse =
 * -inf, dq = 0. Source of the blocked form: Dao et al., FlashAttention (2022), and FlashAttention-2
 * (2023).
 *
 * documents says how the bounds of a call are related. No result depends on it, but a backend may
 * compute such a call segment by segment.
 */
typedef enum nd_segments {
    ND_SEGMENTS_NONE = 0,
    /* Row i and key i are the same token, diag = 0, and every row of a document, whose rows are
     * adjacent, has the first of them as its first_key and i + 1 as its end_key. */
    ND_SEGMENTS_WHOLE,
    /* Here and below, first_key and end_key ascend from row to row, rows of one document have one
     * first_key, and keys of different documents differ. A segment is adjacent rows of a document
     * of which each sees one key more than the row before, which is the row's own token, */
    ND_SEGMENTS_DIAGONAL,
    ND_SEGMENTS_FLAT, /* or which all see the same keys. */
} nd_segments;

typedef struct nd_attention {
    int64_t batch, sq, sk, heads, kv_heads, head_dim;
    int64_t diag;
    float scale;
    int64_t window; /* 0: none */
    nd_segments documents;
    int64_t rounds; /* the most segments of a document that see keys, or fewer; 0: 1 */
} nd_attention;

/* Rows of a call that follow on the tokens of one sequence, which lie in its slot of a cache. */
typedef struct nd_kv_segment {
    int64_t slot;
    int64_t length; /* tokens of the sequence in the slot; 0: the sequence begins */
    int64_t rows;   /* of the call, at least 1; length + rows <= capacity of the slot */
} nd_kv_segment;

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
    /* Optimizers use these; they lie on the device. */
    nd_bf16 *copy; /* NULL, or a BF16 copy, copy[i] of element begin + i */
    float *amax;   /* NULL, or F32 (1): merged with the largest |p| afterwards, as by `amax`; only
                      where nd_ops.optimizer_measures */
} nd_flat_range;

/*
 * FP8. FMAX is the largest finite value of a format: 448 (E4M3), 57344 (E5M2). `scale` is what a
 * value is multiplied by before it is rounded to a code, `inverse` = 1.0f / scale what a code is
 * multiplied by to get the value back: F32, on the device, as many as the granularity says: 1, one
 * per row, or one per column of the matrix (rows, columns).
 */
typedef enum nd_granularity { ND_PER_TENSOR = 0, ND_PER_ROW, ND_PER_COLUMN } nd_granularity;

enum { ND_FP8_PARTS = 3 };

/*
 * The form in which a backend multiplies an operand b, in memory that the caller keeps from one
 * product to the next. The first product that reads it makes the form; while `made` is true,
 * products read the form and not the matrix, with the same bits. It serves products with the same
 * k, n, b_transposed and dtype of b, whatever their m. The caller clears `made` when b has changed.
 */
typedef struct nd_kept_form {
    void *memory; /* nd_form_rule.bytes, aligned to 64, on the device */
    bool made;
} nd_kept_form;

/*
 * A product reads this of an operand: a view that owns nothing. BF16 or F32 are read as they are;
 * FP8 has value(i, j) = code(i, j) inverse[g], g = 0, i or j. Where FP8 is stored as act or F32,
 * the codes are not made yet: the product casts to them while it reads (nd_ops.form). Its scales
 * are then those of current scaling for its own amax: none is infinite, and |x| scale exceeds FMAX
 * by a rounding at most, or is NaN. The bits of the product are those with the codes that make_form
 * makes.
 */
typedef struct nd_matrix {
    nd_tensor stored;       /* (rows, columns): act, F32, or codes E4M3 or E5M2; row stride free */
    bool transposed;        /* it is codes (columns, rows), as nd_ops.form asks for them */
    nd_dtype format;        /* E4M3 or E5M2, of the codes that a product makes */
    float *scale, *inverse; /* 1, (rows) or (columns), or (parts); NULL: not FP8 */
    nd_granularity granularity;
    /* The number of matrices that lie beside one another in `stored`, along the axis that the
     * product does not sum; 0: it is one. Part p has lines[p] rows of op(a) or columns of op(b),
     * and scale[p] and inverse[p]. For products alone; granularity is per tensor. */
    int parts;
    int64_t lines[ND_FP8_PARTS];
    nd_kept_form
        *kept; /* NULL, or where the backend keeps b, without the scales of codes. Where the
                           product casts b, its scales too must not have changed */
} nd_matrix;

/* BF16 or F32 as they are. */
static inline nd_matrix nd_rows(nd_tensor x)
{
    nd_matrix matrix;
    memset(&matrix, 0, sizeof matrix);
    matrix.stored = x;
    return matrix;
}

static inline bool nd_matrix_is_fp8(const nd_matrix *x)
{
    return x->inverse != NULL;
}

/* The operands of a linear's products: y = x w^T, dx = dy w, dw = dy^T x. */
typedef enum nd_role {
    ND_X_OF_Y = 0,
    ND_W_OF_Y,
    ND_DY_OF_DX,
    ND_W_OF_DX,
    ND_DY_OF_DW,
    ND_X_OF_DW,
    ND_ROLE_COUNT
} nd_role;

/* An operand for which a caller asks in which form products read it. */
typedef struct nd_form_need {
    nd_role role;
    int64_t rows, columns; /* as it is stored: x (tokens, in), w (out, in), dy (tokens, out) */
    int64_t others;        /* rows of op(a), or columns of op(b), of the product's other operand */
    nd_dtype stored;       /* act, F32, or FP8: it is codes already */
    nd_dtype format;       /* that products multiply: FP8, or as stored */
    bool measured;         /* who casts it also finds its amax, so that no product can */
    int uses;              /* products that read it before it changes */
} nd_form_need;

typedef enum nd_form_maker {
    ND_FORM_IS_STORED = 0, /* nobody: products read it as it is stored */
    ND_FORM_BY_OP,         /* make_form, or the op that makes the operand (nd_fuse) */
    ND_FORM_BY_PRODUCT     /* the product that reads it first keeps it (nd_matrix.kept); without
                              bytes each product makes it while it reads */
} nd_form_maker;

typedef struct nd_form_rule {
    nd_form_maker maker;
    size_t bytes;    /* of the form; 0: nothing is kept */
    bool transposed; /* BY_OP: the codes transposed, else as they are */
    /* DY_OF_DW, X_OF_DW, of what is not cast: a product that is added to c (beta 1) for so many
     * tokens after the other gives the bits of one product of all tokens; 0: it does not. */
    int64_t block;
} nd_form_rule;

/*
 * This says what an op does with a result in addition to storing it, without reading it again (all
 * zero: nothing). The values are those that are stored, rounded to act. A result with codes need
 * not be stored: its tensor's data may be NULL, its shape and dtype count.
 */
typedef struct nd_fuse {
    float *amax;     /* NULL, or F32 (1), on the device: merged with the largest |value| as by
                         * `amax`; 0 before the first */
    nd_tensor codes; /* data NULL, or FP8 of the result's shape: cast as by make_form, per tensor */
    const float *scale; /* F32 (1), on the device, with codes */
} nd_fuse;

/* This says which of its past amaxes a delayed scale follows: the last one, or the largest of the
 * history. */
typedef enum nd_amax_algorithm { ND_AMAX_MOST_RECENT = 0, ND_AMAX_MAX } nd_amax_algorithm;

/* Delayed scaling of `count` tensors; F32, on the device. At the start amax is 0, scale and inverse
 * are 1. */
typedef struct nd_fp8_history {
    int64_t length, count; /* length >= 1 */
    float *amax;        /* (length, count): row 0 is this step's, then past steps from the oldest */
    const float *limit; /* (count): FMAX of the tensor's format / 2^margin */
    float *scale, *inverse; /* (count) */
} nd_fp8_history;

/* linear algebra */

/*
 * c = op(a) op(b) + beta c, op(x) = x or x^T. a, b: both act, both F32, or both FP8, of which one
 * may be E5M2. c: act or F32 (weight gradients accumulate into F32 with beta = 1). beta is 0 or 1.
 *
 * Sums are in F32. A library may round the product to BF16 before a BF16 c is added (cuBLASLt 13.1
 * does, on an H200). That of FP8 is the sum of the codes; it is multiplied by the inverse scales
 * (in F32, in any order) and c is added before the one rounding. An operand's scale is per tensor
 * or constant along the summed axis: op(a) per row, op(b) per column (of the stored matrix: per
 * column of a transposed a). One of them may have parts, where the other has one scale: the bits
 * are those of a product for each part. In FP8 m, n and k are multiples of 16 on cuda: the model
 * checks
 * users' numbers, and pads m where it is free (nd_ops.fp8_rows).
 */
typedef struct nd_product_args {
    nd_tensor c;       /* (m, n) */
    nd_matrix a;       /* op(a) is (m, k) */
    bool a_transposed; /* a is stored as (k, m) */
    nd_matrix b;       /* op(b) is (k, n) */
    bool b_transposed; /* b is stored as (n, k) */
    float beta;
    bool few_rows; /* a hint where m may be small: a backend may compute the product in another
                      order, as fast as b is read */
    bool fast_accumulation; /* FP8: a tensor core may sum with fewer bits */
    void *scratch; /* FP8: product_scratch bytes, aligned to 256; without parts NULL where products
                      cast */
} nd_product_args;

/* embedding */

/* out row i = table row ids[i] - first, or zero where the id is outside [first, first + V). */
typedef struct nd_embedding_fwd_args {
    nd_tensor out;   /* (n, C) */
    nd_tensor ids;   /* I32 (n) */
    nd_tensor table; /* (V, C) */
    int64_t first;
} nd_embedding_fwd_args;

/* dtable row ids[i] - first += dout row i. Tokens are added in ascending i, so the order is
 * fixed. */
typedef struct nd_embedding_bwd_args {
    nd_tensor dtable; /* F32 (V, C) */
    nd_tensor ids;    /* I32 (n) */
    nd_tensor dout;   /* (n, C) */
    int64_t first;
} nd_embedding_bwd_args;

/* RMSNorm. Source: Zhang and Sennrich (2019); Llama: y = w x / sqrt(mean(x^2) + eps), where w is
 * weight + plus in F32: Gemma stores what is added to 1. */

/*
 * sum = x + delta, then y = w sum rstd. Without delta, sum is not written and x itself is
 * normalised. sum is rounded to act before it is normalised (the residual stream is act). sum may
 * alias x or delta.
 */
typedef struct nd_rmsnorm_fwd_args {
    nd_tensor y, sum;   /* (n, C) */
    nd_tensor rstd;     /* F32 (n) */
    nd_tensor x, delta; /* (n, C); delta may be absent */
    nd_tensor weight;   /* act (C) */
    float plus;         /* 0, or 1 */
    float eps;
    nd_fuse fuse;      /* of y */
    nd_tensor squares; /* absent, or F32 (n): row_dots of x and x over rows of which x has a part */
    int64_t width;     /* with squares: columns of the whole rows */
} nd_rmsnorm_fwd_args;

/*
 * dx = dres + d(norm)/dx applied to dy; an absent dres means 0. dweight += sum_i dy x rstd. x is
 * the normalised input (the sum of the forward). dx may alias dres or dy.
 */
typedef struct nd_rmsnorm_bwd_args {
    nd_tensor dx;       /* (n, C) */
    nd_tensor dweight;  /* F32 (C) */
    nd_tensor dy, dres; /* (n, C); dres may be absent */
    nd_tensor x;        /* (n, C) */
    nd_tensor weight;   /* act (C) */
    float plus;         /* as in the forward */
    nd_tensor rstd;     /* F32 (n) */
    float *amax;        /* NULL, or as nd_fuse.amax, of dx */
    nd_tensor dots;     /* absent, or F32 (n): row_dots of dy and x with weight over whole rows */
    int64_t width;      /* with dots: columns of the whole rows */
} nd_rmsnorm_bwd_args;

/* out = the sum over a row of weight x y, where an absent weight is 1. Ranks that have parts of
 * rows add these up for the norm of the whole rows. */
typedef struct nd_row_dots_args {
    nd_tensor out;    /* F32 (n) */
    nd_tensor x, y;   /* (n, C) */
    nd_tensor weight; /* act (C) or absent */
} nd_row_dots_args;

/*
 * RoPE in the rotate-half form of Hugging Face Llama, pairs (d, d + D/2): out = rotation of x by
 * table row positions[i]; inverse for the backward. 3-d views, stride[1] == D or free. out may be
 * x.
 */
typedef struct nd_rope_args {
    nd_tensor out, x;    /* (n, heads, D) */
    nd_tensor positions; /* I32 (n) */
    nd_rope_view table;
    bool inverse;
} nd_rope_args;

/* SwiGLU: out = silu(gate) up, or gelu(gate) up (GeGLU). Both are gate sigmoid(z) up: silu(g) has
 * z = g, and the tanh form of gelu, g (1 + tanh(sqrt(2 / pi) (g + c g^3))) / 2 with c = 0.044715,
 * has z = g (ND_GELU_LINEAR + ND_GELU_CUBIC g^2). Source: Hendrycks and Gimpel (2016). */
#define ND_GELU_LINEAR 1.5957691216057308 /* 2 sqrt(2 / pi) */
#define ND_GELU_CUBIC  (0.044715 * ND_GELU_LINEAR)

typedef struct nd_swiglu_fwd_args {
    nd_tensor out, gate, up; /* (n, F) */
    bool gelu;
    nd_fuse fuse; /* of out */
} nd_swiglu_fwd_args;

/* dgate and dup may alias gate and up. */
typedef struct nd_swiglu_bwd_args {
    nd_tensor dgate, dup, dout, gate, up; /* (n, F) */
    bool gelu;
    nd_fuse fuse[2]; /* of dgate, of dup */
} nd_swiglu_bwd_args;

/* Every row of out is the bias: what a product with beta 1 is then added to, with one rounding. */
typedef struct nd_bias_fwd_args {
    nd_tensor out;  /* (n, C) */
    nd_tensor bias; /* act (C) */
} nd_bias_fwd_args;

/* dbias += sum_i dout row i, in an order that the shape alone decides. */
typedef struct nd_bias_bwd_args {
    nd_tensor dbias; /* F32 (C) */
    nd_tensor dout;  /* (n, C) */
} nd_bias_bwd_args;

/* attention */

/* out and lse of one block; never materialises (Sq, Sk). */
typedef struct nd_attention_fwd_args {
    nd_attention attention;
    nd_tensor out, lse;
    nd_tensor q, k, v;
    /* Absent, or I32 (B, Sq), contiguous: any numbers in any order. An end_key has a first_key. */
    nd_tensor first_key, end_key;
    void *scratch; /* attention_scratch bytes */
    bool few_rows; /* a hint where Sq may be 1: a backend may compute that in another order, as fast
                      as k and v are read */
} nd_attention_fwd_args;

/*
 * Attention of sequences that are being continued, through their keys and values in a cache. The
 * segments' rows are adjacent in qkv and out, in the order of the segments. First the keys and
 * values of a segment's rows become rows [length, length + rows) of its slot. Then row i of a
 * segment is a query that sees the first length + i + 1 rows of the slot, or with a window the last
 * `window` of these, as in attention_fwd.
 */
typedef struct nd_attention_cached_args {
    nd_attention attention;        /* heads, kv_heads, head_dim, scale, window; nothing else */
    nd_tensor out;                 /* (rows of all segments, H D) */
    nd_tensor qkv;                 /* (rows of all segments, (H + 2 K) D): q, k, v, roped */
    nd_tensor cache;               /* (slots, capacity, 2 K D), contiguous: k, then v of a token */
    const nd_kv_segment *segments; /* (count), no slot twice; host memory */
    int64_t count;
    void *scratch; /* attention_cached_scratch bytes */
} nd_attention_cached_args;

/* delta = rowsum(dout out), once per backward whatever the number of blocks, where
 * attention_uses_delta says so. */
typedef struct nd_attention_delta_args {
    nd_attention attention;
    nd_tensor delta, out, dout;
} nd_attention_delta_args;

/*
 * dq, dk, dv of one block from the final (merged) out, lse and delta. delta is absent where
 * attention_uses_delta says that it is not read; else, without a window, out is not read. A call
 * with a first_key always reads delta. Each output is act or F32.
 */
typedef struct nd_attention_bwd_args {
    nd_attention attention;
    nd_tensor dq, dk, dv;
    nd_tensor q, k, v, out, dout, lse, delta;
    nd_tensor first_key, end_key; /* as in the forward */
    bool add_q;                   /* dq is F32 and is added to; otherwise it is overwritten */
    bool add_kv;   /* the same for dk and dv: blocks of a ring, prefixes of gathered keys */
    void *scratch; /* attention_scratch bytes */
} nd_attention_bwd_args;

/*
 * Online merge of a partial result: acc and acc_lse absorb out and lse.
 *   lse' = log(exp(acc_lse) + exp(lse)); acc = acc exp(acc_lse - lse') + out exp(lse - lse')
 * -inf on either side is exact and gives no NaN; acc is not read in rows whose acc_lse is -inf.
 */
typedef struct nd_lse_merge_args {
    nd_attention attention;
    nd_tensor acc;     /* F32 (B, Sq, H, D) */
    nd_tensor acc_lse; /* F32 (B, H, Sq) */
    nd_tensor out;     /* act (B, Sq, H, D) */
    nd_tensor lse;     /* F32 (B, H, Sq) */
} nd_lse_merge_args;

/* Cross entropy over a vocabulary slice of V columns: ids [first, first + valid) and padding. A
 * label of -100 is not counted. */

/*
 * Per row of logits: row_max; row_sum = sum_v exp(logit - row_max); target = logit of the label
 * when first <= label < first + valid, else 0. Columns >= valid are padding and ignored. Without a
 * logit above -inf row_max is -inf and row_sum is 0; a NaN among the logits makes row_sum NaN.
 * merge: the statistics, which are those of other columns, become those of these columns too: so
 * tiles of columns, one call each, give the statistics of the whole row.
 */
typedef struct nd_ce_stats_args {
    nd_tensor row_max, row_sum, target; /* F32 (n) */
    nd_tensor logits;                   /* act (n, V) */
    nd_tensor labels;                   /* I32 (n) */
    int64_t first, valid;
    bool merge;
} nd_ce_stats_args;

/* row_sum *= exp(row_max - global_max): this slice's sum on the scale of the global maximum. Where
 * row_max is -inf, row_sum stays. */
typedef struct nd_ce_rescale_args {
    nd_tensor row_sum, row_max, global_max; /* F32 (n) */
} nd_ce_rescale_args;

/* *loss_sum += sum over counted rows of log(sum) + max - target, which are the global ones, in a
 * fixed order. */
typedef struct nd_ce_loss_args {
    double *loss_sum;           /* F64 (1) */
    nd_tensor max, sum, target; /* F32 (n) */
    nd_tensor labels;           /* I32 (n) */
} nd_ce_loss_args;

/* logits -> dlogits in place: (softmax - onehot) / *count (the quotient 1 / *count in F64, rounded
 * to F32, multiplies); 0 for rows not counted and for columns >= valid. */
typedef struct nd_ce_bwd_args {
    nd_tensor logits;   /* act (n, V) */
    nd_tensor max, sum; /* F32 (n) */
    nd_tensor labels;   /* I32 (n) */
    int64_t first, valid;
    const int64_t *count; /* I64 (1) */
} nd_ce_bwd_args;

/* elementwise operations and reductions */

/* acc += x. Any views of equal extents. */
typedef struct nd_accumulate_args {
    nd_tensor acc; /* F32 */
    nd_tensor x;   /* act or F32 */
} nd_accumulate_args;

/* BF16 to F32 or back, or a copy. Any views of equal extents. */
typedef struct nd_cast_args {
    nd_tensor out, x;
} nd_cast_args;

/* out = scale x + plus, rounded once; an absent plus means 0. out may alias x or plus. */
typedef struct nd_axpy_args {
    nd_tensor out, x, plus; /* (n, C), act */
    float scale;
} nd_axpy_args;

/* *out += sum x^2, in F64 blocks. */
typedef struct nd_sum_squares_args {
    double *out;
    const float *x; /* (count) */
    int64_t count;
} nd_sum_squares_args;

/*
 * *out += sum over i of (2 i + 1) times the bits of x[i], mod 2^64: the same in every order, and
 * another number when the bits of one element differ, since an odd factor has an inverse. On a CPU
 * any thread may call it.
 */
typedef struct nd_digest_args {
    uint64_t *out;
    const float *x; /* (count) */
    int64_t count;
} nd_digest_args;

/* out[i] = deviation nd_rng_normal(seed, random_stream, first + i), rounded once: the same bits in
 * every backend. */
typedef struct nd_random_normal_args {
    float *out; /* (count) */
    int64_t count;
    float deviation;
    uint64_t seed, random_stream, first;
} nd_random_normal_args;

/* optimizers over flat F32 shards; in place */

/*
 * AdamW (Loshchilov and Hutter, 2019; torch.optim.AdamW): g = grad grad_scale; p -= lr wd p
 * (decay ranges); m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr (m / bias1) / (sqrt(v
 * / bias2) + eps). A range's copy gets the updated p as `cast` rounds it, its amax the size of
 * the largest.
 */
typedef struct nd_adamw_args {
    nd_adamw hyper;
    float *p, *m, *v;
    const float *grad;
    const nd_flat_range *ranges; /* host memory */
    int range_count;
} nd_adamw_args;

/* p -= lr (grad grad_scale + wd p (decay ranges)): torch.optim.SGD without momentum. Copies and
 * amaxes as above. */
typedef struct nd_sgd_args {
    nd_adamw hyper;
    float *p;
    const float *grad;
    const nd_flat_range *ranges; /* host memory */
    int range_count;
} nd_sgd_args;

/* FP8: scales */

/*
 * amax = largest |x| of all of x, of each row or column. NaN in x gives NaN, as torch.max does.
 * merge: the maximum with what is there (NaN on either side gives NaN), so the amax of pieces is
 * that of the whole; otherwise overwritten, 0 where x is empty.
 */
typedef struct nd_amax_args {
    float *amax; /* 1, (rows) or (columns) */
    nd_tensor x; /* act or F32, 2-d, or 1-d per tensor */
    nd_granularity granularity;
    bool merge;
} nd_amax_args;

/*
 * Current scaling: scale = FMAX / max(amax, 1e-12), divided in F64 and rounded to F32; NaN stays
 * NaN, and an infinite amax gives scale 0 and an infinite inverse, so that the product shows it.
 * power_of_two: then 2^floor(l), l = log2(scale) rounded to F32 (which may round up to an
 * integer). Source: torchao 0.18, float8_utils.amax_to_scale.
 */
typedef struct nd_fp8_scale_args {
    float *scale, *inverse; /* (count) */
    const float *amax;      /* (count) */
    int64_t count;
    nd_dtype format;
    bool power_of_two;
} nd_fp8_scale_args;

/*
 * Delayed scaling, once per step, after row 0 is complete (all micro-batches, all ranks). For each
 * tensor, with newest = amax[0]: when newest is not 0, rows 2.. move up by one, newest goes to the
 * last row, and row 0 becomes 0. A = newest, or (max, and newest not 0) the largest of the whole
 * history, row 0 and the row that drops out included, NaN ignored. When A is finite and above 0,
 * scale = limit / A in F32, FLT_MAX where that is infinite; else the scale stays.
 * inverse = 1.0f / scale. Source: Transformer Engine, common/recipe/delayed_scaling.cu.
 */
typedef struct nd_fp8_delayed_args {
    nd_fp8_history history;
    nd_amax_algorithm algorithm;
} nd_fp8_delayed_args;

/* FP8: codes */

/*
 * Makes the form of an operand. x act or F32: codes = x scale (in F32), limited to +-FMAX
 * (infinities too), rounded to nearest even; NaN gives a NaN code (which of them is free), -0 and
 * what rounds to it keeps its sign. Writes out.stored, and the same codes transposed, whichever
 * are there, in one pass, with the scale that is there; reads no inverse. x FP8: `transposed`
 * alone, of its codes. A backend whose nd_ops.form asks for no transposed codes makes none.
 */
typedef struct nd_make_form_args {
    nd_matrix out;        /* its `transposed` is not read */
    nd_tensor transposed; /* (columns, rows) */
    float *amax; /* NULL, or F32 (1): merged with the largest |x| of the tensor as by `amax` */
    nd_tensor x; /* (rows, columns) as codes; 1-d per tensor without `transposed` */
} nd_make_form_args;

/*
 * For the health log: counts[0] += elements that are not 0 but whose code is +-0, counts[1] +=
 * elements with |x scale| > FMAX. NaN counts in neither.
 */
typedef struct nd_fp8_count_args {
    int64_t *counts; /* (2) */
    nd_tensor x;
    nd_matrix as; /* what x is cast to; only its format and scale are read */
} nd_fp8_count_args;

/* The ops that make what calls of the same name keep for their form. */
typedef struct nd_prepare_ops {
    ND_EACH_PREPARED_OP(ND_OP_MEMBER, )
} nd_prepare_ops;

/*
 * The largest sizes of a backend's ops; 0: any. Larger ones are ND_ASSERTs or worse, so a
 * model is compared with these before it is planned.
 */
typedef struct nd_op_limits {
    int64_t hidden;   /* C of rmsnorm_bwd */
    int64_t head_dim; /* D of attention */
    int64_t tokens;   /* n of every op: what an I32 counts */
} nd_op_limits;

typedef struct nd_ops {
    const char *name; /* "ref", "cpu", "cuda" */
    nd_op_limits limits;
    int64_t fp8_rows;             /* m of an FP8 product is a multiple of this; 0: any */
    bool optimizer_measures;      /* adamw and sgd take ranges with an amax */
    const struct nd_tuner *tuner; /* cuda/cuda_ops.h; NULL: nothing to tune */
    /*
     * NULL, or ops that make what a call of the same name keeps for its form, such as a library's
     * plan, and do nothing else. Only the device of the stream is used; tensors need no memory, but
     * addresses that are aligned as those of the call. What attention_scratch returns afterwards
     * holds for the prepared calls.
     */
    const nd_prepare_ops *prepare;

    /* status op(stream, arguments) for every op of the list. The arguments are read before the call
     * returns. */
    ND_EACH_OP(ND_OP_MEMBER, )

    /*
     * Queries; each may be asked before anything runs, and answers for one device.
     *   workspace             bytes that the ops allocate for the device, beside what callers give
     *                         them; on the CPU without what oneDNN's products allocate when they
     *                         first run
     *   attention_scratch     bytes of scratch for a call of attention_fwd, or attention_bwd, with
     *                         these extents (planned once)
     *   attention_cached_scratch  bytes for a call of attention_cached whose segments have at most
     *                         sq rows, and sk tokens with those in the slot
     *   attention_uses_delta  whether attention_bwd of tensors of type act reads delta. Where it
     *                         does not, q, k, v, out and dout must lie at multiples of 16 bytes,
     *                         with strides of multiples of 8 elements
     * product_scratch bytes for one FP8 call with these extents and c of either type (planned
     *                         once; enough for smaller extents too)
     *   form                  in which form products read an operand, and who makes it
     */
    ND_EACH_QUERY(ND_QUERY_MEMBER, )
} nd_ops;

/* Calls an op: ND_CALL(ops, stream, product, .c = c, .a = nd_rows(a), .b = nd_rows(b)). Absent
 * operands are not named. */
#define ND_CALL(ops_, stream_, op_, ...) (ops_)->op_((stream_), &(nd_##op_##_args){__VA_ARGS__})

/* Backends. Each checks its own table for completeness the first time. */
nd_status nd_ops_ref(const nd_ops **out); /* naive F32 C, the oracle */
/* oneDNN, vectorised. What the ops keep (primitives, their scratch) hangs off the device and dies
 * with it. */
nd_status nd_ops_cpu(nd_device *device, const nd_ops **out);
/*
 * Starts the device's threads, which wait for the ops of the calling thread: ours, and as many of
 * oneDNN (libgomp's) where it will multiply, which is F32 (`f32`: there will be products of it) and
 * what our own kernels do not (nd_ops_products). ND_ERR_RESOURCE: a limit forbids so many (ulimit
 * -u, -v, -d, pids.max, stacks that have no room). Without this the first op that needs them starts
 * them, and under such a limit ours warn and leave all work to the calling thread, while libgomp
 * ends the process.
 */
nd_status nd_ops_cpu_start_threads(nd_device *device, bool f32);
/* Address space for the stack of each of these threads: OMP_STACKSIZE, or what the C library gives
 * a thread (ulimit -s). */
int64_t nd_ops_cpu_stack_bytes(void);

/* These texts say what the CPU backend runs on: the instruction set in use ("avx512_bf16"); what
 * multiplies ("BF16 and FP8 products by ndtrain's AVX512_BF16 kernels, F32 by oneDNN 2.6.3"), which
 * lives as long as the device's ops; oneDNN's version. */
const char *nd_ops_machine(const nd_device *device);
const char *nd_ops_products(const nd_device *device);
const char *nd_ops_library_version(void);
/* Date of its OpenMP standard, and the compiler whose library runs its threads. */
const char *nd_ops_openmp_version(void);

/* ND_ERR_INTERNAL naming the first missing op. */
nd_status nd_ops_check(const nd_ops *ops);

#endif
