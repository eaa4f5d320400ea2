// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include "trainer/precision/precision.h"

/* The recipe, of whose products the operands are these. */
static nd_recipe expect_rules(nd_fp8_recipe recipe, nd_fp8_format format, const char *output,
                              const char *input_gradient, const char *weight_gradient)
{
    char text[96];
    nd_config c = {.train = {.precision = ND_PRECISION_FP8}};
    c.fp8.recipe = recipe;
    c.fp8.format = format;
    c.fp8.amax_history_length = 16;
    c.fp8.margin = 2;
    c.fp8.amax_compute = ND_FP8_AMAX_MAX;
    const nd_recipe r = nd_recipe_of(&c);
    cr_expect_str_eq(nd_recipe_format(&r, ND_X_OF_Y, true, text, sizeof text), output);
    cr_expect_str_eq(nd_recipe_format(&r, ND_DY_OF_DX, false, text, sizeof text), input_gradient);
    cr_expect_str_eq(nd_recipe_format(&r, ND_DY_OF_DW, false, text, sizeof text), weight_gradient);
    return r;
}

Test(recipe, none_unless_fp8)
{
    nd_config c = {.train = {.precision = ND_PRECISION_BF16}};
    nd_recipe r = nd_recipe_of(&c);
    cr_expect_null(r.name);
    cr_expect_not(nd_recipe_is_per_tensor(&r));
    cr_expect_not(nd_recipe_is_delayed(&r));
}

/* The tables of torchao 0.18 (float8/config.py) and of Transformer Engine's DelayedScaling. */
Test(recipe, tables)
{
    nd_recipe r = expect_rules(
        ND_FP8_TENSORWISE, ND_FP8_HYBRID, "e4m3 per tensor x e4m3 per tensor, fast accumulation",
        "e5m2 per tensor x e4m3 per tensor", "e5m2 per tensor x e4m3 per tensor");
    cr_expect_not(r.power_of_two);
    cr_expect(nd_recipe_is_per_tensor(&r));
    r = expect_rules(ND_FP8_ROWWISE, ND_FP8_HYBRID,
                     "e4m3 per row x e4m3 per row, fast accumulation",
                     "e4m3 per row x e4m3 per column", "e4m3 per column x e4m3 per column");
    cr_expect(r.power_of_two);
    cr_expect_not(nd_recipe_is_per_tensor(&r));
    r = expect_rules(ND_FP8_ROWWISE_GW_HP, ND_FP8_HYBRID,
                     "e4m3 per row x e4m3 per row, fast accumulation",
                     "e4m3 per row x e4m3 per tensor", "bf16");
    r = expect_rules(ND_FP8_DELAYED, ND_FP8_HYBRID,
                     "e4m3 per tensor x e4m3 per tensor, fast accumulation",
                     "e5m2 per tensor x e4m3 per tensor", "e5m2 per tensor x e4m3 per tensor");
    cr_expect(nd_recipe_is_delayed(&r));
    cr_expect_eq(r.history_length, 16);
    cr_expect_eq(r.margin, 2);
    cr_expect_eq(r.algorithm, ND_AMAX_MAX);
    r = expect_rules(ND_FP8_DELAYED, ND_FP8_E4M3,
                     "e4m3 per tensor x e4m3 per tensor, fast accumulation",
                     "e4m3 per tensor x e4m3 per tensor", "e4m3 per tensor x e4m3 per tensor");
}
