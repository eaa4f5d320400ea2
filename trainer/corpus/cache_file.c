// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/token_cache.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { HEADER_BYTES = ND_TOKEN_CACHE_HEADER_BYTES, CHUNK_BYTES = ND_TOKEN_CACHE_CHUNK_BYTES };

static nd_status fail_file(const char *name, const char *why)
{
    return nd_fail(ND_ERR_DATA, "the token cache \"%s\" %s", name, why);
}

/* The sizes that the header gives, without overflow: each part fits into the file alone. */
static bool sizes_fit(const nd_token_cache_header *h, size_t size, uint64_t *ends_at,
                      uint64_t *sums_at, uint64_t *chunks)
{
    uint64_t room = size - HEADER_BYTES;
    if (h->tokens > room / h->width || h->documents > room / 8 || h->spans > room / 16) {
        return false;
    }
    *ends_at = (HEADER_BYTES + h->tokens * h->width + 7) / 8 * 8;
    *sums_at = *ends_at + h->documents * 8 + h->spans * 16;
    *chunks = (*sums_at - HEADER_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
    return *sums_at <= size && *sums_at + *chunks * 8 == size;
}

nd_status nd_token_cache_parse(const uint8_t *data, size_t size, const char *name,
                               nd_token_view *out)
{
    nd_token_cache_header h;
    uint64_t ends_at, sums_at, chunks;
    if (size < HEADER_BYTES) {
        return fail_file(name, "is shorter than its header");
    }
    memcpy(&h, data, sizeof h);
    if (memcmp(h.magic, ND_TOKEN_CACHE_MAGIC, sizeof h.magic) != 0 ||
        h.version != ND_TOKEN_CACHE_VERSION) {
        return fail_file(name, "is none, or of another version");
    }
    if (h.header_sum != XXH3_64bits(&h, offsetof(nd_token_cache_header, header_sum)) ||
        (h.width != 2 && h.width != 4) || h.vocab > INT32_MAX) {
        return fail_file(name, "has a damaged header");
    }
    if (h.file_bytes != size || !sizes_fit(&h, size, &ends_at, &sums_at, &chunks)) {
        return fail_file(name, "has another size than its header says");
    }
    if (h.sums_sum != XXH3_64bits(data + sums_at, chunks * 8)) {
        return fail_file(name, "has damaged checksums");
    }
    *out = (nd_token_view){
        .width = h.width,
        .tokens = h.tokens,
        .documents = h.documents,
        .spans = h.spans,
        .vocab = (int32_t)h.vocab,
        .ids = data + HEADER_BYTES,
        .ends = data + ends_at,
        .span_pairs = data + ends_at + h.documents * 8,
        .sums = data + sums_at,
        .chunks = chunks,
    };
    return ND_OK;
}

static nd_status parse_map(void *context)
{
    nd_token_cache *cache = context;
    return nd_token_cache_parse(cache->map.data, cache->map.size, cache->path, &cache->view);
}

nd_status nd_token_cache_open_file(const char *path, nd_token_cache **out)
{
    nd_token_cache *cache;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &cache));
    ND_TRY_OUT(nd_fs_format(&cache->path, "%s", path));
    ND_TRY_OUT(nd_fs_map_open(path, ND_ERR_DATA, &cache->map));
    ND_TRY_OUT(nd_fs_map_guard(&cache->map, path, parse_map, cache));
    ND_TRY_OUT(ND_ALLOC(cache->view.chunks + 1, &cache->checked));
    *out = cache;
    cache = NULL;
out:
    nd_token_cache_close(cache);
    return status;
}

void nd_token_cache_close(nd_token_cache *cache)
{
    if (!cache) {
        return;
    }
    nd_fs_map_close(&cache->map);
    free(cache->checked);
    free(cache->path);
    free(cache);
}

static uint64_t u64_at(const uint8_t *p, uint64_t index)
{
    uint64_t x;
    memcpy(&x, p + 8 * index, sizeof x);
    return x;
}

static bool is_checked(const nd_token_cache *cache, uint64_t chunk)
{
    return atomic_load_explicit(&cache->checked[chunk], memory_order_relaxed);
}

/* A chunk that is not checked yet will be read whole. */
void nd_token_cache_prefetch(const nd_token_cache *cache, uint64_t offset, uint64_t bytes)
{
    const uint64_t first = (offset - HEADER_BYTES) / CHUNK_BYTES;
    const uint64_t last = (offset + bytes - 1 - HEADER_BYTES) / CHUNK_BYTES;
    const uint64_t begin = is_checked(cache, first) ? offset : HEADER_BYTES + first * CHUNK_BYTES;
    const uint64_t end =
        is_checked(cache, last) ? offset + bytes : HEADER_BYTES + (last + 1) * CHUNK_BYTES;
    nd_fs_map_prefetch(&cache->map, begin, end - begin);
}

nd_status nd_token_cache_check(const nd_token_cache *cache, uint64_t offset, uint64_t bytes)
{
    const nd_token_view *v = &cache->view;
    const uint64_t end = (uint64_t)(v->sums - cache->map.data);
    ND_ASSERT(offset >= HEADER_BYTES && bytes <= end - HEADER_BYTES && offset <= end - bytes);
    uint64_t first = (offset - HEADER_BYTES) / CHUNK_BYTES;
    for (uint64_t i = first; bytes > 0 && i <= (offset + bytes - 1 - HEADER_BYTES) / CHUNK_BYTES;
         i++) {
        if (is_checked(cache, i)) {
            continue;
        }
        uint64_t begin = HEADER_BYTES + i * CHUNK_BYTES;
        uint64_t n = end - begin < CHUNK_BYTES ? end - begin : CHUNK_BYTES;
        if (XXH3_64bits(cache->map.data + begin, n) != u64_at(v->sums, i)) {
            return nd_fail(
                ND_ERR_DATA,
                "the token cache \"%s\" is damaged at byte %llu; delete it, and the next "
                "run encodes the text again",
                cache->path, (unsigned long long)begin);
        }
        atomic_store_explicit(&cache->checked[i], 1, memory_order_relaxed);
    }
    return ND_OK;
}
