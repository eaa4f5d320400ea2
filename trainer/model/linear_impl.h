// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_LINEAR_IMPL_H
#define ND_MODEL_LINEAR_IMPL_H
/* What linear.c (groups, casts) gives to linear_column.c and linear_row.c. */
#include "trainer/model/linear.h"

/* A part of a group: neighbours in BF16 together, each FP8 linear alone. */
typedef struct nd_linear_part {
    int first, last; /* linears */
    bool fp8;
    int64_t offset, rows; /* columns of the group's output */
} nd_linear_part;

bool nd_linear_any_in_fp8(const nd_model *m, nd_input input, int64_t layer);
nd_linear_part nd_linear_first_part(nd_input input);
/* The part after p; false when there is none. */
bool nd_linear_next_part(const nd_model *m, nd_input input, int64_t layer, nd_linear_part *p);
nd_tensor nd_linear_weight(const nd_model *m, int64_t layer, const nd_linear_part *p);
nd_tensor nd_linear_gradient(const nd_model *m, int64_t layer, const nd_linear_part *p);

typedef struct nd_cast_request {
    const nd_cast_rule *rule;
    int64_t site;
    nd_tensor x;
    bool split;                /* each tp rank sees a part of what one scale covers */
    bool known;                /* the site has the scale of this tensor already */
    bool record;               /* delayed: its amax counts in this step */
    nd_made made;              /* what the op that made x has done of it */
    nd_scale_vectors *vectors; /* scales of rows or columns */
    void *codes, *transposed;  /* NULL: not wanted */
} nd_cast_request;

/* The request for a group's input in this pass, without buffers. */
nd_cast_request nd_linear_input_request(nd_model *m, nd_input input, int64_t layer,
                                        const nd_cast_rule *rule, nd_tensor x);
void nd_linear_want(nd_cast_request *q, bool transposed, void *codes, void *transposed_codes);
/* Settles the scale as the rule says, then casts; what was made already is not made again. */
nd_status nd_linear_cast(nd_model *m, const nd_cast_request *q, nd_fp8 *out);
/* A backend that reads products' operands along the summed axis only needs the transpose of codes
 * that are there. */
nd_status nd_linear_add_transposed(nd_model *m, nd_fp8 *operand, void *buffer);
/* What the op that made the group's input, or (gate up) its outputs' gradients, left: once. */
nd_made nd_linear_take_input(nd_model *m, nd_input input);
nd_made nd_linear_take_gradients(nd_model *m, nd_input input);
/* Where SwiGLU's backward leaves the codes (T, F) of gate's or up's gradient. */
void *nd_linear_gradient_codes(const nd_model *m, int linear);
/* The weight of a product; summed over its rows (dx) or its columns (y). */
nd_status nd_linear_weight_operand(nd_model *m, int64_t layer, int linear, const nd_cast_rule *rule,
                                   bool over_rows, nd_fp8 *out);
/* (Tl, X) codes -> (T, X); `codes` itself when tp is 1. */
nd_status nd_linear_gather_codes(nd_model *m, nd_tensor codes, void *buffer, nd_tensor *full);

#endif
