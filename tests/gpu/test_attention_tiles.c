// SPDX-License-Identifier: Apache-2.0
/* Gradients of attention ops that consist of several calls of cuDNN, whose results are added up:
 * tiles of a deterministic backward, and halves of keys. On a GPU, or on its double. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/cuda/context.h"
#include "tests/ops/conformance.h"

enum { D = 16 };

typedef struct gradients {
    nd_tensor dq, dk, dv;
} gradients;

/* Random, or, where `to` is not 0, so in its second half only. */
static nd_tensor pointing(const int64_t *shape, float to)
{
    nd_tensor t = nd_random(ND_DTYPE_BF16, 4, shape, 0, 1.0f);
    for (int64_t i = 0; i < nd_tensor_count(t) && to != 0.0f; i++) {
        if (i % D < D / 2) {
            nd_put(t, i, to);
        }
    }
    return t;
}

/* Blocks of several tiles, whose lengths are no multiples of a tile's: causal, after a prefix,
 * unmasked, with blind rows and more queries than keys. */
static const nd_attention tiled[] = {
    {1, 300, 300, 4, 2, 16, 0, 0.25f},   {2, 131, 420, 4, 2, 16, 289, 0.25f},
    {1, 260, 270, 4, 2, 16, 270, 0.25f}, {1, 330, 150, 4, 2, 16, -11, 0.25f},
    {1, 64, 390, 4, 2, 16, 326, 0.25f},
};

static nd_tensor gradient(nd_tensor like, bool wide)
{
    nd_tensor t = nd_random(wide ? ND_DTYPE_F32 : ND_DTYPE_BF16, 4, like.shape, 0, 1.0f);
    return t;
}

/* Each of n parts is rounded to BF16, and so is the sum, and cuDNN rounds probabilities and their
 * gradients too: with errors of both signs, each of those less than 2^-9 of the root of
 * the mean square of a gradient whose parts are of one size; a tile that is lost or counted twice
 * is a quarter of it. */
static void expect_alike(const char *what, nd_tensor got, nd_tensor want)
{
    double error = 0.0, size = 0.0;
    for (int64_t i = 0; i < nd_tensor_count(want); i++) {
        double difference = (double)nd_get(got, i) - (double)nd_get(want, i);
        error += difference * difference;
        size += (double)nd_get(want, i) * (double)nd_get(want, i);
    }
    cr_expect_leq(sqrt(error), ldexp(sqrt(size), -7), "%s: off by %g of %g", what, sqrt(error),
                  sqrt(size));
}

/* against: queries and keys point away from each other, with scores of about -120 (8 x 120 x -0.5
 * / 4). It is the queries that are long: a sum over some of the keys is then of the size of that
 * over all. */
static void check_tiled(const nd_backend *backend, const nd_attention *a, bool wide, bool add,
                        bool against)
{
    int64_t rows[] = {a->batch, a->sq, a->heads, D}, keys[] = {a->batch, a->sk, a->kv_heads, D};
    nd_tensor q = pointing(rows, against ? 120.0f : 0.0f), out = nd_clone(q);
    nd_tensor k = pointing(keys, against ? -0.5f : 0.0f);
    nd_tensor v = nd_random(ND_DTYPE_BF16, 4, keys, 0, 1.0f);
    nd_tensor dout = nd_random(ND_DTYPE_BF16, 4, rows, 0, 1.0f);
    nd_tensor lse = nd_random(ND_DTYPE_F32, 3, (int64_t[]){a->batch, a->heads, a->sq}, 0, 1.0f);
    nd_tensor delta = nd_clone(lse);
    gradients before = {gradient(q, wide), gradient(k, wide), gradient(v, wide)}, got[2];
    void *scratch =
        malloc(backend->ref.ops->attention_scratch(backend->ref.device, a, ND_DTYPE_BF16, false));
    ND_RUN(&backend->ref, attention_fwd, .attention = *a, .out = out, .lse = lse, .q = q, .k = k,
           .v = v, .scratch = scratch);
    free(scratch);
    for (int64_t i = 0; i < nd_tensor_count(lse) && against; i++) {
        cr_assert_lt(nd_get(lse, i), -88.73f);
    }
    ND_RUN(&backend->ref, attention_delta, .attention = *a, .delta = delta, .out = out,
           .dout = dout);
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        scratch = malloc(side->ops->attention_scratch(side->device, a, ND_DTYPE_BF16, true));
        got[s] = (gradients){nd_clone(before.dq), nd_clone(before.dk), nd_clone(before.dv)};
        ND_RUN(side, attention_bwd, .attention = *a, .dq = got[s].dq, .dk = got[s].dk,
               .dv = got[s].dv, .q = q, .k = k, .v = v, .out = out, .dout = dout, .lse = lse,
               .delta = delta, .add_q = add, .add_kv = add, .scratch = scratch);
        free(scratch);
    }
    expect_alike("dq", got[1].dq, got[0].dq);
    expect_alike("dk", got[1].dk, got[0].dk);
    expect_alike("dv", got[1].dv, got[0].dv);
    nd_case_free();
}

/* Gradients in BF16, in F32, and added to F32. */
static void check_each(const nd_backend *backend, const nd_attention *cases, size_t count,
                       bool against)
{
    for (size_t i = 0; i < count; i++) {
        check_tiled(backend, &cases[i], false, false, against);
        check_tiled(backend, &cases[i], true, false, against);
        check_tiled(backend, &cases[i], true, true, against);
    }
}

TEST_BEST_BACKEND(attention_tiles, tiles_of_a_deterministic_backward_add_up)
{
    nd_cuda_context_of(backend->side.device)->ordered_bytes = 1 << 16; /* 128 x 128 */
    check_each(backend, tiled, sizeof tiled / sizeof *tiled, false);
}

/* Unmasked keys that end inside of a tile of Hopper's kernel (sdpa_parts.h), and queries that do so
 * or are one, in rows with LSE below -88.7: where cuDNN takes exp(0 - LSE) of what is not there,
 * gradients are NaN. */
static const nd_attention half_tiles[] = {
    {1, 64, 64, 4, 2, 16, 64, 0.25f},   {2, 100, 192, 4, 2, 16, 192, 0.25f},
    {1, 96, 320, 4, 2, 16, 320, 0.25f}, {1, 1, 128, 4, 2, 16, 128, 0.25f},
    {1, 65, 128, 4, 2, 16, 128, 0.25f}, {1, 129, 256, 4, 2, 16, 256, 0.25f},
};

TEST_BEST_BACKEND(attention_tiles, parts_of_tiles_add_up_where_statistics_are_very_negative)
{
    check_each(backend, half_tiles, sizeof half_tiles / sizeof *half_tiles, true);
}
