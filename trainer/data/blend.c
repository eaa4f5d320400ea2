// SPDX-License-Identifier: Apache-2.0
/*
 * Several sources as one dataset, and the order of the training samples.
 *
 * Which source sample i of a run comes from, when sources have weights, is a pure function of i.
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
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "runtime/base/rng.h"
#include "trainer/data/dataset.h"

/* A part of the run in which the same sources take turns. */
typedef struct nd_mix_phase {
    int64_t begin, end; /* samples of the run; end INT64_MAX: it never ends */
    int32_t period;
    /* (period, or up to its end before that): the source of each place, and above SOURCE_BITS how
     * many earlier places are of the same source. */
    uint32_t *places;
    int32_t counts[ND_MIX_SOURCES]; /* places of each source in the period; 0: it has ended */
    int64_t used[ND_MIX_SOURCES];   /* samples of each source before the phase */
} phase;

enum { SOURCE_BITS = 8, SOURCE_MASK = (1 << SOURCE_BITS) - 1 };

typedef struct shares {
    int count;
    int32_t most; /* places of a period */
    double weights[ND_MIX_SOURCES];
    int64_t limits[ND_MIX_SOURCES]; /* samples; INT64_MAX: none */
} shares;

/* The smallest period in which every share is a whole number of places, or the longest one. */
static int32_t choose_period(const double *parts, int count, int32_t most)
{
    for (int32_t period = 1; period < most; period++) {
        int j = 0;
        for (; j < count; j++) {
            const double exact = parts[j] * period;
            if (parts[j] > 0 &&
                (exact <= 0.5 || fabs(exact - round(exact)) > 1e-12 * fmax(1.0, exact))) {
                break;
            }
        }
        if (j == count) {
            return period;
        }
    }
    return most;
}

/* Whole counts whose sum is the period: rounded down, at least 1; what is missing goes to the
 * largest remainders, and what is too much comes from the smallest ones. */
static void round_counts(const double *parts, int count, phase *p)
{
    int64_t missing = p->period;
    for (int j = 0; j < count; j++) {
        const double exact = parts[j] * p->period;
        p->counts[j] = parts[j] == 0 ? 0 : exact < 1 ? 1 : (int32_t)exact;
        missing -= p->counts[j];
    }
    while (missing != 0) {
        const int direction = missing > 0 ? 1 : -1;
        int best = -1;
        double largest = 0;
        for (int j = 0; j < count; j++) {
            double rest = direction * (parts[j] * p->period - p->counts[j]);
            bool may = p->counts[j] > (direction < 0);
            if (may && (best < 0 || rest > largest)) {
                best = j;
                largest = rest;
            }
        }
        p->counts[best] += direction;
        missing -= direction;
    }
}

/*
 * Place n (from 1) goes to the source with the earliest deadline among those that may have it; of
 * equals to the one named first. With x places so far, c of P in all and k = 2 d - 2 for d sources,
 * a source may have it when k (c n - x P) >= P, and its deadline is (k (x + 1) - 1) P / (k c).
 * These fractions differ by more than a double's rounding, or not at all, since c <= 2^20 and
 * k < 2^9. Returns how many samples the phase has before it ends with the last one of some source;
 * INT64_MAX: it never ends.
 */
static int64_t fill_places(const shares *s, const phase *p)
{
    const int64_t P = p->period;
    int32_t given[ND_MIX_SOURCES] = {0};
    int64_t due[ND_MIX_SOURCES];      /* the first place that the source may have */
    double deadlines[ND_MIX_SOURCES]; /* k / P times */
    int64_t active = 0, length = INT64_MAX;
    for (int j = 0; j < s->count; j++) {
        active += p->counts[j] > 0;
    }
    const int64_t k = active > 1 ? 2 * active - 2 : 2; /* a single one may have each place */
    for (int j = 0; j < s->count; j++) {
        const int64_t c = p->counts[j];
        due[j] = c > 0 ? nd_ceil_div(P, k * c) : INT64_MAX;
        deadlines[j] = (double)(k - 1) / (double)c;
    }
    for (int64_t n = 1; n <= P && n <= length; n++) {
        int best = -1;
        for (int j = 0; j < s->count; j++) {
            best = due[j] <= n && (best < 0 || deadlines[j] < deadlines[best]) ? j : best;
        }
        ND_ASSERT(best >= 0);
        const int64_t c = p->counts[best], x = given[best]++;
        p->places[n - 1] = (uint32_t)x << SOURCE_BITS | (uint32_t)best;
        due[best] = x + 1 < c ? nd_ceil_div(P + k * (x + 1) * P, k * c) : INT64_MAX;
        deadlines[best] = (double)(k * (x + 2) - 1) / (double)c;
        /* The source's last sample is in the period `whole`, at this place or at another. */
        const int64_t last = s->limits[best] - p->used[best] - 1, whole = last / c;
        if (s->limits[best] != INT64_MAX && last % c == x && whole < INT64_MAX / 2 / P) {
            length = nd_min(length, whole * P + n);
        }
    }
    return length;
}

/* Samples of each source before sample n, which is of this phase or its end. */
static void count_samples(const phase *p, int count, int64_t n, int64_t *counts)
{
    const int64_t whole = (n - p->begin) / p->period, rest = (n - p->begin) % p->period;
    for (int j = 0; j < count; j++) {
        counts[j] = p->used[j] + whole * p->counts[j];
    }
    for (int64_t place = 0; place < rest; place++) {
        counts[p->places[place] & SOURCE_MASK]++;
    }
}

/* Makes the phase that begins with this sample, whose places have room for the longest period. */
static void make_phase(const shares *s, int64_t begin, phase *p)
{
    double parts[ND_MIX_SOURCES], sum = 0;
    for (int j = 0; j < s->count; j++) {
        parts[j] = p->used[j] < s->limits[j] ? s->weights[j] : 0;
        sum += parts[j];
    }
    for (int j = 0; j < s->count; j++) {
        parts[j] /= sum;
    }
    p->period = choose_period(parts, s->count, s->most);
    round_counts(parts, s->count, p);
    const int64_t length = fill_places(s, p);
    p->begin = begin;
    p->end = length == INT64_MAX ? INT64_MAX : begin + length;
}

/* Makes the order of sources that have weights or epochs. */
static nd_status mix(nd_blend *blend)
{
    shares s = {.count = blend->count};
    int limited = 0, left = blend->count;
    ND_ASSERT(blend->count <= ND_MIX_SOURCES);
    for (int j = 0; j < blend->count; j++) {
        const nd_dataset_part *from = &blend->parts[j];
        const double given = fmax(1.0, round(from->epochs * (double)from->data->blocks));
        ND_ASSERT(from->weight > 0 || from->epochs > 0);
        s.limits[j] = from->epochs > 0 && given < 9e18 ? (int64_t)given : INT64_MAX;
        s.weights[j] = from->weight > 0 ? from->weight : given;
        limited += s.limits[j] != INT64_MAX;
    }
    s.most =
        (int32_t)nd_max(nd_min(ND_MIX_PLACES / (limited + 1), ND_MIX_PERIOD), ND_MIX_LEAST_PERIOD);
    ND_TRY(ND_ALLOC(blend->count + 1, &blend->phases)); /* each ends with a source */
    ND_TRY(ND_ALLOC((int64_t)s.most * (limited + 1), &blend->places));
    blend->samples = 0;
    blend->phases->places = blend->places;
    for (phase *p = blend->phases; left > 0 && blend->samples < INT64_MAX; p++) {
        make_phase(&s, blend->samples, p);
        blend->samples = p->end;
        left = 0;
        if (p->end < INT64_MAX) {
            p[1].places = p->places + nd_min(p->end - p->begin, p->period);
            count_samples(p, blend->count, p->end, p[1].used);
            for (int j = 0; j < blend->count; j++) {
                left += p[1].used[j] < s.limits[j];
            }
        }
    }
    blend->period = blend->phases->period;
    return ND_OK;
}

static nd_status take_parts(nd_dataset *dataset, nd_dataset_part *parts, int count)
{
    nd_blend *blend = dataset->blend;
    bool mixed = false;
    dataset->vocab = parts[0].data->vocab;
    dataset->sequence = parts[0].data->sequence;
    dataset->format = parts[0].data->format;
    for (; blend->count < count; blend->count++) {
        nd_dataset_part *from = &parts[blend->count], *part = &blend->parts[blend->count];
        char *name;
        ND_ASSERT(from->data->sequence == dataset->sequence);
        ND_TRY(nd_fs_format(&name, "%s", from->name));
        *part = *from;
        part->name = name;
        from->data = NULL;
        blend->named = blend->named || name[0];
        mixed = mixed || part->weight > 0 || part->epochs > 0;
        blend->firsts[blend->count] = dataset->blocks;
        dataset->blocks += part->data->blocks;
        dataset->tokens += nd_dataset_tokens(part->data);
    }
    blend->samples = INT64_MAX;
    ND_TRY(nd_fs_format(&dataset->path, "%s and %d more", blend->parts[0].data->path,
                        blend->count - 1)); /* for messages */
    return mixed ? mix(blend) : ND_OK;
}

nd_status nd_dataset_blend(nd_dataset_part *parts, int count, nd_dataset **out)
{
    ND_ASSERT(count >= 1);
    nd_status status = ND_OK;
    nd_dataset *dataset = NULL;
    ND_TRY_OUT(ND_ALLOC(1, &dataset));
    ND_TRY_OUT(ND_ALLOC(1, &dataset->blend));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->parts));
    ND_TRY_OUT(ND_ALLOC(count, &dataset->blend->firsts));
    ND_TRY_OUT(take_parts(dataset, parts, count));
    *out = dataset;
    dataset = NULL;
out:
    nd_dataset_close(dataset);
    for (int j = 0; j < count; j++) {
        nd_dataset_close(parts[j].data);
        parts[j].data = NULL;
    }
    return status;
}

/* Sources. */

int64_t nd_dataset_blocks(const nd_dataset *dataset)
{
    return dataset->blocks;
}

int64_t nd_dataset_tokens(const nd_dataset *dataset)
{
    return nd_dataset_is_packed(dataset) ? dataset->documents->kept : dataset->tokens;
}

int nd_blend_part_of(const nd_blend *blend, int64_t block)
{
    int low = 0, high = blend->count;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (blend->firsts[middle] <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

int nd_dataset_sources(const nd_dataset *dataset)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->count : 1;
}

const char *nd_dataset_source_name(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->parts[index].name : "";
}

const nd_dataset *nd_dataset_source(const nd_dataset *dataset, int index)
{
    return dataset->blend && dataset->blend->named ? dataset->blend->parts[index].data : dataset;
}

/* Samples. */

nd_sample_place nd_blend_sample(const nd_blend *blend, int64_t i)
{
    const phase *p = blend->phases;
    ND_ASSERT(i >= 0 && i < blend->samples);
    while (i >= p->end) {
        p++;
    }
    const int64_t whole = (i - p->begin) / p->period;
    const uint32_t place = p->places[(i - p->begin) % p->period];
    const int j = place & SOURCE_MASK;
    return (nd_sample_place){j, p->used[j] + whole * p->counts[j] + (place >> SOURCE_BITS)};
}

int64_t nd_dataset_sample(const nd_dataset *dataset, int64_t seed, int64_t i)
{
    const nd_blend *blend = dataset->blend;
    const int64_t N = dataset->blocks;
    if (!blend || !blend->phases) {
        return (int64_t)nd_rng_permute((uint64_t)seed, (uint64_t)(i / N), (uint64_t)N,
                                       (uint64_t)(i % N));
    }
    if (i >= blend->samples) {
        return N;
    }
    const nd_sample_place at = nd_blend_sample(blend, i);
    const int64_t own = blend->parts[at.source].data->blocks;
    /* Sources of equal size must not share their orders. */
    const uint64_t stream = (uint64_t)(at.index / own) + ((uint64_t)at.source << 48);
    return blend->firsts[at.source] + (int64_t)nd_rng_permute((uint64_t)seed, stream, (uint64_t)own,
                                                              (uint64_t)(at.index % own));
}

/* Returns how many of the samples blocks 0 to `blocks` - 1 may be expected to give. */
static int64_t expect(const nd_dataset *dataset, int64_t samples, int64_t blocks)
{
    return (int64_t)((long double)samples * blocks / dataset->blocks + 0.5L);
}

bool nd_dataset_count_samples(const nd_dataset *dataset, int64_t samples, int64_t *counts)
{
    const nd_blend *blend = dataset->blend;
    if (!blend || !blend->named) {
        counts[0] = samples;
        return true;
    }
    if (blend->phases) {
        const phase *p = blend->phases;
        samples = nd_min(samples, blend->samples);
        while (samples > p->end) {
            p++;
        }
        count_samples(p, blend->count, samples, counts);
        return true;
    }
    for (int j = 0; j < blend->count; j++) {
        const int64_t first = blend->firsts[j], blocks = blend->parts[j].data->blocks;
        counts[j] = expect(dataset, samples, first + blocks) - expect(dataset, samples, first);
    }
    return samples % dataset->blocks == 0;
}
