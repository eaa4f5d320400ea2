// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/tls.h"

#include <limits.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>

struct nd_tls_context {
    SSL_CTX *ctx;
    bool server;
    nd_tls_use use;
    uint8_t key[ND_KEY_BYTES];
};

struct nd_tls {
    SSL *ssl; /* owns both BIOs */
    BIO *in, *out;
    bool server, established;
    uint64_t records, records_most; /* with the present key */
    size_t sent;                    /* of what `out` holds */
};

static const nd_tls_use use_of_store = {.identity = "ndtrain-job", .records = ND_TLS_RECORDS};
static const unsigned char aes_128_gcm_sha256[] = {0x13, 0x01};

/* Empties the thread's queue of OpenSSL's errors. True when one says that memory ran out. */
static bool clear_errors(void)
{
    bool memory = false;
    for (unsigned long code = ERR_get_error(); code != 0; code = ERR_get_error()) {
        memory |= ERR_GET_REASON(code) == ERR_R_MALLOC_FAILURE;
    }
    return memory;
}

static nd_status fail_library(const char *what)
{
    unsigned long code = ERR_peek_last_error();
    const char *reason = code ? ERR_reason_error_string(code) : NULL;
    if (clear_errors()) {
        return nd_fail_memory("OpenSSL (%s)", what);
    }
    return nd_fail(ND_ERR_INTERNAL, "OpenSSL cannot %s: %s", what,
                   reason ? reason : "no reason given");
}

static SSL_SESSION *session_of_key(SSL *ssl, const uint8_t *key)
{
    SSL_SESSION *session = SSL_SESSION_new();
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, aes_128_gcm_sha256);
    if (!session || !cipher || !SSL_SESSION_set1_master_key(session, key, ND_KEY_BYTES) ||
        !SSL_SESSION_set_cipher(session, cipher) ||
        !SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION)) {
        SSL_SESSION_free(session);
        return NULL;
    }
    return session;
}

static int use_key(SSL *ssl, const EVP_MD *digest, const unsigned char **id, size_t *id_bytes,
                   SSL_SESSION **session)
{
    const nd_tls_context *context = SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl));
    *session = NULL;
    if (digest && EVP_MD_get_type(digest) != NID_sha256) {
        return 1; /* asked again for another digest: no key for it */
    }
    *session = session_of_key(ssl, context->key);
    *id = (const unsigned char *)context->use.identity;
    *id_bytes = strlen(context->use.identity);
    return *session != NULL;
}

static int find_key(SSL *ssl, const unsigned char *id, size_t id_bytes, SSL_SESSION **session)
{
    const nd_tls_context *context = SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl));
    *session = NULL;
    if (id_bytes != strlen(context->use.identity) ||
        memcmp(id, context->use.identity, id_bytes) != 0) {
        return 1; /* unknown: the handshake ends because there is no certificate */
    }
    *session = session_of_key(ssl, context->key);
    return *session != NULL;
}

nd_status nd_tls_context_create(bool server, const uint8_t key[ND_KEY_BYTES], nd_tls_context **out)
{
    nd_tls_context *context;
    ND_TRY(ND_ALLOC(1, &context));
    context->server = server;
    memcpy(context->key, key, ND_KEY_BYTES);
    ERR_clear_error();
    context->ctx = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    if (!context->ctx || !SSL_CTX_set_app_data(context->ctx, context) ||
        !SSL_CTX_set_min_proto_version(context->ctx, TLS1_3_VERSION) ||
        !SSL_CTX_set_max_proto_version(context->ctx, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(context->ctx, "TLS_AES_128_GCM_SHA256") ||
        !SSL_CTX_set_num_tickets(context->ctx, 0)) {
        nd_tls_context_destroy(context);
        return fail_library("prepare TLS 1.3");
    }
    SSL_CTX_set_session_cache_mode(context->ctx, SSL_SESS_CACHE_OFF);
    nd_tls_context_set(context, &use_of_store);
    SSL_CTX_set_options(context->ctx, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    /* A client that meets a server with a certificate goes on to the check of SSL_session_reused,
     * which fails. */
    SSL_CTX_set_verify(context->ctx, SSL_VERIFY_NONE, NULL);
    if (server) {
        SSL_CTX_set_psk_find_session_callback(context->ctx, find_key);
    } else {
        SSL_CTX_set_psk_use_session_callback(context->ctx, use_key);
    }
    *out = context;
    return ND_OK;
}

void nd_tls_context_set(nd_tls_context *context, const nd_tls_use *use)
{
    context->use = *use;
    if (use->keeps_buffers) {
        SSL_CTX_clear_mode(context->ctx, SSL_MODE_RELEASE_BUFFERS);
    } else {
        SSL_CTX_set_mode(context->ctx, SSL_MODE_RELEASE_BUFFERS);
    }
}

void nd_tls_context_destroy(nd_tls_context *context)
{
    if (context) {
        SSL_CTX_free(context->ctx);
        OPENSSL_cleanse(context->key, sizeof context->key);
        free(context);
    }
}

/* One step of the handshake with what has arrived. */
static nd_status shake(nd_tls *tls)
{
    ERR_clear_error();
    int rc = SSL_do_handshake(tls->ssl);
    if (rc == 1) {
        if (SSL_session_reused(tls->ssl) != 1) {
            return nd_fail(ND_ERR_CONFIG, "the other side did not prove that it has the job key");
        }
        tls->established = true;
        return ND_OK;
    }
    if (SSL_get_error(tls->ssl, rc) == SSL_ERROR_WANT_READ) {
        return ND_OK;
    }
    unsigned long code = ERR_peek_error();
    const char *text = ERR_reason_error_string(code);
    int reason = ERR_GET_REASON(code);
    if (clear_errors()) {
        return nd_fail_memory("OpenSSL (meet the other side)");
    }
    bool key = reason == SSL_R_BINDER_DOES_NOT_VERIFY ||
               reason == SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER ||
               reason == SSL_R_TLSV1_ALERT_DECRYPT_ERROR ||
               reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE ||
               reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM || reason == SSL_R_NO_SHARED_CIPHER;
    if (key) {
        return nd_fail(ND_ERR_CONFIG, "the job key differs");
    }
    return nd_fail(ND_ERR_IO, "the other side does not speak the rendezvous protocol (%s)",
                   text ? text : "handshake broken off");
}

nd_status nd_tls_create(nd_tls_context *context, nd_tls **out)
{
    nd_tls *tls;
    ND_TRY(ND_ALLOC(1, &tls));
    tls->server = context->server;
    tls->records_most = context->use.records;
    ERR_clear_error();
    tls->ssl = SSL_new(context->ctx);
    tls->in = BIO_new(BIO_s_mem());
    tls->out = BIO_new(BIO_s_mem());
    if (!tls->ssl || !tls->in || !tls->out) {
        BIO_free(tls->in);
        BIO_free(tls->out);
        SSL_free(tls->ssl);
        free(tls);
        return fail_library("open a session");
    }
    BIO_set_mem_eof_return(tls->in, -1); /* an empty buffer means: retry */
    SSL_set_bio(tls->ssl, tls->in, tls->out);
    if (context->server) {
        SSL_set_accept_state(tls->ssl);
    } else {
        SSL_set_connect_state(tls->ssl);
        nd_status status = shake(tls); /* writes the client's hello */
        if (status != ND_OK) {
            nd_tls_destroy(tls);
            return status;
        }
    }
    *out = tls;
    return ND_OK;
}

void nd_tls_destroy(nd_tls *tls)
{
    if (tls) {
        SSL_free(tls->ssl);
        free(tls);
    }
}

nd_status nd_tls_input(nd_tls *tls, const void *bytes, size_t count)
{
    ND_ASSERT(count <= INT_MAX);
    if (count > 0 && BIO_write(tls->in, bytes, (int)count) != (int)count) {
        return fail_library("keep received bytes");
    }
    return tls->established ? ND_OK : shake(tls);
}

bool nd_tls_established(const nd_tls *tls)
{
    return tls->established;
}

nd_status nd_tls_read(nd_tls *tls, void *out, size_t capacity, size_t *count, bool *closed)
{
    *count = 0;
    *closed = false;
    if (!tls->established) {
        return ND_OK;
    }
    ERR_clear_error();
    int n = SSL_read(tls->ssl, out, capacity > INT_MAX ? INT_MAX : (int)capacity);
    if (n > 0) {
        *count = (size_t)n;
        return ND_OK;
    }
    int error = SSL_get_error(tls->ssl, n);
    if (error == SSL_ERROR_WANT_READ) {
        return ND_OK;
    }
    if (error == SSL_ERROR_ZERO_RETURN) {
        *closed = true;
        return ND_OK;
    }
    const char *text = ERR_reason_error_string(ERR_peek_error());
    if (clear_errors()) {
        return nd_fail_memory("OpenSSL (read a message)");
    }
    return nd_fail(ND_ERR_IO, "the encrypted channel is damaged (%s)",
                   text ? text : "no reason given");
}

nd_status nd_tls_write(nd_tls *tls, const void *bytes, size_t count)
{
    ND_ASSERT(tls->established && count <= INT_MAX);
    ERR_clear_error();
    const uint64_t records = (count + SSL3_RT_MAX_PLAIN_LENGTH - 1) / SSL3_RT_MAX_PLAIN_LENGTH;
    tls->records += records;
    if (tls->records > tls->records_most) {
        tls->records = records;
        if (SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) {
            return fail_library("take a new key");
        }
    }
    if (count > 0 && SSL_write(tls->ssl, bytes, (int)count) != (int)count) {
        return fail_library("encrypt a message");
    }
    return ND_OK;
}

size_t nd_tls_pending(const nd_tls *tls, const void **bytes)
{
    char *data;
    long size = BIO_get_mem_data(tls->out, &data);
    *bytes = size > 0 ? data + tls->sent : NULL;
    return size > 0 ? (size_t)size - tls->sent : 0;
}

void nd_tls_sent(nd_tls *tls, size_t count)
{
    const void *bytes;
    size_t left = nd_tls_pending(tls, &bytes);
    ND_ASSERT(count <= left);
    tls->sent += count;
    if (count == left) {
        tls->sent = 0;
        (void)BIO_reset(tls->out);
    }
}
