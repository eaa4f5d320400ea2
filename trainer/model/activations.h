// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_ACTIVATIONS_H
#define ND_MODEL_ACTIVATIONS_H
/* Where the activations of each block lie: kept for backward, or in buffers that all blocks share
 * (model.h says which mode keeps what). */
#include "trainer/model/model.h"

/* Wants the activations of all blocks. */
void nd_activations_plan(nd_model *model, nd_memplan *plan);
/* An input of linears that is kept as codes lies in a backward buffer of its size until they are
 * made: dh (Tl, C) or dact (T, F), by the number of its want. */
void nd_activations_borrow(nd_model *model, nd_memplan *plan, int dh, int dact);

#endif
