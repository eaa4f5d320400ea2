// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>

#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};

/* batch, Sq, Sk, H, K, D, diag: causal, unmasked, with a prefix, with blind rows, odd sizes, more
 * than one tile. */
static const nd_attention cases[] = {
    {1, 1, 1, 1, 1, 2, 0, 1.0f},
    {2, 9, 9, 4, 2, 8, 0, 0.35f},
    {1, 70, 70, 2, 1, 16, 0, 0.25f},
    {2, 5, 33, 6, 2, 10, 33, 0.3f},
    {1, 20, 52, 2, 2, 32, 32, 0.18f},
    {1, 40, 30, 4, 1, 16, -10, 0.25f},
    {1, 130, 300, 2, 1, 64, 170, 0.125f},
    {1, 12, 4, 3, 3, 8, -12, 0.35f},
    /* several blocks of queries, and of keys; blocks of queries of several heads in one task */
    {1, 520, 520, 1, 1, 2, 0, 0.7f},
    /* the last query and the last key alone in their blocks, and more KV heads than sums of dQ */
    {2, 257, 257, 4, 2, 8, 0, 0.35f},
    {4, 3, 3, 8, 1, 2, 0, 0.7f},
};

/* Sizes of heads that are whole tiles of AMX, and that leave a part; keys that do so too. Windows
 * of one key, that cross tiles, larger than a block of keys, and with rows that see nothing. */
static const nd_attention sizes[] = {
    {1, 66, 99, 2, 1, 34, 33, 0.17f},          {1, 37, 81, 1, 1, 80, 81, 0.11f},
    {1, 64, 128, 2, 1, 128, 64, 0.09f},        {1, 18, 47, 1, 1, 256, 29, 0.06f},
    {1, 70, 70, 2, 1, 16, 0, 0.25f, 1},        {1, 600, 600, 1, 1, 2, 0, 0.7f, 520},
    {1, 130, 300, 2, 1, 64, 170, 0.125f, 100}, {1, 40, 30, 4, 1, 16, -10, 0.25f, 7},
    {2, 1, 600, 4, 2, 20, 599, 0.22f, 70},
};

enum { CASES = sizeof cases / sizeof cases[0], SIZES = sizeof sizes / sizeof sizes[0] };

static nd_tensor queries(const nd_attention *a, nd_dtype dtype, int64_t gap)
{
    return nd_random(dtype, 4, (int64_t[]){a->batch, a->sq, a->heads, a->head_dim}, gap, 1.0f);
}

static nd_tensor keys(const nd_attention *a, nd_dtype dtype, int64_t gap)
{
    return nd_random(dtype, 4, (int64_t[]){a->batch, a->sk, a->kv_heads, a->head_dim}, gap, 1.0f);
}

static nd_tensor rows(const nd_attention *a)
{
    return nd_random(ND_DTYPE_F32, 3, (int64_t[]){a->batch, a->heads, a->sq}, 0, 1.0f);
}

/*
 * F32: a score is a sum of D products, scaled: 4 eps D; it moves p by that factor. Sums over Sk
 * keys of weights that add up to 1: about sqrt(Sk) eps. Together below 2 eps (4 D + Sk), on values
 * of size 1. BF16: in addition probabilities and score gradients may be rounded to BF16 (2^-8 each)
 * before the sum, at random over keys; bounded by one eps_bf16 (2^-7) of the largest value, about
 * 4, for sums of weights that add up to 1.
 */
static nd_tolerance forward_tolerance(const nd_attention *a, nd_dtype dtype)
{
    double f32 = 2.0 * (double)(4 * a->head_dim + a->sk) * nd_eps_f32;
    return (nd_tolerance){.absolute = dtype == ND_DTYPE_BF16 ? f32 + 2.0 * nd_eps_bf16 : f32};
}

/* Which keys the rows of a call see; absent: what the attention says. */
typedef struct bounds {
    nd_tensor first_key, end_key;
} bounds;

static const bounds all;

static void forward(const nd_backend *backend, const nd_attention *a, bounds seen, nd_dtype dtype,
                    int64_t gap, bool few)
{
    nd_tensor q = queries(a, dtype, gap), k = keys(a, dtype, gap), v = keys(a, dtype, gap);
    nd_tensor out = queries(a, dtype, gap), lse = rows(a), o[2], l[2];
    nd_case_poison(out);
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        o[s] = nd_clone(out);
        l[s] = nd_clone(lse);
        ND_RUN(side, attention_fwd, .attention = *a, .out = o[s], .lse = l[s], .q = q, .k = k,
               .v = v, .first_key = seen.first_key, .end_key = seen.end_key,
               .scratch = nd_attention_memory(side, a, dtype, false), .few_rows = few);
    }
    nd_tolerance exact = forward_tolerance(a, ND_DTYPE_F32);
    nd_expect_close(backend->name, "attention_fwd lse", l[1], l[0], exact);
    nd_expect_close(backend->name, "attention_fwd out", o[1], o[0], forward_tolerance(a, dtype));
    nd_case_free();
}

TEST_EACH_BACKEND(attention, forward)
{
    for (int d = 0; d < 2; d++) {
        for (int c = 0; c < CASES; c++) {
            forward(backend, &cases[c], all, dtypes[d], 0, false);
            forward(backend, &cases[c], all, dtypes[d], 6, false);
            forward(backend, &cases[c], all, dtypes[d], 8, false);
        }
        for (int c = 0; c < SIZES; c++) {
            forward(backend, &sizes[c], all, dtypes[d], 0, false);
        }
    }
}

/* One query against keys of one span and of several, at its borders; blind ones, and keys that are
 * not seen; a head size that leaves a part of a vector; groups of one, of some and of many. */
static const nd_attention one_query[] = {
    {1, 1, 1, 1, 1, 2, 0, 1.0f},         {1, 1, 511, 4, 2, 64, 510, 0.125f},
    {1, 1, 512, 4, 2, 64, 511, 0.125f},  {1, 1, 513, 4, 2, 64, 512, 0.125f},
    {1, 1, 1600, 8, 1, 20, 1599, 0.22f}, {3, 1, 1100, 5, 1, 128, 1099, 0.09f},
    {2, 1, 40, 4, 4, 10, -2, 0.3f},      {1, 1, 700, 16, 2, 72, 520, 0.1f},
    {1, 1, 17000, 2, 2, 8, 16999, 0.35f}};

TEST_EACH_BACKEND(attention, one_query_at_each_instruction_set)
{
    for (int d = 0; d < 2; d++) {
        for (size_t c = 0; c < sizeof one_query / sizeof *one_query; c++) {
            forward(backend, &one_query[c], all, dtypes[d], 0, true);
            forward(backend, &one_query[c], all, dtypes[d], 6, true);
        }
    }
}

/* Score j of query i is j or -j steps: the maximum of the even queries grows by `step`, in units of
 * log2, with each key, and that of the odd ones never. */
static void growing_once(const nd_backend *backend, nd_dtype dtype, float step, int64_t queried)
{
    enum { KEYS = 600, D = 4 };
    const nd_attention a = {1, queried, KEYS, 1, 1, D, KEYS, step * (float)M_LN2};
    nd_tensor q = queries(&a, dtype, 0), k = keys(&a, dtype, 0), v = keys(&a, dtype, 0);
    nd_tensor o[2] = {queries(&a, dtype, 0), queries(&a, dtype, 0)}, l[2] = {rows(&a), rows(&a)};
    for (int64_t i = 0; i < queried * D; i++) {
        nd_put(q, i, i % D != 0 ? 0.0f : i / D % 2 == 0 ? 1.0f : -1.0f);
    }
    for (int64_t j = 0; j < KEYS; j++) {
        nd_put(k, j * D, (float)(j / 4 * 4)); /* a BF16 below 1024 */
    }
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        ND_RUN(side, attention_fwd, .attention = a, .out = o[s], .lse = l[s], .q = q, .k = k,
               .v = v, .scratch = nd_attention_memory(side, &a, dtype, false),
               .few_rows = queried == 1);
    }
    /* A score is rounded to eps of itself, which moves p by that factor. */
    const double scores = 2.0 * step * KEYS * nd_eps_f32;
    nd_tolerance lse = forward_tolerance(&a, ND_DTYPE_F32), out = forward_tolerance(&a, dtype);
    lse.absolute += scores;
    out.absolute += scores * 4.0;
    nd_expect_close(backend->name, "attention_fwd lse", l[1], l[0], lse);
    nd_expect_close(backend->name, "attention_fwd out", o[1], o[0], out);
    nd_case_free();
}

TEST_EACH_BACKEND(attention, forward_whose_maxima_grow)
{
    /* All keys together grow by less than one growth of the maximum, several pieces by more than
     * one, a single piece by more than one. */
    static const float steps[] = {0.0125f, 0.1f, 0.4f};
    for (int d = 0; d < 2; d++) {
        for (int i = 0; i < 3; i++) {
            growing_once(backend, dtypes[d], steps[i], 70);
            /* In spans, the later ones far above the first. */
            growing_once(backend, dtypes[d], 5.0f * steps[i], 1);
        }
    }
}

static nd_tensor gradient_output(nd_tensor like, int64_t gap, bool add, bool wide)
{
    nd_dtype dtype = add || wide ? ND_DTYPE_F32 : like.dtype;
    nd_tensor t = nd_random(dtype, 4, like.shape, gap, 1.0f);
    if (!add) {
        nd_case_poison(t);
    }
    return t;
}

/* A backend that does not read delta runs once more without it, and gives the same bits (of one
 * tile, since cuDNN adds several in any order).
 * flags: 1 add_q, 2 add_kv, 4 F32 outputs that are overwritten. Where `even`, strides are multiples
 * of 8 elements, which cuDNN needs; it leaves other calls to the plain kernel. */
static void backward(const nd_backend *backend, const nd_attention *a, bounds seen, nd_dtype dtype,
                     int flags, bool even)
{
    bool add_q = flags & 1, add_kv = flags & 2, wide = flags & 4;
    const int64_t gap = even ? 8 : 2, gap_out = even ? 8 : 3;
    nd_tensor q = queries(a, dtype, 0), k = keys(a, dtype, gap), v = keys(a, dtype, gap);
    nd_tensor dout = queries(a, dtype, gap), out = queries(a, dtype, 0), lse = rows(a), delta[2];
    nd_tensor grads[3] = {gradient_output(q, gap_out, add_q, wide),
                          gradient_output(k, gap_out, add_kv, wide),
                          gradient_output(v, gap_out, add_kv, wide)};
    enum { TILE = 64 };
    nd_tensor got[3][3];
    const bool lacks_delta =
        even && flags == 0 && !seen.first_key.data && a->sq <= TILE && a->sk <= TILE &&
        !backend->side.ops->attention_uses_delta(backend->side.device, a, dtype);
    ND_RUN(&backend->ref, attention_fwd, .attention = *a, .out = out, .lse = lse, .q = q, .k = k,
           .v = v, .first_key = seen.first_key, .end_key = seen.end_key,
           .scratch = nd_attention_memory(&backend->ref, a, dtype, false));
    delta[0] = rows(a);
    delta[1] = nd_clone(delta[0]);
    for (int r = 0; r < 2 + lacks_delta; r++) {
        const nd_side *side = &backend->sides[r > 0];
        for (int g = 0; g < 3; g++) {
            got[r][g] = nd_clone(grads[g]);
        }
        ND_RUN(side, attention_delta, .attention = *a, .delta = delta[r > 0], .out = out,
               .dout = dout);
        ND_RUN(side, attention_bwd, .attention = *a, .dq = got[r][0], .dk = got[r][1],
               .dv = got[r][2], .q = q, .k = k, .v = v, .out = out, .dout = dout, .lse = lse,
               .delta = r < 2 ? delta[0] : (nd_tensor){0}, .first_key = seen.first_key,
               .end_key = seen.end_key, .add_q = add_q, .add_kv = add_kv,
               .scratch = nd_attention_memory(side, a, dtype, true));
    }
    for (int g = 0; g < 3 && lacks_delta; g++) {
        nd_expect_same(backend->name, "a gradient without delta", got[2][g], got[1][g]);
    }
    nd_expect_close(backend->name, "attention_delta", delta[1], delta[0],
                    (nd_tolerance){.absolute = 2.0 * (double)(a->head_dim + 4) * nd_eps_f32});
    /*
     * A key's gradient sums over all rows that see it, H / K heads of Sq queries, with weights p
     * that can all be near 1 and factors dp - delta of up to about 4 sqrt(D): the forward's bound
     * times that factor and, for random errors, the root of the number of rows.
     */
    double rows_per_key = (double)(a->sq * (a->heads / a->kv_heads));
    double growth = 2.0 * sqrt((double)a->head_dim) * a->scale * sqrt(rows_per_key) + 2.0;
    nd_tolerance tolerance = forward_tolerance(a, dtype);
    tolerance.absolute *= growth;
    nd_expect_close(backend->name, "attention_bwd dq", got[1][0], got[0][0], tolerance);
    nd_expect_close(backend->name, "attention_bwd dk", got[1][1], got[0][1], tolerance);
    nd_expect_close(backend->name, "attention_bwd dv", got[1][2], got[0][2], tolerance);
    nd_case_free();
}

TEST_EACH_BACKEND(attention, backward)
{
    for (int d = 0; d < 2; d++) {
        for (int c = 0; c < CASES; c++) {
            for (int flags = 0; flags < 5; flags += ND_SANITIZED ? 2 : 1) {
                backward(backend, &cases[c], all, dtypes[d], flags, false);
                /* cuDNN needs a plan, about a second, for each: adding to one of both is shown by
                 * some. */
                bool adds_to_one = flags == 1 || flags == 2;
                if (!adds_to_one || c < 3) {
                    backward(backend, &cases[c], all, dtypes[d], flags, true);
                }
            }
        }
        for (int c = 0; c < SIZES; c++) {
            backward(backend, &sizes[c], all, dtypes[d], 0, true);
        }
    }
}

/* Partial results absorbed one after the other; -inf on either side, on both, and lse far apart. */
static void merge_once(const nd_backend *backend, const nd_attention *of, nd_dtype dtype,
                       int64_t gap)
{
    const nd_attention a = *of;
    nd_tensor acc = queries(&a, ND_DTYPE_F32, 2 * gap), acc_lse = rows(&a);
    nd_tensor out = queries(&a, dtype, gap), lse = rows(&a), got[2][2];
    for (int64_t i = 0; i < nd_tensor_count(lse); i++) {
        nd_put(lse, i, i % 5 == 0 ? -INFINITY : i % 7 == 0 ? 60.0f : nd_get(lse, i));
        nd_put(acc_lse, i, i % 3 == 0 ? -INFINITY : i % 11 == 0 ? 60.0f : nd_get(acc_lse, i));
    }
    for (int64_t i = 0; i < nd_tensor_count(acc); i++) { /* what must not be read */
        int64_t h = i / a.head_dim % a.heads, s = i / a.head_dim / a.heads % a.sq;
        int64_t b = i / a.head_dim / a.heads / a.sq;
        if (isinf(nd_get(acc_lse, (b * a.heads + h) * a.sq + s))) {
            bool both = isinf(nd_get(lse, (b * a.heads + h) * a.sq + s));
            nd_put(acc, i, both ? 0.0f : NAN);
        }
    }
    for (int s = 0; s < 2; s++) {
        got[s][0] = nd_clone(acc);
        got[s][1] = nd_clone(acc_lse);
        ND_RUN(&backend->sides[s], lse_merge, .attention = a, .acc = got[s][0],
               .acc_lse = got[s][1], .out = out, .lse = lse);
    }
    /* Weights within a few eps, of values up to about 5; the merged lse of 60 within a few eps
     * of itself. */
    nd_tolerance tolerance = {.relative = 4 * nd_eps_f32, .absolute = 40 * nd_eps_f32};
    nd_expect_close(backend->name, "lse_merge acc", got[1][0], got[0][0], tolerance);
    nd_expect_close(backend->name, "lse_merge lse", got[1][1], got[0][1], tolerance);
    nd_case_free();
}

TEST_EACH_BACKEND(attention, merge)
{
    static const nd_attention a = {2, 37, 1, 3, 1, 20, 0, 1.0f};
    merge_once(backend, &a, dtypes[0], 2);
    merge_once(backend, &a, dtypes[1], 2);
}

/* From no key that is seen to all of them, often causal. */
static nd_attention draw_attention(nd_draw *d)
{
    const int64_t kv_heads = draw_range(d, 1, 3), head_dim = 2 * draw_extent(d, 70);
    nd_attention a = {.batch = draw_range(d, 1, 3),
                      .sq = draw_extent(d, draw_once_in(d, 3) ? 300 : 70),
                      .sk = draw_extent(d, draw_once_in(d, 3) ? 300 : 70),
                      .heads = kv_heads * draw_range(d, 1, 3),
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .scale = (float)(1.0 / sqrt((double)head_dim))};
    a.diag = draw_range(d, -a.sq, a.sk);
    if (draw_once_in(d, 2)) {
        a.sk = a.sq;
        a.diag = 0;
    }
    return a;
}

/* Numbers in any order, some of them beyond all keys. */
static nd_tensor draw_numbers(const nd_attention *a)
{
    return nd_random_ids(a->batch * a->sq, -3, a->sk + 3);
}

/* Absent; numbers in any order; or documents of drawn lengths, either of all rows or of tiles of
 * rows that lie anywhere in the order of the keys. */
static bounds draw_bounds(nd_draw *d, const nd_attention *a)
{
    const int64_t kind = draw_range(d, 0, 4), longest = DRAW(d, 1, 5, 40, 130);
    const int64_t tile = DRAW(d, 1, 8, 64, 100);
    bounds s = {{0}, {0}};
    if (kind == 0) {
        return s;
    }
    s.first_key = draw_numbers(a);
    s.end_key = kind > 2 ? draw_numbers(a) : (nd_tensor){0};
    int32_t *firsts = s.first_key.data, *ends = s.end_key.data;
    for (int64_t i = 0, first = 0, end = 0; i < a->batch * a->sq && kind % 2 == 0; i++) {
        const bool begins = i % a->sq % tile == 0;
        end = !ends ? i % a->sq + a->diag + 1 : begins ? draw_range(d, 0, a->sk) : end + 1;
        first = begins || draw_once_in(d, longest) ? end - 1 : first;
        firsts[i] = (int32_t)(ends && begins ? draw_range(d, -1, first) : first);
        if (ends) {
            ends[i] = (int32_t)end;
        }
    }
    return s;
}

TEST_EACH_DRAW(attention, drawn_masks)
{
    nd_attention a = draw_attention(d);
    a.sq = draw_once_in(d, 6) ? 1 : a.sq;
    a.window = draw_once_in(d, 2) ? draw_range(d, 1, a.sk + 2) : 0;
    const nd_dtype dtype = dtypes[draw_range(d, 0, 1)];
    const nd_draw same = *d;
    forward(backend, &a, draw_bounds(d, &a), dtype, draw_range(d, 0, 12), draw_once_in(d, 2));
    *d = same;
    backward(backend, &a, draw_bounds(d, &a), dtype, (int)draw_range(d, 0, 4), draw_once_in(d, 2));
}

/* Documents of drawn lengths, which fill each sequence. */
static bounds draw_documents(nd_draw *d, const nd_attention *a)
{
    const int64_t longest = DRAW(d, 1, 3, 20, 70, 300, a->sq);
    bounds s = {draw_numbers(a), draw_numbers(a)};
    int32_t *firsts = s.first_key.data, *ends = s.end_key.data;
    for (int64_t at = 0, end = 0; at < a->batch * a->sq; at++) {
        const int64_t i = at % a->sq;
        const bool begins = i == 0 || i == end;
        end = begins ? i + draw_range(d, 1, longest) : end;
        firsts[at] = (int32_t)(begins ? i : firsts[at - 1]);
        ends[at] = (int32_t)i + 1;
    }
    return s;
}

/* Few shapes, for which cuDNN makes plans, of many documents. */
TEST_EACH_DRAW(attention, drawn_documents)
{
    static const nd_attention shapes[] = {
        {1, 70, 70, 4, 2, 16, 0, 0.25f, 0, true},   {2, 200, 200, 2, 2, 32, 0, 0.18f, 0, true},
        {1, 600, 600, 4, 1, 16, 0, 0.25f, 0, true}, {1, 130, 130, 2, 1, 24, 0, 0.2f, 0, true},
        {2, 40, 40, 2, 1, 16, 0, 0.25f, 0, true},
    };
    const nd_attention *a = &shapes[draw_range(d, 0, 4)];
    const nd_dtype dtype = dtypes[draw_once_in(d, 4) ? 0 : 1];
    const nd_draw same = *d;
    forward(backend, a, draw_documents(d, a), dtype, DRAW(d, 0, 8, 3), false);
    *d = same;
    backward(backend, a, draw_documents(d, a), dtype, (int)draw_range(d, 0, 4),
             !draw_once_in(d, 4));
}

TEST_EACH_DRAW(attention, drawn)
{
    const nd_attention a = draw_attention(d);
    const nd_dtype dtype = dtypes[draw_range(d, 0, 1)];
    forward(backend, &a, all, dtype, draw_range(d, 0, 12), draw_once_in(d, 2));
    backward(backend, &a, all, dtype, (int)draw_range(d, 0, 4), draw_once_in(d, 2));
    merge_once(backend, &a, dtype, draw_range(d, 0, 9));
}
