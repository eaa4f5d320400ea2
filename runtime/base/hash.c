// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/hash.h"

#include <openssl/evp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef ND_HAS_XXHASH_DISPATCH
#include <xxh_x86dispatch.h> /* the same functions, on the widest vectors of this processor */
#else
#include <xxhash.h>
#endif

#include "runtime/base/fs.h"
#include "runtime/base/math.h"

enum { BLOCK_BYTES = 1 << 20 };

uint64_t nd_hash_64(const void *data, size_t size)
{
    return XXH3_64bits(data, size);
}

void nd_hash_128(const void *data, size_t size, uint64_t out[2])
{
    const XXH128_hash_t hash = XXH3_128bits(data, size);
    memcpy(out, &hash, sizeof hash); /* whose low half comes first */
}

struct nd_hash {
    nd_hash_kind kind;
    XXH3_state_t *xxh3; /* the size of the digest matters to the last call alone */
    EVP_MD_CTX *sha256; /* where there is no xxh3 */
};

int nd_hash_bytes(nd_hash_kind kind)
{
    return kind == ND_HASH_XXH3_64 ? 8 : kind == ND_HASH_XXH3_128 ? 16 : 32;
}

nd_status nd_hash_create(nd_hash_kind kind, nd_hash **out)
{
    nd_hash *h = NULL;
    ND_TRY(ND_ALLOC(1, &h));
    h->kind = kind;
    h->xxh3 = kind != ND_HASH_SHA256 ? XXH3_createState() : NULL;
    h->sha256 = kind == ND_HASH_SHA256 ? EVP_MD_CTX_new() : NULL;
    if (!h->xxh3 && !h->sha256) {
        nd_hash_destroy(h);
        return nd_fail_memory("the state of a checksum");
    }
    *out = h;
    return ND_OK;
}

void nd_hash_destroy(nd_hash *h)
{
    if (h) {
        XXH3_freeState(h->xxh3);
        EVP_MD_CTX_free(h->sha256);
        free(h);
    }
}

static nd_status check_result(bool good)
{
    return good ? ND_OK : nd_fail(ND_ERR_INTERNAL, "the checksum of some bytes cannot be computed");
}

nd_status nd_hash_begin(nd_hash *h)
{
    return check_result(h->xxh3 ? XXH3_64bits_reset(h->xxh3) == XXH_OK
                                : EVP_DigestInit_ex(h->sha256, EVP_sha256(), NULL) == 1);
}

nd_status nd_hash_add(nd_hash *h, const void *data, size_t size)
{
    return check_result(h->xxh3 ? XXH3_64bits_update(h->xxh3, data, size) == XXH_OK
                                : EVP_DigestUpdate(h->sha256, data, size) == 1);
}

nd_status nd_hash_end(nd_hash *h, uint8_t out[ND_HASH_MAX])
{
    if (h->kind == ND_HASH_SHA256) {
        return check_result(EVP_DigestFinal_ex(h->sha256, out, NULL) == 1);
    }
    if (h->kind == ND_HASH_XXH3_64) {
        const uint64_t digest = XXH3_64bits_digest(h->xxh3);
        memcpy(out, &digest, sizeof digest); /* little-endian, as this machine is */
        return ND_OK;
    }
    XXH128_canonicalFromHash((XXH128_canonical_t *)out, XXH3_128bits_digest(h->xxh3));
    return ND_OK;
}

nd_status nd_hash_end_text(nd_hash *h, char hex[ND_HASH_HEX_MAX])
{
    uint8_t digest[ND_HASH_MAX];
    ND_TRY(nd_hash_end(h, digest));
    for (int i = 0; i < nd_hash_bytes(h->kind); i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
    return ND_OK;
}

nd_status nd_hash_text(nd_hash_kind kind, const void *data, size_t size, char hex[ND_HASH_HEX_MAX])
{
    nd_hash *h = NULL;
    nd_status status = nd_hash_create(kind, &h);
    status = status == ND_OK ? nd_hash_begin(h) : status;
    status = status == ND_OK ? nd_hash_add(h, data, size) : status;
    status = status == ND_OK ? nd_hash_end_text(h, hex) : status;
    nd_hash_destroy(h);
    return status;
}

nd_status nd_sha256(const void *data, size_t size, char hex[ND_HASH_HEX_MAX])
{
    return nd_hash_text(ND_HASH_SHA256, data, size, hex);
}

nd_status nd_sha256_file(const char *path, char hex[ND_HASH_HEX_MAX])
{
    int fd = -1;
    uint8_t *block = NULL;
    nd_hash *h = NULL;
    struct stat st;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_open(path, ND_ERR_DATA, &fd, &st));
    ND_TRY_OUT(nd_hash_create(ND_HASH_SHA256, &h));
    ND_TRY_OUT(nd_hash_begin(h));
    ND_TRY_OUT(nd_alloc(BLOCK_BYTES, 1, (void **)&block));
    for (int64_t at = 0; at < st.st_size; at += BLOCK_BYTES) {
        const size_t size = (size_t)nd_min(st.st_size - at, BLOCK_BYTES);
        ND_TRY_OUT(nd_fs_pread(fd, path, block, size, at));
        ND_TRY_OUT(nd_hash_add(h, block, size));
    }
    status = nd_hash_end_text(h, hex);
out:
    nd_hash_destroy(h);
    free(block);
    close(fd);
    return status;
}
