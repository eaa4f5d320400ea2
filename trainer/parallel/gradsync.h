// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_GRADSYNC_H
#define ND_PARALLEL_GRADSYNC_H
/*
 * The rest of gradient synchronisation after a step's micro-batches were reduce-scattered, and the
 * gradient norm.
 *
 *  1. HSDP: the sums over dp_replicate that began unit by unit (fsdp.h) end
 *  2. KV heads of which several tp ranks have copies (each rank saw only its queries): summed over
 *     the copies in the order of their ranks, so that all get the same bits
 *  3. norms, and biases that tp does not split (each tp rank saw only its tokens): packed, summed
 *     over tp, then over dp_replicate; with tp 1 they are among those of 1
 *  4. norm: every element is counted once whatever the mesh, by the rank that owns it
 */
#include "trainer/parallel/fsdp.h"

typedef struct nd_gradsync {
    nd_fsdp *fsdp;                 /* borrowed */
    nd_flat_range *owned, *copied; /* [..._count] of the shard: whose squares this rank counts, of
                                      which other ranks have copies; owned */
    int owned_count, copied_count;
    int64_t packed_count;
    float *packed; /* (packed_count): gradients of norms and biases that tp does not split; none
                      where tp is 1 */
} nd_gradsync;

/* Finds what is summed, and wants the buffer `packed`. */
nd_status nd_gradsync_init(nd_gradsync *sync, nd_fsdp *fsdp, nd_memplan *plan);
void nd_gradsync_fini(nd_gradsync *sync);

/* Steps 1 to 3. */
nd_status nd_gradsync_reduce(nd_gradsync *sync);
/* Step 4: *squares, on the device, becomes the square of the gradient's global L2 norm, the same
 * number on every rank. */
nd_status nd_gradsync_squares(nd_gradsync *sync, double *squares);

#endif
