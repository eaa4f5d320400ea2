// SPDX-License-Identifier: Apache-2.0
/* A token cache: what is accepted lies within the file. The checksums of the header are made right
 * first, or nothing would get past them. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"
#include "tests/fuzz/fuzz.h"
#include "trainer/corpus/token_cache.h"

enum { SUMS_SUM_AT = 56, HEADER_SUM_AT = 64, BYTES_AT = 48 };

static void put_u64(uint8_t *p, uint64_t value)
{
    memcpy(p, &value, sizeof value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* A small header, then what follows the header of a file. */
    enum { SMALL = 72 };
    if (size < SMALL) {
        return 0;
    }
    size_t rest = size - SMALL, whole = ND_TOKEN_CACHE_HEADER_BYTES + rest;
    uint8_t *file = calloc(whole, 1);
    ND_ASSERT(file);
    memcpy(file, data, SMALL);
    memcpy(file + ND_TOKEN_CACHE_HEADER_BYTES, data + SMALL, rest);
    memcpy(file, "NDTOKENS\1\0\0", 11);
    put_u64(file + BYTES_AT, whole);
    for (size_t chunks = 0; chunks < 3 && 8 * chunks <= rest; chunks++) {
        nd_token_view v;
        put_u64(file + SUMS_SUM_AT, nd_hash_64(file + whole - 8 * chunks, 8 * chunks));
        put_u64(file + HEADER_SUM_AT, nd_hash_64(file, HEADER_SUM_AT));
        if (nd_token_cache_parse(file, whole, "input", &v) != ND_OK) {
            continue;
        }
        ND_ASSERT(v.width == 2 || v.width == 4);
        ND_ASSERT(v.ids + v.tokens * v.width <= v.ends);
        ND_ASSERT(v.ends + 8 * v.documents == v.span_pairs);
        ND_ASSERT(v.span_pairs + 16 * v.spans == v.sums);
        ND_ASSERT(v.sums + 8 * v.chunks == file + whole);
    }
    free(file);
    return 0;
}
