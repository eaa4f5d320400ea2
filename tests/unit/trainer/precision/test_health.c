// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>

#include "runtime/base/rng.h"
#include "trainer/precision/precision.h"

enum { LAYERS = 5, CASES = 300 };

/* Few values, so that layers are often equal, and NaN among them. */
Test(health, the_first_of_the_worst_layers_is_named)
{
    nd_filter_reason reasons[LAYERS * ND_LINEAR_COUNT];
    nd_scales s = {.layers = LAYERS, .filter = {.layers = LAYERS, .reasons = reasons}};
    nd_site_report report[3 * LAYERS * ND_LINEAR_COUNT] = {{0}};
    s.report = report;
    for (uint64_t seed = 0; seed < CASES; seed++) {
        double worst = -1;
        int at = -1;
        nd_health_summary all;
        for (int i = 0; i < LAYERS * ND_LINEAR_COUNT; i++) {
            reasons[i] =
                nd_rng_u64(seed, 0, (uint64_t)i) % 4 ? ND_FILTER_CONVERTED : ND_FILTER_FIRST;
        }
        for (int layer = 0; layer < LAYERS; layer++) {
            const uint64_t drawn = nd_rng_u64(seed, 1, (uint64_t)layer) % 9;
            const float amax = drawn == 8 ? NAN : (float)(drawn % 3);
            report[nd_site_gradient(&s, layer, 2)].amax = amax;
            const bool is_worse = isnan(amax) ? !isnan(worst) : (double)amax > worst;
            if (nd_filter_converts(&s.filter, layer, 2) && is_worse) {
                worst = (double)amax;
                at = layer;
            }
        }
        nd_health_summarise(&s, &all);
        cr_expect_eq(all.worst[ND_OPERAND_GRADIENT][2].amax_layer, at, "seed %d: layer %d, not %d",
                     (int)seed, all.worst[ND_OPERAND_GRADIENT][2].amax_layer, at);
    }
}

/* Each site has other shares, and the three values are worst in different layers. */
Test(health, each_value_is_that_of_its_operand_and_linear)
{
    enum { LAST = LAYERS - 1, SITES = 3 * LAYERS * ND_LINEAR_COUNT };
    nd_filter_reason reasons[LAYERS * ND_LINEAR_COUNT] = {0}; /* all are converted */
    nd_site_report report[SITES];
    nd_scales s = {.layers = LAYERS, .filter = {LAYERS, reasons, 0}, .report = report};
    nd_health_summary all;
    for (int i = 0; i < SITES; i++) {
        report[i] = (nd_site_report){.counts = {SITES - i, i, 1000}, .amax = i / 7 == 2 ? 1 : 0};
    }
    nd_health_summarise(&s, &all);
    for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
        const int64_t sites[] = {nd_site_input(&s, LAST, nd_linears[linear].input),
                                 nd_site_weight(&s, LAST, linear),
                                 nd_site_gradient(&s, LAST, linear)};
        for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
            const nd_health_worst *w = &all.worst[kind][linear];
            cr_expect(w->underflow_layer == 0 && w->amax_layer != LAST);
            cr_expect_eq(w->saturation_layer, LAST);
            cr_expect_eq(w->saturation, (double)sites[kind] / 1000, "%g", w->saturation);
        }
        cr_expect_eq(all.worst[ND_OPERAND_WEIGHT][linear].amax_layer, 2);
    }
}
