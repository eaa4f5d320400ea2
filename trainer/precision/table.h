// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PRECISION_TABLE_H
#define ND_PRECISION_TABLE_H
/* What a run says of its FP8 at start and in `ndtrain plan`; nothing without FP8. */
#include "trainer/precision/scales.h"

/* Calls line(context, text) for the recipe, its three products, and every linear with its precision
 * and why. */
void nd_precision_each_line(const nd_scales *scales, const nd_llama_shape *shape,
                            void (*line)(void *context, const char *text), void *context);

#endif
