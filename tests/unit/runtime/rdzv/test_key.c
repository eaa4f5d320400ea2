// SPDX-License-Identifier: Apache-2.0
/* Key files: modes, sizes, digits; and TLS between two ends in memory with equal and different
 * keys. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/rdzv/key.h"
#include "tests/support/cipher.h"
#include "tests/support/tempdir.h"

static tempdir dir;
static uint8_t key[ND_KEY_BYTES];

TEMPDIR_SUITE(key, tempdir_leave_empty);

static const char *write_private(const char *name, const void *data, size_t size)
{
    const char *path = tempdir_write(&dir, name, data, size);
    cr_assert_eq(chmod(path, 0600), 0);
    return path;
}

Test(key, a_made_file_is_private_new_and_random)
{
    uint8_t a[ND_KEY_BYTES], b[ND_KEY_BYTES];
    struct stat st;
    assert_ok(nd_key_make_file(tempdir_file(&dir, "a")));
    cr_assert_eq(stat(dir.name, &st), 0);
    cr_assert_eq(st.st_mode & 07777, 0600);
    assert_ok(nd_key_read_file(dir.name, a));
    assert_fails(nd_key_make_file(dir.name), ND_ERR_CANTCREATE, "exists");
    assert_ok(nd_key_make_file(tempdir_file(&dir, "b")));
    assert_ok(nd_key_read_file(dir.name, b));
    cr_assert_arr_neq(a, b, ND_KEY_BYTES);
    int fd;
    assert_ok(nd_key_to_fd(a, &fd));
    cr_assert_eq(pwrite(fd, b, 1, 0), -1, "a worker can change the key of the others");
    close(fd);
}

Test(key, raw_bytes_and_both_cases_of_hexadecimal_are_read)
{
    uint8_t raw[ND_KEY_BYTES];
    char hex[2 * ND_KEY_BYTES + 2];
    for (int i = 0; i < ND_KEY_BYTES; i++) {
        raw[i] = (uint8_t)(i * 37 + 11);
        snprintf(hex + 2 * i, 3, i % 2 ? "%02x" : "%02X", raw[i]);
    }
    hex[2 * ND_KEY_BYTES] = '\n';
    assert_ok(nd_key_read_file(write_private("raw", raw, ND_KEY_BYTES), key));
    cr_assert_arr_eq(key, raw, ND_KEY_BYTES);
    assert_ok(nd_key_read_file(write_private("hex", hex, 2 * ND_KEY_BYTES), key));
    cr_assert_arr_eq(key, raw, ND_KEY_BYTES);
    assert_ok(nd_key_read_file(write_private("line", hex, 2 * ND_KEY_BYTES + 1), key));
    cr_assert_arr_eq(key, raw, ND_KEY_BYTES);
    hex[5] = 'g';
    assert_fails(nd_key_read_file(write_private("bad", hex, 2 * ND_KEY_BYTES), key), ND_ERR_CONFIG,
                 "holds no key");
}

Test(key, other_sizes_modes_and_kinds_are_refused)
{
    uint8_t bytes[80] = {0};
    static const size_t sizes[] = {0, 31, 33, 63, 66, 80};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        assert_fails(nd_key_read_file(write_private("size", bytes, sizes[i]), key), ND_ERR_CONFIG,
                     "holds no key");
    }
    static const mode_t modes[] = {0640, 0604, 0620, 0602, 0610, 0601};
    write_private("mode", bytes, ND_KEY_BYTES);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        cr_assert_eq(chmod(dir.name, modes[i]), 0);
        assert_fails(nd_key_read_file(dir.name, key), ND_ERR_CONFIG, "--make-key");
    }
    assert_fails(nd_key_read_file(dir.path, key), ND_ERR_CONFIG, "is a folder, not a file");
    /* Another user's file: root gives one away, others look at one of root's. */
    const char *other =
        geteuid() == 0 ? write_private("other", bytes, ND_KEY_BYTES) : "/etc/passwd";
    cr_assert(geteuid() != 0 || chown(other, 65534, 65534) == 0);
    assert_fails(nd_key_read_file(other, key), ND_ERR_CONFIG, "belongs to user");
    assert_fails(nd_key_read_file("/nonexistent/key", key), ND_ERR_CONFIG, "cannot open");
}

/* Moves ciphertext from one end to the other. */
static nd_status pump(nd_tls *from, nd_tls *to)
{
    char cipher[4096];
    size_t count;
    while ((count = take_cipher(from, cipher, sizeof cipher)) > 0) {
        ND_TRY(nd_tls_input(to, cipher, count));
    }
    return ND_OK;
}

/* The ends of the test's connection. */
static struct {
    const nd_tls_use *uses[2]; /* NULL: the store's */
    nd_tls_context *contexts[2];
    nd_tls *client, *server;
} e;

static nd_status connect_ends(uint8_t client_first, uint8_t server_first)
{
    key[0] = client_first;
    assert_ok(nd_tls_context_create(false, key, &e.contexts[0]));
    key[0] = server_first;
    assert_ok(nd_tls_context_create(true, key, &e.contexts[1]));
    for (int i = 0; i < 2; i++) {
        if (e.uses[i]) {
            nd_tls_context_set(e.contexts[i], e.uses[i]);
        }
    }
    assert_ok(nd_tls_create(e.contexts[0], &e.client));
    assert_ok(nd_tls_create(e.contexts[1], &e.server));
    for (int i = 0; i < 4; i++) {
        ND_TRY(pump(e.client, e.server));
        ND_TRY(pump(e.server, e.client));
    }
    return ND_OK;
}

static void close_ends(void)
{
    nd_tls_destroy(e.client);
    nd_tls_destroy(e.server);
    nd_tls_context_destroy(e.contexts[0]);
    nd_tls_context_destroy(e.contexts[1]);
}

TestSuite(tls_key, .fini = close_ends);

Test(tls_key, ends_with_the_same_key_talk_in_secret)
{
    char plain[32], cipher[4096];
    size_t count;
    bool closed;
    assert_ok(connect_ends(1, 1));
    cr_assert(nd_tls_established(e.client) && nd_tls_established(e.server));
    assert_ok(nd_tls_write(e.client, "a secret ", 9));
    size_t taken = take_cipher(e.client, cipher, 10); /* as a socket takes what it has room for */
    assert_ok(nd_tls_write(e.client, "word", 4));
    taken += take_cipher(e.client, cipher + taken, 10);
    taken += take_cipher(e.client, cipher + taken, sizeof cipher - taken);
    cr_assert_null(memmem(cipher, taken, "secret", 6));
    assert_ok(nd_tls_input(e.server, cipher, taken));
    assert_ok(nd_tls_read(e.server, plain, sizeof plain, &count, &closed));
    cr_assert_eq(count, 9);
    assert_ok(nd_tls_read(e.server, plain + 9, sizeof plain - 9, &count, &closed));
    cr_assert_eq(count, 4);
    cr_assert_arr_eq(plain, "a secret word", 13);
}

Test(tls_key, ends_with_different_keys_do_not_meet)
{
    assert_fails(connect_ends(1, 9), ND_ERR_CONFIG, "key");
    cr_assert_not(nd_tls_established(e.server));
}

static const nd_tls_use other_use = {.identity = "other", .records = 4};

/* One key opens several protocols, and connects no two of them. */
Test(tls_key, ends_of_different_protocols_do_not_meet)
{
    e.uses[0] = &other_use;
    assert_fails(connect_ends(1, 1), ND_ERR_CONFIG, "key");
    cr_assert_not(nd_tls_established(e.server));
}

/* A write that takes a new key has one record more, which says so. */
Test(tls_key, a_new_key_follows_a_number_of_records)
{
    static const size_t writes[] = {1, 1, 1, 1, 1, 1, 20000, 1, 1};
    static const bool new_key[] = {false, false, false, false, true, false, false, true, false};
    enum { RECORD = 5 + 1 + 16, UPDATE = RECORD + 5 }; /* without the plaintext */
    static char plain[20000], cipher[40000], got[20000];
    e.uses[0] = e.uses[1] = &other_use;
    assert_ok(connect_ends(1, 1));
    for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
        size_t records = writes[i] > 16384 ? 2 : 1, count, part = 1;
        bool closed;
        memset(plain, 'a' + (int)i, writes[i]);
        assert_ok(nd_tls_write(e.client, plain, writes[i]));
        count = take_cipher(e.client, cipher, sizeof cipher);
        cr_expect_eq(count, writes[i] + records * RECORD + (new_key[i] ? UPDATE : 0),
                     "write %zu takes %zu bytes", i, count);
        assert_ok(nd_tls_input(e.server, cipher, count));
        for (count = 0; count < writes[i] && part > 0; count += part) {
            assert_ok(nd_tls_read(e.server, got + count, sizeof got - count, &part, &closed));
        }
        cr_assert_eq(count, writes[i]);
        cr_assert_arr_eq(got, plain, count);
    }
}

Test(tls_key, a_changed_byte_ends_the_channel)
{
    char cipher[4096];
    assert_ok(connect_ends(1, 1));
    assert_ok(nd_tls_write(e.client, "a secret word", 13));
    size_t count = take_cipher(e.client, cipher, sizeof cipher), got;
    bool closed;
    cipher[count - 1] ^= 1;
    nd_status status = nd_tls_input(e.server, cipher, count);
    char plain[32];
    status = status == ND_OK ? nd_tls_read(e.server, plain, sizeof plain, &got, &closed) : status;
    cr_assert_eq(status, ND_ERR_IO);
}

Test(key, junk_is_not_the_protocol)
{
    nd_tls_context *context;
    nd_tls *tls;
    assert_ok(nd_tls_context_create(true, key, &context));
    assert_ok(nd_tls_create(context, &tls));
    assert_fails(nd_tls_input(tls, "GET / HTTP/1.1\r\n\r\n", 18), ND_ERR_IO,
                 "does not speak the rendezvous protocol");
    nd_tls_destroy(tls);
    nd_tls_context_destroy(context);
}

/* Standard input of this test's process holds these bytes and ends. */
static void give_stdin(const char *bytes, size_t count)
{
    int pipes[2];
    cr_assert_eq(pipe(pipes), 0);
    cr_assert_eq(write(pipes[1], bytes, count), (ssize_t)count);
    close(pipes[1]);
    cr_assert_eq(dup2(pipes[0], STDIN_FILENO), STDIN_FILENO);
    close(pipes[0]);
}

Test(key, standard_input_gives_the_key_as_a_file_does)
{
    uint8_t from_file[ND_KEY_BYTES];
    char *text;
    size_t count;
    const char *path = tempdir_file(&dir, "key");
    assert_ok(nd_key_make_file(path));
    assert_ok(nd_key_read_file(path, from_file));
    assert_ok(nd_fs_read(path, 80, ND_ERR_DATA, &text, &count));
    give_stdin(text, count);
    free(text);
    assert_ok(nd_key_read("-", key));
    cr_assert_arr_eq(from_file, key, ND_KEY_BYTES);
}

Test(key, standard_input_without_a_key_is_refused)
{
    char many[200];
    memset(many, 'a', sizeof many);
    give_stdin("", 0);
    assert_fails(nd_key_read("-", key), ND_ERR_CONFIG, "and gave 0 bytes");
    give_stdin("not a key", 9);
    assert_fails(nd_key_read("-", key), ND_ERR_CONFIG, "and gave 9 bytes");
    give_stdin(many, sizeof many);
    assert_fails(nd_key_read("-", key), ND_ERR_CONFIG, "or more");
}

Test(key, a_readable_file_on_standard_input_is_refused)
{
    const char *path = tempdir_file(&dir, "key");
    assert_ok(nd_key_make_file(path));
    cr_assert_eq(chmod(path, 0644), 0);
    cr_assert_not_null(freopen(path, "r", stdin));
    assert_fails(nd_key_read("-", key), ND_ERR_CONFIG, "mode 0644");
}
