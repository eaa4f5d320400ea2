// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_LINEAR_H
#define ND_MODEL_LINEAR_H
/*
 * The linears of a block, forward and backward, in BF16 or FP8, with their tensor-parallel
 * exchange. Each FP8 linear has its own weight scale and its own gradient scale. Adjacent linears
 * with one input that stay in BF16 make one product. Each FP8 linear makes its own, except for y
 * and dw where nd_linears_join says so. The input's scale is found once, and its codes are made
 * once, or by each product where products cast (nd_products_cast).
 *
 *   column-parallel (q k v; gate up)   the input is gathered over tp, each rank computes its
 *                                      columns
 *   row-parallel (o; down)             each rank multiplies its columns of the input, partial sums
 *                                      are reduced
 *
 * With one scale per tensor the amax of a tensor that is split over tp is its maximum over tp;
 * inputs and gradients are cast before they are gathered, and travel as codes, unless a BF16 linear
 * with the same input needs the BF16 rows too. Backward then keeps the input as codes (1 byte),
 * except the attention output, which the attention's backward needs in BF16: it is cast again with
 * its saved scale. Other recipes gather and keep BF16, and settle what tp splits of the scales of
 * rows and columns by one reduction for each input: before y of a row-parallel linear, before dx of
 * the column-parallel ones.
 *
 * Norms and SwiGLU measure or cast their results while they store them, where that gives the same
 * bits; BF16 rows that no product reads are then not written. An operand carries what is known of
 * it from the op that makes it to the linears that read it.
 */
#include "trainer/model/model.h"

/* What the op that made an operand left: the rows; also their amax; or their codes instead. */
typedef enum nd_known { ND_KNOWN_NOTHING = 0, ND_KNOWN_AMAX, ND_KNOWN_CODES } nd_known;

/* An input of linears, or the gradient of their outputs: a variable of the caller. */
typedef struct nd_operand {
    nd_tensor rows; /* BF16 or F32; data NULL: only codes are there */
    /* An input (T or Tl, K): where the block keeps its codes; data NULL: it keeps none. Gradients
     * of several linears' outputs (linears x T, rows of one): where their op leaves the codes. */
    nd_tensor codes;
    nd_scale_ref scale; /* of the whole tensor; of gradients: of the first linear's */
    nd_known known;
    nd_matrix cast; /* what FP8 products read, once it was cast, and gathered over tp */
} nd_operand;

/* Adjacent linears of one product: those in BF16 together, each FP8 linear alone or, where they can
 * be (nd_linears_join), together too. */
typedef struct nd_linear_part {
    int first, last; /* linears */
    bool fp8;
    int fp8_before;       /* FP8 linears with this input before this part */
    int64_t offset, rows; /* columns of the output of all linears with this input */
} nd_linear_part;

/* operands.c */

/* Buffers that the FP8 products of all blocks share. Nothing without FP8. */
void nd_operands_plan(nd_model *model, nd_memplan *plan);
/* Scales of rows or columns that one operand, and all operands that are settled together, have. */
nd_vector_counts nd_operand_vectors(const nd_dims *dims, bool forward_only);

bool nd_linear_in_fp8(nd_block_call call, int linear);
/* Whether any linear with this input is in FP8. */
bool nd_input_in_fp8(nd_block_call call, nd_input input);

/* An input as the block keeps it. */
nd_operand nd_operand_of(nd_block_call call, nd_input input);
/* Before the op that makes an input (q k v, gate up: (Tl, C); o: (T, H D); down: (T, F)): give
 * out->rows and fuse to that op. */
nd_status nd_operand_prepare(nd_block_call call, nd_input input, nd_operand *out, nd_fuse *fuse);
/* Before SwiGLU's backward: the gradient dy of the outputs of gate and up, in whose place it is
 * made. Give to[i] and fuse[i] (0: gate, 1: up) to that op. */
nd_status nd_operand_prepare_gradients(nd_block_call call, nd_operand *dy, nd_tensor to[2],
                                       nd_fuse fuse[2]);
/* The gradient of the residual stream, m->dx, as that of the output of o or of down. Before the op
 * that makes it: where that op leaves its amax; NULL: nowhere. Afterwards: what is known of it. */
nd_status nd_gradient_prepare(nd_block_call call, nd_input input, float **amax);
nd_known nd_gradient_known(nd_block_call call, nd_input input);
/* Finds the scale of an input whose codes the block keeps, and writes the codes, unless the op that
 * made the input has. Nothing where the block keeps none. */
nd_status nd_operand_keep(nd_block_call call, nd_operand *x);

/* Whether products cast operands while they read them, so that no op of its own does. Delayed
 * scaling measures what it casts. */
bool nd_products_cast(const nd_model *model);
/* Whether they read transposed codes where the stored ones do not lie along the summed axis. */
bool nd_products_transpose(const nd_model *model);

/* Whether adjacent FP8 linears make one product for y, and one for dw, with a scale for each
 * (nd_matrix.parts): where products cast, each weight has one scale, and weights do not travel as
 * codes. Each linear makes its own dx, which is rounded in between. */
bool nd_linears_join(const nd_model *model);

/* Settles the scale as the rule says, then casts, or leaves that to the products; what is known is
 * not made again. */
typedef struct nd_cast {
    const nd_cast_rule *rule;
    bool split;               /* each tp rank sees a part of what one scale covers */
    bool settled;             /* the scales are those of this tensor already */
    bool record;              /* delayed: its amax counts in this step */
    nd_scale_ref vectors;     /* for scales of rows or columns */
    void *codes, *transposed; /* NULL: not wanted */
    bool by_products;         /* the products cast: codes and transposed are not wanted */
} nd_cast;
nd_status nd_operand_cast(nd_model *model, nd_operand *x, const nd_cast *how);
/* Codes or transposed codes alone, as a product wants them, or neither where products cast. */
void nd_cast_want(const nd_model *model, nd_cast *how, bool transposed, void *codes,
                  void *transposed_codes);
/* The weight of an FP8 product; summed over its rows (dx) or its columns (y).
 * settled: its scales of rows or columns where tp splits them; otherwise they are found here. */
nd_status nd_operand_weight(nd_block_call call, int linear, const nd_cast_rule *rule,
                            bool over_rows, const nd_scale_ref *settled, nd_matrix *out);
/* Transposes codes that are there, for a backend that reads operands along the summed axis only. */
nd_status nd_operand_transpose(nd_model *model, nd_matrix *operand, void *buffer);
/* (Tl, X) codes -> (T, X); `codes` itself when tp is 1. */
nd_status nd_operand_gather_codes(nd_model *model, nd_tensor codes, void *buffer, nd_tensor *full);

/* linear.c */

/* Wants the packed forms of the weights of all blocks. */
void nd_linear_want_packed(nd_model *model);

/* y = x w^T of all linears with this input. Column-parallel: x (Tl, C), y (T, N). Row-parallel: x
 * (T, K), y (Tl, C), the sum over tp. Codes that the block keeps are written. */
nd_status nd_linear_forward(nd_block_call call, nd_input input, nd_operand *x, nd_tensor y);
/* dx = dy w, and weight gradients += dy^T x of the input that the block keeps. Column-parallel: dy
 * (T, N), dx (Tl, C). Row-parallel: dy (Tl, C), dx (T, K). */
nd_status nd_linear_backward(nd_block_call call, nd_input input, nd_operand *dy, nd_tensor dx);

/* The two products of a part's backward. dy (T, rows of the part). dx (T, K) is overwritten by the
 * first part and added to by the others; an FP8 linear is a part of its own. nd_linear_backward has
 * settled what tp splits. */
nd_status nd_linear_input_gradient(nd_block_call call, const nd_linear_part *part, nd_operand *dy,
                                   nd_tensor dx);
/* x (T, K). What the weight gradient needs of operands in another form than dx is cast here. Of
 * several FP8 linears dy->cast is there, with a part for each. */
nd_status nd_linear_weight_gradient(nd_block_call call, const nd_linear_part *part, nd_operand *x,
                                    nd_operand *dy);

#endif
