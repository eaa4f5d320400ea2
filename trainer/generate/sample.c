// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/sample.h"

#include <math.h>

#include "runtime/base/rng.h"

nd_status nd_sampling_check(const nd_sampling *s)
{
    if (!(s->temperature >= 0) || !isfinite(s->temperature)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--temperature is %g; it must be 0, which is greedy, or a number above 0",
                       s->temperature);
    }
    if (s->top_k < 0) {
        return nd_fail(ND_ERR_CONFIG, "--top-k is %lld; it must be 0, which keeps all, or more",
                       (long long)s->top_k);
    }
    if (!(s->top_p > 0 && s->top_p <= 1)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--top-p is %g; it must be above 0 and at most 1, which keeps all",
                       s->top_p);
    }
    if (!(s->min_p >= 0 && s->min_p <= 1)) {
        return nd_fail(ND_ERR_CONFIG, "--min-p is %g; it must be 0, which keeps all, to 1",
                       s->min_p);
    }
    return ND_OK;
}

/* The likeliest id; the lowest of equal ones. */
static nd_status find_likeliest(const float *logits, int64_t vocab, int32_t *id)
{
    int32_t best = 0;
    for (int64_t v = 0; v < vocab; v++) {
        if (isnan(logits[v])) {
            return nd_fail(ND_ERR_NUMERIC,
                           "the logit of token %lld is NaN; the weights of this model are damaged, "
                           "or its activations overflow in this precision",
                           (long long)v);
        }
        best = logits[v] > logits[best] ? (int32_t)v : best;
    }
    if (!isfinite(logits[best])) {
        return nd_fail(ND_ERR_NUMERIC,
                       "the greatest logit, of token %d, is %g; the weights of this model are "
                       "damaged, or its activations overflow in this precision",
                       best, (double)logits[best]);
    }
    *id = best;
    return ND_OK;
}

/* Returns whether a comes before b: it is likelier, or as likely with a lower id. */
static bool comes_before(const nd_candidate *a, const nd_candidate *b)
{
    return a->weight != b->weight ? a->weight > b->weight : a->id < b->id;
}

static bool has_lower_id(const nd_candidate *a, const nd_candidate *b)
{
    return a->id < b->id;
}

typedef bool before(const nd_candidate *a, const nd_candidate *b);

static void swap(nd_candidate *a, nd_candidate *b)
{
    nd_candidate moved = *a;
    *a = *b;
    *b = moved;
}

/* A heap whose first element comes after all others. */
static void sift_down(nd_candidate *heap, int64_t count, int64_t at, before *comes)
{
    for (int64_t child; (child = 2 * at + 1) < count;) {
        child += child + 1 < count && comes(&heap[child], &heap[child + 1]);
        if (!comes(&heap[at], &heap[child])) {
            return;
        }
        swap(&heap[at], &heap[child]);
        at = child;
    }
}

static void make_heap(nd_candidate *c, int64_t count, before *comes)
{
    for (int64_t i = count / 2; i-- > 0;) {
        sift_down(c, count, i, comes);
    }
}

/* In place: qsort may allocate. */
static void sort(nd_candidate *c, int64_t count, before *comes)
{
    int64_t sorted = 1;
    while (sorted < count && comes(&c[sorted - 1], &c[sorted])) {
        sorted++;
    }
    if (sorted >= count) {
        return;
    }
    make_heap(c, count, comes);
    for (int64_t last = count - 1; last > 0; last--) {
        swap(&c[0], &c[last]);
        sift_down(c, last, 0, comes);
    }
}

/* Leaves the first k in any order; returns their number. */
static int64_t keep_top_k(nd_candidate *c, int64_t count, int64_t k)
{
    if (k == 0 || k >= count) {
        return count;
    }
    make_heap(c, k, comes_before);
    for (int64_t i = k; i < count; i++) {
        if (comes_before(&c[i], &c[0])) {
            c[0] = c[i];
            sift_down(c, k, 0, comes_before);
        }
    }
    return k;
}

/* Leaves those of at least this weight, in their order; returns their number. */
static int64_t keep_heavy(nd_candidate *c, int64_t count, double least)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (c[i].weight >= least) {
            c[kept++] = c[i];
        }
    }
    return kept;
}

static double sum_of(const nd_candidate *c, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += c[i].weight;
    }
    return sum;
}

/*
 * Leaves the likeliest until they reach the share p; sorted. Candidates below (1 - p) / count of
 * the sum are left out before the sort: all that are as small together have less than 1 - p, so
 * those that come before them reach p.
 */
static int64_t keep_top_p(nd_candidate *c, int64_t count, double p)
{
    const double sum = sum_of(c, count), least = (1 - p) / (double)count * sum;
    const int64_t large = keep_heavy(c, count, least);
    int64_t kept = 0;
    double reached = 0;
    sort(c, large, comes_before);
    while (kept < large && reached < p * sum) {
        reached += c[kept++].weight;
    }
    return kept > 0 ? kept : 1;
}

/* In the order of the ids, so that two that are almost equally likely may change places in the
 * order of likelihood, as another mesh's rounding may do, without another choice. */
static int32_t choose(nd_candidate *c, int64_t count, double u)
{
    sort(c, count, has_lower_id);
    const double wanted = u * sum_of(c, count);
    double sum = 0;
    int64_t i = 0;
    for (; i < count - 1; i++) {
        sum += c[i].weight;
        if (sum > wanted) {
            break;
        }
    }
    return c[i].id;
}

nd_status nd_sample(const nd_sampling *s, const float *logits, int64_t vocab, nd_draw draw,
                    nd_candidate *c, int32_t *id)
{
    /* Uniform in [0, 1): 53 bits. */
    const double u = (double)(nd_rng_u64(s->seed, draw.request, draw.position) >> 11) * 0x1p-53;
    int64_t count = 0;
    int32_t best = 0;
    ND_TRY(find_likeliest(logits, vocab, &best));
    if (s->temperature == 0) {
        *id = best;
        return ND_OK;
    }
    for (int64_t v = 0; v < vocab; v++) {
        double distance = (double)logits[v] - (double)logits[best];
        double weight = v == best ? 1 : exp(distance / s->temperature);
        c[count] = (nd_candidate){weight, (int32_t)v};
        count += weight > 0;
    }
    count = keep_top_k(c, count, s->top_k);
    count = s->top_p < 1 ? keep_top_p(c, count, s->top_p) : count;
    count = keep_heavy(c, count, s->min_p);
    *id = choose(c, count, u);
    return ND_OK;
}

nd_status nd_score_token(const float *logits, int64_t vocab, int32_t id, nd_token_score *out)
{
    double sum = 0;
    int32_t best = 0;
    ND_TRY(find_likeliest(logits, vocab, &best));
    for (int64_t v = 0; v < vocab; v++) {
        sum += exp((double)logits[v] - (double)logits[best]);
    }
    *out = (nd_token_score){(double)logits[id] - (double)logits[best] - log(sum), best};
    return ND_OK;
}
