// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_LOADER_H
#define ND_DATA_LOADER_H
/*
 * This rank's part of each step's batch, read one step ahead by a prefetch thread.
 *
 * Order (DESIGN 9): with G = accumulation x dp x B the global batch, sample
 *   i = step x G + micro x (dp x B) + dp_index x B + b        (step from 0)
 * is block perm(seed, epoch)(i mod N) of the N blocks, epoch = i / N. The same on every mesh; tp
 * and cp peers get the same blocks. Validation: blocks 0, 1, 2, ... in file order, the same rule
 * with perm the identity; past the end all labels are -100 so that every rank makes the same number
 * of calls.
 *
 * Context parallel: the sequence is cut into 2 cp chunks and this rank holds chunks r and 2 cp - 1
 * - r, in that order (zig-zag); labels were shifted before, positions are global. cp = 1: the
 * sequence as it is.
 */
#include <stdint.h>

#include "trainer/data/dataset.h"

typedef struct nd_loader nd_loader;

typedef struct nd_loader_options {
    int64_t sequence, micro_batch, accumulation;
    int dp_size, dp_index;
    int cp_size, cp_index;
    int64_t seed;
    bool validation;
    int64_t first_step; /* 0 */
} nd_loader_options;

/* One step on this rank. Arrays are lent until the next nd_loader_next. s = S / cp. */
typedef struct nd_step_batch {
    const int32_t *inputs; /* (accumulation, B, s) */
    const int32_t *labels; /* (accumulation, B, s); -100 = not counted */
    const int32_t
        *positions;      /* (B, s): the same for every micro-batch; global positions, 0 .. S-1 */
    int64_t valid;       /* labels != -100 held by this rank in the whole step */
    double wait_seconds; /* how long this call waited for the prefetch thread */
} nd_step_batch;

nd_status nd_loader_open(const nd_dataset *dataset, const nd_loader_options *options,
                         nd_loader **out);
/*
 * Joins the thread. False when it hangs in the file system: then the dataset must stay open, since
 * the thread still reads it.
 */
bool nd_loader_close(nd_loader *loader);
/* What a loader of these options holds. */
size_t nd_loader_bytes(const nd_loader_options *options);
nd_status nd_loader_next(nd_loader *loader, nd_step_batch *out);
/* Validation: back to block 0. */
nd_status nd_loader_rewind(nd_loader *loader);
/* Calls of nd_loader_next that cover all blocks once (accumulation is 1 for validation). */
int64_t nd_loader_validation_steps(const nd_dataset *dataset, const nd_loader_options *options);

#endif
