// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_LINEAR_H
#define ND_MODEL_LINEAR_H
/*
 * The linears of a block, forward and backward, with their tensor-parallel exchange.
 *
 *   column-parallel (q k v; gate up)   the input is gathered over tp, each rank computes its
 *                                      columns
 *   row-parallel (o; down)             each rank multiplies its columns of the input, partial sums
 *                                      are reduced
 *
 * The words, in the order in which a step of a group comes to them:
 *
 *   group    the linears with one input; linear_groups.c makes them when the model is made
 *   part     adjacent linears of a group that make one product
 *   rule     how the recipe casts the operand of a role (nd_recipe.rules); none: it is not cast
 *   settle   to find the scales of an operand that is cast with its own amaxes
 *   encode   to cast rows before they are gathered: their codes are kept, or travel
 *   form     what a product reads of an operand: rows, codes or transposed codes (nd_form_rule)
 *
 * linear.c has these steps, and the exchanges over tp; operands.c encodes and makes forms. A method
 * has what only its recipes do. In the backward of a column-parallel group the input is gathered
 * beside the products of dx, and the sums of dx are scattered beside those of dw.
 *
 * Each FP8 linear has its own weight scale and its own gradient scale; the input's scale is found
 * once, and its codes are made once, or by each product where products cast (nd_form_rule).
 * With one scale per tensor backward keeps the input as codes (1 byte), except the attention
 * output, which the attention's backward needs in BF16: it is cast again with its saved scale.
 *
 * Norms and SwiGLU measure or cast their results while they store them, where that gives the same
 * bits; BF16 rows that no product reads are then not written. An operand carries what is known of
 * it from the op that makes it to the linears that read it.
 */
#include "trainer/model/model.h"

/* This is known of an operand that is stored as rows. */
typedef enum nd_known {
    ND_KNOWN_NOTHING = 0,
    ND_KNOWN_AMAX,  /* the op that made it left its amax */
    ND_KNOWN_SCALE, /* its one scale is settled */
    ND_KNOWN_CODES  /* the op that made it has left codes in its place for them */
} nd_known;

/* Products in FP8 read this of an operand. */
typedef struct nd_made_form {
    nd_matrix matrix;
    nd_tensor transposed; /* its codes, where a product reads them so */
} nd_made_form;

/* An input of linears, a weight, or the gradient of outputs: a variable of the caller. */
typedef struct nd_operand {
    nd_tensor stored; /* its rows in BF16 or F32, or their FP8 codes */
    /* The place for codes of the rows; data NULL: they are not encoded. Gradients of several
     * linears' outputs (linears x T, rows of one): those that their op leaves. */
    nd_tensor codes;
    nd_scale_ref scale; /* of the whole tensor */
    nd_known known;
    nd_made_form form; /* all zero: not made */
} nd_operand;

/* Adjacent linears of one product. */
typedef struct nd_linear_part {
    bool fp8;
    nd_param_id first, last;
    int linear, count;           /* number of the first linear, and how many there are */
    int64_t offset, rows;        /* columns of the output of all linears with this input */
    int64_t columns;             /* of the weights */
    int64_t lines[ND_FP8_PARTS]; /* of each linear */
    /* These say how the operands of its three products are cast, and how the backend reads them:
     * weights as they are gathered, inputs and gradients as they come from other ranks or from the
     * op that makes them. */
    const nd_cast_rule *rules[ND_ROLE_COUNT]; /* NULL: they are not cast */
    nd_form_rule forms[ND_ROLE_COUNT];
    /* Scales of rows or columns that tp splits begin here in nd_scales.joint; -1: none. */
    int64_t joint[ND_ROLE_COUNT];
    int64_t dy_codes, dy_transposed; /* bytes before the forms of dy in their buffers */
    int packed;                      /* number of the kept form of its weights */
} nd_linear_part;

/* The linears with one input. */
typedef struct nd_linear_group {
    nd_input input;
    bool column;                           /* column-parallel */
    bool fp8;                              /* any part is */
    bool keeps;                            /* the block keeps the input as codes, in this table */
    bool travels;                          /* gradients of outputs are gathered over tp as codes */
    const struct nd_linear_method *method; /* of the parts in FP8 */
    int first, count;                      /* linears */
    bool bias;                             /* they have biases, these */
    nd_param_id first_bias, last_bias;
    float beta; /* of their products, which are added to the biases: 0 where this rank has none to
                   add, as the sum over tp has those of a row-parallel group once */
    /* The products of y and of dw. Those of dx are separate between FP8 linears, since dx is
     * rounded after each of them. */
    int part_count, dx_part_count;
    nd_linear_part parts[ND_FP8_PARTS], dx_parts[ND_FP8_PARTS];
} nd_linear_group;

/* The linears of a recipe do this, and others do not; NULL: nothing. */
typedef struct nd_linear_method {
    /* Decides what else of the group follows from the recipe, and raises the bytes of the buffers
     * of products to what it needs. */
    void (*plan)(const nd_model *, nd_linear_group *, size_t bytes[ND_FP8_BUFFERS]);
    /* Settles with one reduction the scales of an operand that are found before its products: of
     * the input x (T, K) before y (ND_X_OF_Y), and of the gradients dy (T, N), or (Tl, C) of a
     * row-parallel group, before they are gathered (ND_DY_OF_DX). Encodes dy where codes travel. */
    nd_status (*settle)(nd_block_call, const nd_linear_group *, nd_role, nd_operand *);
} nd_linear_method;

extern const nd_linear_method nd_linear_fp8_tensor, nd_linear_fp8_rows;

/* linear_groups.c */

/* Wants the buffers that the FP8 products of all blocks share. The layout is made before. */
nd_status nd_linears_create(nd_model *model, nd_memplan *plan);
/* The groups of a layer, [inputs], for passes that train (table 0) or validate (1). */
static inline nd_linear_group *nd_linear_groups(const nd_model *model, int table, int64_t layer)
{
    const nd_layer_range layers = model->stage->layers;
    const int64_t count = layers.end - layers.begin;
    return model->linears + (table * count + layer - layers.begin) * ND_INPUT_COUNT;
}
static inline const nd_linear_group *nd_linear_group_of(nd_block_call call, nd_input input)
{
    return nd_linear_groups(call.model, call.pass == ND_PASS_EVAL, call.layer) + input;
}

/* operands.c */

static inline nd_operand_kind nd_role_operand(nd_role role)
{
    return role == ND_X_OF_Y || role == ND_X_OF_DW   ? ND_OPERAND_INPUT
           : role == ND_W_OF_Y || role == ND_W_OF_DX ? ND_OPERAND_WEIGHT
                                                     : ND_OPERAND_GRADIENT;
}
/* Returns the buffer of codes; transposed codes have the next one. */
static inline nd_fp8_buffer nd_operand_buffer(nd_operand_kind of)
{
    return of == ND_OPERAND_INPUT ? ND_FP8_X : of == ND_OPERAND_WEIGHT ? ND_FP8_W : ND_FP8_DY;
}

/* This comes before the op that makes an input (q k v, gate up: (Tl, C); o: (T, H D); down: (T,
 * F)). Give x->stored and fuse to that op. */
nd_status nd_operand_prepare(nd_block_call call, nd_input input, nd_operand *x, nd_fuse *fuse);
/* An input as the block keeps it for its backward. */
nd_operand nd_operand_kept(nd_block_call call, nd_input input);
/* This comes before SwiGLU's backward: the gradient dy of the outputs gu of gate and up is made in
 * their place. Give to[i] and fuse[i] (0: gate, 1: up) to that op. */
nd_status nd_operand_prepare_gradients(nd_block_call call, nd_tensor gu, nd_operand *dy,
                                       nd_tensor to[2], nd_fuse fuse[2]);
/* The gradient of the residual stream as that of the output of o or of down. Before the op that
 * makes it: where that op leaves its amax; NULL: nowhere. Afterwards: what is known of it. */
nd_status nd_gradient_prepare(nd_block_call call, nd_input input, float **amax);
nd_known nd_gradient_known(nd_block_call call, nd_input input);

/* Casts this rank's rows of x, which have one scale over all tp ranks, to x->codes, which are then
 * what is stored; the op that made x may have done so. Nothing where x has no place for codes. */
nd_status nd_operand_encode(nd_block_call call, nd_role role, nd_operand *x);
/* The form in which a product of a part reads x or dy (T, rows of the part), of all tp ranks. It
 * stays in x->form for the next product that reads it by an equal rule. */
nd_status nd_operand_form(nd_block_call call, const nd_linear_group *group,
                          const nd_linear_part *part, nd_role role, nd_operand *x, nd_matrix *a);
/* The form in which it reads the weights of the part. */
nd_status nd_weight_form(nd_block_call call, const nd_linear_group *group,
                         const nd_linear_part *part, nd_role role, nd_matrix *b);

/* linear.c */

/* The products of y = x w^T (rows, N) of all linears with an input, without what tp exchanges: x
 * has rows of all tp ranks, and y of a row-parallel group is this rank's part of the sum. */
nd_status nd_linear_products(nd_block_call call, const nd_linear_group *group, nd_operand *x,
                             nd_tensor y);

/* The input x (Tl, C) of a column-parallel group from all tp ranks: full (T, C). Codes that the
 * block keeps are written. */
nd_status nd_linear_gather(nd_block_call call, nd_operand *x, nd_operand *full);
/* y = x w^T of all linears with this input. Column-parallel: x (Tl, C), y (T, N). Row-parallel: x
 * (T, K), y (Tl, C), the sum over tp. Codes that the block keeps are written. */
nd_status nd_linear_forward(nd_block_call call, nd_input input, nd_operand *x, nd_tensor y);

/* The input gradient of a group leaves this for its weight gradients. */
typedef struct nd_linear_rest {
    nd_block_call call;
    const nd_linear_group *group;
    nd_operand x, dy;                 /* gathered over tp */
    nd_made_form forms[ND_FP8_PARTS]; /* of dy, by part of group->dx_parts */
    nd_exchange exchange;             /* of dx; before that of x */
    bool adds;                        /* the weights have gradients of tokens before these */
} nd_linear_rest;

/* The products of dx = dy w, without what tp exchanges: dx of a column-parallel group is this
 * rank's part of the sum. */
nd_status nd_linear_gradient_products(nd_linear_rest *rest, nd_tensor dx);
/* Makes what comes before them: bias gradients, and the scales of dy. */
nd_status nd_linear_begin_gradient(nd_linear_rest *rest);

/* dx = dy w. Column-parallel: dy (T, N), dx (Tl, C), complete at the end of rest->exchange.
 * Row-parallel: dy (Tl, C), dx (T, K). The buffers of FP8 products, full_a and full_b of the model,
 * and dy stay as they are until the weight gradients are made. */
nd_status nd_linear_input_gradient(nd_block_call call, nd_input input, const nd_operand *dy,
                                   nd_tensor dx, nd_linear_rest *rest);
/* Weight gradients += dy^T x of the input that the block keeps. */
nd_status nd_linear_weight_gradient(nd_linear_rest *rest);
/* Both, unless weight gradients are delayed. The exchange of dx runs beside them, and ends here. */
nd_status nd_linear_backward(nd_block_call call, nd_input input, const nd_operand *dy,
                             nd_tensor dx);
/* The weight gradients that it has left out, from the rows dy that the set keeps. */
nd_status nd_linear_delayed_gradient(nd_block_call call, nd_input input, nd_tensor dy);

#endif
