// SPDX-License-Identifier: Apache-2.0
#include "trainer/tune/decide.h"

static bool known(double seconds)
{
    return seconds >= 0.0; /* false for NaN */
}

int nd_decide_mask(const double seconds[ND_GROUP_MASKS], int asked)
{
    const double clearly = 0.98;
    int best = asked;
    if (!known(seconds[asked])) {
        return asked;
    }
    /* From many linears in FP8 to few: of equals the one that is nearer to what was asked. */
    for (int mask = asked - 1; mask >= 0; mask--) {
        bool subset = (mask & ~asked) == 0;
        if (subset && known(seconds[mask]) && seconds[mask] < seconds[best]) {
            best = mask;
        }
    }
    return seconds[best] < clearly * seconds[asked] ? best : asked;
}
