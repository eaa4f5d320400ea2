// SPDX-License-Identifier: Apache-2.0
/*
 * Gradients of attention whose keys come block by block, as in a ring of context-parallel ranks:
 * cuDNN rounds each block's gradients to BF16, and they are added in F32.
 *
 * Bound, for each element. Rounding block b's result r_b errs by at most 2^-8 |r_b|, and nothing
 * else is rounded to BF16 here: the double of cuDNN keeps probabilities in F32, which leaves the
 * F32 errors of scores and sums, below 2^-13 of the largest terms. So the sum is off by at most
 * 2^-8 sum |r_b|. Sums kept in BF16 would add 2^-8 of each partial sum; the gradients of one sign
 * here make that several times the bound.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "tests/ops/conformance.h"

enum { BLOCKS = 12, ROWS = 32, KEYS = 16, H = 4, K = 2, D = 16 };

typedef struct gradients {
    nd_tensor dq, dk, dv;
} gradients;

static nd_tensor tensor(nd_dtype dtype, int64_t rows, int64_t heads, float base)
{
    nd_tensor t = nd_random(dtype, 4, (int64_t[]){1, rows, heads, D}, 0, 0.3f);
    for (int64_t i = 0; i < nd_tensor_count(t); i++) {
        nd_put(t, i, nd_get(t, i) + base);
    }
    return t;
}

static nd_tensor zeros(int64_t rows, int64_t heads)
{
    nd_tensor t = tensor(ND_DTYPE_F32, rows, heads, 0.0f);
    memset(t.data, 0, nd_tensor_bytes(t));
    return t;
}

static nd_tensor some_rows(nd_tensor t, int64_t begin, int64_t rows)
{
    t.data = (char *)t.data + begin * t.stride[1] * (int64_t)nd_dtype_size(t.dtype);
    t.shape[1] = rows;
    return t;
}

/* The unmasked block b of `in`, added into out's F32. */
static void add_block(const nd_side *side, const gradients *in, nd_tensor out, nd_tensor dout,
                      nd_tensor lse, nd_tensor delta, int b, const gradients *to)
{
    nd_attention a = {1, ROWS, KEYS, H, K, D, KEYS, 0.25f};
    void *scratch = malloc(side->ops->attention_scratch(side->device, &a, ND_DTYPE_BF16, true));
    int64_t at = b * KEYS;
    ND_RUN(side, attention_bwd, .attention = a, .dq = to->dq, .dk = some_rows(to->dk, at, KEYS),
           .dv = some_rows(to->dv, at, KEYS), .q = in->dq, .k = some_rows(in->dk, at, KEYS),
           .v = some_rows(in->dv, at, KEYS), .out = out, .dout = dout, .lse = lse, .delta = delta,
           .add_q = true, .add_kv = true, .scratch = scratch);
    free(scratch);
}

/* `sizes`: the sum of the sizes of what the blocks add. */
static void expect_within(const char *what, nd_tensor got, nd_tensor want, nd_tensor sizes)
{
    double most = 0.0;
    for (int64_t i = 0; i < nd_tensor_count(want); i++) {
        double error = fabs((double)nd_get(got, i) - (double)nd_get(want, i));
        double bound = ldexp(fabs((double)nd_get(sizes, i)), -8) + ldexp(1.0, -13);
        most = fmax(most, error / bound);
        cr_assert_leq(error, bound, "%s, element %lld: %g, not %g", what, (long long)i,
                      (double)nd_get(got, i), (double)nd_get(want, i));
    }
    cr_expect_gt(most, 0.2, "%s: blocks are rounded at all (%g of the bound)", what, most);
}

TEST_BEST_BACKEND(attention_blocks, gradients_of_blocks_are_rounded_once_and_added_in_f32)
{
    gradients in = {tensor(ND_DTYPE_BF16, ROWS, H, 0.5f),
                    tensor(ND_DTYPE_BF16, BLOCKS * KEYS, K, 0.5f),
                    tensor(ND_DTYPE_BF16, BLOCKS * KEYS, K, 0.5f)};
    nd_tensor dout = tensor(ND_DTYPE_BF16, ROWS, H, 1.0f), out = nd_clone(dout);
    nd_tensor lse = nd_random(ND_DTYPE_F32, 3, (int64_t[]){1, H, ROWS}, 0, 1.0f);
    nd_tensor delta = nd_clone(lse);
    nd_attention all = {1, ROWS, BLOCKS * KEYS, H, K, D, BLOCKS * KEYS, 0.25f};
    const nd_side *ref = &backend->ref;
    void *scratch = malloc(ref->ops->attention_scratch(ref->device, &all, ND_DTYPE_BF16, false));
    ND_RUN(ref, attention_fwd, .attention = all, .out = out, .lse = lse, .q = in.dq, .k = in.dk,
           .v = in.dv, .scratch = scratch);
    free(scratch);
    ND_RUN(ref, attention_delta, .attention = all, .delta = delta, .out = out, .dout = dout);
    gradients got = {zeros(ROWS, H), zeros(BLOCKS * KEYS, K), zeros(BLOCKS * KEYS, K)};
    gradients want = {zeros(ROWS, H), zeros(BLOCKS * KEYS, K), zeros(BLOCKS * KEYS, K)};
    nd_tensor sizes = zeros(ROWS, H);
    for (int b = 0; b < BLOCKS; b++) {
        nd_tensor before = nd_clone(want.dq);
        add_block(ref, &in, out, dout, lse, delta, b, &want);
        add_block(&backend->side, &in, out, dout, lse, delta, b, &got);
        for (int64_t i = 0; i < nd_tensor_count(sizes); i++) {
            float block = nd_get(want.dq, i) - nd_get(before, i);
            nd_put(sizes, i, nd_get(sizes, i) + fabsf(block));
        }
    }
    expect_within("dq", got.dq, want.dq, sizes);
    expect_within("dk", got.dk, want.dk, want.dk); /* one block each */
    nd_case_free();
}
