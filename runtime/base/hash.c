// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/hash.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"

enum { SHA_BLOCK_BYTES = 1 << 20 };

static void put_hex(const unsigned char digest[32], char hex[65])
{
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
}

/* *state is the caller's, also where this fails. */
static nd_status begin_sha256(EVP_MD_CTX **state)
{
    *state = EVP_MD_CTX_new();
    return !*state ? nd_fail_memory("a SHA-256")
           : EVP_DigestInit_ex(*state, EVP_sha256(), NULL) == 1
               ? ND_OK
               : nd_fail(ND_ERR_INTERNAL, "OpenSSL has no SHA-256");
}

static bool end_sha256(EVP_MD_CTX *state, char hex[65])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    if (EVP_DigestFinal_ex(state, digest, &length) != 1 || length != 32) {
        return false;
    }
    put_hex(digest, hex);
    return true;
}

nd_status nd_sha256(const void *data, size_t size, char hex[65])
{
    EVP_MD_CTX *state;
    nd_status status = begin_sha256(&state);
    if (status == ND_OK && (EVP_DigestUpdate(state, data, size) != 1 || !end_sha256(state, hex))) {
        status = nd_fail(ND_ERR_INTERNAL, "OpenSSL could not compute a SHA-256 of %zu bytes", size);
    }
    EVP_MD_CTX_free(state);
    return status;
}

static nd_status digest_file(int fd, const char *path, EVP_MD_CTX *state, uint8_t *block)
{
    ssize_t n;
    while ((n = read(fd, block, SHA_BLOCK_BYTES)) != 0) {
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
        }
        if (EVP_DigestUpdate(state, block, (size_t)n) != 1) {
            return nd_fail(ND_ERR_INTERNAL, "OpenSSL could not compute the SHA-256 of \"%s\"",
                           path);
        }
        nd_fs_beat();
    }
    return ND_OK;
}

nd_status nd_sha256_file(const char *path, char hex[65])
{
    struct stat st;
    int fd = -1;
    uint8_t *block = NULL;
    EVP_MD_CTX *state = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_open(path, ND_ERR_DATA, &fd, &st));
    ND_TRY_OUT(begin_sha256(&state));
    ND_TRY_OUT(nd_alloc(SHA_BLOCK_BYTES, 1, (void **)&block));
    ND_TRY_OUT(digest_file(fd, path, state, block));
    if (!end_sha256(state, hex)) {
        status = nd_fail(ND_ERR_INTERNAL, "OpenSSL could not compute the SHA-256 of \"%s\"", path);
    }
out:
    EVP_MD_CTX_free(state);
    free(block);
    close(fd);
    return status;
}
