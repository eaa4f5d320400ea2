// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_LINEAR_H
#define ND_MODEL_LINEAR_H
/*
 * The linears of a block, forward and backward, in BF16 or FP8, with their tensor-parallel
 * exchange. Linears that share an input are a group. Neighbours that stay in BF16 make one product;
 * each FP8 linear makes its own, with its own weight scale and its own gradient scale; the group's
 * input is cast once.
 *
 *   column-parallel (q k v; gate up)   the input is gathered over tp, each rank computes its
 *                                      columns
 *   row-parallel (o; down)             each rank multiplies its columns of the input, partial sums
 *                                      are reduced
 *
 * With one scale per tensor the amax of a tensor that is split over tp is its maximum over tp;
 * inputs and gradients are cast before they are gathered, and travel as codes, unless a BF16 linear
 * of the group needs the BF16 rows too. What backward needs of the input is then kept as codes (1
 * byte), except the attention output, which the attention's backward needs in BF16: it is cast
 * again with its saved scale. Other recipes gather and keep BF16.
 *
 * Norms and SwiGLU measure or cast their results on the way out, where that gives the same bits:
 * what nobody needs in BF16 is then not written.
 */
#include "trainer/model/model.h"

/* Whether backward keeps the group's input as codes. */
bool nd_linear_keeps_codes(const nd_scales *scales, nd_input input, int64_t layer);

/* Longest row or column count of an operand: of the scale vectors. */
int64_t nd_linear_vector(const nd_dims *dims);
/* Buffers that the FP8 products of all blocks share. Nothing without FP8. */
void nd_linear_plan(nd_model *model, nd_memplan *plan);

/* y (T, N) = input w^T. local (Tl, C); codes (Tl, C) are written when the group keeps them. */
nd_status nd_linear_column_fwd(nd_model *model, nd_input input, int64_t layer, nd_tensor local,
                               nd_tensor codes, nd_tensor y);
/* dlocal (Tl, C) = dy w; weight gradients = dy^T input (+ beta ...). dy (T, N). */
nd_status nd_linear_column_bwd(nd_model *model, nd_input input, int64_t layer, nd_tensor dlocal,
                               nd_tensor dy, nd_tensor local, nd_tensor codes, float beta);
/* out (Tl, C) = sum over tp of x w^T. x (T, K); codes (T, K) are written when the group keeps
 * them. */
nd_status nd_linear_row_fwd(nd_model *model, nd_input input, int64_t layer, nd_tensor x,
                            nd_tensor codes, nd_tensor out);
/* dx (T, K) = dy w, weight gradient = dy^T x (+ beta ...). dy_local (Tl, C). */
nd_status nd_linear_row_bwd(nd_model *model, nd_input input, int64_t layer, nd_tensor dx,
                            nd_tensor dy_local, nd_tensor x, nd_tensor codes, float beta);

/*
 * How an op makes an operand of linears: where it stores it, data NULL when only codes are wanted,
 * and what it does beside (linear_fuse.c).
 */
typedef struct nd_making {
    nd_tensor to;
    nd_fuse fuse;
} nd_making;

/*
 * Before the op that makes a group's input x (q k v, gate up: (Tl, C); down: (T, F)); codes are
 * x's, where the group keeps them.
 */
nd_status nd_linear_make_input(nd_model *model, nd_input input, int64_t layer, nd_tensor x,
                               nd_tensor codes, nd_making *out);
/* Before SwiGLU's backward: the gradients (T, F) of gate's and up's outputs. */
nd_status nd_linear_make_gradients(nd_model *model, int64_t layer, nd_tensor dgate, nd_tensor dup,
                                   nd_making out[2]);

/* Recompute: codes of x again, with the scale of the forward pass; nothing when the group keeps
 * none. */
nd_status nd_linear_recast(nd_model *model, nd_input input, int64_t layer, nd_tensor x,
                           nd_tensor codes);

#endif
