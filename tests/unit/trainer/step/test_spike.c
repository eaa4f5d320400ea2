// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include "trainer/step/parts.h"

static nd_recent_losses losses(int count, double base, double slope)
{
    nd_recent_losses recent = {0};
    for (int i = 0; i < count; i++) {
        nd_spike_note(&recent, 2, base + slope * i);
    }
    return recent;
}

Test(spike, needs_a_factor_and_some_losses)
{
    double median = 0;
    nd_recent_losses recent = losses(15, 3, 0);
    cr_expect_not(nd_spike_is(&recent, 2, 1e9, &median));
    nd_spike_note(&recent, 2, 3);
    cr_expect(nd_spike_is(&recent, 2, 6.001, &median));
    cr_expect_eq(median, 3);
    cr_expect_not(nd_spike_is(&recent, 2, 6, &median));
    cr_expect_not(nd_spike_is(&recent, 0, 1e9, &median));
    nd_spike_note(&recent, 0, 3);
    cr_expect_eq(recent.count, 16);
}

/* The median of an even number is the mean of the middle two; outliers do not move it. */
Test(spike, is_measured_by_the_median)
{
    double median = 0;
    nd_recent_losses recent = losses(16, 1, 1); /* 1 to 16 */
    cr_expect(nd_spike_is(&recent, 2, 17.1, &median));
    cr_expect_eq(median, 8.5);
    nd_spike_note(&recent, 2, 1e300);
    cr_expect(nd_spike_is(&recent, 2, 18.1, &median));
    cr_expect_eq(median, 9);
    recent = losses(16, 16, -1); /* in another order */
    cr_expect(nd_spike_is(&recent, 2, 17.1, &median));
    cr_expect_eq(median, 8.5);
}

/* Only the last ones count, so that a new level is no spike for ever. */
Test(spike, forgets_what_is_long_ago)
{
    double median = 0;
    nd_recent_losses recent = losses(1000, 1, 0);
    for (int i = 0; i < ND_RECENT_LOSSES / 2; i++) {
        cr_expect(nd_spike_is(&recent, 2, 5, &median), "%d", i);
        nd_spike_note(&recent, 2, 5);
    }
    nd_spike_note(&recent, 2, 5);
    cr_expect_not(nd_spike_is(&recent, 2, 5, &median));
    cr_expect_eq(median, 5);
}
