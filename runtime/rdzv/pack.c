// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/pack.h"

#include <stdlib.h>
#include <zstd.h>
#include <zstd_errors.h>

enum { LEVEL = 1 }; /* the store's only thread packs, half a gigabyte in a second */

bool nd_pack(const uint8_t *bytes, size_t count, uint8_t **out, size_t *packed)
{
    size_t room = count - count / 8;
    uint8_t *data = malloc(room ? room : 1);
    size_t used = data ? ZSTD_compress(data, room, bytes, count, LEVEL) : 0;
    if (!data || ZSTD_isError(used)) { /* mostly: it does not fit */
        free(data);
        return false;
    }
    uint8_t *trimmed = realloc(data, used);
    *out = trimmed ? trimmed : data;
    *packed = used;
    return true;
}

nd_status nd_unpack(const uint8_t *packed, size_t packed_bytes, void *out, size_t count)
{
    size_t got = ZSTD_decompress(out, count, packed, packed_bytes);
    if (ZSTD_isError(got) && ZSTD_getErrorCode(got) == ZSTD_error_memory_allocation) {
        return nd_fail_memory("the result of an exchange");
    }
    if (ZSTD_isError(got) || got != count) {
        return nd_fail(ND_ERR_IO, "the store sent a damaged result of an exchange");
    }
    return ND_OK;
}
