// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_TIMING_H
#define ND_TUNE_TIMING_H
/*
 * Times parts of a training step on this machine, for `ndtrain bench`: one linear in BF16 and in
 * FP8, and one layer on a mesh. The calls of a linear are those that a step makes, found by a
 * dry run; a layer is computed by the model's own code.
 */
#include "trainer/dry/dry.h"

/* y (m, n) = x (m, k) w^T: m tokens of a rank, k inputs, n outputs. FP8 needs multiples of 16. */
typedef struct nd_linear_extents {
    int64_t m, k, n;
} nd_linear_extents;

/* FLOPs of a linear's three products: y, dx, dw. */
static inline double nd_linear_flops(nd_linear_extents extents)
{
    return 6.0 * (double)extents.m * (double)extents.k * (double)extents.n;
}

typedef struct nd_linear_times {
    double bf16;                     /* seconds: forward and backward */
    double fp8[ND_FP8_RECIPE_COUNT]; /* by the recipes that were asked for */
    bool stopped;                    /* it was asked to stop: no times */
} nd_linear_times;

/* The rank that is timed, and how often. */
typedef struct nd_timing {
    nd_rank *rank;
    int repeats; /* of each call of a linear; of a layer, which runs once before they count */
    bool (*stop)(void); /* asked before each call of a linear, and on each rank after each layer */
    /* Fails when the rank may not take so many bytes; asked once, before they are allocated. */
    nd_status (*room)(void *context, double bytes);
    void *context;
} nd_timing;

/*
 * Times a linear forward and backward: its three products, and with FP8 the amaxes, scales, casts
 * and transposes that come with them. Not in the times are what SwiGLU does on the way, as it
 * stores the input, and a weight's amax, which a step finds once. Each call's time is the least of
 * `repeats` medians of five, in rounds over all calls, so that a disturbance favours no recipe.
 * `count` recipes: 1 to ND_FP8_RECIPE_COUNT. ND_ERR_CONFIG: 16 does not divide an extent.
 * ND_ERR_RESOURCE: no memory for the operands.
 */
nd_status nd_time_linear(const nd_timing *timing, const nd_fp8_recipe *recipes, int count,
                         nd_linear_extents extents, nd_linear_times *out);

typedef struct nd_layer_times {
    double forward, backward; /* seconds: medians over the repeats, of the slowest rank each time */
    bool stopped;             /* some rank was asked to stop: no times */
} nd_layer_times;

/*
 * Times the block of the rank's model on its mesh, in the precision of its configuration: forward
 * with the gathering or cast of the weights, which an update has changed, then backward with the
 * reduction of gradients over the shards. The rank's shape has one layer. Collective.
 * ND_ERR_RESOURCE: no memory.
 */
nd_status nd_time_layer(const nd_timing *timing, nd_layer_times *out);

#endif
