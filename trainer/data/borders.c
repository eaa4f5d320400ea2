// SPDX-License-Identifier: Apache-2.0
/* Borders of documents, which a token cache and a Megatron index list: tokens before each, in
 * order. */
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/data/formats.h"

static nd_status encoded_border(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    const nd_token_cache *cache = dataset->cache;
    const uint8_t *p = cache->view.ends + index * sizeof *token;
    ND_TRY(nd_token_cache_check(cache, (uint64_t)(p - cache->map.data), sizeof *token));
    memcpy(token, p, sizeof *token);
    return ND_OK;
}

static nd_status border_at(const nd_dataset *dataset, uint64_t index, uint64_t *token)
{
    ND_TRY(dataset->cache ? encoded_border(dataset, index, token)
                          : nd_megatron_border(dataset, index, token));
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
