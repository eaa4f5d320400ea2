// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_MODEL_H
#define ND_MODEL_MODEL_H
/*
 * The Llama of one rank: activations, workspaces, and the two numbered lists of ops, forward
 * (llama_fwd.c) and backward (llama_bwd.c, in mirror order), with the head and its loss in head.c.
 *
 * What a block keeps from forward to backward depends on `recompute`; what it does not keep lives
 * in one shared set of buffers and is computed again by the same ops, so the results are the same
 * bits.
 *   none       everything
 *   selective  not the norm outputs (h1, h2) and the SwiGLU output (act); matmul and attention
 *              outputs are kept
 *   full       only the block's input (x_in)
 * In FP8 with a scale per tensor h1, h2 and act are kept as codes.
 */
#include "runtime/device/graphs.h"
#include "trainer/model/batches.h"
#include "trainer/layout/layout.h"
#include "trainer/parallel/cp.h"
#include "trainer/parallel/fsdp.h"
#include "trainer/parallel/tp.h"
#include "trainer/precision/precision.h"

/* Activations of one block. (rows, columns); q, k, v are columns of qkv, gate and up of gu. */
typedef struct nd_block_acts {
    nd_tensor x_in;  /* (Tl, C) block input: the residual stream */
    nd_tensor rstd1; /* (Tl) F32 */
    nd_tensor h1;    /* (Tl, C) normed input */
    nd_tensor qkv;   /* (T, QKV) roped */
    nd_tensor o;     /* (T, H D) attention output */
    nd_tensor lse;   /* (chunks, B, H, chunk) F32 */
    nd_tensor x_mid; /* (Tl, C) after attention */
    nd_tensor rstd2; /* (Tl) F32 */
    nd_tensor h2;    /* (Tl, C) */
    nd_tensor gu;    /* (T, 2 F) gate | up */
    nd_tensor act;   /* (T, F) silu(gate) up */
    /* The same as FP8 codes where that is what backward keeps of them (linear.h); else data is
     * NULL. */
    nd_tensor h1_codes, h2_codes, act_codes;
} nd_block_acts;

/* The numbers of a step, on the device. They are neighbours, so that one copy reads them all. */
typedef struct nd_step_numbers {
    double loss_sum; /* NLL over counted labels since it was zeroed: this rank's, then of all */
    double squares;  /* of all elements of the gradient */
    int64_t tokens;  /* counted labels of the step, of all ranks */
    int64_t stop;    /* not 0: a signal asked to stop; the largest of all ranks */
} nd_step_numbers;

/*
 * What the op that makes an operand of linears leaves: the operand; also its amax in the site; or
 * its FP8 codes instead. Set before the op, taken by the linears that read the operand
 * (linear_fuse.c).
 */
typedef enum nd_made { ND_MADE_PLAIN = 0, ND_MADE_AMAX, ND_MADE_CODES } nd_made;

typedef enum nd_pass { ND_PASS_TRAIN = 0, ND_PASS_EVAL, ND_PASS_BACKWARD } nd_pass;

/* Buffers of FP8 products, shared by all blocks; NULL where nothing needs them. */
typedef struct nd_fp8_scratch {
    void *x, *x_transposed;   /* an input: (T, columns) */
    void *dy, *dy_transposed; /* gradients of the outputs of a group */
    void *dy_local;           /* (Tl, C), before it is gathered over tp; NULL when tp is 1 */
    void *w, *w_transposed;   /* a weight */
    void *gemm;               /* of nd_ops.matmul_fp8 */
} nd_fp8_scratch;

typedef struct nd_model {
    nd_rank *rank;
    nd_dims dims;
    nd_layout *layout;
    nd_fsdp fsdp;
    nd_scales scales;
    nd_fp8_scratch fp8;
    nd_pass pass;
    nd_made made[ND_INPUT_COUNT], made_gradients; /* inputs; outputs' gradients of gate and up */
    nd_cp cp;
    nd_recompute recompute;

    nd_block_acts *acts; /* [L] */
    nd_rope_view rope;

    nd_batches batches;

    /* Buffers shared by all blocks. */
    nd_tensor branch; /* (Tl, C) output of attention or MLP before it joins the residual stream */
    nd_tensor dx, dh; /* (Tl, C) gradient of the residual stream, of a norm output */
    nd_tensor dact;   /* (T, F) */
    nd_tensor dqkv, dout;  /* (T, QKV), (T, H D) */
    void *full_a, *full_b; /* (T, C): gathered activations, partial sums; NULL when tp is 1 */

    /* Head. n = tp x head_rows rows of one chunk. */
    nd_tensor x_final, h_final, rstd_final, dh_final; /* (Tl, C), (Tl, C), (Tl), (Tl, C) */
    nd_tensor logits;                                 /* (n, V) */
    void *head_full, *head_dfull; /* (n, C) gathered rows and their gradient; NULL when tp is 1 */
    float *row_max, *row_sums, *global_max; /* (n), (2 n): sum | target, (n) */
    nd_step_numbers *numbers;
    nd_graphs *graphs; /* borrowed: of the blocks of a training step; NULL: none in this step */
} nd_model;

/* Lays out everything this rank needs into `plan`; no memory yet. */
nd_status nd_model_create(nd_rank *rank, nd_memplan *plan, nd_model **out);
/* After the plan was committed: what memory must hold before the first step. */
nd_status nd_model_start(nd_model *model);
void nd_model_destroy(nd_model *model);

/* inputs, labels (B, s) of one micro-batch and positions (B, s): copied, and on their way to the
 * device, where it is the current one for what is enqueued from here on. */
nd_status nd_model_load_batch(nd_model *model, const int32_t *inputs, const int32_t *labels,
                              const int32_t *positions);

/*
 * Forward of the loaded micro-batch up to the final norm, then the head: adds to numbers->loss_sum.
 * With train the head's backward runs inside (dlogits divided by numbers->tokens) and the blocks'
 * activations are kept.
 */
nd_status nd_model_forward(nd_model *model, bool train);
/* Backward of the blocks and the embedding; gradients are accumulated into the shards. */
nd_status nd_model_backward(nd_model *model);

/* Parts, in their own files. */
/* The work of a block in the buffers that its unit has now. */
nd_graph_key nd_block_graph_key(const nd_model *model, const char *name, int64_t layer);
nd_status nd_block_forward(nd_model *model, int64_t layer, nd_tensor x, nd_tensor delta);
nd_status nd_block_recompute(nd_model *model, int64_t layer);
/* The codes of a normed input (second: norm 2) that the block did not keep, just before the
 * products that need them. */
nd_status nd_block_recompute_codes(nd_model *model, int64_t layer, bool second);
nd_status nd_head_forward(nd_model *model, nd_tensor x, nd_tensor delta, bool train);
/* Gradient of the residual stream after the last block, into model->dx. */
nd_status nd_head_backward(nd_model *model);

#endif
