// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/precision.h"

#include <stdio.h>

#define CURRENT(format, along)                                                                     \
    {                                                                                              \
        ND_SCALING_CURRENT, ND_DTYPE_F8_##format, ND_PER_##along                                   \
    }
#define DELAYED(format)                                                                            \
    {                                                                                              \
        ND_SCALING_DELAYED, ND_DTYPE_F8_##format, ND_PER_TENSOR                                    \
    }
#define IN_BF16                                                                                    \
    {                                                                                              \
        .scaling = ND_SCALING_NONE                                                                 \
    }
#define ND_FP8_RECIPE(id, name_, x_y, w_y, dy_dx, w_dx, dy_dw, x_dw, by_two)                       \
    [ND_FP8_##id] = {                                                                              \
        .name = name_, .rules = {x_y, w_y, dy_dx, w_dx, dy_dw, x_dw}, .power_of_two = by_two},
static const nd_recipe recipes[ND_FP8_RECIPE_COUNT] = {
#include "runtime/config/fp8_recipes.def"
};

nd_recipe nd_recipe_of(const nd_config *config)
{
    if (config->train.precision != ND_PRECISION_FP8) {
        return (nd_recipe){0};
    }
    ND_ASSERT(config->fp8.recipe < ND_FP8_RECIPE_COUNT);
    nd_recipe recipe = recipes[config->fp8.recipe];
    if (config->fp8.recipe == ND_FP8_DELAYED) {
        if (config->fp8.format == ND_FP8_E4M3) {
            recipe.rules[ND_DY_OF_DX].format = ND_DTYPE_F8_E4M3;
            recipe.rules[ND_DY_OF_DW].format = ND_DTYPE_F8_E4M3;
        }
        recipe.history_length = config->fp8.amax_history_length;
        recipe.algorithm =
            config->fp8.amax_compute == ND_FP8_AMAX_MAX ? ND_AMAX_MAX : ND_AMAX_MOST_RECENT;
        recipe.margin = config->fp8.margin;
    }
    return recipe;
}

static const char *operand(const nd_cast_rule *rule, char buffer[32])
{
    static const char *const along[] = {
        [ND_PER_TENSOR] = "tensor", [ND_PER_ROW] = "row", [ND_PER_COLUMN] = "column"};
    snprintf(buffer, 32, "%s per %s", rule->format == ND_DTYPE_F8_E4M3 ? "e4m3" : "e5m2",
             along[rule->granularity]);
    return buffer;
}

const char *nd_recipe_format(const nd_recipe *recipe, nd_role first, bool fast, char *buffer,
                             size_t size)
{
    const nd_cast_rule *a = &recipe->rules[first], *b = a + 1;
    char of_a[32], of_b[32];
    if (a->scaling == ND_SCALING_NONE) {
        snprintf(buffer, size, "bf16");
    } else {
        snprintf(buffer, size, "%s x %s%s", operand(a, of_a), operand(b, of_b),
                 fast ? ", fast accumulation" : "");
    }
    return buffer;
}
