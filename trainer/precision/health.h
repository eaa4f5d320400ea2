// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PRECISION_HEALTH_H
#define ND_PRECISION_HEALTH_H
/*
 * The health of FP8, every fp8.health_interval steps, in the debug log: for each converted linear
 * and each of its operands, over all ranks and micro-batches, the largest |x|, the scale that goes
 * with it (of several scales, the smallest; with powers of two, rounded), the share of elements
 * that became 0 without being 0 (underflow) and that of elements beyond the format (saturation).
 * A step that is counted casts apart from other ops, without CUDA graphs, and reads more; so none
 * is where rank 0, which writes the lines, has another log.level than debug.
 */
#include "trainer/precision/scales.h"

/* Whether reports are made at all. Collective where fp8.health_interval asks for them, since each
 * node has its own log.level. */
nd_status nd_health_agree(nd_scales *scales);
/* Before the gradients of a step: whether this one is counted. */
nd_status nd_health_begin(nd_scales *scales, int64_t step);
/* After them; collective when the step was counted. The lines go to nd_log_debug on rank 0. */
nd_status nd_health_end(nd_scales *scales, int64_t step);

/* One operand of the last report; shares in 0 .. 1. For tests. */
typedef struct nd_health_entry {
    float amax, scale;
    double underflow, saturation;
} nd_health_entry;
nd_health_entry nd_health_of(const nd_scales *scales, int64_t site);

#endif
