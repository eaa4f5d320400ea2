// SPDX-License-Identifier: Apache-2.0
#ifndef ND_STEP_NONFINITE_H
#define ND_STEP_NONFINITE_H
/*
 * Which tensor of a step first held NaN or infinity, for the sentence that stops or skips it.
 * Looked for in the order of the computation: weights, what each block was given (of the last
 * micro-batch), gradients from the last parameter to the first.
 */
#include "trainer/model/model.h"

enum { ND_NONFINITE_NAME = 160 };

/*
 * Collective over all ranks; each gets the same text: "the input of layer 3", "the gradient of
 * <name>", or "" when every tensor that is looked at is finite on every rank.
 */
nd_status nd_nonfinite_find(nd_model *model, char name[ND_NONFINITE_NAME]);

#endif
