// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_CIPHER_H
#define ND_TESTS_SUPPORT_CIPHER_H
#include <string.h>

#include "runtime/rdzv/tls.h"

/* Takes ciphertext that is to be sent; returns the number of bytes, at most `capacity`. */
static inline size_t take_cipher(nd_tls *tls, void *out, size_t capacity)
{
    const void *bytes;
    size_t left = nd_tls_pending(tls, &bytes), count = left < capacity ? left : capacity;
    if (count > 0) {
        memcpy(out, bytes, count);
        nd_tls_sent(tls, count);
    }
    return count;
}

#endif
