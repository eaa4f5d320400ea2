// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/precision.h"

#include <stdio.h>
#include <string.h>

#include "runtime/base/log.h"

nd_status nd_health_agree(nd_scales *s)
{
    nd_rank *r = s->rank;
    const nd_config *config = r->config;
    if (!s->recipe.name || config->fp8.health_interval == 0) {
        return ND_OK;
    }
    int64_t reports = r->rank == 0 && strcmp(config->log.level, "debug") == 0;
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, &reports, 1,
                              ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    s->health_interval = reports ? config->fp8.health_interval : 0;
    return ND_OK;
}

nd_status nd_health_begin(nd_scales *s, int64_t step)
{
    s->counting = s->health_interval > 0 && step % s->health_interval == 0;
    if (!s->counting) {
        return ND_OK;
    }
    memset(s->report, 0, (size_t)s->sites * sizeof *s->report);
    ND_TRY(nd_zero(&s->rank->stream, s->health.amax, (size_t)s->sites * sizeof(float)));
    return nd_zero(&s->rank->stream, s->health.counts, (size_t)s->sites * sizeof *s->health.counts);
}

static nd_status reduce(nd_scales *s, void *buffer, int64_t count, nd_dtype dtype, nd_redop op)
{
    nd_rank *r = s->rank;
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, buffer, count, dtype,
                              op, NULL));
    return ND_OK;
}

/* Adds up the counts of all ranks, of the device and of the host. */
static nd_status collect_counts(nd_scales *s)
{
    nd_stream *stream = &s->rank->stream;
    for (int64_t i = 0; i < s->sites; i++) {
        ND_TRY(nd_copy(stream, &s->health.counts[i][2], &s->report[i].elements, sizeof(int64_t)));
    }
    ND_TRY(reduce(s, s->health.counts, 3 * s->sites, ND_DTYPE_I64, ND_REDOP_SUM));
    for (int64_t i = 0; i < s->sites; i++) {
        ND_TRY(
            nd_copy(stream, s->report[i].counts, s->health.counts[i], sizeof s->report[i].counts));
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
    nd_health_state *h = &s->health;
    const nd_recipe *recipe = &s->recipe;
    int64_t gradients = nd_site_gradient(s, 0, 0);
    if (nd_recipe_is_delayed(recipe)) {
        return nd_copy(stream, h->scale, s->scale, (size_t)s->sites * sizeof(float));
    }
    ND_OP(s->rank, ND_TRACE_CAST, fp8_scale, .scale = h->scale, .inverse = h->inverse,
          .amax = h->amax, .count = gradients, .format = recipe->output.a.format,
          .power_of_two = recipe->power_of_two);
    ND_OP(s->rank, ND_TRACE_CAST, fp8_scale, .scale = h->scale + gradients,
          .inverse = h->inverse + gradients, .amax = h->amax + gradients,
          .count = s->sites - gradients, .format = recipe->input_gradient.a.format,
          .power_of_two = recipe->power_of_two);
    return ND_OK;
}

/* Weights are not cast again where gathered codes are still valid, so their amaxes are those of the
 * refresh. */
static nd_status collect_amaxes(nd_scales *s)
{
    nd_stream *stream = &s->rank->stream;
    nd_health_state *h = &s->health;
    size_t weights = (size_t)nd_site_input(s, 0, 0) * sizeof(float);
    ND_TRY(nd_copy(stream, h->amax, s->amax, weights));
    ND_TRY(reduce(s, h->amax, s->sites, ND_DTYPE_F32, ND_REDOP_MAX));
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

static int operand_text(const nd_scales *s, int64_t site, const char *name, char *text, size_t size)
{
    nd_health_entry e = nd_health_of(s, site);
    return snprintf(text, size, "  %s: amax %.3g scale %.4g underflow %.3f %% saturated %.3f %%",
                    name, (double)e.amax, (double)e.scale, e.underflow * 100, e.saturation * 100);
}

static void print_linear(const nd_scales *s, int64_t step, int64_t layer, int linear)
{
    int64_t input = nd_site_input(s, layer, nd_linear_input(linear));
    char text[512];
    size_t used = 0;
    used += (size_t)operand_text(s, input, "input", text, sizeof text);
    used += (size_t)operand_text(s, nd_site_weight(s, layer, linear), "weight", text + used,
                                 sizeof text - used);
    operand_text(s, nd_site_gradient(s, layer, linear), "gradient", text + used,
                 sizeof text - used);
    nd_log_debug("fp8 step %lld layers.%lld.%s%s", (long long)step, (long long)layer,
                 nd_linear_name(linear), text);
}

nd_status nd_health_end(nd_scales *s, int64_t step)
{
    if (!s->counting) {
        return ND_OK;
    }
    s->counting = false;
    ND_TRY(collect_counts(s));
    ND_TRY(collect_amaxes(s));
    ND_TRY(nd_stream_sync(&s->rank->stream));
    for (int64_t i = 0; i < s->layers * ND_LINEARS_OF_BLOCK && s->rank->rank == 0; i++) {
        int64_t layer = i / ND_LINEARS_OF_BLOCK;
        int linear = (int)(i % ND_LINEARS_OF_BLOCK);
        if (nd_filter_converts(&s->filter, layer, linear)) {
            print_linear(s, step, layer, linear);
        }
    }
    return ND_OK;
}
