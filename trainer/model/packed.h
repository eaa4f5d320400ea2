// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_PACKED_H
#define ND_MODEL_PACKED_H
/*
 * Weights in the form in which products read them, where the backend has one (nd_kept_form in
 * kernels/ops.h). The first product that reads a form makes it. All later products read it until
 * the weights change: those of other micro-batches of the step, of a recompute, and of other chunks
 * of the head.
 *
 * A weight has up to two forms, for the forward (b = w^T) and for the input gradient (b = w). The
 * head's weight has two for each tile of the vocabulary, since each tile has products of its own. A
 * form is kept where a step reads it more than once and its unit has a buffer of its own. A block
 * that shares its buffer is gathered again before each pass, and a pass reads a form once.
 */
#include "kernels/ops.h"
#include "runtime/device/memplan.h"
#include "trainer/parallel/fsdp.h"

/* One form of a weight. */
typedef struct nd_packed_weight {
    bool head;
    size_t bytes;    /* 0: it is not kept */
    int64_t version; /* of the weights from which the form was made */
    nd_kept_form form;
} nd_packed_weight;

typedef struct nd_packed_weights {
    const nd_fsdp *fsdp;
    nd_packed_weight *weights; /* owned */
    int count, most;
} nd_packed_weights;

/* fsdp is borrowed. tiles: of the head. */
nd_status nd_packed_init(nd_packed_weights *packed, const nd_fsdp *fsdp, int64_t tiles);
void nd_packed_fini(nd_packed_weights *packed);

/* Wants a form of a weight of the unit where products keep one and no other unit shares its buffer.
 * Returns its number; numbers are adjacent, from 1 on. */
int nd_packed_want(nd_packed_weights *packed, const nd_unit *unit, nd_form_rule form);
/* Bytes of the forms of the blocks, or of those of the head. */
size_t nd_packed_bytes(const nd_packed_weights *packed, bool head);
/* Wants their memory. Without it each product packs its weight itself, with the same bits. */
void nd_packed_plan(nd_packed_weights *packed, bool head, nd_memplan *plan);

/* A form by its number, for nd_matrix.kept; NULL where none is kept, and where none was wanted
 * (0). It is marked as not made when the weights have changed. */
nd_kept_form *nd_packed_form(nd_packed_weights *packed, int number);

#endif
