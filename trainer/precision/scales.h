// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PRECISION_SCALES_H
#define ND_PRECISION_SCALES_H
/*
 * The FP8 scales of one rank: for every linear of every block one site each for its weight and its
 * output's gradient, and for every group of linears that share an input one site for that input. A
 * site has a scale, its inverse and an amax, on the device; with `delayed` also a history of
 * amaxes. Nothing is read back to the host inside a step.
 *
 * Weight scales are computed once after every change of the weights, from the F32 shards: amax of
 * this rank's part of each weight, one all-reduce MAX over dp_shard x cp x tp, scales. When weights
 * are gathered in BF16 the amax is rounded to BF16 first: rounding is monotone, so that is the amax
 * of the gathered weight.
 *
 * Scales along rows or columns (rowwise) are not kept: they live in one vector set for each kind of
 * operand while a product needs them. Where a recipe has no others for weights, their amaxes are
 * found and reduced only in steps that the health log counts.
 */
#include "runtime/device/memplan.h"
#include "trainer/precision/filter.h"
#include "trainer/precision/recipe.h"
#include "trainer/rank.h"

typedef struct nd_scale_vectors {
    float *amax, *scale, *inverse;
} nd_scale_vectors;

/* What the health log counts and measures, on the device; (sites) each. */
typedef struct nd_health_state {
    int64_t (*counts)[3]; /* nd_ops.fp8_count, and room for the elements */
    float *amax;          /* of all that was cast in the step */
    float *scale, *inverse;
} nd_health_state;

/* What the health log knows of a site, on the host. */
typedef struct nd_site_report {
    int64_t elements;  /* cast here since the counts were zeroed */
    int64_t counts[3]; /* of all ranks: underflow, saturation, elements */
    float amax, scale; /* of all ranks: the largest amax, and the scale that goes with it */
} nd_site_report;

/* Operands cast since the start: an operand of each linear (input: of each group) counts once per
 * cast. */
typedef struct nd_cast_counts {
    int64_t weights, inputs, gradients;
} nd_cast_counts;

typedef struct nd_scales {
    nd_rank *rank;
    const nd_layout *layout;
    nd_recipe recipe;
    nd_filter filter;
    bool codes_gathered; /* weights travel as codes: segment FP8 */
    int64_t layers, sites;
    nd_flat_range
        *weights;    /* [layers x linears] our part in the flat state; empty: none, or BF16 */
    int64_t version; /* of the weights that the weight scales belong to; 0: none */
    float *scale, *inverse;      /* (sites) */
    float *amax;                 /* (sites): of this step; row 0 of the history */
    float *limit;                /* (sites), delayed */
    nd_bf16 *rounded;            /* (layers x linears) */
    nd_scale_vectors vectors[3]; /* of an input, a weight, a gradient */
    nd_health_state health;      /* NULLs without a health log */
    nd_site_report *report;      /* host, [sites] */
    int64_t health_interval;     /* as agreed (health.h); 0: no reports */
    bool healthy;                /* counting now */
    nd_cast_counts casts;
} nd_scales;

/* Decides which linears are converted; no memory yet. Without FP8 everything below is a no-op. */
nd_status nd_scales_init(nd_scales *scales, nd_rank *rank);
/* Plans; the layout is borrowed. `vector` is the longest row or column count of an operand. */
nd_status nd_scales_plan(nd_scales *scales, const nd_layout *layout, int64_t vector,
                         nd_memplan *plan);
/* After the plan was committed: the start values of delayed scaling, which are scales of 1 and the
 * largest value of each site's format. */
nd_status nd_scales_start(nd_scales *scales);
void nd_scales_fini(nd_scales *scales);

/* Whether a parameter lies in the FP8 segment; for nd_layout_create, context is the nd_scales. */
bool nd_scales_in_segment(void *context, const nd_param *param);

/* Sites: of a linear's weight, of the input of a group of linears (filter.h), of the gradient of a
 * linear's output. */
int64_t nd_site_weight(const nd_scales *scales, int64_t layer, int linear);
int64_t nd_site_input(const nd_scales *scales, int64_t layer, nd_input input);
int64_t nd_site_gradient(const nd_scales *scales, int64_t layer, int linear);

/* A matrix cast with a site's scale; codes are filled in by the caller. */
nd_fp8 nd_scales_at(const nd_scales *scales, int64_t site);

/* The weights changed to `version`: new weight scales (delayed: amaxes of this step). No-op when
 * they are known, and where only the health log would read them (rowwise) and the step is not
 * counted. */
nd_status nd_scales_refresh(nd_scales *scales, const float *master, int64_t version);

/*
 * Current scaling of neighbouring sites: amax[first..] were measured; `split` when each tp rank
 * measured a part of the tensors. One all-reduce MAX over tp, then scales.
 */
nd_status nd_scales_settle(nd_scales *scales, int64_t first, int64_t count, nd_dtype format,
                           bool split);
/* The same for `count` entries of a vector set. */
nd_status nd_scales_settle_vector(nd_scales *scales, nd_scale_vectors *vector, int64_t count,
                                  nd_dtype format, bool split);

/* Largest |x| of a whole tensor into the site's amax, overwritten. */
nd_status nd_scales_measure(nd_scales *scales, int64_t site, nd_tensor x);

/*
 * fp8_cast, and the health counts of the site when they are on. amax: NULL, or where the largest
 * |x| is merged into.
 */
nd_status nd_scales_cast(nd_scales *scales, int64_t site, nd_fp8 out, float *amax, nd_tensor x);

/*
 * End of a step, delayed only: this step's amaxes, reduced over all ranks by one all-reduce, enter
 * the history and give the scales of the next step.
 */
nd_status nd_scales_advance(nd_scales *scales);
/* The step is skipped: its amaxes of inputs and gradients are forgotten. */
nd_status nd_scales_forget(nd_scales *scales);

/* Entries of the state that a run must carry to go on with the same bits (delayed): empty for the
 * other recipes. */
typedef struct nd_scale_state {
    const char *name;
    float *data; /* on the device */
    int64_t count;
} nd_scale_state;
int nd_scales_state(const nd_scales *scales, nd_scale_state out[3]);

#endif
