// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_DECIDE_H
#define ND_TUNE_DECIDE_H
/* From times to choices: no clock, no device. */
#include "trainer/precision/filter.h"

/*
 * Of the linears that are asked for in FP8, the ones to run in FP8. seconds[mask]: what the group
 * takes with exactly those in FP8; negative or NaN: not known. FP8 was asked for, so it stays
 * unless another mask is faster by more than 2 %: times differ by that much between runs.
 */
int nd_decide_mask(const double seconds[ND_GROUP_MASKS], int asked);

#endif
