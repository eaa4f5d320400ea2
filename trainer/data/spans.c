// SPDX-License-Identifier: Apache-2.0
/* Labels of tokens that do not count in the loss: spans of a token cache, or of a loss mask. */
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/data/formats.h"

typedef struct span {
    uint64_t begin, end; /* tokens */
} span;

static nd_status span_at(const nd_span_list *spans, uint64_t index, span *out)
{
    const uint8_t *p = spans->pairs + index * sizeof *out;
    if (spans->check) {
        ND_TRY(spans->check(spans->context, p, sizeof *out));
    }
    memcpy(out, p, sizeof *out);
    return ND_OK;
}

nd_status nd_spans_ignore(const nd_span_list *spans, uint64_t first, uint64_t count,
                          int32_t *labels)
{
    uint64_t low = 0, high = spans->count; /* the first span that ends behind first + 1 */
    span s;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        ND_TRY(span_at(spans, middle, &s));
        if (s.end <= first + 1) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (; low < spans->count; low++) {
        ND_TRY(span_at(spans, low, &s));
        if (s.begin >= first + count) {
            break;
        }
        for (uint64_t t = s.begin > first ? s.begin : first + 1; t < s.end && t < first + count;
             t++) {
            labels[t - first - 1] = ND_LABEL_IGNORED;
        }
    }
    return ND_OK;
}

/* Tokens of the span that blocks of whole rows hold. *block: the first that may hold some. */
static int64_t count_kept(const nd_dataset *dataset, const span *s, int64_t *block)
{
    int64_t sum = 0;
    for (; *block < dataset->blocks; ++*block) {
        const nd_block_place b = dataset->documents->blocks[*block];
        const int64_t end = b.first + b.count;
        sum += nd_max(nd_min((int64_t)s->end, end) - nd_max((int64_t)s->begin, b.first), 0);
        if (end >= (int64_t)s->end) {
            break;
        }
    }
    return sum;
}

nd_status nd_spans_count(const nd_dataset *dataset, const nd_span_list *spans, int64_t *tokens)
{
    const bool drops = dataset->documents && dataset->documents->drops;
    int64_t sum = 0, block = 0;
    for (uint64_t i = 0; i < spans->count; i++) {
        span s;
        ND_TRY(span_at(spans, i, &s));
        sum += drops ? count_kept(dataset, &s, &block) : (int64_t)(s.end - s.begin);
    }
    *tokens = sum;
    return ND_OK;
}
