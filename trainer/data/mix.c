// SPDX-License-Identifier: Apache-2.0
/*
 * The order of the training samples.
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
     * many earlier places are of the same source; owned. */
    uint32_t *places;
    int32_t counts[ND_MIX_SOURCES]; /* places of each source in the period; 0: it has ended */
    int64_t used[ND_MIX_SOURCES];   /* samples of each source before the phase */
} phase;

enum { SOURCE_BITS = 8, SOURCE_MASK = (1 << SOURCE_BITS) - 1 };

/* These are the parts of a phase. */
typedef struct shares {
    int count;
    int32_t most; /* places of a period */
    double weights[ND_MIX_SOURCES];
    int64_t limits[ND_MIX_SOURCES]; /* samples; INT64_MAX: none */
    uint32_t *places;               /* (most): of the phase that is being made */
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

/* While the places of a phase are filled. */
typedef struct turns {
    int64_t k;                     /* 2 d - 2 for d sources */
    int32_t given[ND_MIX_SOURCES]; /* places of each source */
    /* A place that is not filled yet has the list of the sources that may have it, and none before
     * it: the first one + 1, and `next` of each; 0: there is none. */
    uint32_t *places, next[ND_MIX_SOURCES];
    /* A tournament of the sources that may have the next place: source j is at room + j, and at i
     * the one of 2 i and 2 i + 1 with the earlier deadline; of equals the one named first. */
    int room; /* a power of two */
    uint8_t first[2 * ND_MIX_SOURCES];
    double deadlines[ND_MIX_SOURCES]; /* INFINITY: it may not have it */
} turns;

static void set_deadline(turns *t, int j, double deadline)
{
    t->deadlines[j] = deadline;
    t->first[t->room + j] = (uint8_t)j;
    for (int i = (t->room + j) / 2; i > 0; i /= 2) {
        const uint8_t left = t->first[2 * i], right = t->first[2 * i + 1];
        t->first[i] = t->deadlines[right] < t->deadlines[left] ? right : left;
    }
}

/* Lists the source at the first place from n on that it may have, unless it has all of its own. */
static void wait_for_place(turns *t, const phase *p, int j, int64_t n)
{
    const int64_t P = p->period, c = p->counts[j], x = t->given[j];
    if (x < c) {
        uint32_t *list = &t->places[nd_max(nd_ceil_div(P + t->k * x * P, t->k * c), n) - 1];
        t->next[j] = *list;
        *list = (uint32_t)j + 1;
    }
}

/*
 * Place n (from 1) goes to the source with the earliest deadline among those that may have it: with
 * x places so far, c of P in all and k = 2 d - 2 for d sources, a source may have it when
 * k (c n - x P) >= P, and its deadline is (k (x + 1) - 1) P / (k c). These fractions differ by more
 * than a double's rounding, or not at all, since c <= 2^20 and k < 2^9. Returns how many samples
 * the phase has before it ends with the last one of some source; INT64_MAX: it never ends.
 */
static int64_t fill_places(const shares *s, const phase *p)
{
    const int64_t P = p->period;
    turns t = {.places = s->places, .room = 2};
    int64_t active = 0, length = INT64_MAX;
    memset(t.places, 0, (size_t)P * sizeof *t.places);
    while (t.room < s->count) {
        t.room *= 2;
    }
    for (int j = 0; j < t.room; j++) {
        active += p->counts[j] > 0;
        set_deadline(&t, j, INFINITY);
    }
    t.k = active > 1 ? 2 * active - 2 : 2; /* a single one may have each place */
    for (int j = 0; j < s->count; j++) {
        wait_for_place(&t, p, j, 1);
    }
    for (int64_t n = 1; n <= P && n <= length; n++) {
        for (uint32_t list = t.places[n - 1]; list > 0; list = t.next[list - 1]) {
            const int j = (int)list - 1;
            set_deadline(&t, j, (double)(t.k * (t.given[j] + 1) - 1) / p->counts[j]);
        }
        const int best = t.first[1];
        ND_ASSERT(t.deadlines[best] < INFINITY);
        const int64_t c = p->counts[best], x = t.given[best]++;
        t.places[n - 1] = (uint32_t)x << SOURCE_BITS | (uint32_t)best;
        set_deadline(&t, best, INFINITY);
        wait_for_place(&t, p, best, n + 1);
        /* The source's last sample is in the period `whole`, at this place or at another. */
        const int64_t last = s->limits[best] - p->used[best] - 1, whole = last / c;
        if (s->limits[best] != INT64_MAX && last % c == x && whole < INT64_MAX / 2 / P) {
            length = nd_min(length, whole * P + n);
        }
    }
    return length;
}

static nd_status make_phase(const shares *s, int64_t begin, phase *p)
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
    const int64_t length = fill_places(s, p), kept = nd_min(length, p->period);
    ND_TRY(ND_ALLOC(kept, &p->places));
    memcpy(p->places, s->places, (size_t)kept * sizeof *p->places);
    p->begin = begin;
    p->end = length == INT64_MAX ? INT64_MAX : begin + length;
    return ND_OK;
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

static nd_status make_phases(nd_mix *mix, const shares *s)
{
    int left = mix->count;
    for (phase *p = mix->phases; left > 0 && mix->samples < INT64_MAX; p++) {
        ND_TRY(make_phase(s, mix->samples, p));
        mix->phase_count++;
        mix->samples = p->end;
        left = 0;
        if (p->end < INT64_MAX) {
            count_samples(p, mix->count, p->end, p[1].used);
            for (int j = 0; j < mix->count; j++) {
                left += p[1].used[j] < s->limits[j];
            }
        }
    }
    return ND_OK;
}

nd_status nd_mix_create(const nd_mix_source *sources, int count, nd_mix **out)
{
    ND_ASSERT(count >= 1 && count <= ND_MIX_SOURCES);
    shares s = {.count = count};
    nd_mix *mix = NULL;
    nd_status status = ND_OK;
    int limited = 0;
    for (int j = 0; j < count; j++) {
        const nd_mix_source *from = &sources[j];
        double given = fmax(1.0, round(from->epochs * (double)from->blocks));
        ND_ASSERT(from->blocks >= 1 && (from->weight > 0 || from->epochs > 0));
        s.limits[j] = from->epochs > 0 && given < 9e18 ? (int64_t)given : INT64_MAX;
        s.weights[j] = from->weight > 0 ? from->weight : given;
        limited += s.limits[j] != INT64_MAX;
    }
    s.most =
        (int32_t)nd_max(nd_min(ND_MIX_PLACES / (limited + 1), ND_MIX_PERIOD), ND_MIX_LEAST_PERIOD);
    ND_TRY_OUT(ND_ALLOC(1, &mix));
    mix->count = count;
    ND_TRY_OUT(ND_ALLOC(count + 1, &mix->phases)); /* each ends with a source */
    ND_TRY_OUT(ND_ALLOC(s.most, &s.places));
    ND_TRY_OUT(make_phases(mix, &s));
    mix->period = mix->phases->period;
    *out = mix;
    mix = NULL;
out:
    free(s.places);
    nd_mix_destroy(mix);
    return status;
}

void nd_mix_destroy(nd_mix *mix)
{
    if (!mix) {
        return;
    }
    for (int i = 0; i < mix->phase_count; i++) {
        free(mix->phases[i].places);
    }
    free(mix->phases);
    free(mix);
}

nd_mix_place nd_mix_at(const nd_mix *mix, int64_t i)
{
    const phase *p = mix->phases;
    ND_ASSERT(i >= 0 && i < mix->samples);
    while (i >= p->end) {
        p++;
    }
    const int64_t whole = (i - p->begin) / p->period;
    const uint32_t place = p->places[(i - p->begin) % p->period];
    const int j = place & SOURCE_MASK;
    return (nd_mix_place){j, p->used[j] + whole * p->counts[j] + (place >> SOURCE_BITS)};
}

void nd_mix_counts(const nd_mix *mix, int64_t n, int64_t *counts)
{
    const phase *p = mix->phases;
    n = nd_min(n, mix->samples);
    while (n > p->end) {
        p++;
    }
    count_samples(p, mix->count, n, counts);
}

int64_t nd_dataset_sample(const nd_dataset *dataset, int64_t seed, int64_t i)
{
    const nd_blend *blend = dataset->blend;
    const int64_t N = dataset->blocks;
    if (!blend || !blend->mix) {
        return (int64_t)nd_rng_permute((uint64_t)seed, (uint64_t)(i / N), (uint64_t)N,
                                       (uint64_t)(i % N));
    }
    if (i >= blend->mix->samples) {
        return N;
    }
    const nd_mix_place at = nd_mix_at(blend->mix, i);
    const int64_t own = blend->parts[at.source].data->blocks;
    /* Sources of equal size must not share their orders. */
    const uint64_t stream = (uint64_t)(at.index / own) + ((uint64_t)at.source << 48);
    return blend->firsts[at.source] + (int64_t)nd_rng_permute((uint64_t)seed, stream, (uint64_t)own,
                                                              (uint64_t)(at.index % own));
}

/* Of the samples, those that blocks 0 to `blocks` - 1 may be expected to give. */
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
    if (blend->mix) {
        nd_mix_counts(blend->mix, samples, counts);
        return true;
    }
    for (int j = 0; j < blend->count; j++) {
        const int64_t first = blend->firsts[j], blocks = blend->parts[j].data->blocks;
        counts[j] = expect(dataset, samples, first + blocks) - expect(dataset, samples, first);
    }
    return samples % dataset->blocks == 0;
}
