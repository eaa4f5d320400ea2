// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "trainer/step/parts.h"

enum { LEAST = 16 }; /* losses without which nothing is a spike: a run begins with large ones */

bool nd_spike_is(const nd_recent_losses *recent, double factor, double loss, double *median)
{
    double sorted[ND_RECENT_LOSSES];
    int count = recent->count < ND_RECENT_LOSSES ? (int)recent->count : ND_RECENT_LOSSES;
    if (factor <= 0 || count < LEAST) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > recent->value[i]; at--) {
            sorted[at] = sorted[at - 1];
        }
        sorted[at] = recent->value[i];
    }
    *median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
    return loss > factor * *median;
}

void nd_spike_note(nd_recent_losses *recent, double factor, double loss)
{
    if (factor > 0) {
        recent->value[recent->count++ % ND_RECENT_LOSSES] = loss;
    }
}
