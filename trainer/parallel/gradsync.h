// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_GRADSYNC_H
#define ND_PARALLEL_GRADSYNC_H
/*
 * The rest of gradient synchronisation after a step's micro-batches were reduce-scattered, and the
 * gradient norm.
 *
 *  1. HSDP: the sums over dp_replicate that began unit by unit (fsdp.h) end
 *  2. norms, and biases that tp does not split (each tp rank saw only its tokens): packed, summed
 *     over tp, then over dp_replicate; with tp 1 they are among those of 1
 *  3. norm: every element counted once whatever the mesh; replicated parameters by tp index 0 only
 */
#include "trainer/parallel/fsdp.h"

typedef struct nd_gradsync {
    nd_fsdp *fsdp;      /* borrowed */
    nd_flat_range *all; /* [all_count] whose squares this rank counts; owned */
    int all_count;
    int64_t packed_count;
    float *packed; /* (packed_count): gradients of norms and biases that tp does not split; none
                      where tp is 1 */
} nd_gradsync;

/* Finds what is summed, and wants the buffer `packed`. */
nd_status nd_gradsync_init(nd_gradsync *sync, nd_fsdp *fsdp, nd_memplan *plan);
void nd_gradsync_fini(nd_gradsync *sync);

/* Steps 1 and 2. */
nd_status nd_gradsync_reduce(nd_gradsync *sync);
/* Step 3: *squares, on the device, becomes the square of the gradient's global L2 norm, the same
 * number on every rank. */
nd_status nd_gradsync_squares(nd_gradsync *sync, double *squares);

#endif
