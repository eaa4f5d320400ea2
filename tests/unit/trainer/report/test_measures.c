// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include "tests/unit/trainer/shapes.h"
#include "trainer/report/report.h"

/* Published tables give a tenth of a GFLOP up to 1,000 and one GFLOP above, from a parameter count
 * of four digits. */
static void assert_giga(double flops, double published)
{
    double unit = published < 1000 ? 0.1 : 1;
    cr_assert_float_eq(flops * 1e-9, published, unit, "%.3f GFLOP, published %.1f", flops * 1e-9,
                       published);
}

Test(flops, causal_count_agrees_with_published_tables)
{
    assert_giga(nd_flops_per_token_causal(&llama_8b, 4096), 48.2);
    assert_giga(nd_flops_per_token_causal(&llama_8b, 8192), 51.5);
    assert_giga(nd_flops_per_token_causal(&llama_8b, 32768), 70.8);
    assert_giga(nd_flops_per_token_causal(&llama_8b, 131072), 148.1);
    assert_giga(nd_flops_per_token_causal(&llama_70b, 8192), 449.2);
    assert_giga(nd_flops_per_token_causal(&llama_405b, 8192), 2524);
}

/* The full count is the causal one with the attention twice: 57.9 for 8B at 8,192. */
Test(flops, attention_is_the_only_part_that_grows_with_the_sequence)
{
    double at_8k = nd_flops_per_token_causal(&llama_8b, 8192);
    double at_0 = nd_flops_per_token_causal(&llama_8b, 0);
    assert_giga(at_0 + 2 * (at_8k - at_0), 57.9);
    assert_giga(at_0, 6 * 7.505);
}

Test(flops, accelerate_count_is_kept_as_accelerate_has_it)
{
    double got = nd_flops_per_token_accelerate(&llama_8b, 8192);
    cr_assert_float_eq(got, 4.67e10, 0.005e10, "%g", got);
    double ratio = nd_flops_per_token_accelerate(&llama_8b, 128000) /
                   nd_flops_per_token_causal(&llama_8b, 128000);
    cr_assert_float_eq(ratio, 1.6, 0.05, "%g", ratio);
    nd_shape other = llama_8b; /* accelerate takes hidden / heads, whatever head_dim is */
    other.head_dim = 256;
    cr_assert_eq(nd_flops_per_token_accelerate(&other, 8192), got);
    const nd_shape small = {SIZES(256, 64, 128, 2, 4, 2, 16)};
    cr_assert_eq(nd_flops_per_token_accelerate(&small, 128),
                 2 * (18 * 64 * 128 + 12 * 16 * (4 + 2) + 12 * 4 * 16 * 128));
    const double scores = nd_flops_per_token_causal(&llama_8b, 8192);
    cr_assert_eq(nd_flops_per_token_causal(&other, 8192) - nd_flops_per_token_causal(&other, 0),
                 2 * (scores - nd_flops_per_token_causal(&llama_8b, 0)));
}

/* A tied head is still a product: tying must not change the count. */
Test(flops, tied_embeddings_count_the_head_once)
{
    nd_shape tied = llama_8b;
    tied.tied = true;
    cr_assert_eq(nd_flops_per_token_causal(&tied, 8192),
                 nd_flops_per_token_causal(&llama_8b, 8192));
}

/* A token sees S / 2 keys on the average, and w - w^2 / 2S where a layer has a window of w keys, as
 * one of two layers has here: of a half of the sequence, 3/4 of what it sees without. */
Test(flops, a_window_has_fewer_scores)
{
    nd_shape windowed = llama_8b;
    const double at_0 = nd_flops_per_token_causal(&llama_8b, 0);
    const double all = nd_flops_per_token_causal(&llama_8b, 8192) - at_0;
    windowed.layers = 2;
    windowed.window = 4096;
    nd_layer_set_add(&windowed.full, 1);
    const double some = nd_flops_per_token_causal(&windowed, 8192);
    windowed.window = 0;
    const double without = nd_flops_per_token_causal(&windowed, 8192);
    cr_assert_float_eq(without - some, all / 32 / 4, 1e-9 * all);
}
