// SPDX-License-Identifier: Apache-2.0
/* Labels of tokens that do not count in the loss: spans of a token cache, or of a loss mask. */
#include <string.h>

#include "trainer/data/formats.h"

nd_status nd_token_span_at(const nd_span_list *spans, uint64_t index, nd_token_span *out)
{
    const uint8_t *p = spans->pairs + index * sizeof *out;
    if (spans->check) {
        ND_TRY(spans->check(spans->context, p, sizeof *out));
    }
    memcpy(out, p, sizeof *out);
    return ND_OK;
}

nd_status nd_spans_ignore(const nd_span_list *spans, const nd_piece *piece, int32_t *labels)
{
    const uint64_t first = (uint64_t)piece->first, count = (uint64_t)piece->count;
    uint64_t low = 0, high = spans->count; /* the first span that ends behind first + 1 */
    nd_token_span s;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        ND_TRY(nd_token_span_at(spans, middle, &s));
        if (s.end <= first + 1) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (; low < spans->count; low++) {
        ND_TRY(nd_token_span_at(spans, low, &s));
        if (s.begin >= first + count) {
            break;
        }
        for (uint64_t t = s.begin > first ? s.begin : first + 1; t < s.end && t < first + count;
             t++) {
            labels[piece->place + (int64_t)(t - first) - 1] = ND_LABEL_IGNORED;
        }
    }
    return ND_OK;
}
