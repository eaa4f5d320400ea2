// SPDX-License-Identifier: Apache-2.0
/* The product that stands for those of a layer. That pairs are timed and chosen is shown over the
 * doubles: tests/hostcuda/test_tune.c. */
#include <criterion/criterion.h>

#include "trainer/tune/measure.h"

enum { C = 64, F = 96, QKV = 128, TOKENS = 64 };

static nd_config config;
static nd_rank rank_of_one;

static void setup(void)
{
    cr_assert_eq(nd_config_init(&config), ND_OK);
    config.train.sequence_length = TOKENS;
    config.train.precision = ND_PRECISION_BF16;
    config.train.gradient_accumulation_steps = 4;
    rank_of_one = (nd_rank){.world_size = 1,
                            .mesh = {{1, 1, 1, 1, 1}},
                            .config = &config,
                            .shape = {.vocab = 4096, /* the head has the largest products */
                                      .hidden = C,
                                      .ffn = F,
                                      .layers = 3,
                                      .heads = 4,
                                      .kv_heads = 2,
                                      .head_dim = 16,
                                      .max_positions = 128,
                                      .rms_eps = 1e-5,
                                      .init_std = 0.02,
                                      .rope = {.theta = 10000.0}}};
    cr_assert_eq(nd_ops_ref(&rank_of_one.ops), ND_OK);
}

static void teardown(void)
{
    nd_config_fini(&config);
}

TestSuite(division, .init = setup, .fini = teardown, .timeout = 120);

/* Gate and up are one product of 2 F C a token, the largest; q k v have QKV C, o C C, down F C. */
static int64_t expected_times(int passes)
{
    const int layer = QKV * C + C * C + 3 * F * C, largest = 2 * F * C;
    return (passes * layer + largest / 2) / largest;
}

static void expect_product(int64_t times, nd_call_kind kind)
{
    nd_call product;
    int64_t found = 0;
    cr_assert_eq(nd_layer_product(&rank_of_one, &product, &found), ND_OK, "%s",
                 nd_error_last()->message);
    cr_expect_eq(product.kind, (int32_t)kind);
    const double arithmetic =
        (double)product.c.columns * (double)product.a.rows * (double)product.a.columns;
    cr_expect_eq(arithmetic, (double)TOKENS * 2 * F * C, "gate and up");
    cr_expect_eq(found, times, "%lld times, not %lld", (long long)found, (long long)times);
}

Test(division, the_largest_product_of_a_layer_stands_for_all)
{
    expect_product(expected_times(3), ND_CALL_PRODUCT);
    rank_of_one.shape.layers = 1;
    config.train.gradient_accumulation_steps = 1;
    expect_product(expected_times(3), ND_CALL_PRODUCT);
}

/* All forward products again but that of down, whose output is not needed. */
Test(division, recompute_counts)
{
    const int layer = QKV * C + C * C + 3 * F * C, again = layer - F * C, largest = 2 * F * C;
    config.parallel.recompute = ND_RECOMPUTE_FULL;
    expect_product((3 * layer + again + largest / 2) / largest, ND_CALL_PRODUCT);
}
