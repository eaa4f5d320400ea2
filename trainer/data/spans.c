// SPDX-License-Identifier: Apache-2.0
/* What a cache, an index and a loss mask say of tokens: borders of documents, which are the numbers
 * of tokens before each, and spans that do not count in the loss; both in order. */
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/data/formats.h"

/* Before numbers of a cache are read; a mask was checked when it was opened. */
static nd_status check_numbers(const nd_dataset *dataset, const uint8_t *p, size_t size)
{
    const nd_token_cache *cache = dataset->cache;
    return cache ? nd_token_cache_check(cache, (uint64_t)(p - cache->map.data), size) : ND_OK;
}

nd_status nd_span_at(const nd_dataset *dataset, uint64_t index, nd_token_span *out)
{
    const uint8_t *p = dataset->span_pairs + index * sizeof *out;
    ND_TRY(check_numbers(dataset, p, sizeof *out));
    memcpy(out, p, sizeof *out);
    return ND_OK;
}

nd_status nd_spans_ignore(const nd_dataset *dataset, const nd_piece *piece, int32_t *labels)
{
    const uint64_t first = (uint64_t)piece->first, count = (uint64_t)piece->count;
    uint64_t low = 0, high = dataset->spans; /* the first span that ends behind first + 1 */
    nd_token_span s;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        ND_TRY(nd_span_at(dataset, middle, &s));
        if (s.end <= first + 1) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (; low < dataset->spans; low++) {
        ND_TRY(nd_span_at(dataset, low, &s));
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

static nd_status border_at(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    if (dataset->cache) {
        const uint8_t *p = dataset->cache->view.ends + index * sizeof *token;
        ND_TRY(check_numbers(dataset, p, sizeof *token));
        memcpy(token, p, sizeof *token);
    } else {
        ND_TRY(nd_megatron_border(dataset, index, token));
    }
    return *token <= (uint64_t)dataset->tokens
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\": document boundary %llu is token %llu, but there are %lld: the "
                         "boundaries are damaged or belong to another file",
                         dataset->path, (unsigned long long)index, (unsigned long long)*token,
                         (long long)dataset->tokens);
}

nd_status nd_border_after(const nd_dataset *dataset, int64_t token, int64_t *out)
{
    const uint64_t borders = dataset->documents->borders;
    uint64_t low = 0, high = borders, at;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        ND_TRY(border_at(dataset, middle, &at));
        if (at <= (uint64_t)token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    at = (uint64_t)dataset->tokens;
    ND_TRY(low < borders ? border_at(dataset, low, &at) : ND_OK);
    *out = (int64_t)at;
    return ND_OK;
}

nd_status nd_border_row(const nd_dataset *dataset, uint64_t index, nd_piece *row)
{
    uint64_t begin = 0, end;
    ND_TRY(index > 0 ? border_at(dataset, index - 1, &begin) : ND_OK);
    ND_TRY(border_at(dataset, index, &end));
    *row = (nd_piece){.first = (int64_t)begin, .count = nd_max((int64_t)(end - begin), 0)};
    return ND_OK;
}
