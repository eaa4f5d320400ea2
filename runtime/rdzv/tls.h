// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_TLS_H
#define ND_RDZV_TLS_H
/*
 * TLS 1.3 with the job's 32-byte key as external pre-shared key, on OpenSSL, over memory buffers:
 * the caller moves the ciphertext. Key exchange is psk_dhe_ke (forward secrecy); there are no
 * certificates, tickets or early data. Both sides require that the key was used
 * (SSL_session_reused), so a server with any certificate does not pass.
 *
 * One thread per nd_tls; a context may be shared by the connections of one thread.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

enum {
    ND_KEY_BYTES = 32,
    ND_TLS_RECORDS = 1 << 23, /* that one key encrypts: AES-GCM allows 2^24.5 (RFC 8446, 5.5) */
};

typedef struct nd_tls_context nd_tls_context;
typedef struct nd_tls nd_tls;

/* The key is copied, and wiped by destroy. */
nd_status nd_tls_context_create(bool server, const uint8_t key[ND_KEY_BYTES], nd_tls_context **out);
void nd_tls_context_destroy(nd_tls_context *context);

/* The purpose of a context's connections: their protocol, and how long a key and buffers last. */
typedef struct nd_tls_use {
    const char *identity; /* the key's name in this protocol, on both sides; static */
    uint64_t records;     /* of at most 16 KiB, before a new key */
    bool keeps_buffers;   /* 34 KB of each connection, which messages then need not allocate */
} nd_tls_use;
/* Before the first connection. Without it they are to the store, whose identity is "ndtrain-job",
 * take a new key after ND_TLS_RECORDS, and free buffers while nothing is under way. */
void nd_tls_context_set(nd_tls_context *context, const nd_tls_use *use);

/* The context is borrowed until destroy. */
nd_status nd_tls_create(nd_tls_context *context, nd_tls **out);
void nd_tls_destroy(nd_tls *tls);

/*
 * Takes ciphertext from the network and goes on with the handshake. ND_ERR_CONFIG: the other side
 * has another key. ND_ERR_IO: it does not speak this protocol. After an error an alert may be
 * pending, to be sent.
 */
nd_status nd_tls_input(nd_tls *tls, const void *bytes, size_t count);
bool nd_tls_established(const nd_tls *tls);
/* Plaintext received so far; *count 0: none now. *closed: the other side ended the session. */
nd_status nd_tls_read(nd_tls *tls, void *out, size_t capacity, size_t *count, bool *closed);
/* To be called only when the channel is established. Takes a new key in time. */
nd_status nd_tls_write(nd_tls *tls, const void *bytes, size_t count);
/* Ciphertext to be sent; returns the number of bytes, 0 when there is none. They stay until
 * nd_tls_sent takes the first `count` of them away, and valid until the next call. */
size_t nd_tls_pending(const nd_tls *tls, const void **bytes);
void nd_tls_sent(nd_tls *tls, size_t count);

#endif
