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
 * The linears with one input are a group. When the model is made, linear_groups.c decides for each
 * group which linears make one product, and by which method: in BF16 or F32 (linear_bf16.c), in FP8
 * with one scale per tensor (linear_fp8_tensor.c), or in FP8 with scales of rows and columns
 * (linear_fp8_rows.c). A step asks nothing of that again. linear.c exchanges over tp and calls the
 * methods part by part. In the backward of a column-parallel group the input is gathered beside the
 * products of dx, and the sums of dx are scattered beside those of dw.
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

/* What the op that made an operand left: the rows; also their amax; or their codes instead. */
typedef enum nd_known { ND_KNOWN_NOTHING = 0, ND_KNOWN_AMAX, ND_KNOWN_CODES } nd_known;

/* An input of linears, or the gradient of their outputs: a variable of the caller. */
typedef struct nd_operand {
    nd_tensor rows; /* BF16 or F32; data NULL: only codes are there */
    /* Where its codes are, or will be, in the order of its rows; data NULL: only the products' form
     * is made. An input: those that the block keeps. Gradients of several linears' outputs (linears
     * x T, rows of one): those that their op leaves. */
    nd_tensor codes;
    nd_scale_ref scale; /* of the whole tensor */
    nd_known known;
    nd_matrix cast; /* what FP8 products read, once it was made */
} nd_operand;

/* Adjacent linears of one product. */
typedef struct nd_linear_part {
    const struct nd_linear_method *method;
    bool fp8;
    nd_param_id first, last;
    int linear, count;           /* number of the first linear, and how many there are */
    int64_t offset, rows;        /* columns of the output of all linears with this input */
    int64_t columns;             /* of the weights */
    int64_t lines[ND_FP8_PARTS]; /* of each linear */
    /* How the backend reads the operands of its three products: weights as they are gathered,
     * inputs and gradients as they come from other ranks or from the op that makes them. */
    nd_form_rule rules[ND_ROLE_COUNT];
    /* Scales of rows and columns that tp splits: where those of x or dy, and those of the weight,
     * begin in nd_scales.joint; -1: it splits none. */
    int64_t joint_rows, joint_weight;
} nd_linear_part;

/* The linears with one input. */
typedef struct nd_linear_group {
    nd_input input;
    bool column;                           /* column-parallel */
    bool fp8;                              /* any part is */
    bool keeps;                            /* the block keeps the input as codes, in this table */
    bool travels;                          /* gradients of outputs are gathered over tp as codes */
    const struct nd_linear_method *method; /* of the parts in FP8, or BF16 where there are none */
    int first, count;                      /* linears */
    bool bias;                             /* they have biases */
    float beta; /* of their products, which are added to the biases: 0 where this rank has none to
                   add, as the sum over tp has those of a row-parallel group once */
    /* Products of y and of dw; and of dx, which is rounded between FP8 linears: there each of them
     * is a part of its own. */
    int part_count, alone_count;
    nd_linear_part parts[ND_FP8_PARTS], alone[ND_FP8_PARTS];
} nd_linear_group;

/*
 * A recipe: how the operands of products are cast. linear.c multiplies.
 *   plan              decides what else of the group follows from the recipe, and raises the bytes
 *                     of the buffers of products to what it needs
 *   settle_gradients  what of the gradients dy (T, N), or of a row-parallel group (Tl, C), is found
 *                     or made before they are gathered: scales with one reduction, and codes that
 *                     travel
 *   form              how the products of a part read x or dy (T, rows of the part), as linear.c
 *                     has gathered them, or without x its weights. What is made stays in x->cast
 *                     for the next product that reads it; for dw that of dx may be there
 */
typedef struct nd_linear_method {
    void (*plan)(const nd_model *, nd_linear_group *, nd_fp8_bytes *);
    nd_status (*settle_gradients)(nd_block_call, const nd_linear_group *, nd_operand *dy);
    nd_status (*form)(nd_block_call, const nd_linear_group *, const nd_linear_part *, nd_role,
                      nd_operand *x, nd_matrix *out);
} nd_linear_method;

extern const nd_linear_method nd_linear_bf16, nd_linear_fp8_tensor, nd_linear_fp8_rows;

/* linear_groups.c */

/* After the layout is made. *bytes: what the buffers need that the FP8 products of all blocks
 * share. */
nd_status nd_linears_create(nd_model *model, nd_fp8_bytes *bytes);
/* Wants those buffers. */
void nd_linears_plan(nd_model *model, const nd_fp8_bytes *bytes, nd_memplan *plan);
/* Wants the packed forms of the weights of all blocks. */
void nd_linears_want_packed(nd_model *model);
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

/* Scales of rows or columns that one operand, and all operands that are settled together, have. */
nd_vector_counts nd_operand_vectors(const nd_dims *dims, bool forward_only);

/* An input as the block keeps it. */
nd_operand nd_operand_of(nd_block_call call, nd_input input);
/* Before the op that makes an input (q k v, gate up: (Tl, C); o: (T, H D); down: (T, F)): give
 * out->rows and fuse to that op. */
nd_status nd_operand_prepare(nd_block_call call, nd_input input, nd_operand *out, nd_fuse *fuse);
/* Before SwiGLU's backward: the gradient dy of the outputs of gate and up, in whose place it is
 * made. Give to[i] and fuse[i] (0: gate, 1: up) to that op. */
nd_status nd_operand_prepare_gradients(nd_block_call call, nd_operand *dy, nd_tensor to[2],
                                       nd_fuse fuse[2]);
/* The gradient of the residual stream as that of the output of o or of down. Before the op that
 * makes it: where that op leaves its amax; NULL: nowhere. Afterwards: what is known of it. */
nd_status nd_gradient_prepare(nd_block_call call, nd_input input, float **amax);
nd_known nd_gradient_known(nd_block_call call, nd_input input);
/* Finds the scale of an input whose codes the block keeps, and writes the codes, unless the op that
 * made the input has. Nothing where the block keeps none. */
nd_status nd_operand_keep(nd_block_call call, nd_operand *x);

/* Makes x->cast: settles the scale as the rule says, then casts, or leaves that to the products.
 * Codes that are there are read. */
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
/* Wants a form in addition to others: codes, transposed codes, or neither where products cast. */
void nd_cast_want(nd_cast *how, nd_form_rule form, void *codes, void *transposed);
/* Raises the bytes of buffers to what the forms of a part need. Those of dy begin `dx` and `dw`
 * bytes behind the begin of their buffers. */
void nd_cast_rooms(const nd_model *model, const nd_linear_part *part, int64_t dx, int64_t dw,
                   nd_fp8_bytes *bytes);
/* Linear number i of a part: the weight of an FP8 product. settled: its scales of rows or columns
 * where tp splits them; otherwise they are found here. */
nd_status nd_operand_weight(nd_block_call call, const nd_linear_part *part, int i, nd_role role,
                            const nd_scale_ref *settled, nd_matrix *out);

/* linear.c */

/* y = x w^T of all linears with this input. Column-parallel: x (Tl, C), y (T, N). Row-parallel: x
 * (T, K), y (Tl, C), the sum over tp. Codes that the block keeps are written. */
nd_status nd_linear_forward(nd_block_call call, nd_input input, nd_operand *x, nd_tensor y);

/* What the input gradient of a group leaves for its weight gradients. */
typedef struct nd_linear_rest {
    nd_block_call call;
    const nd_linear_group *group;
    nd_operand x, dy;              /* gathered over tp */
    nd_matrix casts[ND_FP8_PARTS]; /* of dy, by part of group->alone */
    nd_exchange exchange;          /* of dx; before that of x */
} nd_linear_rest;

/* dx = dy w. Column-parallel: dy (T, N), dx (Tl, C), complete at the end of rest->exchange.
 * Row-parallel: dy (Tl, C), dx (T, K). The buffers of FP8 products, full_a and full_b of the model,
 * and dy stay as they are until the weight gradients are made. */
nd_status nd_linear_input_gradient(nd_block_call call, nd_input input, nd_operand *dy, nd_tensor dx,
                                   nd_linear_rest *rest);
/* Weight gradients += dy^T x of the input that the block keeps. */
nd_status nd_linear_weight_gradient(nd_linear_rest *rest);
/* Both, unless weight gradients are delayed. The exchange of dx runs beside them, and ends here. */
nd_status nd_linear_backward(nd_block_call call, nd_input input, nd_operand *dy, nd_tensor dx);
/* The weight gradients that it has left out, from the rows dy that the set keeps. */
nd_status nd_linear_delayed_gradient(nd_block_call call, nd_input input, nd_tensor dy);

/* For the methods. */

/* The weights of a part, one below the other, in the compute dtype. */
nd_tensor nd_linear_weight(nd_block_call call, const nd_linear_part *part);
/* Where the backend keeps the weight for y (transposed) or for dx; NULL: nowhere. */
nd_kept_form *nd_linear_kept(nd_block_call call, const nd_linear_part *part, bool transposed);
/* Of several FP8 linears: turns the first one's matrix into that of all, whose rows are given. */
void nd_linear_join(const nd_linear_part *part, nd_tensor rows, nd_matrix *first);
/* One part of the gradient dy of the outputs of all linears with an input. */
nd_operand nd_linear_part_of(nd_block_call call, const nd_linear_group *group,
                             const nd_linear_part *part, const nd_operand *dy);

#endif
