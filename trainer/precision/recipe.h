// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PRECISION_RECIPE_H
#define ND_PRECISION_RECIPE_H
/*
 * FP8 recipes as data: for each of a linear's three products, how each operand is cast. A
 * granularity is that of the operand as it is stored: x (tokens, in), w (out, in), dy (tokens,
 * out).
 *
 *   tensorwise, rowwise, rowwise_with_gw_hp   torchao 0.18, float8/config.py
 *   delayed                                   Transformer Engine, common/recipe/__init__.py
 *                                             (DelayedScaling)
 */
#include "kernels/ops.h"
#include "runtime/config/config.h"
#include "runtime/tensor/fp8.h"

typedef enum nd_scaling {
    ND_SCALING_NONE = 0, /* not cast: the product runs in BF16 */
    ND_SCALING_CURRENT,  /* from the amax of the tensor itself */
    ND_SCALING_DELAYED   /* from the amaxes of past steps */
} nd_scaling;

typedef struct nd_cast_rule {
    nd_scaling scaling;
    nd_dtype format;
    nd_granularity granularity;
} nd_cast_rule;

typedef struct nd_gemm_rule {
    nd_cast_rule a, b;
    bool fast_accumulation;
} nd_gemm_rule;

typedef struct nd_recipe {
    const char *name;             /* NULL: no FP8 */
    nd_gemm_rule output;          /* y = x w^T: a is x, b is w */
    nd_gemm_rule input_gradient;  /* dx = dy w: a is dy, b is w */
    nd_gemm_rule weight_gradient; /* dw = dy^T x: a is dy, b is x */
    bool power_of_two;            /* current scales are rounded down to powers of two */
    /* delayed */
    int64_t history_length;
    nd_amax_algorithm algorithm;
    int64_t margin;
} nd_recipe;

/* The recipe of a configuration; name NULL unless train.precision is fp8. */
nd_recipe nd_recipe_of(const nd_config *config);

/*
 * Every operand has one scale: inputs are kept for backward as codes, weights may be gathered as
 * codes. Otherwise scales lie along rows or columns, inputs are kept in BF16 and cast again.
 */
bool nd_recipe_is_per_tensor(const nd_recipe *recipe);
bool nd_recipe_is_delayed(const nd_recipe *recipe);

/* "e4m3 per tensor x e4m3 per tensor, fast accumulation", or "bf16"; returns buffer. */
const char *nd_gemm_rule_format(const nd_gemm_rule *rule, char *buffer, size_t size);

#endif
