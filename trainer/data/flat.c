// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/formats.h"

#include <string.h>

size_t nd_token_size(nd_token_type type)
{
    static const size_t sizes[] = {
        [ND_TOKEN_U8] = 1,  [ND_TOKEN_I8] = 1,  [ND_TOKEN_U16] = 2, [ND_TOKEN_I16] = 2,
        [ND_TOKEN_U32] = 4, [ND_TOKEN_I32] = 4, [ND_TOKEN_I64] = 8,
    };
    return sizes[type];
}

/* The id at p, which need not be aligned. Files are little-endian, as are the machines this runs
 * on. */
static int64_t id_at(const uint8_t *p, nd_token_type type)
{
    int8_t i8;
    uint16_t u16;
    int16_t i16;
    uint32_t u32;
    int32_t i32;
    int64_t i64;
    switch (type) {
    case ND_TOKEN_U8:
        return *p;
    case ND_TOKEN_I8:
        memcpy(&i8, p, sizeof i8);
        return i8;
    case ND_TOKEN_U16:
        memcpy(&u16, p, sizeof u16);
        return u16;
    case ND_TOKEN_I16:
        memcpy(&i16, p, sizeof i16);
        return i16;
    case ND_TOKEN_U32:
        memcpy(&u32, p, sizeof u32);
        return u32;
    case ND_TOKEN_I32:
        memcpy(&i32, p, sizeof i32);
        return i32;
    case ND_TOKEN_I64:
        break;
    }
    memcpy(&i64, p, sizeof i64);
    return i64;
}

static nd_status bad_id(const nd_dataset *dataset, int64_t token, int64_t id)
{
    size_t byte = dataset->first_byte + (size_t)token * nd_token_size(dataset->type);
    if (id < 0) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": token %lld (byte %zu) has the negative id %lld: the file is damaged "
            "or has another token type",
            dataset->path, (long long)token, byte, (long long)id);
    }
    return nd_fail(
        ND_ERR_DATA,
        "\"%s\": token %lld (byte %zu) has id %lld, but the model's vocabulary ends at %lld: "
        "tokenize the data for this model, or use a model whose vocab_size is above %lld",
        dataset->path, (long long)token, byte, (long long)id, (long long)dataset->vocab - 1,
        (long long)id);
}

nd_status nd_flat_read(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *out)
{
    size_t size = nd_token_size(dataset->type);
    size_t begin = dataset->first_byte + (size_t)first * size;
    nd_fs_map_prefetch(&dataset->map, begin, (size_t)count * size);
    const uint8_t *p = dataset->map.data + begin;
    for (int64_t i = 0; i < count; i++, p += size) {
        int64_t id = id_at(p, dataset->type);
        if (id < 0 || id >= dataset->vocab) {
            return bad_id(dataset, first + i, id);
        }
        out[i] = (int32_t)id;
    }
    return ND_OK;
}
