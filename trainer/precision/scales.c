// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/precision.h"

#include <math.h>
#include <stdlib.h>

#include "runtime/base/math.h"

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

enum { OPERANDS = 3 }; /* that have scales of rows or columns */

static bool enabled(const nd_scales *s)
{
    return s->recipe.name != NULL;
}

static int64_t weight_sites(const nd_scales *s)
{
    return s->layers * ND_LINEAR_COUNT;
}

int64_t nd_site_weight(const nd_scales *s, int64_t layer, int linear)
{
    ND_ASSERT(layer < s->layers);
    return layer * ND_LINEAR_COUNT + linear;
}

int64_t nd_site_input(const nd_scales *s, int64_t layer, nd_input input)
{
    return weight_sites(s) + layer * ND_INPUT_COUNT + (int64_t)input;
}

int64_t nd_site_gradient(const nd_scales *s, int64_t layer, int linear)
{
    return weight_sites(s) + s->layers * ND_INPUT_COUNT + layer * ND_LINEAR_COUNT + linear;
}

nd_status nd_scales_init(nd_scales *s, nd_rank *rank, const nd_linear_choice *linears,
                         bool forward_only)
{
    *s = (nd_scales){
        .rank = rank, .recipe = nd_recipe_of(rank->config), .layers = rank->shape.layers};
    s->sites = weight_sites(s) * 2 + s->layers * ND_INPUT_COUNT;
    s->codes_gathered = nd_recipe_is_per_tensor(&s->recipe) && rank->config->fp8.all_gather;
    s->from_bf16 = !s->codes_gathered;
    s->weights_kept = forward_only && enabled(s) && !nd_recipe_is_delayed(&s->recipe);
    s->codes_gathered |= s->weights_kept;
    ND_TRY(nd_filter_init(&s->filter, rank->config, &rank->shape));
    ND_TRY(nd_filter_check(&s->filter, rank->config, &rank->shape, &rank->mesh));
    return linears ? nd_filter_choose(&s->filter, linears) : ND_OK;
}

bool nd_scales_in_segment(void *context, const nd_param *param)
{
    const nd_scales *s = context;
    int linear = nd_linear_of_param(param->id);
    return s->codes_gathered && linear >= 0 && nd_filter_converts(&s->filter, param->layer, linear);
}

bool nd_scales_keep_codes(const nd_scales *s, nd_input input, int64_t layer)
{
    int first, count = nd_input_linears(input, &first);
    bool all = nd_filter_mask(&s->filter, layer, input) == (1 << count) - 1;
    return all && input != ND_INPUT_O && nd_recipe_is_per_tensor(&s->recipe);
}

nd_flat_range nd_scales_part(const nd_scales *s, int64_t site)
{
    const int64_t layer = site / ND_LINEAR_COUNT;
    const int linear = (int)(site % ND_LINEAR_COUNT);
    const nd_param *p = nd_layout_param(s->layout, nd_linears[linear].param, layer);
    return p && nd_filter_converts(&s->filter, layer, linear) ? nd_layout_shard_range(s->layout, p)
                                                              : (nd_flat_range){0};
}

/* Amaxes, scales and inverses of `count` entries, one after the other; returns their bytes. */
static size_t place_scales(nd_memplan *plan, int want, size_t offset, int64_t count,
                           nd_scale_ref *to)
{
    const size_t each = (size_t)count * sizeof(float);
    nd_memplan_also(plan, want, offset, &to->amax);
    nd_memplan_also(plan, want, offset + each, &to->scale);
    nd_memplan_also(plan, want, offset + 2 * each, &to->inverse);
    return 3 * each;
}

static void plan_vectors(nd_scales *s, int64_t each, int64_t joint, nd_memplan *plan)
{
    const size_t bytes = 3 * (size_t)(OPERANDS * each + joint) * sizeof(float);
    const int want = nd_memplan_want(plan, ND_MEM_SCRATCH, "fp8: scales of rows", bytes, NULL);
    size_t offset = 0;
    for (int i = 0; i < OPERANDS; i++) {
        offset += place_scales(plan, want, offset, each, &s->vectors[i]);
    }
    place_scales(plan, want, offset, joint, &s->joint);
    s->joint_count = joint;
}

static bool keeps_rows(const nd_scales *s)
{
    return s->weights_kept && s->recipe.rules[ND_W_OF_Y].granularity == ND_PER_ROW;
}

/* Gives rows to those of a layer's kept weights that tp splits in this way, from `row` on. */
static int64_t place_rows(nd_scales *s, int64_t layer, bool by_rows, int64_t row)
{
    for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
        const nd_param *p = nd_layout_param(s->layout, nd_linears[linear].param, layer);
        if (p && p->segment == ND_SEGMENT_FP8 && (p->split == ND_SPLIT_ROWS) == by_rows) {
            s->first_row[nd_site_weight(s, layer, linear)] = row;
            row += p->local_rows;
        }
    }
    return row;
}

/* Scales of the rows of kept weights. */
static nd_status plan_rows(nd_scales *s, nd_memplan *plan)
{
    int64_t rows = 0;
    ND_TRY(ND_ALLOC(weight_sites(s), &s->first_row));
    ND_TRY(ND_ALLOC(s->layers, &s->kept_rows));
    for (int64_t layer = 0; layer < s->layers && keeps_rows(s); layer++) {
        nd_kept_rows *k = &s->kept_rows[layer];
        k->begin = rows;
        k->split = place_rows(s, layer, true, k->begin);
        k->end = rows = place_rows(s, layer, false, k->split);
    }
    const int want = nd_memplan_want(plan, ND_MEM_WEIGHTS, "fp8: scales of weight rows",
                                     3 * (size_t)rows * sizeof(float), NULL);
    place_scales(plan, want, 0, rows, &s->rows);
    return ND_OK;
}

/* True if a product, and not the health log alone, reads an amax of a whole weight. */
static bool products_read_amaxes(const nd_scales *s)
{
    return s->recipe.rules[ND_W_OF_Y].granularity == ND_PER_TENSOR ||
           s->recipe.rules[ND_W_OF_DX].granularity == ND_PER_TENSOR;
}

static bool optimizer_measures(const nd_scales *s)
{
    return !s->weights_kept && products_read_amaxes(s) && s->rank->ops->optimizer_measures;
}

static void plan_health(nd_scales *s, nd_memplan *plan)
{
    const int64_t sites = s->rank->config->fp8.health_interval ? s->sites : 0;
    nd_memplan_want(plan, ND_MEM_STATE, "fp8: health counts", (size_t)sites * sizeof *s->counts,
                    &s->counts);
    const int want = nd_memplan_want(plan, ND_MEM_STATE, "fp8: health amaxes and scales",
                                     3 * (size_t)sites * sizeof(float), NULL);
    place_scales(plan, want, 0, sites, &s->worst);
}

nd_status nd_scales_plan(nd_scales *s, const nd_layout *layout, int64_t each_vector, int64_t joint,
                         nd_memplan *plan)
{
    s->layout = layout;
    if (!enabled(s)) {
        return ND_OK;
    }
    bool delayed = nd_recipe_is_delayed(&s->recipe), rows = !nd_recipe_is_per_tensor(&s->recipe);
    int64_t length = delayed ? s->recipe.history_length : 1;
    size_t each = (size_t)s->sites * sizeof(float);
    nd_memplan_want(plan, ND_MEM_STATE, "fp8: scales", each, &s->scale);
    nd_memplan_want(plan, ND_MEM_STATE, "fp8: inverse scales", each, &s->inverse);
    nd_memplan_want(plan, ND_MEM_STATE, delayed ? "fp8: amax history" : "fp8: amaxes",
                    (size_t)length * each, &s->amax);
    nd_memplan_want(plan, ND_MEM_STATE, "fp8: largest values", delayed ? each : 0, &s->limit);
    nd_memplan_want(plan, ND_MEM_STATE, "fp8: amaxes of updated weights",
                    optimizer_measures(s) ? (size_t)weight_sites(s) * sizeof *s->updated : 0,
                    &s->updated);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "fp8: amaxes in bf16",
                    (size_t)weight_sites(s) * sizeof *s->rounded, &s->rounded);
    plan_vectors(s, rows ? each_vector : 0, rows ? joint : 0, plan);
    plan_health(s, plan);
    ND_TRY(ND_ALLOC(s->sites, &s->report));
    return plan_rows(s, plan);
}

nd_status nd_scales_start(nd_scales *s)
{
    nd_stream *stream = &s->rank->stream;
    float *ones = NULL, *limit = NULL;
    nd_status status = ND_OK;
    if (!nd_recipe_is_delayed(&s->recipe)) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(s->sites, &ones));
    ND_TRY_OUT(ND_ALLOC(s->sites, &limit));
    for (int64_t i = 0; i < s->sites; i++) {
        nd_dtype format = i < nd_site_gradient(s, 0, 0) ? s->recipe.rules[ND_X_OF_Y].format
                                                        : s->recipe.rules[ND_DY_OF_DX].format;
        ones[i] = 1.0f;
        limit[i] = (float)ldexp((double)nd_fp8_max(format), -(int)s->recipe.margin);
    }
    ND_TRY_OUT(nd_copy(stream, s->scale, ones, (size_t)s->sites * 4));
    ND_TRY_OUT(nd_copy(stream, s->inverse, ones, (size_t)s->sites * 4));
    ND_TRY_OUT(nd_copy(stream, s->limit, limit, (size_t)s->sites * 4));
    ND_TRY_OUT(nd_stream_sync(stream));
out:
    free(ones);
    free(limit);
    return status;
}

void nd_scales_fini(nd_scales *s)
{
    nd_filter_fini(&s->filter);
    free(s->first_row);
    free(s->kept_rows);
    free(s->report);
    s->first_row = NULL;
    s->kept_rows = NULL;
    s->report = NULL;
}

nd_scale_ref nd_scales_at(const nd_scales *s, int64_t site)
{
    return (nd_scale_ref){site, s->amax + site, s->scale + site, s->inverse + site};
}

static nd_scale_ref entries(nd_scale_ref of, int64_t at)
{
    return (nd_scale_ref){of.site, of.amax + at, of.scale + at, of.inverse + at};
}

nd_scale_ref nd_scales_of_weight(const nd_scales *s, int64_t layer, int linear)
{
    const int64_t site = nd_site_weight(s, layer, linear);
    if (!keeps_rows(s)) {
        return nd_scales_at(s, site);
    }
    nd_scale_ref rows = entries(s->rows, s->first_row[site]);
    rows.site = site;
    return rows;
}

nd_scale_ref nd_scales_joint(const nd_scales *s, int64_t at, int64_t count)
{
    ND_ASSERT(at >= 0 && count >= 0 && at + count <= s->joint_count);
    return entries(s->joint, at);
}

nd_matrix nd_matrix_with(nd_scale_ref scale, const nd_cast_rule *rule, nd_tensor stored)
{
    return (nd_matrix){.stored = stored,
                       .format = rule->format,
                       .scale = scale.scale,
                       .inverse = scale.inverse,
                       .granularity = rule->granularity};
}

static nd_status max_over(nd_scales *s, nd_group_kind group, float *amax, int64_t count)
{
    return nd_all_reduce(s->rank, group, amax, count, ND_DTYPE_F32, ND_REDOP_MAX);
}

/* Turns the amaxes of the weights into those of their BF16 copies. */
static nd_status round_weights(nd_scales *s)
{
    nd_tensor amax = nd_tensor_1d(s->amax, ND_DTYPE_F32, weight_sites(s));
    nd_tensor rounded = nd_tensor_1d(s->rounded, ND_DTYPE_BF16, weight_sites(s));
    ND_OP(s->rank, ND_TRACE_CAST, cast, .out = rounded, .x = amax);
    ND_OP(s->rank, ND_TRACE_CAST, cast, .out = amax, .x = rounded);
    return ND_OK;
}

nd_status nd_scales_begin_update(nd_scales *s, int64_t version)
{
    if (!s->updated) {
        return ND_OK;
    }
    s->updated_version = version;
    return nd_zero(&s->rank->stream, s->updated, (size_t)weight_sites(s) * sizeof *s->updated);
}

float *nd_scales_updated_amax(const nd_scales *s, int64_t begin)
{
    for (int64_t i = 0; s->updated && i < weight_sites(s); i++) {
        const nd_flat_range part = nd_scales_part(s, i);
        if (part.begin < part.end && part.begin == begin) {
            return s->updated + i;
        }
    }
    return NULL;
}

/* This rank's amaxes of its part of each weight. */
static nd_status measure_weights(nd_scales *s, const float *master, int64_t version)
{
    nd_rank *r = s->rank;
    const size_t bytes = (size_t)weight_sites(s) * sizeof *s->amax;
    if (s->updated_version == version) {
        return nd_copy(&r->stream, s->amax, s->updated, bytes);
    }
    ND_TRY(nd_zero(&r->stream, s->amax, bytes));
    for (int64_t i = 0; i < weight_sites(s); i++) {
        const nd_flat_range part = nd_scales_part(s, i);
        if (part.begin < part.end) {
            ND_OP(r, ND_TRACE_CAST, amax, .amax = s->amax + i,
                  .x = nd_tensor_1d((float *)master + part.begin, ND_DTYPE_F32,
                                    part.end - part.begin),
                  .granularity = ND_PER_TENSOR);
        }
    }
    return ND_OK;
}

nd_status nd_scales_refresh(nd_scales *s, const float *master, int64_t version)
{
    nd_rank *r = s->rank;
    if (!enabled(s) || s->weights_kept || s->version == version ||
        !(s->counting || products_read_amaxes(s))) {
        return ND_OK;
    }
    s->version = version;
    ND_TRY(measure_weights(s, master, version));
    if (!s->codes_gathered) {
        ND_TRY(round_weights(s));
    }
    if (nd_recipe_is_delayed(&s->recipe)) {
        return ND_OK;
    }
    ND_TRY(max_over(s, ND_GROUP_MODEL, s->amax, weight_sites(s)));
    ND_OP(r, ND_TRACE_CAST, fp8_scale, .scale = s->scale, .inverse = s->inverse, .amax = s->amax,
          .count = weight_sites(s), .format = ND_DTYPE_F8_E4M3,
          .power_of_two = s->recipe.power_of_two);
    return ND_OK;
}

/* Kept weights. */

/* The scales of all kept weights of a layer; with one scale each, of its other linears too. */
static nd_scale_ref scales_of_layer(const nd_scales *s, int64_t layer, int64_t *count)
{
    if (!keeps_rows(s)) {
        *count = ND_LINEAR_COUNT;
        return nd_scales_at(s, nd_site_weight(s, layer, 0));
    }
    const nd_kept_rows *k = &s->kept_rows[layer];
    *count = k->end - k->begin;
    return entries(s->rows, k->begin);
}

nd_status nd_scales_begin_weights(nd_scales *s, int64_t layer)
{
    int64_t count;
    const nd_scale_ref all = scales_of_layer(s, layer, &count);
    return nd_zero(&s->rank->stream, all.amax, (size_t)count * sizeof(float));
}

nd_scale_ref nd_scales_of_elements(const nd_scales *s, const nd_param *p, int64_t element,
                                   nd_tensor *x)
{
    nd_scale_ref at = nd_scales_of_weight(s, p->layer, nd_linear_of_param(p->id));
    if (keeps_rows(s)) {
        const int64_t cols = p->local_cols, row = element / cols, col = element % cols;
        const int64_t count = nd_tensor_count(*x), n = nd_min(count, cols - col);
        ND_ASSERT(count == n || (col == 0 && count % n == 0));
        at = entries(at, row);
        *x = nd_tensor_2d(x->data, x->dtype, count / n, n);
    }
    return at;
}

nd_status nd_scales_settle_weights(nd_scales *s, int64_t layer)
{
    int64_t count;
    const nd_scale_ref all = scales_of_layer(s, layer, &count);
    if (keeps_rows(s)) { /* before `split`, tp ranks have different rows */
        const nd_kept_rows *k = &s->kept_rows[layer];
        ND_TRY(max_over(s, ND_GROUP_DP_SHARD_CP, all.amax, count));
        ND_TRY(max_over(s, ND_GROUP_TP, s->rows.amax + k->split, k->end - k->split));
    } else {
        ND_TRY(max_over(s, ND_GROUP_MODEL, all.amax, count));
    }
    ND_TRY(max_over(s, ND_GROUP_DP_REPLICATE, all.amax, count));
    return nd_scales_settle(s, all, count, s->recipe.rules[ND_W_OF_Y].format, false);
}

nd_status nd_scales_settle(nd_scales *s, nd_scale_ref first, int64_t count, nd_dtype format,
                           bool split)
{
    if (split) {
        ND_TRY(max_over(s, ND_GROUP_TP, first.amax, count));
    }
    ND_OP(s->rank, ND_TRACE_CAST, fp8_scale, .scale = first.scale, .inverse = first.inverse,
          .amax = first.amax, .count = count, .format = format,
          .power_of_two = s->recipe.power_of_two);
    return ND_OK;
}

nd_status nd_scales_count(nd_scales *s, int64_t site, const nd_matrix *as, nd_tensor x)
{
    if (s->counting) {
        s->report[site].elements += nd_tensor_count(x);
        ND_OP(s->rank, ND_TRACE_CAST, fp8_count, .counts = s->counts[site], .x = x, .as = *as);
        ND_OP(s->rank, ND_TRACE_CAST, amax, .amax = s->worst.amax + site, .x = x,
              .granularity = ND_PER_TENSOR, .merge = true);
    }
    return ND_OK;
}

/* The next step merges into amaxes of 0. Those of the weights are overwritten when the weights
 * change. */
nd_status nd_scales_forget(nd_scales *s)
{
    if (!nd_recipe_is_delayed(&s->recipe)) {
        return ND_OK;
    }
    int64_t first = weight_sites(s);
    return nd_zero(&s->rank->stream, s->amax + first, (size_t)(s->sites - first) * 4);
}

nd_status nd_scales_advance(nd_scales *s)
{
    if (!nd_recipe_is_delayed(&s->recipe)) {
        return ND_OK;
    }
    ND_TRY(max_over(s, ND_GROUP_WORLD, s->amax, s->sites));
    nd_fp8_history history = {
        .length = s->recipe.history_length,
        .count = s->sites,
        .amax = s->amax,
        .limit = s->limit,
        .scale = s->scale,
        .inverse = s->inverse,
    };
    ND_OP(s->rank, ND_TRACE_CAST, fp8_delayed, .history = history,
          .algorithm = s->recipe.algorithm);
    return ND_OK;
}

int nd_scales_state(const nd_scales *s, nd_scale_state out[3])
{
    if (!nd_recipe_is_delayed(&s->recipe)) {
        return 0;
    }
    out[0] = (nd_scale_state){"fp8.scale", s->scale, s->sites};
    out[1] = (nd_scale_state){"fp8.inverse", s->inverse, s->sites};
    out[2] = (nd_scale_state){"fp8.amax_history", s->amax, s->sites * s->recipe.history_length};
    return 3;
}
