// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_HASH_H
#define ND_BASE_HASH_H
/*
 * Digests of bytes. XXH3 finds accidents, not attacks; SHA-256 (OpenSSL) is for those who hand
 * files to others. XXH3 of 64 bits is given as little-endian bytes, that of 128 bits in its
 * canonical form.
 */
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef enum nd_hash_kind { ND_HASH_XXH3_64 = 0, ND_HASH_XXH3_128, ND_HASH_SHA256 } nd_hash_kind;

enum { ND_HASH_MAX = 32 /* bytes of a digest */ };
int nd_hash_bytes(nd_hash_kind kind); /* 8, 16, 32 */

/* For bytes that arrive in parts, one digest after the other: begin, any number of adds, end. */
typedef struct nd_hash nd_hash;
nd_status nd_hash_create(nd_hash_kind kind, nd_hash **out);
nd_status nd_hash_begin(nd_hash *hash);
nd_status nd_hash_add(nd_hash *hash, const void *data, size_t size);
nd_status nd_hash_end(nd_hash *hash, uint8_t out[ND_HASH_MAX]);
/* Ends it too, and writes lower-case hexadecimal digits, two for each byte of the digest. */
enum { ND_HASH_HEX_MAX = 2 * ND_HASH_MAX + 1 };
nd_status nd_hash_end_text(nd_hash *hash, char hex[ND_HASH_HEX_MAX]);
void nd_hash_destroy(nd_hash *hash); /* NULL is legal */

/* The digest of these bytes, likewise. */
nd_status nd_hash_text(nd_hash_kind kind, const void *data, size_t size, char hex[ND_HASH_HEX_MAX]);
nd_status nd_sha256(const void *data, size_t size, char hex[ND_HASH_HEX_MAX]);
/* Like nd_sha256, but for the bytes that a file has when it is opened. */
nd_status nd_sha256_file(const char *path, char hex[ND_HASH_HEX_MAX]);
/* XXH3 of these bytes as a number, and as two numbers of which the first is the low half. */
uint64_t nd_hash_64(const void *data, size_t size);
void nd_hash_128(const void *data, size_t size, uint64_t out[2]);

#endif
