// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DATA_MIX_H
#define ND_DATA_MIX_H
/*
 * Which source sample i of a run comes from, when sources have weights: a pure function of i.
 *
 * Weights. The weights, divided by their sum, become whole counts c_j in a period of P samples:
 * the smallest P up to a limit L that holds them exactly, else L with the largest remainders
 * rounded up, and at least 1 for each source: c_j / P are the weights of the run. Inside the period
 * Tijdeman's algorithm for the chairman assignment problem (Discrete Mathematics 32, 1980) gives
 * each place a source, so that after any n samples source j has had fewer than 1 more or less than
 * n c_j / P. Sample i is the (i div P) c_j + k-th sample of the source j of place i mod P, the k-th
 * of its places in the period.
 *
 * Limits. A source with epochs e gives at most e times its blocks, rounded to whole samples. After
 * its last sample the others go on with their weights: a new phase begins, with a period of its
 * own, in which n counts from its first sample. When no source is left, the mix ends. Sources that
 * have epochs and no weights are mixed in proportion to what they give.
 *
 * L is ND_MIX_PERIOD, or less where the tables of many phases would take too much memory: with e
 * sources that have epochs ND_MIX_PLACES / (e + 1), but at least ND_MIX_LEAST_PERIOD. A place takes
 * 4 bytes.
 */
#include <stdint.h>

#include "runtime/base/status.h"

enum {
    ND_MIX_PERIOD = 1 << 20,
    ND_MIX_LEAST_PERIOD = 1 << 16,
    ND_MIX_PLACES = 1 << 22,
    ND_MIX_SOURCES = 256
};

typedef struct nd_mix_source {
    int64_t blocks; /* >= 1 */
    double weight;  /* > 0, or 0 for every source */
    double epochs;  /* the limit; 0: none, which needs a weight */
} nd_mix_source;

typedef struct nd_mix {
    int64_t samples; /* INT64_MAX when some source has no limit */
    int64_t period;  /* P of the first phase */
    int count;       /* sources */
    int phase_count;
    struct nd_mix_phase *phases; /* (count + 1); owned */
} nd_mix;

/* 1 to ND_MIX_SOURCES sources. ND_ERR_RESOURCE: no memory. */
nd_status nd_mix_create(const nd_mix_source *sources, int count, nd_mix **out);
void nd_mix_destroy(nd_mix *mix);

typedef struct nd_mix_place {
    int source;
    int64_t index; /* of the source's samples, from 0; it may be any number of its epochs */
} nd_mix_place;

/* 0 <= i < mix->samples. Thread-safe. */
nd_mix_place nd_mix_at(const nd_mix *mix, int64_t i);
/* How many of samples 0 to n - 1 each source gives. */
void nd_mix_counts(const nd_mix *mix, int64_t n, int64_t *counts);

#endif
