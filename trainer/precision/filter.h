// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PRECISION_FILTER_H
#define ND_PRECISION_FILTER_H
/*
 * Which linears an FP8 recipe converts, and why; decided once, before step 0, from the shape alone
 * (so alike on every rank). The head is fused with the loss and always stays in BF16.
 *
 *   accelerate    all but the first and the last linear by module order (layer 0's q_proj and
 *                 lm_head), and those whose sizes 16 does not divide (accelerate's default filter)
 *   auto          torchao's thresholds below which FP8 is slower (float8_linear_utils.py), by
 *                 recipe
 *   a,b,...       linears whose module name matches a pattern: a part of the name, or with * ? [ a
 *                 shell pattern of the whole; "*" is all
 */
#include <stdio.h>

#include "runtime/config/config.h"
#include "trainer/layout/layout.h"

typedef enum nd_filter_reason {
    ND_FILTER_CONVERTED = 0,
    ND_FILTER_FIRST,     /* the model's first linear */
    ND_FILTER_LAST,      /* its last */
    ND_FILTER_SIZE,      /* 16 does not divide its sizes */
    ND_FILTER_SMALL,     /* below torchao's threshold */
    ND_FILTER_UNMATCHED, /* no pattern matches */
    ND_FILTER_SLOWER,    /* autotune: FP8 takes longer here */
} nd_filter_reason;

typedef struct nd_filter {
    int64_t layers;
    nd_filter_reason *reasons; /* [layers][ND_LINEARS_OF_BLOCK], owned; NULL: no FP8 */
    int64_t converted;         /* linears in FP8 */
} nd_filter;

enum { ND_INPUT_MASKS = 8 }; /* of up to three linears with one input */

/*
 * What autotune makes of the filter's linears. Masks have bit i for linear i of those that read an
 * input.
 *   fp8[input][asked]   of those that the filter asks for, the ones that run in FP8; -1: not known
 * forced: fp8[input][0] whatever is asked, to find out what it takes.
 */
typedef struct nd_linear_choice {
    bool forced;
    int8_t fp8[ND_INPUT_COUNT][ND_INPUT_MASKS];
} nd_linear_choice;

/* The linears of a layer with an input that are converted. */
int nd_filter_mask(const nd_filter *filter, int64_t layer, nd_input input);
/* ND_ERR_DATA when there is no choice for what the filter asks. No-op without FP8. */
nd_status nd_filter_choose(nd_filter *filter, const nd_linear_choice *choice);

/*
 * Nothing is converted unless train.precision is fp8. ND_ERR_CONFIG: a pattern that matches
 * nothing, a linear named whose sizes 16 does not divide, nothing left to convert.
 */
nd_status nd_filter_init(nd_filter *filter, const nd_config *config, const nd_llama_shape *shape);
void nd_filter_fini(nd_filter *filter);

bool nd_filter_converts(const nd_filter *filter, int64_t layer, int linear);

/*
 * Conditions of the products on this mesh, with numbers: local weight sizes and a rank's tokens in
 * multiples of 16. ND_ERR_CONFIG.
 */
nd_status nd_filter_check(const nd_filter *filter, const nd_config *config,
                          const nd_llama_shape *shape, const nd_mesh *mesh);

/* The start-up table: every linear with its sizes, precision and why; equal neighbours of the
 * layers in one line. */
void nd_filter_each_line(const nd_filter *filter, const nd_llama_shape *shape,
                         void (*line)(void *context, const char *text), void *context);

#endif
