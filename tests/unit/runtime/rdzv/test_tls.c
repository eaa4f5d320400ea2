// SPDX-License-Identifier: Apache-2.0
/* A member refuses a server that is not the job's: it speaks TLS 1.3 and has a certificate, as any
 * web server has, but not the key. */
#include <criterion/criterion.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "runtime/rdzv/tls.h"
#include "tests/support/cipher.h"
#include "tests/support/tempdir.h"

static X509 *certificate_of(EVP_PKEY *key)
{
    X509 *x = X509_new();
    X509_set_version(x, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(x), 1);
    X509_gmtime_adj(X509_getm_notBefore(x), -3600);
    X509_gmtime_adj(X509_getm_notAfter(x), 3600);
    X509_set_pubkey(x, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                               (const unsigned char *)"stranger", -1, -1, 0);
    X509_set_issuer_name(x, X509_get_subject_name(x));
    cr_assert_gt(X509_sign(x, key, EVP_sha256()), 0);
    return x;
}

static SSL_CTX *stranger_create(void)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    cr_assert(key && context);
    X509 *certificate = certificate_of(key);
    cr_assert_eq(SSL_CTX_use_certificate(context, certificate), 1);
    cr_assert_eq(SSL_CTX_use_PrivateKey(context, key), 1);
    X509_free(certificate);
    EVP_PKEY_free(key);
    return context;
}

Test(tls, a_server_with_a_certificate_and_no_key_is_refused)
{
    const uint8_t key[ND_KEY_BYTES] = {1, 2, 3};
    char bytes[8192];
    nd_tls_context *context;
    nd_tls *member;
    SSL_CTX *stranger = stranger_create();
    SSL *server = SSL_new(stranger);
    SSL_set_bio(server, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_set_accept_state(server);
    assert_ok(nd_tls_context_create(false, key, &context));
    assert_ok(nd_tls_create(context, &member));
    nd_status status = ND_OK;
    for (int round = 0; round < 4 && status == ND_OK; round++) {
        int n = (int)take_cipher(member, bytes, sizeof bytes);
        BIO_write(SSL_get_rbio(server), bytes, n);
        SSL_do_handshake(server);
        n = BIO_read(SSL_get_wbio(server), bytes, sizeof bytes);
        status = n > 0 ? nd_tls_input(member, bytes, (size_t)n) : ND_OK;
    }
    cr_expect_eq(status, ND_ERR_CONFIG, "%d", status);
    cr_expect(strstr(nd_error_last()->message, "did not prove that it has the job key"), "%s",
              nd_error_last()->message);
    cr_expect_not(nd_tls_established(member));
    nd_tls_destroy(member);
    nd_tls_context_destroy(context);
    SSL_free(server);
    SSL_CTX_free(stranger);
}
