// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/precision.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/log.h"

nd_status nd_health_begin(nd_scales *s, int64_t step)
{
    const int64_t interval = s->recipe.name ? s->rank->config->fp8.health_interval : 0;
    s->counting = interval > 0 && step % interval == 0;
    if (!s->counting) {
        return ND_OK;
    }
    memset(s->report, 0, (size_t)s->sites * sizeof *s->report);
    ND_TRY(nd_zero(&s->rank->stream, s->worst.amax, (size_t)s->sites * sizeof(float)));
    return nd_zero(&s->rank->stream, s->counts, (size_t)s->sites * sizeof *s->counts);
}

/* Adds up the counts of all ranks, of the device and of the host. */
static nd_status collect_counts(nd_scales *s)
{
    nd_stream *stream = &s->rank->stream;
    for (int64_t i = 0; i < s->sites; i++) {
        ND_TRY(nd_copy(stream, &s->counts[i][2], &s->report[i].elements, sizeof(int64_t)));
    }
    ND_TRY(nd_all_reduce(s->rank, ND_GROUP_WORLD, s->counts, 3 * s->sites, ND_DTYPE_I64,
                         ND_REDOP_SUM));
    for (int64_t i = 0; i < s->sites; i++) {
        ND_TRY(nd_copy(stream, s->report[i].counts, s->counts[i], sizeof s->report[i].counts));
    }
    return ND_OK;
}

/*
 * The scale of the largest amax. A scale falls with its amax, so with current scaling this is the
 * smallest scale of all ranks, micro-batches, rows and columns. Delayed scales are equal on all
 * ranks.
 */
static nd_status find_scales(nd_scales *s)
{
    nd_stream *stream = &s->rank->stream;
    const nd_scale_ref *h = &s->worst;
    const nd_recipe *recipe = &s->recipe;
    int64_t gradients = nd_site_gradient(s, 0, 0);
    if (nd_recipe_is_delayed(recipe)) {
        return nd_copy(stream, h->scale, s->scale, (size_t)s->sites * sizeof(float));
    }
    ND_OP(s->rank, ND_TRACE_CAST, fp8_scale, .scale = h->scale, .inverse = h->inverse,
          .amax = h->amax, .count = gradients, .format = recipe->rules[ND_X_OF_Y].format,
          .power_of_two = recipe->power_of_two);
    ND_OP(s->rank, ND_TRACE_CAST, fp8_scale, .scale = h->scale + gradients,
          .inverse = h->inverse + gradients, .amax = h->amax + gradients,
          .count = s->sites - gradients, .format = recipe->rules[ND_DY_OF_DX].format,
          .power_of_two = recipe->power_of_two);
    return ND_OK;
}

/* Weights are not cast again where gathered codes are still valid, so their amaxes are those of the
 * refresh. */
static nd_status collect_amaxes(nd_scales *s)
{
    nd_stream *stream = &s->rank->stream;
    const nd_scale_ref *h = &s->worst;
    size_t weights = (size_t)nd_site_input(s, 0, 0) * sizeof(float);
    ND_TRY(nd_copy(stream, h->amax, s->amax, weights));
    ND_TRY(nd_all_reduce(s->rank, ND_GROUP_WORLD, h->amax, s->sites, ND_DTYPE_F32, ND_REDOP_MAX));
    ND_TRY(find_scales(s));
    for (int64_t i = 0; i < s->sites; i++) {
        ND_TRY(nd_copy(stream, &s->report[i].amax, h->amax + i, sizeof(float)));
        ND_TRY(nd_copy(stream, &s->report[i].scale, h->scale + i, sizeof(float)));
    }
    return ND_OK;
}

nd_health_entry nd_health_of(const nd_scales *s, int64_t site)
{
    const nd_site_report *r = &s->report[site];
    double elements = r->counts[2] > 0 ? (double)r->counts[2] : 1.0;
    return (nd_health_entry){
        .amax = r->amax,
        .scale = r->scale,
        .underflow = (double)r->counts[0] / elements,
        .saturation = (double)r->counts[1] / elements,
    };
}

const char *nd_operand_name(nd_operand_kind kind)
{
    static const char *const names[ND_OPERAND_KINDS] = {"input", "weight", "gradient"};
    return names[kind];
}

static int64_t site_of(const nd_scales *s, nd_operand_kind kind, int64_t layer, int linear)
{
    return kind == ND_OPERAND_INPUT    ? nd_site_input(s, layer, nd_linears[linear].input)
           : kind == ND_OPERAND_WEIGHT ? nd_site_weight(s, layer, linear)
                                       : nd_site_gradient(s, layer, linear);
}

/* A value that is not a number is worse than any other. */
static void take_worse(double *worst, int *at, double value, int layer)
{
    if (*at < 0 || (!isnan(*worst) && !(value <= *worst))) {
        *worst = value;
        *at = layer;
    }
}

static nd_health_worst worst_of(const nd_scales *s, nd_operand_kind kind, int linear)
{
    nd_health_worst out = {.underflow_layer = -1, .saturation_layer = -1, .amax_layer = -1};
    for (int layer = 0; layer < (int)s->layers; layer++) {
        if (nd_filter_converts(&s->filter, layer, linear)) {
            const nd_health_entry e = nd_health_of(s, site_of(s, kind, layer, linear));
            take_worse(&out.underflow, &out.underflow_layer, e.underflow, layer);
            take_worse(&out.saturation, &out.saturation_layer, e.saturation, layer);
            take_worse(&out.amax, &out.amax_layer, (double)e.amax, layer);
        }
    }
    return out;
}

void nd_health_summarise(const nd_scales *s, nd_health_summary *out)
{
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            out->worst[kind][linear] = worst_of(s, (nd_operand_kind)kind, linear);
        }
    }
}

static void print_linear(const nd_scales *s, int64_t step, int64_t layer, int linear)
{
    char text[512];
    size_t used = 0;
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        const nd_health_entry e = nd_health_of(s, site_of(s, (nd_operand_kind)kind, layer, linear));
        used += (size_t)snprintf(text + used, sizeof text - used,
                                 "  %s: amax %.3g scale %.4g underflow %.3f %% saturated %.3f %%",
                                 nd_operand_name((nd_operand_kind)kind), (double)e.amax,
                                 (double)e.scale, e.underflow * 100, e.saturation * 100);
    }
    nd_log_debug("fp8 step %lld layers.%lld.%s%s", (long long)step, (long long)layer,
                 nd_linears[linear].module, text);
}

nd_status nd_health_end(nd_scales *s, int64_t step)
{
    if (!s->counting) {
        return ND_OK;
    }
    s->counting = false;
    s->counted = step;
    ND_TRY(collect_counts(s));
    ND_TRY(collect_amaxes(s));
    ND_TRY(nd_stream_sync(&s->rank->stream));
    for (int64_t i = 0; i < s->layers * ND_LINEAR_COUNT && s->rank->rank == 0; i++) {
        int64_t layer = i / ND_LINEAR_COUNT;
        int linear = (int)(i % ND_LINEAR_COUNT);
        if (nd_filter_converts(&s->filter, layer, linear)) {
            print_linear(s, step, layer, linear);
        }
    }
    return ND_OK;
}
