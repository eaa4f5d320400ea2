// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/mix.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* A part of the run in which the same sources take turns. */
typedef struct phase {
    int64_t begin, end; /* samples of the run; end INT64_MAX: it never ends */
    int32_t period;
    uint8_t *source;                /* (period, or up to its end before that); owned */
    uint32_t *before;               /* likewise: earlier places of the same source; owned */
    int32_t counts[ND_MIX_SOURCES]; /* places of each source in the period; 0: it has ended */
    int64_t used[ND_MIX_SOURCES];   /* samples of each source before the phase */
} phase;

struct nd_mix {
    int count, phase_count;
    int32_t most; /* places of a period */
    double weights[ND_MIX_SOURCES];
    int64_t limits[ND_MIX_SOURCES]; /* samples; INT64_MAX: none */
    phase *phases; /* each ends with that of a source; room for one more than sources; owned */
};

static bool is_whole(double x)
{
    return fabs(x - round(x)) <= 1e-12 * fmax(1.0, x);
}

/* The smallest period in which every share is a whole number of places; 0: none. */
static int32_t exact_period(const double *shares, int count, int32_t most)
{
    for (int32_t p = 1; p <= most; p++) {
        int j = 0;
        while (j < count && (shares[j] == 0 || (is_whole(shares[j] * p) && shares[j] * p > 0.5))) {
            j++;
        }
        if (j == count) {
            return p;
        }
    }
    return 0;
}

/* Whole counts whose sum is the period: rounded down, at least 1; what is missing goes to the
 * largest remainders, and what is too much comes from the smallest ones. */
static void round_counts(const double *shares, int count, int32_t period, int32_t *counts)
{
    int64_t sum = 0;
    for (int j = 0; j < count; j++) {
        double exact = shares[j] * period;
        counts[j] = shares[j] == 0 ? 0 : exact < 1 ? 1 : (int32_t)exact;
        sum += counts[j];
    }
    while (sum != period) {
        const int direction = sum < period ? 1 : -1;
        int best = -1;
        double largest = 0;
        for (int j = 0; j < count; j++) {
            double rest = direction * (shares[j] * period - counts[j]);
            bool may = counts[j] > (direction < 0);
            if (may && (best < 0 || rest > largest)) {
                best = j;
                largest = rest;
            }
        }
        counts[best] += direction;
        sum += direction;
    }
}

static void set_counts(const nd_mix *mix, phase *p)
{
    double shares[ND_MIX_SOURCES], sum = 0;
    for (int j = 0; j < mix->count; j++) {
        shares[j] = p->used[j] < mix->limits[j] ? mix->weights[j] : 0;
        sum += shares[j];
    }
    for (int j = 0; j < mix->count; j++) {
        shares[j] /= sum;
    }
    p->period = exact_period(shares, mix->count, mix->most);
    if (p->period == 0) {
        p->period = mix->most;
        round_counts(shares, mix->count, p->period, p->counts);
    } else {
        for (int j = 0; j < mix->count; j++) {
            p->counts[j] = (int32_t)llround(shares[j] * p->period);
        }
    }
}

/* The places of a period that a phase has given to its sources so far. */
typedef struct turns {
    int64_t k;                     /* 2 d - 2 for d sources */
    int32_t given[ND_MIX_SOURCES]; /* to each */
    int64_t from[ND_MIX_SOURCES];  /* the first place that each may have next; INT64_MAX: none */
} turns;

/* Whether a's deadline is before b's. */
static bool is_before(const phase *p, const turns *t, int a, int b)
{
    return (t->k * (t->given[a] + 1) - 1) * p->counts[b] <
           (t->k * (t->given[b] + 1) - 1) * p->counts[a];
}

static int64_t next_place(const phase *p, const turns *t, int j)
{
    const int64_t P = p->period, c = p->counts[j], x = t->given[j];
    return x < c ? (P + t->k * x * P + t->k * c - 1) / (t->k * c) : INT64_MAX;
}

/*
 * Place n (from 1) goes to the source with the earliest deadline among those that may have it, of
 * equals to the one that was named first: with x places so far, c of P in all and k = 2 d - 2 for d
 * sources, a source may have it when k (c n - x P) >= P, and its deadline is (k (x + 1) - 1) P /
 * (k c). A source that ends in the first period ends the phase. Returns the number of places that
 * were filled.
 */
static int64_t fill_places(const nd_mix *mix, phase *p)
{
    turns t = {0};
    int active = 0;
    for (int j = 0; j < mix->count; j++) {
        active += p->counts[j] > 0;
    }
    t.k = active > 1 ? 2 * active - 2 : 2; /* a single one may have each place */
    for (int j = 0; j < mix->count; j++) {
        t.from[j] = next_place(p, &t, j);
    }
    int64_t filled = p->period;
    for (int64_t n = 1; n <= filled; n++) {
        int best = -1;
        for (int j = 0; j < mix->count; j++) {
            if (t.from[j] <= n && (best < 0 || is_before(p, &t, j, best))) {
                best = j;
            }
        }
        ND_ASSERT(best >= 0);
        p->source[n - 1] = (uint8_t)best;
        p->before[n - 1] = (uint32_t)t.given[best]++;
        t.from[best] = next_place(p, &t, best);
        if (p->used[best] + t.given[best] == mix->limits[best]) {
            filled = n;
        }
    }
    return filled;
}

/* Samples of source j among the first n of the phase. */
static int64_t samples_in(const phase *p, int j, int64_t n)
{
    const uint8_t *last = memrchr(p->source, j, (size_t)(n % p->period));
    return n / p->period * p->counts[j] + (last ? p->before[last - p->source] + 1 : 0);
}

/* How many samples the phase has before it ends with the last one of some source. */
static int64_t length_of(const nd_mix *mix, const phase *p)
{
    int64_t length = INT64_MAX;
    for (int32_t place = 0; place < p->period; place++) {
        int j = p->source[place];
        if (mix->limits[j] == INT64_MAX) {
            continue;
        }
        /* The source's last sample is in the period `whole`, at this place or at another. */
        int64_t last = mix->limits[j] - p->used[j] - 1, whole = last / p->counts[j];
        if (last % p->counts[j] == p->before[place]) {
            int64_t end =
                whole < INT64_MAX / 2 / p->period ? whole * p->period + place + 1 : INT64_MAX;
            length = end < length ? end : length;
        }
    }
    return length;
}

/* Keeps the first n places. */
static void shorten(phase *p, int64_t n)
{
    uint8_t *source = realloc(p->source, (size_t)n * sizeof *source);
    p->source = source ? source : p->source;
    uint32_t *before = realloc(p->before, (size_t)n * sizeof *before);
    p->before = before ? before : p->before;
}

static nd_status add_phase(nd_mix *mix, int64_t begin)
{
    phase *p = &mix->phases[mix->phase_count];
    set_counts(mix, p);
    ND_TRY(ND_ALLOC(p->period, &p->source));
    mix->phase_count++;
    ND_TRY(ND_ALLOC(p->period, &p->before));
    int64_t length = fill_places(mix, p);
    if (length < p->period) { /* many short phases are small */
        shorten(p, length);
    } else {
        length = length_of(mix, p);
    }
    p->begin = begin;
    p->end = length == INT64_MAX ? INT64_MAX : begin + length;
    return ND_OK;
}

/* Whether sources are left; *next then has what each has given. */
static bool follow(const nd_mix *mix, const phase *p, phase *next)
{
    bool left = false;
    for (int j = 0; j < mix->count; j++) {
        next->used[j] = p->used[j] + samples_in(p, j, p->end - p->begin);
        left = left || next->used[j] < mix->limits[j];
    }
    return left;
}

/* L of mix.h, for so many sources that end. */
static int32_t longest_period(int limited)
{
    const int32_t period = ND_MIX_PLACES / (limited + 1);
    return period > ND_MIX_PERIOD         ? ND_MIX_PERIOD
           : period < ND_MIX_LEAST_PERIOD ? ND_MIX_LEAST_PERIOD
                                          : period;
}

nd_status nd_mix_create(const nd_mix_source *sources, int count, nd_mix **out)
{
    ND_ASSERT(count >= 1 && count <= ND_MIX_SOURCES);
    nd_mix *mix = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &mix));
    mix->count = count;
    ND_TRY_OUT(ND_ALLOC(count + 1, &mix->phases));
    int limited = 0;
    for (int j = 0; j < count; j++) {
        const nd_mix_source *s = &sources[j];
        double given = fmax(1.0, round(s->epochs * (double)s->blocks));
        ND_ASSERT(s->blocks >= 1 && (s->weight > 0 || s->epochs > 0));
        mix->limits[j] = s->epochs > 0 && given < 9e18 ? (int64_t)given : INT64_MAX;
        mix->weights[j] = s->weight > 0 ? s->weight : given;
        limited += mix->limits[j] != INT64_MAX;
    }
    mix->most = longest_period(limited);
    ND_TRY_OUT(add_phase(mix, 0));
    for (phase *p = mix->phases; p->end != INT64_MAX && follow(mix, p, p + 1); p++) {
        ND_TRY_OUT(add_phase(mix, p->end));
    }
    *out = mix;
    mix = NULL;
out:
    nd_mix_destroy(mix);
    return status;
}

void nd_mix_destroy(nd_mix *mix)
{
    if (!mix) {
        return;
    }
    for (int i = 0; i < mix->phase_count; i++) {
        free(mix->phases[i].source);
        free(mix->phases[i].before);
    }
    free(mix->phases);
    free(mix);
}

nd_mix_place nd_mix_at(const nd_mix *mix, int64_t i)
{
    const phase *p = mix->phases;
    ND_ASSERT(i >= 0 && i < nd_mix_samples(mix));
    while (i >= p->end) {
        p++;
    }
    int64_t at = i - p->begin, place = at % p->period;
    int j = p->source[place];
    return (nd_mix_place){j, p->used[j] + at / p->period * p->counts[j] + p->before[place]};
}

int64_t nd_mix_count(const nd_mix *mix, int source, int64_t n)
{
    const phase *p = mix->phases;
    n = n < nd_mix_samples(mix) ? n : nd_mix_samples(mix);
    while (n > p->end) {
        p++;
    }
    return p->used[source] + samples_in(p, source, n - p->begin);
}

int64_t nd_mix_period(const nd_mix *mix)
{
    return mix->phases->period;
}

int64_t nd_mix_samples(const nd_mix *mix)
{
    return mix->phases[mix->phase_count - 1].end;
}
