// SPDX-License-Identifier: Apache-2.0
/* Blocks of a text that a tokenizer encoded into a cache: a flat array of ids, and spans of it that
 * do not count in the loss. */
#include <string.h>

#include "trainer/data/formats.h"

typedef struct span {
    uint64_t begin, end; /* tokens */
} span;

static nd_status span_at(const nd_token_cache *cache, uint64_t index, span *out)
{
    const uint8_t *p = cache->view.span_pairs + index * sizeof *out;
    ND_TRY(nd_token_cache_check(cache, (uint64_t)(p - cache->map.data), sizeof *out));
    memcpy(out, p, sizeof *out);
    return ND_OK;
}

/* Labels of the tokens behind `first` that lie in spans. */
static nd_status ignore_spans(const nd_token_cache *cache, uint64_t first, uint64_t count,
                              int32_t *labels)
{
    uint64_t low = 0, high = cache->view.spans; /* the first span that ends behind first + 1 */
    span s;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        ND_TRY(span_at(cache, middle, &s));
        if (s.end <= first + 1) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (; low < cache->view.spans; low++) {
        ND_TRY(span_at(cache, low, &s));
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

nd_status nd_encoded_block(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *inputs,
                           int32_t *labels)
{
    const nd_token_cache *cache = dataset->cache;
    const uint64_t width = cache->view.width;
    ND_TRY(nd_token_cache_check(cache, ND_TOKEN_CACHE_HEADER_BYTES + (uint64_t)first * width,
                                (uint64_t)count * width));
    ND_TRY(nd_flat_block(dataset, first, count, inputs, labels));
    return ignore_spans(cache, (uint64_t)first, (uint64_t)count, labels);
}
