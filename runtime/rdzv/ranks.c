// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/ranks.h"

#include <stdio.h>
#include <string.h>

void nd_ranks_text(nd_rank_test *passes, const void *context, int first, int count, char *out,
                   size_t capacity)
{
    enum { ELLIPSIS = 6 }; /* ", ..." and the NUL */
    size_t used = 0;
    out[0] = '\0';
    for (const int end = first + count; first < end;) {
        if (!passes(context, first)) {
            first++;
            continue;
        }
        int last = first;
        while (last + 1 < end && passes(context, last + 1)) {
            last++;
        }
        char range[32];
        int n = last == first ? snprintf(range, sizeof range, "%d", first)
                              : snprintf(range, sizeof range, "%d-%d", first, last);
        const char *comma = used ? ", " : "";
        if (used + strlen(comma) + (size_t)n + ELLIPSIS > capacity) {
            snprintf(out + used, capacity - used, "%s...", comma);
            return;
        }
        used += (size_t)snprintf(out + used, capacity - used, "%s%s", comma, range);
        first = last + 1;
    }
}
