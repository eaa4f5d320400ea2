// SPDX-License-Identifier: Apache-2.0
/* Blocks of a text that a tokenizer encoded into a cache: a flat array of ids, and spans of it that
 * do not count in the loss. */
#include "trainer/data/formats.h"

/* Before a span of the cache is read. */
static nd_status check_span(const void *context, const uint8_t *span, size_t size)
{
    const nd_token_cache *cache = context;
    return nd_token_cache_check(cache, (uint64_t)(span - cache->map.data), size);
}

nd_span_list nd_encoded_spans(const nd_dataset *dataset)
{
    const nd_token_cache *cache = dataset->cache;
    return (nd_span_list){cache->view.span_pairs, cache->view.spans, check_span, cache};
}

nd_status nd_encoded_piece(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                           int32_t *labels)
{
    const nd_token_cache *cache = dataset->cache;
    const uint64_t width = cache->view.width;
    const nd_span_list spans = nd_encoded_spans(dataset);
    ND_TRY(nd_token_cache_check(cache, ND_TOKEN_CACHE_HEADER_BYTES + (uint64_t)piece->first * width,
                                (uint64_t)piece->count * width));
    ND_TRY(nd_flat_piece(dataset, piece, inputs, labels));
    return nd_spans_ignore(&spans, piece, labels);
}
