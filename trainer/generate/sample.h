// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_SAMPLE_H
#define ND_GENERATE_SAMPLE_H
/*
 * The next token from logits: a pure function of the logits, the settings, the number of the
 * request and the number of its token. There is no state, so a text does not depend on what else is
 * in the batch, on the mesh, or on the tokens that other requests drew.
 *
 * In this order, as transformers applies them:
 *   temperature  p = softmax(logits / temperature); 0 is greedy, and the rest has no effect
 *   top_k        the k likeliest; 0: all
 *   top_p        the likeliest, until their probability reaches top_p, the one that reaches it
 *                included; 1: all
 *   min_p        those with at least min_p times the greatest probability; 0: all
 * Between equal logits the lowest id is the likelier. Then one uniform number of Philox, keyed by
 * the seed, chooses among what is left. All sums are F64.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_sampling {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    uint64_t seed;
} nd_sampling;

/* ND_ERR_CONFIG names the setting that is out of its range, and the range. */
nd_status nd_sampling_check(const nd_sampling *sampling);

typedef struct nd_candidate {
    double weight; /* probability over that of the likeliest */
    int32_t id;
} nd_candidate;

/* The numbers that tell one draw from all others. */
typedef struct nd_draw {
    uint64_t request;  /* its number in the input, from 0 */
    uint64_t position; /* of the new token among the request's new tokens, from 0 */
} nd_draw;

/* logits (vocab); room [vocab] is for the call alone. ND_ERR_NUMERIC when a logit is NaN, or the
 * greatest is infinite. */
nd_status nd_sample(const nd_sampling *sampling, const float *logits, int64_t vocab, nd_draw draw,
                    nd_candidate *room, int32_t *id);

/* log softmax(logits)[id], and whether no other id is likelier: for scores. */
typedef struct nd_token_score {
    double log_probability;
    int32_t greedy; /* the likeliest id */
} nd_token_score;
nd_status nd_score_token(const float *logits, int64_t vocab, int32_t id, nd_token_score *out);

#endif
