// SPDX-License-Identifier: Apache-2.0
#include "trainer/precision/health.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/log.h"

static bool is_counted(const nd_scales *s, int64_t step)
{
    int64_t interval = s->recipe.name ? s->rank->config->fp8.health_interval : 0;
    return interval > 0 && step % interval == 0;
}

nd_status nd_health_begin(nd_scales *s, int64_t step)
{
    s->healthy = is_counted(s, step);
    if (!s->healthy) {
        return ND_OK;
    }
    memset(s->report, 0, (size_t)s->sites * sizeof *s->report);
    return nd_zero(&s->rank->stream, s->counts, (size_t)s->sites * sizeof *s->counts);
}

/* What was counted on the device joins what was counted here; amax and scale of this rank come
 * along. */
static nd_status collect(nd_scales *s)
{
    nd_rank *r = s->rank;
    for (int64_t i = 0; i < s->sites; i++) {
        ND_TRY(nd_copy(&r->stream, &s->counts[i][2], &s->report[i].elements, sizeof(int64_t)));
    }
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, s->counts,
                              3 * s->sites, ND_DTYPE_I64, ND_REDOP_SUM, NULL));
    for (int64_t i = 0; i < s->sites; i++) {
        nd_site_report *to = &s->report[i];
        ND_TRY(nd_copy(&r->stream, to->counts, s->counts[i], sizeof to->counts));
        ND_TRY(nd_copy(&r->stream, &to->amax, s->amax + i, sizeof to->amax));
        ND_TRY(nd_copy(&r->stream, &to->scale, s->scale + i, sizeof to->scale));
    }
    return nd_stream_sync(&r->stream);
}

nd_health_entry nd_health_of(const nd_scales *s, int64_t site)
{
    const nd_site_report *r = &s->report[site];
    double elements = r->counts[2] > 0 ? (double)r->counts[2] : 1.0;
    bool rows = !nd_recipe_is_per_tensor(&s->recipe);
    return (nd_health_entry){
        .amax = r->amax,
        .scale = rows ? nd_fp8_max(ND_DTYPE_F8_E4M3) / r->amax : r->scale, /* rows: the smallest */
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
    static const int input_of[ND_LINEARS_OF_BLOCK] = {0, 0, 0, 1, 2, 2, 3};
    char text[512];
    size_t used = 0;
    used += (size_t)operand_text(s, nd_site_input(s, layer, input_of[linear]), "input", text,
                                 sizeof text);
    used += (size_t)operand_text(s, nd_site_weight(s, layer, linear), "weight", text + used,
                                 sizeof text - used);
    operand_text(s, nd_site_gradient(s, layer, linear), "gradient", text + used,
                 sizeof text - used);
    nd_log_debug("fp8 step %lld layers.%lld.%s%s", (long long)step, (long long)layer,
                 nd_linear_name(linear), text);
}

nd_status nd_health_end(nd_scales *s, int64_t step)
{
    if (!s->healthy) {
        return ND_OK;
    }
    s->healthy = false;
    ND_TRY(collect(s));
    for (int64_t i = 0; i < s->layers * ND_LINEARS_OF_BLOCK && s->rank->rank == 0; i++) {
        int64_t layer = i / ND_LINEARS_OF_BLOCK;
        int linear = (int)(i % ND_LINEARS_OF_BLOCK);
        if (nd_filter_converts(&s->filter, layer, linear)) {
            print_linear(s, step, layer, linear);
        }
    }
    return ND_OK;
}
