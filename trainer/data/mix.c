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
    int64_t comparisons;
    nd_mix_rounding rounding;
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

/* Of the sources of the first phase, which are all. */
static nd_mix_rounding find_rounding(const double *shares, int count, const phase *p)
{
    nd_mix_rounding out = {.period = p->period, .source = -1};
    double largest = 0;
    for (int j = 0; j < count; j++) {
        const double exact = shares[j] * p->period, counts = (double)p->counts[j] / p->period;
        const double change = fabs(counts - shares[j]) / shares[j];
        if (change > largest && !(is_whole(exact) && exact > 0.5)) {
            largest = change;
            out.source = j;
            out.share = shares[j];
            out.counts = counts;
        }
    }
    return out;
}

static void set_counts(nd_mix *mix, phase *p)
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
    if (p == mix->phases) {
        mix->rounding = find_rounding(shares, mix->count, p);
    }
}

/* Who may have the next places of a period. */
typedef struct turns {
    const phase *p;
    int64_t k;                     /* 2 d - 2 for d sources */
    int32_t given[ND_MIX_SOURCES]; /* places so far */
    int ready[ND_MIX_SOURCES];     /* a heap of those that may have the next place */
    int ready_count;
    int64_t comparisons;
    int16_t *first; /* (period + 1): a source that may have place n only, or later; -1: none */
    int16_t next[ND_MIX_SOURCES]; /* another one with the same first place; -1: none */
} turns;

/* By deadline; of equals, the one that was named first. */
static bool is_before(turns *t, int a, int b)
{
    t->comparisons++;
    int64_t left = (t->k * (t->given[a] + 1) - 1) * t->p->counts[b];
    int64_t right = (t->k * (t->given[b] + 1) - 1) * t->p->counts[a];
    return left != right ? left < right : a < b;
}

static void push_ready(turns *t, int j)
{
    int at = t->ready_count++;
    for (int up = (at - 1) / 2; at > 0 && is_before(t, j, t->ready[up]); up = (at - 1) / 2) {
        t->ready[at] = t->ready[up];
        at = up;
    }
    t->ready[at] = j;
}

static int pop_ready(turns *t)
{
    ND_ASSERT(t->ready_count > 0);
    const int best = t->ready[0], last = t->ready[--t->ready_count];
    int at = 0;
    for (int down = 1; down < t->ready_count; down = 2 * at + 1) {
        down += down + 1 < t->ready_count && is_before(t, t->ready[down + 1], t->ready[down]);
        if (!is_before(t, t->ready[down], last)) {
            break;
        }
        t->ready[at] = t->ready[down];
        at = down;
    }
    t->ready[at] = last;
    return best;
}

/* Lets source j have its next place from the first one on that it may have, but not before n. */
static void wait_from(turns *t, int j, int64_t n)
{
    const int64_t P = t->p->period, c = t->p->counts[j], x = t->given[j];
    const int64_t first = (P + t->k * x * P + t->k * c - 1) / (t->k * c);
    if (x < c) {
        n = first > n ? first : n;
        t->next[j] = t->first[n];
        t->first[n] = (int16_t)j;
    }
}

/*
 * Place n (from 1) goes to the source with the earliest deadline among those that may have it: with
 * x places so far, c of P in all and k = 2 d - 2 for d sources, a source may have it when
 * k (c n - x P) >= P, and its deadline is (k (x + 1) - 1) P / (k c). A source that ends in the
 * first period ends the phase. Returns the number of places that were filled.
 */
static int64_t fill_places(nd_mix *mix, phase *p, int16_t *first)
{
    turns t = {.p = p, .first = first};
    int active = 0;
    for (int j = 0; j < mix->count; j++) {
        active += p->counts[j] > 0;
    }
    t.k = active > 1 ? 2 * active - 2 : 2; /* a single one may have each place */
    for (int64_t n = 0; n <= p->period; n++) {
        first[n] = -1;
    }
    for (int j = 0; j < mix->count; j++) {
        if (p->counts[j] > 0) {
            wait_from(&t, j, 1);
        }
    }
    int64_t filled = p->period;
    for (int64_t n = 1; n <= filled; n++) {
        for (int j = first[n]; j >= 0; j = t.next[j]) {
            push_ready(&t, j);
        }
        const int best = pop_ready(&t);
        p->source[n - 1] = (uint8_t)best;
        p->before[n - 1] = (uint32_t)t.given[best]++;
        if (p->used[best] + t.given[best] == mix->limits[best]) {
            filled = n;
        } else {
            wait_from(&t, best, n + 1);
        }
    }
    mix->comparisons += t.comparisons;
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

/* `first` is room for fill_places. */
static nd_status add_phase(nd_mix *mix, int64_t begin, int16_t *first)
{
    phase *p = &mix->phases[mix->phase_count];
    set_counts(mix, p);
    ND_TRY(ND_ALLOC(p->period, &p->source));
    mix->phase_count++;
    ND_TRY(ND_ALLOC(p->period, &p->before));
    int64_t length = fill_places(mix, p, first);
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
    int16_t *first = NULL;
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
    ND_TRY_OUT(ND_ALLOC(mix->most + 1, &first));
    ND_TRY_OUT(add_phase(mix, 0, first));
    for (phase *p = mix->phases; p->end != INT64_MAX && follow(mix, p, p + 1); p++) {
        ND_TRY_OUT(add_phase(mix, p->end, first));
    }
    *out = mix;
    mix = NULL;
out:
    free(first);
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

nd_mix_rounding nd_mix_rounding_of(const nd_mix *mix)
{
    return mix->rounding;
}

int64_t nd_mix_comparisons(const nd_mix *mix)
{
    return mix->comparisons;
}

int64_t nd_mix_samples(const nd_mix *mix)
{
    return mix->phases[mix->phase_count - 1].end;
}
