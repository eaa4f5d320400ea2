// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention.h"

#include "runtime/base/math.h"

const int32_t *nd_attention_limit(const nd_attention *a, int64_t q0, int64_t key0, int keys,
                                  int32_t limit[ND_TILE])
{
    if (key0 + keys - 1 <= q0 + a->diag) {
        return NULL;
    }
    for (int r = 0; r < ND_TILE; r++) {
        int64_t last = q0 + r + a->diag - key0;
        limit[r] = (int32_t)(last < -1 ? -1 : last > keys ? keys : last);
    }
    return limit;
}

void *nd_attention_cut(char *base, size_t *used, int64_t count)
{
    size_t at = *used;
    *used += nd_round_up_bytes((size_t)count * 4, 64);
    return base ? base + at : NULL;
}
